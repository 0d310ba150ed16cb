"""Gives each rank one partition of a DataFrame from the notebook."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.cluster.base import pandas_unused
from sparkring.cluster.java_errors import REASONS, line_with
from sparkring.cluster.jobs import interruptibly
from sparkring.cluster.session import cluster_of, stopped
from sparkring.errors import LaunchError, OptionsError
from sparkring.executor.orders import SPARK_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from sparkring.cluster.base import Cluster
    from sparkring.executor.tasks import Task


class Data(NamedTuple):
    """A DataFrame whose partitions go to the ranks, and what the notebook calls it.

    `counted` says whether the number of ranks was taken from the number of partitions. If not, the two may differ.
    """

    name: str
    frame: DataFrame
    counted: bool

    def cluster(self) -> Cluster:
        cluster = cluster_of(self.frame.sparkSession)
        if cluster.is_stopped():
            raise stopped()
        return cluster

    def partitions(self) -> int:
        """Return the number of partitions. To find this number, Spark may have to run all stages but the last."""
        cluster = self.cluster()
        try:
            return cluster.partitions(self.frame)
        except Exception as error:  # a DataFrame is computed lazily, so its errors first appear here
            raise LaunchError(f"Spark cannot compute `{self.name}`: {line_with(str(error), *REASONS)}") from error

    def ranks(self) -> int:
        """Return the default number of ranks, which is one for each partition."""
        count = interruptibly(self.cluster(), "counting partitions", self.partitions)
        if count == 0:
            raise OptionsError(
                f"`{self.name}` is empty and has no partitions: set the number of ranks, for example -n 4."
            )
        return count

    def schema(self) -> bytes:
        """Return the DataFrame's Arrow schema. Its metadata says how toPandas() converts the columns to Python."""
        try:
            return arrow_schema(self.frame.schema, self.frame.sparkSession)
        except Exception as error:  # pyspark has several classes for this error
            raise LaunchError(f"`{self.name}`: {not_in_arrow(self.frame.schema, error)}") from error

    def run(self, size: int, task: Task, *, barrier: bool, gpus: int) -> None:
        """Run `task` on each of `size` partitions.

        `barrier` says whether the tasks are a barrier stage. With `gpus`, each gets so many GPUs.
        """
        as_it_is = self.counted or self.partitions() == size
        frame = self.frame if as_it_is else self.frame.repartition(size)
        # mapInArrow() looks columns up by name, which fails if a name has a dot or if two columns have the same name.
        frame = frame.toDF(*map(str, range(len(frame.columns))))
        cluster_of(frame.sparkSession).collect_rows(frame, task, "nothing int", barrier=barrier, gpus=gpus)


def arrow_schema(schema: StructType, session: SparkSession) -> bytes:
    """Return the Arrow schema of rows with this Spark `schema`, serialized. Raises if Arrow cannot represent a column.

    The schema's metadata says how toPandas() converts the columns to Python with the settings of the session.
    """
    import cloudpickle
    from pyspark.sql.pandas.types import to_arrow_schema

    setting = session.conf.get
    # get() is called without a default, because Spark's own default for this setting differs between versions.
    by_arrow = setting("spark.sql.execution.arrow.pyspark.enabled") == "true"
    structs = "legacy"
    with contextlib.suppress(Exception):  # Spark 3.4 does not have this setting
        structs = setting("spark.sql.execution.pandas.structHandlingMode")
    if structs == "legacy":
        structs = "dict" if by_arrow else "row"
    # The schema is pickled by value, because the notebook may define types that ranks cannot import. JSON would name
    # these types, but not contain them.
    meaning = cloudpickle.dumps((schema, setting("spark.sql.session.timeZone"), by_arrow, structs))
    with pandas_unused():
        # From pyspark 4.3 on, the time zone is an argument. Before that, it is always UTC.
        has_zone = "timezone" in inspect.signature(to_arrow_schema).parameters
        described = to_arrow_schema(schema, **({"timezone": "UTC"} if has_zone else {}))
    return bytes(described.with_metadata({SPARK_SCHEMA: meaning}).serialize())


def not_in_arrow(schema: StructType, error: Exception) -> str:
    """Return the message about a column that Arrow cannot represent. `error` is pyspark's error."""
    from pyspark.sql.pandas.types import to_arrow_type

    for field in schema.fields:
        try:
            to_arrow_type(field.dataType)
        except Exception:  # pyspark has several classes for this error
            kind = field.dataType.simpleString()
            return (
                f"column `{field.name}` is {kind}, which Arrow cannot represent: cast it to another type, or select "
                "the other columns."
            )
    return f"Arrow cannot represent a column: {line_with(str(error))}"


def find_data(name: str, namespace: Mapping[str, Any], *, counted: bool) -> Data:
    """Return the DataFrame that the notebook calls `name`. Raises OptionsError if `name` is not a Spark DataFrame."""
    if name not in namespace:
        raise OptionsError(f"--data {name}: the notebook has no variable `{name}`.")
    value = namespace[name]
    roots = {(base.__module__.partition(".")[0], base.__name__) for base in type(value).__mro__}
    if ("pyspark", "DataFrame") in roots:
        return Data(name, value, counted)
    if ("pandas", "DataFrame") in roots:
        raise OptionsError(
            f"--data {name}: `{name}` is a pandas DataFrame; convert it to a Spark DataFrame, `{name} = "
            f"spark.createDataFrame({name})`, or leave out --data and read `{name}` in the cell."
        )
    raise OptionsError(f"--data {name}: `{name}` is a `{type(value).__name__}`, not a Spark DataFrame.")
