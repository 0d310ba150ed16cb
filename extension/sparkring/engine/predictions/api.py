"""`predict(…)`: a model's predictions as a column of a DataFrame, or as Parquet files that a pool writes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import pickle
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, overload

import pyarrow as pa

from sparkring.capture.content import digest
from sparkring.data.columns import is_object
from sparkring.data.dataset import Dataset, open_dataset
from sparkring.data.layout import Columns, Transform
from sparkring.data.reader import first_rows
from sparkring.data.tables import resolved
from sparkring.data.where import nearest
from sparkring.engine.foreach import run as foreach_run
from sparkring.engine.foreach.api import carry_out_items, open_items
from sparkring.engine.foreach.options import ForeachOptions
from sparkring.engine.foreach.run import ForeachRun, ForeachSpec
from sparkring.engine.predictions.column import IDLE_S, packed_scorer
from sparkring.engine.predictions.dataframes import predict_frame
from sparkring.engine.predictions.destination import MODEL, PARTS, Destination, Mode
from sparkring.engine.predictions.model_version import version_of
from sparkring.engine.predictions.settings import PROBED_ROWS, Settings
from sparkring.engine.run.background import BackgroundRun
from sparkring.engine.run.prepare import refuse_shared
from sparkring.engine.run.spec import Call
from sparkring.errors import DataError, OptionsError
from sparkring.executor.orders import ModelOrder
from sparkring.history import describe
from sparkring.launchers import place_of
from sparkring.runtime import limits
from sparkring.runtime.storage import Location, root_for_ranks
from sparkring.worker.member import gpus
from sparkring.worker.model import outputs
from sparkring.worker.model.outputs import PredictedColumn
from sparkring.worker.model.parts import Job, Model, ModelProcess, Written, parts_of
from sparkring.worker.model.predictors import Autocast
from sparkring.worker.model.saved import Saved
from sparkring.worker.model.scorer import OnError

if TYPE_CHECKING:
    import torch
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType
    from typing_extensions import Unpack

    from sparkring.checkpointing.store import Which
    from sparkring.engine.predictions.keywords import FilesKeywords, PredictKeywords
    from sparkring.history.record import RunRecord

# Spark's names for the types of columns.
_TYPES = {
    "boolean": pa.bool_(),
    **dict.fromkeys(("tinyint", "byte"), pa.int8()),
    **dict.fromkeys(("smallint", "short"), pa.int16()),
    **dict.fromkeys(("int", "integer"), pa.int32()),
    **dict.fromkeys(("bigint", "long"), pa.int64()),
    **dict.fromkeys(("float", "real"), pa.float32()),
    "double": pa.float64(),
    **dict.fromkeys(("string", "char", "varchar"), pa.string()),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


@dataclass(frozen=True)
class Predictions:
    """The Parquet files that predict() has written to the folder `path`.

    There are `parts` files with `rows` rows in all. Of these, `nulls` rows have no prediction, because they could not
    be scored. This run took `seconds` and scored `rows_scored` rows; the other rows were scored by earlier runs that
    did not finish. `record` is the RunRecord.
    """

    path: str
    rows: int
    parts: int
    nulls: int
    seconds: float
    rows_scored: int
    record: RunRecord

    def __repr__(self) -> str:
        amount = f"{describe.counted(self.rows, 'row')} in {describe.counted(self.parts, 'file')} in {self.path}"
        without = f", {self.nulls:,} without a prediction" if self.nulls else ""
        earlier = self.rows - self.rows_scored
        before = f", {describe.counted(earlier, 'row')} of them from an earlier run" if earlier else ""
        return f"Predictions({amount}{without}{before}; {describe.duration(self.seconds)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


_Files: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
_Make: TypeAlias = "Callable[[], Any] | None"


@overload
def predict(
    data: DataFrame | str,
    model: Any,
    make_model: _Make = None,
    *,
    refresh_s: float | None = None,
    idle_s: float = IDLE_S,
    **keywords: Unpack[PredictKeywords],
) -> DataFrame: ...


@overload
def predict(
    data: _Files, model: Any, make_model: _Make = None, *, background: Literal[True], **keywords: Unpack[FilesKeywords]
) -> BackgroundRun[Predictions]: ...


@overload
def predict(data: _Files, model: Any, make_model: _Make = None, **keywords: Unpack[FilesKeywords]) -> Predictions: ...


def predict(
    data: DataFrame | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    model: Any,
    make_model: Callable[[], Any] | None = None,
    *,
    inputs: Columns,
    returns: str | DataType | Mapping[str, str | DataType] | None = None,
    which: Which = "latest",
    key: str | Sequence[str] | None = None,
    version: str | None = None,
    refresh_s: float | None = None,
    batch_size: int = 1024,
    transform: Transform | None = None,
    fill: Mapping[str, Any] | None = None,
    raw: Mapping[str, tuple[Any, Sequence[int]]] | None = None,
    dtype: Any = None,
    on_error: OnError = "raise",
    probe: bool = True,
    autocast: Autocast | torch.dtype | None = None,
    idle_s: float = IDLE_S,
    to: str | os.PathLike[str] | None = None,
    np: int | None = None,
    columns: Sequence[str] | None = None,
    mode: Mode = "error",
    background: bool = False,
) -> DataFrame | Predictions | BackgroundRun[Predictions]:
    """Add the predictions of a model to a DataFrame or to Parquet files, as one or more new columns.

        scored = sparkring.predict(df, "dbfs:/ml/run1", make_model, inputs=["pixels"])
        scored.select("label", "prediction").show()

        sparkring.predict("dbfs:/data/test", "dbfs:/ml/run1", make_model, inputs=["pixels"], to="dbfs:/preds", np=-4)

    For a DataFrame, the result is a lazy DataFrame: the model runs only for rows and columns that are used. For files,
    predict() writes new files to the folder `to` and returns Predictions. The folder appears when all files are
    complete. If the run is interrupted or killed, the same call continues with the missing parts.

    On each machine, one process loads the model, and all tasks on the machine send their rows to it. If the tasks have
    GPUs, there is one such process for each GPU. Before predict() returns, it lets the model score the first rows
    in the calling process, so that errors in columns, shapes and types are raised at once.

    data: a Spark DataFrame, which may be a stream; the name of a table or view in the Spark session; or the path of
        Parquet files or of a Delta table, as in shards(): a file, a folder, a glob, or a list of these.
    model: a torch module; a Keras model; a function that is called with a dict of arrays [rows, …] and returns an array
        or a dict of arrays; a directory of checkpoints; or a store that checkpoints() has returned.
    make_model: for checkpoints, a function that returns the model into which the weights are loaded. It is not needed
        for a Keras model that was saved with its configuration.
    inputs: the names of the columns to use, or a dict that describes the model's inputs, as in shards(columns=…). A key
        is the name of an input. Its value is the name of a column, or a list of numeric columns, which become one
        array [rows, columns].
    returns: the Spark type of the predictions, as in "array<float>", or a dict from the names of the new columns to
        their types. By default, the types are taken from the predictions for the first rows, and a single column is
        called `prediction`.
    which: for checkpoints, "latest", "best" (of a store with a metric), a step, or a name. The checkpoint is looked up
        once, during this call, unless refresh_s is set.
    key: for checkpoints, the name of the value that is the model, if it is neither `model` nor the only model. For
        checkpoints of %%stream with --by, the name of the column (or a list of names) that has each row's key: the row
        is scored by the model of this key. A key without a state is an error, or null with on_error="null".
    version: for checkpoints, the name of a new column that has the step of the checkpoint that made each prediction.
    refresh_s: for a streaming DataFrame and which="latest" or "best", how often each model process looks for a newer or
        better checkpoint, in seconds. It loads such a checkpoint in the background, and uses it for the rows that are
        sent from then on. If the checkpoint cannot be loaded, the model in use stays.
    batch_size: the number of rows in each call to the model.
    transform: a function that is called with each batch before the model, as in shards().
    fill, raw, dtype: as in shards(). For a torch module, floating-point inputs get the type of its weights.
    on_error: "raise" ends the query or the run at a row that cannot be scored; "null" makes the row's prediction null.
    probe: whether the model scores the first rows in the calling process. To find the first rows of a DataFrame,
        Spark may have to run a job.
    autocast: for a torch module, "bfloat16" or "float16" lets the module compute under torch.autocast() with this type,
        on the module's device. Predictions of either type become float32 columns.
    idle_s: for a DataFrame, how many seconds a process keeps the model while no task is using it.

    The other arguments are for files only.

    to: the folder to write, which all machines must be able to reach.
    np: how many parts are scored at once. np=-4 means four processes on this machine; np=4 means four Spark tasks. The
        default is one process on this machine for each core.
    columns: the columns of the data that are written beside the predictions; all by default.
    mode: "error" raises an error if `to` already contains files; "overwrite" replaces the folder.
    background: whether to return a BackgroundRun at once.

    Raises DataError, OptionsError, PathError, CheckpointError or CaptureError. For files, it also raises LaunchError,
    and ItemsFailed if rows cannot be scored.
    """
    settings = Settings(
        model, inputs, make_model, returns, which, batch_size, transform, fill, raw, dtype, on_error, probe, autocast,
        key, version, refresh_s,
    )  # fmt: skip
    data, table_name = resolved(data, as_frame=to is None)
    if not _is_path(data):
        for_files = {"to": to, "np": np, "columns": columns, "mode": None if mode == "error" else mode}
        for name, value in {**for_files, "background": background or None}.items():
            if value is not None:
                raise OptionsError(
                    f"{name}=… is only for Parquet files. For a DataFrame, predict() returns a DataFrame: write the "
                    "result with .write.parquet(…), or pass the path of Parquet files instead of a DataFrame."
                )
        return predict_frame(data, settings, idle_s=idle_s)
    if refresh_s is not None:
        raise OptionsError("refresh_s=… is only for streaming DataFrames: leave it out. Files are scored by one model.")
    if to is None:
        raise OptionsError(
            "to=… is missing. With Parquet files as input, predict() writes the predictions to files: name a folder "
            "for them, as in to='dbfs:/preds/run1'."
        )
    if np == 0:
        raise OptionsError(
            "np must not be 0: use np=-4 for four processes on this machine, or np=4 for four Spark tasks."
        )
    scoring = _prepared(data, table_name, settings, to, columns, mode)
    run, processes = _opened(scoring, -limits.cores() if np is None else np, background=background)
    work = functools.partial(_carried_out, scoring, run, processes)
    if background:
        return BackgroundRun(work, run.recorder, run.interrupts, scoring.destination.unfinished)
    return work()


# ── The arguments ────────────────────────────────────────────────────────────────────────────────────────────────────


class _Scoring(NamedTuple):
    """A call of predict() for Parquet files, after the arguments have been checked.

    `scorer` holds the arguments of the Scorer. `model` and `code` describe the model and the call in the run's record.
    """

    dataset: Dataset
    scorer: dict[str, Any]
    used: tuple[str, ...]
    kept: tuple[str, ...]
    destination: Destination
    belongs: dict[str, str]
    model: str
    code: str


def _prepared(
    data: Any, called: str, settings: Settings, to: str | os.PathLike[str], columns: Sequence[str] | None, mode: Mode
) -> _Scoring:
    """Check the arguments as far as possible without starting a process. If `probe` is true, score the first rows.

    `called` is the name of the data in messages, or '' if its path is.
    """
    destination = Destination(to, mode)
    refuse_shared(destination.unfinished.written)
    used = settings.used
    dataset = _dataset(data, called, used, columns)
    _check_apart(dataset, destination.folder)
    kept = dataset.columns if columns is None else tuple(dict.fromkeys(columns))
    inputs, source, kinds = settings.described(dataset.name), settings.source(), settings.kinds()
    kinds = settings.with_version(kinds, "bigint") if kinds else {}
    new_columns = tuple(_output(name, kind, several=len(kinds) > 1) for name, kind in kinds.items())
    probe = settings.probed(source, inputs, first_rows(dataset, used, PROBED_ROWS)) if settings.probe else None
    if probe is not None:
        if not new_columns:
            inferred = settings.with_version(outputs.types_of(probe.results, (), probe.rows), pa.int64())
            new_columns = tuple(
                PredictedColumn(name, kind, str(kind), len(inferred) > 1) for name, kind in inferred.items()
            )
        outputs.columns_of(probe.results, settings.of_model(new_columns), probe.rows)
    elif not new_columns:
        why = "none of the first rows can become arrays"
        if not settings.probe:
            why = "with probe=False the model is not tried on any rows"
        raise OptionsError(
            f"the type of the predictions is not known, because {why}: set the type, as in returns='float'."
        )
    settings.check_new(new_columns, kept, "the data", ", or leave the column out with columns=[…]")
    is_saved = isinstance(source, Saved)
    name = source.label
    belongs = {
        "data": dataset.version,
        "model": version_of(settings.make_model if is_saved else settings.model, name),
        "transform": version_of(settings.transform),
        "settings": digest(
            list(settings.groups.items()), settings.by_name, settings.fill, settings.raw, str(settings.dtype),
            str(new_columns), settings.batch_size, settings.on_error, settings.autocast_name, settings.key, kept,
        ),
    }  # fmt: skip
    code = f"sparkring.predict({dataset.name!r}, {name}, inputs={settings.inputs!r}, to={destination.folder.written!r})"
    version = (
        f"# {dataset.rows:,} rows in {describe.counted(len(dataset.files), 'file')}, version {dataset.version_words}"
    )
    scorer = settings.scorer(source, inputs, new_columns, small=probe is not None and probe.small)
    return _Scoring(dataset, scorer, used, kept, destination, belongs, name, f"{code}\n{version}")


def _is_path(data: Any) -> bool:
    paths = data if isinstance(data, list | tuple) else [data]
    return bool(paths) and all(isinstance(path, str | os.PathLike) for path in paths)


def _dataset(data: Any, name: str, used: Sequence[str], columns: Sequence[str] | None) -> Dataset:
    if isinstance(columns, str):
        raise OptionsError(f"columns={columns!r} is a string: write columns=[{columns!r}].")
    whole = open_dataset(data, None if columns is None else [*columns, *used], name=name)
    for column in used:
        if column not in whole.columns:
            raise DataError(f"{whole.name} has no column `{column}`: {nearest(column, whole.columns)}")
        kind = whole.schema.field(column).type
        if is_object(kind):
            raise DataError(
                f"column `{column}` cannot be an input, because its type is {kind}, which no array can hold: leave the "
                "column out of inputs=…."
            )
    return whole


def _check_apart(dataset: Dataset, folder: Location) -> None:
    """Raise OptionsError if a file of the input is in the folder to be written."""
    inside = next((file.path for file in dataset.files if file.path.startswith(f"{folder.path}/")), None)
    if dataset.fs == folder.fs and inside is not None:
        raise OptionsError(f"to={folder.written!r} contains files of the input, such as {inside}: name another folder.")


def _output(name: str, kind: Any, *, several: bool) -> PredictedColumn:
    written = kind if isinstance(kind, str) else getattr(kind, "simpleString", lambda: str(kind))()
    return PredictedColumn(name, _arrow_type(written, written), written, several)


def _arrow_type(kind: str, written: str) -> pa.DataType:
    """Return the Arrow type for a Spark type, which is `written` in messages: kind is a part of it."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:<(.*)>|\(([\d\s,]*)\))?\s*", kind, re.DOTALL)
    name, inner, numbers = (match[1].lower(), match[2], match[3]) if match else ("", None, None)
    with contextlib.suppress(ValueError):  # too few or too many parts
        if inner is None and name == "decimal":
            return pa.decimal128(*(map(int, numbers.split(",")) if numbers else (10, 0)))
        if inner is None and name in _TYPES and (numbers is None or name in ("char", "varchar")):
            return _TYPES[name]
        if inner is not None and name == "array":
            return pa.list_(_arrow_type(inner, written))
        if inner is not None and name == "map":
            key, value = _parts(inner)
            return pa.map_(_arrow_type(key, written), _arrow_type(value, written))
        if inner is not None and name == "struct":
            fields = [re.fullmatch(r"\s*(?:`(.+?)`|(\w+))\s*[:\s]\s*(.+)", part, re.DOTALL) for part in _parts(inner)]
            if all(fields):
                return pa.struct([(field[1] or field[2], _arrow_type(field[3], written)) for field in fields if field])
    raise OptionsError(
        f"returns: {written!r} is not a type that predict() can write: use one of {', '.join(_TYPES)}, decimal(10,2), "
        "or array, map and struct of these, as in array<float> or struct<label:string,score:float>."
    )


def _parts(inner: str) -> list[str]:
    """Divide the parts of a type at the commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in inner:
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


# ── The run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _opened(scoring: _Scoring, np: int, *, background: bool) -> tuple[ForeachRun, list[ModelProcess]]:
    """Prepare the folder. Return the run that writes the parts, and the model processes of this machine."""
    packed = packed_scorer(scoring.scorer, here=place_of(np).here)
    scoring.destination.open(scoring.belongs)
    try:
        return _run_of(scoring, packed, np, background)
    except BaseException:  # an interrupt, too, must not leave the folder behind
        scoring.destination.release()
        raise


def _run_of(scoring: _Scoring, packed: Any, np: int, background: bool) -> tuple[ForeachRun, list[ModelProcess]]:
    unfinished, parts = scoring.destination.unfinished, parts_of(scoring.dataset)
    order = ModelOrder(secrets.token_hex(8), secrets.token_hex(32), [], root_for_ranks(), IDLE_S)
    here = place_of(np).here
    if here:
        order = order._replace(path=[os.path.abspath(entry) for entry in sys.path], watch=os.getpid())
    process = order, _written(packed, unfinished / MODEL)
    dataset, folder = replace(scoring.dataset, files=()), (unfinished / PARTS).written
    outputs, batch_size = scoring.scorer["outputs"], scoring.scorer["batch_size"]
    job = Job(dataset, scoring.used, scoring.kept, outputs, batch_size, folder, *process)
    at_once = min(abs(np), len(parts))
    addresses = gpus.visible()[:at_once] if here else []
    gpus_each = 1 / math.ceil(at_once / len(addresses)) if addresses else None  # spreads the ranks over all GPUs
    options = ForeachOptions(
        np=-at_once if here else at_once,
        fail_fast=True,
        background=background,
        checkpoint_dir=unfinished.written,
        gpus=gpus_each,
    )
    title = f"predict {scoring.dataset.name} with {scoring.model}"
    prepared = foreach_run.prepare(ForeachSpec(Call(job), parts, options, title=title, code=scoring.code))
    # The directory belongs to this run only, and is removed when the run has finished.
    prepared = prepared._replace(
        started=prepared.started._replace(checkpoint_dir="", captured=()), stay=True, noun="part"
    )
    assert prepared.kept is not None
    prepared.kept.notice_if_used = f"parts that an earlier run has written to {unfinished.written} are used"
    shares = [[address] for address in addresses] or [[]]
    return open_items(prepared), [ModelProcess(*process, share) for share in shares]


def _written(packed: Any, target: Location) -> Model:
    """Write the packed model to a file, for the ranks."""
    with target.fs.open(target.path, "wb") as out:
        stream = _Digested(out)
        pickle.dump(packed, stream, protocol=5)
    return Model(target.written, stream.digest.hexdigest())


class _Digested:
    """A file that computes the digest of the data that is written to it."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return int(self._out.write(data))


def _carried_out(scoring: _Scoring, run: ForeachRun, processes: Sequence[ModelProcess]) -> Predictions:
    """Carry out the run, and make its parts visible. Raises DataError and the errors of carry_out_items()."""
    destination = scoring.destination
    written: dict[int, Written] = {}

    def finish(values: Mapping[int, Written]) -> None:
        written.update(values)
        files = {part.file: part.size_bytes for _, part in sorted(values.items())}
        about = {"rows": scoring.dataset.rows, "data": scoring.dataset.name, "version": scoring.dataset.version}
        destination.commit(files, {**about, "model": scoring.model, "files": list(files)})
        run.recorder.notice(_summary(run.recorder.record, values))

    run.finish = finish
    run.kept_words = (
        f"The parts that are complete stay in {destination.unfinished.written}: the same call writes only the others."
    )
    try:
        for process in processes if run.prepared.options.place.here else ():
            process.start()
        carry_out_items(run)
    finally:
        for process in processes:
            process.end()
        destination.release()
    record = run.recorder.record
    rows = sum(part.rows for part in written.values())
    nulls = sum(part.nulls for part in written.values())
    scored = sum(written[number].rows for number in _ran(record))
    seconds = record.ended - record.started
    return Predictions(destination.folder.written, rows, len(written), nulls, seconds, scored, record)


def _ran(record: RunRecord) -> list[int]:
    """Return the numbers of the parts that this run has written."""
    return [] if record.items is None else [item.item for item in record.items.known if item.state == "finished"]


def _summary(record: RunRecord, values: Mapping[int, Written]) -> str:
    """Return a line about the parts that this run has written."""
    ran = {number: values[number] for number in _ran(record)}
    if not ran:
        return "all parts were already complete"
    loads = {part.process: part.load_s for part in ran.values() if part.process}
    rows = sum(part.rows for part in ran.values())
    loaded = f"model loaded in {', '.join(describe.duration(load_s) for load_s in loads.values())}" if loads else ""
    slowest = max(ran, key=lambda number: ran[number].seconds)
    return describe.dotted(
        f"{describe.counted(rows, 'row')} scored",
        describe.items_rate(record, time.time()),
        loaded,
        f"slowest part: {slowest} ({describe.duration(ran[slowest].seconds)})",
    )
