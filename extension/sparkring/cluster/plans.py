"""Reads and changes the plans of classic DataFrames, through Java."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sparkring.cluster.base import ParquetFiles
from sparkring.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_CATALYST = "org.apache.spark.sql.catalyst."
_FILES = "org.apache.spark.sql.execution.datasources.LogicalRelation"
# Spark's own file formats. In tables of other formats, such as Delta, the data files alone may not determine the rows.
_FORMATS = ("org.apache.spark.sql.execution.datasources.", "org.apache.spark.sql.avro.")
# If the class name of a plan's node contains one of these words, the plan does not determine the rows: the node depends
# on the time, the user, a function's body or rows outside files, or it contains another plan.
_UNTOLD = re.compile(
    r"UDF|UDAF|UDTF|Pandas|Arrow|Invoke|Reflect|Current(?!Row)|Now$|LocalTimestamp|Uuid|Shuffle$|Subquery$|^Exists$"
    r"|ListQuery|MapPartitions|MapElements|MapGroups|TypedFilter|Script|Stream|LocalRelation|LogicalRDD"
)
# Fields of a plan's JSON in which a null hides nothing that determines the rows. Some of these fields are optional, and
# the values of others are in the plan's text. _files() describes `relation`, and the child plan describes `desc`. In
# Spark 4.3, evalContext replaces evalMode. A null in any other field may hide something that determines the rows.
_EMPTY = {"evalMode", "evalContext", "relation", "desc", "timeZoneId", "condition", "filter", "catalogTable", "session",
          "hint", "value"}  # fmt: skip
_IDS = re.compile(r"#\d+L?")
_STATUS = re.compile(r"path=(.+?); isDirectory=false; length=(\d+);.*?modification_time=(\d+);")

_SPARK = "org.apache.spark.sql."
# The nodes that a plan over Parquet files may have, if the files store the columns as they are in the DataFrame.
_PLANS = {f"{_SPARK}catalyst.plans.logical.{name}" for name in ("Project", "Filter", "SubqueryAlias")}
_LISTED = f"{_SPARK}execution.datasources.InMemoryFileIndex"
_PARQUET = f"{_SPARK}execution.datasources.parquet.ParquetFileFormat"


def facts(frame: DataFrame) -> list[str]:
    """Return everything that determines the rows, in a fixed order, or [] if the plan does not determine the rows."""
    execution, session = frame._jdf.queryExecution(), frame.sparkSession
    if "InMemoryRelation" in execution.withCachedData().toString():
        return []  # the cached rows may be older than the files
    plan = execution.analyzed()
    nodes = json.loads(plan.toJSON())
    if not all(_tells(node) for node in _nodes(nodes)):
        return []
    leaves = plan.collectLeaves()
    files = [line for index in range(leaves.size()) for line in _files(session, leaves.apply(index))]
    # The plan's text contains values that its JSON leaves out.
    text = _text(plan)
    seen: dict[str, str] = {}
    settings = [
        line
        for line in session._jsparkSession.conf().getAll().mkString("\n").splitlines()
        if line.startswith("spark.sql.") and "warehouse" not in line
    ]
    return [
        session.version,
        frame.schema.json(),
        json.dumps(_renumbered(nodes, seen), sort_keys=True),
        _IDS.sub(lambda match: _number(match[0].rstrip("L"), seen), text),
        *sorted(settings),
        *files,
    ]


def _text(plan: Any) -> str:
    from py4j.protocol import Py4JError

    arguments = (True, False, 1_000_000, False)  # verbose, addSuffix, maxFields, printOperatorId
    try:
        return str(plan.treeString(*arguments))
    except Py4JError:  # Spark 4.3 has a fifth parameter; its default is not visible from Java
        return str(plan.treeString(*arguments, False))


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        if "class" in tree:
            yield tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from _nodes(part)


def _tells(node: dict[str, Any]) -> bool:
    name = str(node["class"])
    ours = name == _FILES or name.startswith(_CATALYST)
    lost = {key for key, value in node.items() if value is None} - _EMPTY
    return ours and not lost and not _UNTOLD.search(name.rpartition(".")[2])


def _files(session: SparkSession, leaf: Any) -> list[str]:
    """Return the file format and options of a leaf of the plan, and the path, size and modification time of each file.

    Return [] if the leaf reads no files. Raise LookupError if the format is not one of Spark's own.
    """
    if leaf.getClass().getName() != _FILES:
        return []
    relation = leaf.relation()
    reader = relation.fileFormat().getClass().getName()
    if not reader.startswith(_FORMATS):
        raise LookupError(reader)
    paths = sorted(unquote(path) for path in relation.location().inputFiles())
    listing: dict[str, str] = {}
    for folder in {path.rpartition("/")[0] for path in paths}:
        listing |= _listed(session, folder)
    return [reader, relation.options().toString(), *(f"{path} {listing[_bare(path)]}" for path in paths)]


def _listed(session: SparkSession, folder: str) -> dict[str, str]:
    """Return the size and modification time of each file in a folder, without Spark's cache, which may be outdated."""
    jvm: Any = session._jvm
    path = jvm.org.apache.hadoop.fs.Path(folder)
    listed = path.getFileSystem(session.sparkContext._jsc.hadoopConfiguration()).listStatus(path)
    text = jvm.org.apache.commons.lang3.ArrayUtils.toString(listed)  # one call for all files
    return {_bare(name): f"{size} {changed}" for name, size, changed in _STATUS.findall(text)}


def _bare(path: str) -> str:
    """Return a path with one slash after the colon, since file:///x and file:/x are the same file."""
    return re.sub(r":/+", ":/", path, count=1)


def _renumbered(tree: Any, seen: dict[str, str]) -> Any:
    """Return a plan's JSON with expressions numbered as they occur, and without ids that differ between processes."""
    if isinstance(tree, list):
        return [_renumbered(part, seen) for part in tree]
    if not isinstance(tree, dict):
        return tree
    if "jvmId" in tree:
        return _number(f"#{tree['id']}", seen)
    return {key: _renumbered(part, seen) for key, part in tree.items() if not key.endswith("dataset_id")}


def _number(name: str, seen: dict[str, str]) -> str:
    return seen.setdefault(name, f"#{len(seen)}")


def with_setting(frame: DataFrame, name: str, value: str) -> DataFrame:
    """Return a DataFrame with the same plan in a copy of its session, which has this setting."""
    from pyspark.sql import DataFrame

    session = frame.sparkSession
    copied: Any = session._jsparkSession.cloneSession()
    copied.conf().set(name, value)
    made = copy.copy(session)  # the constructor would let RDD.toDF() use the new session
    made._jsparkSession = copied
    vars(made).pop("_conf", None)
    dataset: Any = session._jvm
    for part in str(frame._jdf.getClass().getName()).split("."):  # the package of Dataset depends on Spark's version
        dataset = getattr(dataset, part)
    return DataFrame(dataset.ofRows(copied, frame._jdf.queryExecution().analyzed()), made)


def keys(grouped: Any, frame: DataFrame) -> list[int | Column]:
    """Return the number of the column by which a DataFrame is grouped, or the expression, for each key."""
    from pyspark.sql import functions

    attributes = frame._jdf.queryExecution().analyzed().output()
    ids = [int(attributes.apply(index).exprId().id()) for index in range(attributes.size())]
    counted = grouped.count()
    by = counted._jdf.queryExecution().analyzed().groupingExpressions()
    jvm: Any = frame.sparkSession._jvm
    made = type(functions.lit(None))  # the class of columns depends on Spark's version
    numbers: list[int | Column] = []
    for index in range(by.size()):
        expression = by.apply(index)
        if expression.getClass().getName().endswith(".AttributeReference"):
            if expression.exprId().id() not in ids:  # Spark computes the expression before it groups the rows
                raise DataError(
                    "groupBy() groups by an expression whose values are random, such as rand(): add it as a column "
                    "with df.withColumn() first, and group by that column."
                )
            numbers.append(ids.index(expression.exprId().id()))
            continue
        try:
            column = jvm.org.apache.spark.sql.classic.ExpressionUtils.column(expression)
        except TypeError:  # Spark 3 has no such class
            column = jvm.org.apache.spark.sql.Column(expression)
        name = counted.columns[index] if len(counted.columns) > by.size() else "key"  # spark.sql.retainGroupColumns
        numbers.append(made(column).alias(name))
    return numbers


def parquet_files(frame: DataFrame, names: Sequence[str]) -> ParquetFiles | None:
    """Return the Parquet files that store these columns as they are in the DataFrame, or None if there are none."""
    # select() makes a new DataFrame, because Spark remembers what was in the cache when `frame` was first used.
    execution = frame.select("*")._jdf.queryExecution()
    if "InMemoryRelation" in execution.withCachedData().toString():
        return None  # the cached rows may be older than the files
    plan = leaf = execution.analyzed()
    filtered = False
    while (name := leaf.getClass().getName()) in _PLANS:
        filtered = filtered or name.endswith("Filter")
        leaf = leaf.children().apply(0)
    if name != _FILES:
        return None
    relation = leaf.relation()
    if (relation.fileFormat().getClass().getName(), relation.location().getClass().getName()) != (_PARQUET, _LISTED):
        return None
    folders = {str(name).lower() for name in relation.partitionSchema().fieldNames()}
    stored = leaf.outputSet()
    if "_metadata" in {name.lower() for name in (*frame.columns, *relation.dataSchema().fieldNames(), *folders)}:
        return None
    for name in names:
        column = plan.output().apply(frame.columns.index(name))
        computed = not stored.contains(column) or name.lower() in folders
        if computed or "EXISTS_DEFAULT" in column.metadata().json():
            return None
    return ParquetFiles(list(relation.location().inputFiles()), filtered or bool(folders))
