"""`predict(…)`: a DataFrame with a model's predictions as a new column."""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkring.checkpointing.store import Store, Which, checkpoints
from sparkring.cluster.java_errors import root_cause
from sparkring.cluster.jobs import interruptibly
from sparkring.cluster.python import executed_by_this_python
from sparkring.data.columns import Making, is_object
from sparkring.data.frames import for_array, for_arrays, quoted, session_of
from sparkring.data.layout import Columns, Layout, Transform, groups_of, raw_of
from sparkring.data.where import nearest
from sparkring.errors import DataError, OptionsError
from sparkring.inference import outputs, predictors
from sparkring.inference.column import Returned, arrow_types, returned, scoring_udf, spark_types
from sparkring.inference.files import Files, files_of, row_numbers
from sparkring.inference.inputs import Described
from sparkring.inference.scorer import OnError, Source, told
from sparkring.runtime.interrupts import interrupted
from sparkring.runtime.kernel import tell

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

PROBED_ROWS = 16
DEFAULT_NAME = "prediction"
IDLE_S = 300.0


class Live:
    """A model of the notebook: a torch module, a Keras model or a function."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def load(self) -> Any:
        return self._model


class Saved:
    """A model whose weights are in a checkpoint."""

    def __init__(self, directory: str, name: str, make_model: Callable[[], Any] | None) -> None:
        self._directory, self._name, self._make_model = directory, name, make_model

    @property
    def told(self) -> str:
        """The model as messages name it: the checkpoint and its directory."""
        return f"{self._name} of {self._directory}"

    def load(self) -> Any:
        store = checkpoints(self._directory)
        if self._make_model is not None:
            model = self._make_model()
            if not predictors.is_model(model):
                raise OptionsError(
                    f"make_model returned a `{type(model).__name__}`: it must return a torch module or a Keras model."
                )
            store.load_model(model, self._name)
            return model
        state = store.load(self._name)
        found = [value for value in state.values() if predictors.is_model(value)]
        if len(found) != 1:
            raise OptionsError(
                f"the checkpoint {self._name} in {self._directory} has weights, but no configuration from which to "
                "make the model: pass a function that makes it, as in predict(df, directory, make_model, …)."
            )
        return found[0]


def predict(
    data: DataFrame,
    model: Any,
    make_model: Callable[[], Any] | None = None,
    *,
    inputs: Columns,
    returns: str | DataType | Mapping[str, str | DataType] | None = None,
    which: Which = "latest",
    batch_size: int = 1024,
    transform: Transform | None = None,
    fill: Mapping[str, Any] | None = None,
    raw: Mapping[str, tuple[Any, Sequence[int]]] | None = None,
    dtype: Any = None,
    on_error: OnError = "raise",
    probe: bool = True,
    idle_s: float = IDLE_S,
) -> DataFrame:
    """Return a DataFrame with the predictions of a model as one or more new columns.

    engine/predict.py describes the arguments. Raises DataError, OptionsError, CheckpointError, CaptureError.
    """
    if type(data).__module__.startswith("pyspark.sql.connect."):
        raise DataError("predict() needs a classic SparkSession, but the DataFrame belongs to a Spark Connect session.")
    session = session_of(data)
    groups = checked(inputs, batch_size, on_error)
    names = list(dict.fromkeys(name for members in groups.values() for name in members))
    used = _used(data, names)
    types = _types(used, session)
    kind = None if dtype is None else np.dtype(dtype)
    layout = Layout("the DataFrame", groups, making_of(names, fill, raw), kind, transform)
    source = source_of(model, make_model, which)
    found = kinds_of(returns)
    found_inputs = Described(layout)
    by_their_names = isinstance(inputs, Mapping)
    result = returned(found, session, struct=False) if found else None
    small = False
    files = files_of(data, names, types)
    rows = _first_rows(used, types, files, session) if probe and not data.isStreaming else None
    if rows is not None:
        result, small = _probed(source, found_inputs, rows, result, session, by_their_names, batch_size)
    if result is None:
        why = "the DataFrame is empty" if probe else "with probe=False no row is looked at"
        raise OptionsError(
            "the type of the predictions is not known, because "
            f"{'the DataFrame is a stream' if data.isStreaming else why}: set the type, as in returns='float'."
        )
    taken = {name.lower() for name in data.columns}
    for output in result.outputs:
        if output.name.lower() in taken:
            raise OptionsError(
                f"the DataFrame already has a column `{output.name}`: give the predictions another name, as in "
                f"returns={{'{output.name}_2': {output.written!r}}}."
            )
    settings = {
        "model": source,
        "inputs": found_inputs,
        "outputs": result.outputs,
        "by_name": by_their_names,
        "batch_size": batch_size,
        "on_error": on_error,
        "files": files,
        "small": small,
    }
    sent = types if files is None else pa.schema([("row", pa.int64())])
    udf = scoring_udf(session, settings, result.kind, sent.serialize().to_pybytes(), idle_s=idle_s)
    with executed_by_this_python(session.sparkContext):
        column = udf(*(_columns(data, types, fill or {}) if files is None else [row_numbers()]))
    return _with(data, column, result)


# ── What is given ────────────────────────────────────────────────────────────────────────────────────────────────────


def checked(inputs: Columns, batch_size: int, on_error: str) -> dict[str, tuple[str, ...]]:
    """Return the columns of each input. Raise OptionsError if one of the arguments is invalid."""
    if batch_size < 1:
        raise OptionsError(f"batch_size={batch_size!r}: expected the number of rows in a batch, at least 1.")
    if on_error not in ("raise", "null"):
        raise OptionsError(f'on_error={on_error!r}: expected "raise" or "null".')
    groups = groups_of(inputs, "inputs")
    if not groups:
        raise OptionsError("inputs names no columns: name those that the model uses, as in inputs=['pixels'].")
    return groups


def _used(data: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return the DataFrame's columns that the model uses. Raise DataError unless each name has exactly one column."""
    for name in names:
        count = data.columns.count(name)
        if not count:
            raise DataError(f"the DataFrame has no column `{name}`: {nearest(name, data.columns)}")
        if count > 1:
            raise DataError(f"the DataFrame has {count} columns called `{name}`: rename or drop all but one.")
    from pyspark.sql import functions

    return for_arrays(data.select([functions.col(quoted(name)) for name in names]))


def _columns(data: DataFrame, types: pa.Schema, fill: Mapping[str, Any]) -> list[Column]:
    from pyspark.sql import functions

    fields = {field.name: field for field in data.schema.fields}
    found = []
    for name, kind in zip(types.names, types.types, strict=True):
        column = for_array(fields[name])
        column = functions.col(quoted(name)) if column is None else column
        if name in fill and pa.types.is_floating(kind):  # pandas does not tell a null from a NaN
            column = functions.coalesce(column, functions.lit(fill[name]).cast(fields[name].dataType))
        found.append(column)
    return found


def _types(used: DataFrame, session: SparkSession) -> pa.Schema:
    types = arrow_types(used.schema, session)
    for field in types:
        if is_object(field.type):
            raise DataError(
                f"column `{field.name}` is {field.type}, which no array can hold: make columns of its parts, as in "
                f"df.withColumn('part', df['{field.name}']['part'])."
            )
    return types


def making_of(names: Sequence[str], fill: Mapping[str, Any] | None, raw: Mapping[str, Any] | None) -> Making:
    """Return how arrays are made from columns. Raise DataError if an option names a column that is not an input."""
    for option, named in (("fill", fill or {}), ("raw", raw or {})):
        for name in named:
            if name not in names:
                raise DataError(f"{option} names `{name}`, which is not among the inputs.")
    return Making(dict(fill or {}), {name: raw_of(name, value) for name, value in (raw or {}).items()})


def source_of(model: Any, make_model: Callable[[], Any] | None, which: Which) -> Source:
    """Return where the model comes from. Checkpoints are looked up now. Raise OptionsError if `model` is no model."""
    store = model if isinstance(model, Store) else None
    if isinstance(model, str | os.PathLike):
        store = checkpoints(model)
    if store is not None:
        entry = store.find(which)
        tell(f"predicting with the checkpoint of step {entry.step:,} in {store.directory} ({entry.name})")
        return Saved(store.directory, entry.name, make_model)
    if make_model is not None:
        raise OptionsError("make_model is only for checkpoints, but the model itself was passed: leave make_model out.")
    if not callable(model):
        raise OptionsError(
            f"the model is a `{type(model).__name__}`: pass a torch module, a Keras model, a function of a dict of "
            "arrays, as in lambda batch: model.predict(batch['x']), or a directory of checkpoints."
        )
    if predictors.is_torch(model) and any(each.device.type != "cpu" for each in model.parameters()):
        return Live(copy.deepcopy(model).cpu())  # the executors may have no GPU, or other GPUs
    return Live(model)


def kinds_of(returns: Any) -> dict[str, Any]:
    """Return the types of the predictions by the names of their columns; empty if they are not given."""
    if returns is None:
        return {}
    if isinstance(returns, Mapping):
        if not returns:
            raise OptionsError("returns={}: name at least one column, as in returns={'score': 'float'}.")
        return {str(name): kind for name, kind in returns.items()}
    return {DEFAULT_NAME: returns}


# ── The first rows ───────────────────────────────────────────────────────────────────────────────────────────────────


def _first_rows(used: DataFrame, types: pa.Schema, files: Files | None, session: SparkSession) -> pa.RecordBatch | None:
    """Return the first rows that the model would get; None if the DataFrame is empty.

    If it is certain that the DataFrame has all rows of its files, the rows are read here, without a Spark job.
    """
    if files is not None and not files.filtered and (found := files.first_rows(PROBED_ROWS)) is not None:
        return found
    try:
        rows = interruptibly(session.sparkContext, "the first rows for predict()", lambda: used.take(PROBED_ROWS), tell)
    except KeyboardInterrupt:
        raise interrupted("") from None
    except Exception as error:  # pyspark and py4j have several classes for this error
        raise DataError(f"Spark could not compute the first rows of the DataFrame: {root_cause(str(error))}") from error
    if not rows:
        return None
    columns = [
        pa.array([bytes(row[at]) if isinstance(row[at], bytearray) else row[at] for row in rows], field.type)
        for at, field in enumerate(types)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=types)


def _probed(
    source: Source,
    inputs: Described,
    rows: pa.RecordBatch,
    expected: Returned | None,
    session: SparkSession,
    by_name: bool,
    batch_size: int,
) -> tuple[Returned, bool]:
    """Score the first rows here, and return the type of the predictions, and whether the model is small.

    Raise DataError if that is not possible.
    """
    results, small = probed(source, inputs, rows, batch_size, by_name=by_name)
    return _checked(results, expected, session, len(rows)), small


def probed(
    source: Source, inputs: Described, rows: pa.RecordBatch, batch_size: int, *, by_name: bool
) -> tuple[Any, bool]:
    """Score the first rows here, and return what the model returns, and whether the model is small.

    Raise DataError if that is not possible.
    """
    try:
        arrays = inputs.learn(rows)
    except DataError:
        raise
    except Exception as error:  # `transform` is the user's code
        raise DataError(f"transform failed on the first {len(rows)} rows: {told(error)}") from error
    model = source.load()
    given = ", ".join(f"`{name}`: {outputs.described(array)}" for name, array in arrays.items())
    try:
        with predictors.borrowed(model):
            predict = predictors.predictor_of(model, by_name=by_name)
            return predict(arrays), predictors.is_small(model, predict, arrays, batch_size)
    except DataError:
        raise
    except Exception as error:  # the model is the user's code
        raise DataError(
            f"the model failed on the first {len(rows)} rows: {told(error)}. Its inputs were {given}."
        ) from error


def _checked(results: Any, expected: Returned | None, session: SparkSession, rows: int) -> Returned:
    """Return the type of the predictions. Raise DataError if the model's results do not fit it."""
    found = expected
    if found is None:
        arrays = outputs.by_name(results, ())
        kinds = spark_types(arrays, [outputs.type_of(name, array, rows) for name, array in arrays.items()])
        found = returned(kinds, session, struct=False)
    outputs.columns_of(results, found.outputs, rows)
    return found


def _with(data: DataFrame, column: Column, result: Returned) -> DataFrame:
    """Return the DataFrame with the column of a UDF. If the UDF returns a struct, add its fields as columns instead."""
    names = [output.name for output in result.outputs]
    if len(names) == 1:
        return data.withColumn(names[0], column)
    from pyspark.sql import functions

    struct = f"sparkring_{secrets.token_hex(4)}"
    scored = data.withColumn(struct, column)
    fields = [functions.col(f"{struct}.{quoted(name)}").alias(name) for name in names]
    return scored.select("*", *fields).drop(struct)
