"""`shards(…)`: this rank's shard of a data set, batch by batch, for TensorFlow, PyTorch, NumPy or Arrow."""

from __future__ import annotations

import datetime
import operator
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from sparkring.data import plan as planning
from sparkring.data.bad_rows import NAMED, ON_ERROR, BadRows, OnError, too_many
from sparkring.data.columns import Caller, Making, changes_with_nulls, has_nulls, holds_nulls, replacement, writable
from sparkring.data.dataset import Dataset, Source, having_nulls, open_dataset
from sparkring.data.layout import (
    Array,
    Batch,
    BatchLayout,
    Columns,
    Spec,
    Transform,
    dtype_of,
    groups_of,
    making_of,
    members_of,
)
from sparkring.data.plan import REMAINDERS, Leg, Position, RowRange, Shard
from sparkring.data.progress import ReadProgress, Route
from sparkring.data.reader import Ahead, Window, first_rows, windows
from sparkring.data.tensors import refused
from sparkring.data.where import Where, nearest
from sparkring.errors import CheckpointError, DataError
from sparkring.runtime import world
from sparkring.runtime.kernel import tell
from sparkring.wire.messages import Piece

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkring.capture.names import MethodCall
    from sparkring.data.plan import Remainder

SHUFFLED_ROWS = 65_536
SHUFFLED_BYTES = 16_000_000  # by default, a window holds at most SHUFFLED_ROWS rows and SHUFFLED_BYTES bytes
SHUFFLED_GROUPS = 32  # and, in remote storage, the rows of about this number of row groups
MANY_FOOTERS = 2_000  # ranks that read this many remote footers together are told how to read them once
PROBED_ROWS = 16  # the number of rows from which `spec` is found
# With a transform, this number of batches is read ahead for each of the buffers that `prefetch` asks for.
TRANSFORMED_AHEAD = 8

_AHEAD = -1  # a value of `_steps`: batches were read ahead, and it is not known how many were used

Held = TypeVar("Held")


class Buffer(NamedTuple):
    """The first `rows` rows of a window, after its rows have been put in `order` (None: as stored).

    `before` is the number of rows of this rank's shard that come before these rows.
    """

    window: Window
    order: Array | None
    rows: int
    before: int


@dataclass(frozen=True)
class Chunk(Generic[Held]):
    """Rows to hand out, in whole batches except at the end of an epoch. `place` says where the last row is stored.

    `left_out` names the rows that were left out, and in whose places there are others.
    """

    data: Held
    rows: int
    size_bytes: int
    place: str
    left_out: tuple[str, ...] = ()


def shards(
    source: Source | DataFrame | Dataset,
    batch_size: int = 32,
    *,
    columns: Columns | None = None,
    where: Where = None,
    transform: Transform | None = None,
    shuffle: bool | int = True,
    seed: int = 0,
    remainder: Remainder = "drop",
    fill: Mapping[str, Any] | None = None,
    raw: Mapping[str, tuple[Any, Sequence[int]]] | None = None,
    dtype: Any = None,
    prefetch: int = 2,
    on_error: OnError = "raise",
    most: int = 100,
    cache: str | os.PathLike[str] | None = None,
    version: int | None = None,
    timestamp: str | datetime.datetime | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> Shards:
    """Return this rank's shard of a Parquet data set or Spark DataFrame, in batches.

        data = shards("dbfs:/flights", 256, columns={"x": ["distance", "hour"], "y": "delay"}, where="delay < 600")
        model.fit(data.as_tf("x", "y"), epochs=3)

    Call shards() in the notebook, and use its result in the cell, so that errors are raised before the launch. On the
    driver, the shard is the whole data set. On the ranks, every row is read once per epoch, except that `remainder` can
    leave out or repeat a few rows. The numbers of rows in any two shards differ by at most one. All ranks take the same
    number of steps, except with remainder="join": some ranks may then take one more step than others.

    source: the path of a file or a folder, or a glob (dbfs:, file:, or any URL that fsspec supports); a list of these;
        the folder of a Delta table; a Spark DataFrame, which is written once to the folder `cache`, and read from
        there; or the name of a table or view in the Spark session, as in "catalog.schema.table".
    batch_size: the number of rows in a batch of this rank.
    columns: the names of the columns to read (default: all), or a dict that describes the arrays of a batch. A key of
        this dict is the name of an array. Its value is the name of a column, which becomes an array [rows, …] of its
        values, or a list of numeric columns, which become one array [rows, columns]. A list of one column of numbers
        becomes an array [rows, 1].
    where: a row filter, as in "speed > 3 and city == 'Ulm'", or in SQL: "speed > 3 AND city = 'Ulm'". A list in the
        form of pyarrow's `filters`, or an Arrow expression, is also accepted.
    transform: a function that is called with each batch (a dict of arrays [rows, …]) and returns the dict of arrays
        to use instead.
    shuffle: whether to read row groups in a new order every epoch, and to shuffle rows in a buffer. A number sets the
        size of this buffer, in rows.
    seed: the seed for the shuffled order. It must be the same on all ranks; 0 is a seed like any other.
    remainder: what to do with the last rows of an epoch that do not fill a batch: "drop" leaves them out, "pad" fills
        the batch with rows that the rank has already read, "join" returns a smaller batch.
    fill: a dict from columns to the values that replace their nulls. Without a replacement, integer columns with nulls
        become float64 with NaN, and in other columns, nulls become NaN, NaT or None; lists, vectors and raw bytes
        cannot hold nulls.
    raw: a dict from binary columns to the dtype and shape of the array that each of their rows holds, as in
        {"image": ("uint8", (32, 32, 3))}.
    dtype: the dtype of all floating-point columns and decimals, and of the arrays that combine them with other columns,
        as in dtype="float32".
    prefetch: the number of buffers to read ahead.
    on_error: what to do with a row that cannot become arrays, or for which the transform raises an error: "raise"
        raises a DataError that names the file, the row group and the row; "skip" leaves the row out, repeats another
        row of the batch in its place, so that all ranks still take the same number of steps, and says which ones.
    most: with on_error="skip", how many rows of its shard a rank may leave out in an epoch.
    version, timestamp: for the folder of a Delta table, the number of the version to read, or a time, as in
        timestamp="2026-01-31 12:00": the version that was the newest then. The default is the newest version.
    rank, size: the rank whose shard to return, and the number of ranks to divide the data set among; default: those of
        this process. Give both or neither.

    Raises DataError or PathError.
    """
    batch_size = _whole("batch_size", batch_size, 1, "the number of rows in a batch")
    seed = _whole("seed", seed, 0, "a number that is the same on all ranks")
    prefetch = _whole("prefetch", prefetch, 1, "the number of buffers to read ahead")
    if remainder not in REMAINDERS:
        raise DataError(f"remainder={remainder!r}: expected one of {', '.join(map(repr, REMAINDERS))}.")
    if on_error not in ON_ERROR:
        raise DataError(f"on_error={on_error!r}: expected one of {', '.join(map(repr, ON_ERROR))}.")
    most = _whole("most", most, 0, "how many rows may be left out")
    seat = planning.seat(rank, size)
    groups = groups_of(columns)
    names = None if groups is None else [name for group in groups.values() for name in members_of(group)]
    dataset = _open(source, names, where, cache, version, timestamp)
    _advise(dataset)
    if groups is None:
        groups = {name: name for name in dataset.columns}
    caller: Caller = "shards" if dataset.form is None else "tfrecords"
    making = making_of(fill, raw, dataset.columns, "columns to be read", caller)
    making = replace(making, nulls=_nulls(dataset, making), spark=dataset.spark)
    layout = BatchLayout(dataset.name, groups, making, dtype_of(dtype), transform)
    window = _window(shuffle, batch_size, dataset)
    return Shards(dataset, batch_size, layout, window, remainder, prefetch, seat, Position(seed=seed), on_error, most)


@dataclass
class Shards:
    """A data set that is divided among the ranks. `len()` is the number of steps that this rank takes in an epoch.

    Each iteration with one of the `as_…` methods reads the next epoch. If an epoch was not read to its end, the next
    iteration reads the same epoch again from its beginning. `position()` returns how far the ranks have read, and
    `resume()` continues from such a position.
    """

    dataset: Dataset
    batch_size: int
    layout: BatchLayout
    window: int
    remainder: Remainder
    prefetch: int
    seat: tuple[int, int] | None
    start: Position
    on_error: OnError = "raise"
    most: int = 100
    _steps: int = 0  # the batches handed out since `start`
    _planned: tuple[int, Position, tuple[Shard, ...]] | None = field(default=None, repr=False)
    _progress: ReadProgress | None = field(default=None, repr=False)

    # ── Properties ────────────────────────────────────────────────────────────

    @property
    def rank(self) -> int:
        """The rank whose shard this is: this process's rank, unless another was given."""
        return self.seat[0] if self.seat else world.world().rank

    @property
    def size(self) -> int:
        """The number of ranks that the data set is divided among."""
        return self.seat[1] if self.seat else world.world().size

    @property
    def epoch(self) -> int:
        """The epoch that will be read next, counted from 1."""
        return self.start.epoch

    def __len__(self) -> int:
        return self.plan()[self.rank].steps

    @property
    def steps(self) -> int:
        """The number of batches that this rank reads in this epoch, or in the rest of it after resume()."""
        return len(self)

    def plan(self, size: int | None = None) -> tuple[Shard, ...]:
        """Return the shard of each rank in this epoch, or in the rest of it after resume().

        Raise DataError if the data set is so small that no rank would take a step.
        """
        size = size or self.size
        if self._planned is not None and self._planned[:2] == (size, self.start):
            return self._planned[2]
        counts, remainder = self.dataset.counts(), self.remainder
        plan = planning.plan(
            counts, size, self.batch_size, position=self.start, remainder=remainder, window=self.window
        )
        if not self.start.legs and not any(shard.steps for shard in plan):
            least = min(shard.rows for shard in plan)
            raise DataError(
                f"{self.dataset.name} has {self.dataset.rows:,} rows. With size={size}, a rank has {least:,}, which "
                f"does not fill a batch of {self.batch_size:,}: use a smaller batch_size, fewer ranks, or "
                'remainder="pad".'
            )
        self._planned = size, self.start, plan
        return plan

    @property
    def spec(self) -> dict[str, Spec]:
        """The shape of one row and the dtype, for each column of a batch. Both are taken from the first rows."""
        if not self.layout.spec:
            # These are the first rows of the whole data set, not of this rank's shard, so that all ranks find the same
            # spec.
            first = planning.in_order(self.dataset.counts())[0]
            bad = self._bad_rows(lambda row: self._place([first], row), [])
            self.layout.learn(first_rows(self.dataset, self.dataset.columns, PROBED_ROWS), bad)
        return self.layout.spec

    def __sparkring_validate__(self, size: int, calls: Iterable[MethodCall] = ()) -> None:
        """Raise, before any rank is started, the errors that ranks would raise.

        `size` is the number of ranks. `calls` are the calls of this object's methods in the cell.
        """
        self.plan(self.size if self.seat else size)
        for column in self.dataset.schema:
            count, placed = (
                self._nulls(column.name),
                column.name not in self.layout.making.raw and holds_nulls(column.type),
            )
            if count and not placed:
                raise has_nulls(column.name, count, self.dataset.rows, value=replacement(column.type))
        try:
            self.spec  # noqa: B018
        except DataError:
            raise
        except Exception:
            return  # the transform may work on a rank; if it fails there, too, the rank's error shows the line
        for call in calls:
            if call.method in ("as_tf", "as_torch") and all(isinstance(name, str) for name in call.arguments):
                self.tensors(call.arguments)

    def _nulls(self, name: str) -> int:
        """Return how many nulls a column of the batches is known to have before any row is read, or 0 if unknown."""
        # `fill` replaces the nulls. If rows are left out, they may be those with nulls, so the number is unknown.
        if name in self.layout.making.fill or self.dataset.is_filtered:
            return 0
        return self.dataset.nulls.get(name, 0)

    def __repr__(self) -> str:
        from sparkring.history.describe import counted

        dataset, plan = self.dataset, self.plan()
        least, most = min(shard.steps for shard in plan), max(shard.steps for shard in plan)
        steps = counted(most, "step") if least == most else f"{least:,} to {most:,} steps"
        where = f" where {dataset.where}" if dataset.where else ""
        rows, groups = counted(dataset.rows, "row"), counted(dataset.row_groups, "row group")
        lies = f"{rows} in {groups} of {counted(len(dataset.files), 'file')}"
        ranks = f" on each of {self.size} ranks" if self.size > 1 else ""
        step = f"{steps} of {counted(self.batch_size, 'row')} per epoch"
        return f"<shards of {dataset.name}{where}: {lies}; {step}{ranks}>"

    # ── Reading ───────────────────────────────────────────────────────────────

    def as_numpy(self, *names: str) -> Iterator[Any]:
        """Yield the batches of one epoch as NumPy arrays.

        Without `names`, a batch is a dict of arrays [rows, …]; with one name, it is the array of that name; with
        several names, it is a tuple of their arrays.
        """
        take = self.taking(names)
        return (take(writable(batch)) for batch in self.batches())

    def as_arrow(self) -> Iterator[pa.Table]:
        """Yield the batches of one epoch as Arrow tables.

        The tables hold the columns as they are stored: `fill` and `transform` are not applied.
        """
        return self.handed_out(self._ahead(self._read_arrow), lambda table, begin: table.slice(begin, self.batch_size))

    def as_tf(self, *names: str) -> Any:
        """Return a tf.data.Dataset that reads the next epoch each time it is iterated.

            model.fit(data.as_tf("x", "y"))

        Without `names`, the elements are dicts of tensors [rows, …]; with one name, they are tensors; with several
        names, they are tuples of tensors in the order of the names (for Keras, inputs and targets). Shapes are static;
        dates are int64 nanoseconds since 1970. A column that no tensor can hold (decimals, rows, maps, None) raises
        DataError. In a fit under MultiWorkerMirroredStrategy, TensorFlow divides each batch among the ranks:
        `batch_size` is then the number of rows on all ranks together.
        """
        from sparkring.data.tensorflow_dataset import as_tf

        return as_tf(self, names)

    def as_torch(self, *names: str, workers: int = 0) -> Any:
        """Return a torch DataLoader that reads the next epoch each time it is iterated.

            for x, y in data.as_torch("x", "y"): …

        Without `names`, the batches are dicts of tensors [rows, …]; with one name, they are tensors; with several
        names, they are tuples of tensors. Strings are lists, and dates are int64 nanoseconds since 1970. A column that
        no tensor can hold (decimals, rows, maps, None) raises DataError. `workers` is the number of processes that read
        and transform rows; each process takes one buffer at a time.
        """
        workers = _whole("workers", workers, 0, "a number of processes (with 0, the rank itself reads)")
        from sparkring.data.torch_dataset import as_torch

        return as_torch(self, names, workers)

    def position(self, step: int | None = None) -> Position:
        """Return the position of all ranks after `step` batches.

        Count `step` from the beginning of the epoch or, if the epoch was resumed, from the call of resume(). `step`
        defaults to the number of batches that this rank has read. With TensorFlow, pass `step` unless you are between
        two epochs: TensorFlow reads ahead, and sparkring does not know how many of the batches the training has used.
        """
        if step is None:
            step = self._steps
        if step == _AHEAD:
            raise DataError(
                f"TensorFlow has read ahead of the training in {self.dataset.name}: save between epochs, call "
                "position(step=…) with the number of batches that were used for training, or train with "
                "checkpoints(…).keras(model, data=data), which counts the steps."
            )
        if not step:
            return self.start
        before, read = planning.begun(self.start, self.size, self.window, self.batch_size)
        leg = Leg(self.size, read + step * self.batch_size, self.window)
        return before._replace(legs=(*before.legs, leg))

    def resume(self, position: Sequence[Any]) -> Shards:
        """Return shards of the same data that begin at `position`, divided among the current number of ranks.

        A position that was saved as JSON, and so became a list, is also accepted.
        """
        return replace(self, start=Position.of(position), _steps=0, _progress=None)

    def state_dict(self, position: Position | None = None) -> dict[str, Any]:
        """Return the state for a checkpoint: `position` (default: position()), and the version of the data.

        Raise DataError if `position` is None and the current position is unknown, because TensorFlow has read ahead.
        """
        epoch, seed, legs = self.position() if position is None else position
        dataset = self.dataset
        return {
            "position": [epoch, seed, [list(leg) for leg in legs]],
            "version": dataset.version,
            "name": dataset.name,
            "table_version": dataset.table_version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in `state`, which state_dict() has returned, with the current number of ranks.

        Of a Delta table, the version that was read then is read again.
        Raise CheckpointError if the data has changed since then, or if different columns or rows are being read.
        """
        earlier = state.get("table_version")  # checkpoints of older versions do not have it
        if state["version"] != self.dataset.version and earlier is not None and self.dataset.table:
            newer = self.dataset.table_version
            try:
                dataset = self.dataset.at(earlier)
            except DataError as error:
                raise CheckpointError(
                    f"the checkpoint was saved while version {earlier:,} of {self.dataset.name} was read, which cannot "
                    f"be read again: {error}"
                ) from error
            making = replace(self.layout.making, nulls=_nulls(dataset, self.layout.making))
            if world.world().rank == 0 and earlier != newer:
                tell(f"the training goes on with version {earlier:,} of {dataset.name}, instead of version {newer:,}")
            layout = self.layout
            self.layout = BatchLayout(dataset.name, layout.groups, making, layout.dtype, layout.transform)
            self.dataset = dataset
        if state["version"] != self.dataset.version:
            raise CheckpointError(
                f"the data of {self.dataset.name} has changed since the checkpoint was saved (then: {state['name']} as "
                f"of {state['version']}, now: {self.dataset.version}), or different columns or rows are being read, so "
                "the saved position is no longer valid. Start over with --fresh, or leave the data out of the state "
                "for restore()."
            )
        self.start, self._steps, self._progress = Position.of(state["position"]), 0, None

    # ── For the as_… methods ──────────────────────────────────────────────────

    def taking(self, names: Sequence[str]) -> Callable[[Mapping[str, Any]], Any]:
        """Return a function that takes a batch and returns the part of it that `names` ask for.

        Without `names`, this part is the whole batch; with one name, it is that column; with several names, it is a
        tuple of columns.
        """
        for name in names:
            if name not in self.spec:
                raise DataError(f"a batch has no column `{name}`: {nearest(name, list(self.spec))}")
        if not names:
            return dict
        if len(names) == 1:
            return lambda batch: batch[names[0]]
        return lambda batch: tuple(batch[name] for name in names)

    def tensors(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the columns to turn into tensors: those in `names`, or all columns if there are no names.

        Raise DataError if one of these columns has a type that no tensor can hold.
        """
        self.taking(names)
        wanted = tuple(dict.fromkeys(names)) or tuple(self.spec)
        for name in wanted:
            if self.layout.transform is not None:
                if name in self.layout.objects:
                    raise DataError(
                        f"transform returned `{name}` as `{self.layout.objects[name]}` objects, which no tensor can "
                        "hold: return numbers, str or bytes, or leave it out."
                    )
                continue
            group = self.layout.groups[name]
            member, *others = members_of(group)
            if others or member in self.layout.making.raw:  # several columns are numbers, and so are `raw` arrays
                continue
            nulls = self._nulls(member) > 0 or member in self.layout.making.nulls
            kind = self.dataset.schema.field(member).type
            error = refused(member, kind, nulls=nulls, floats=self.layout.dtype is not None or group != member)
            if error is not None:
                raise error
        return wanted

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of one epoch as dicts of arrays [rows, …]."""

        def cut(arrays: Batch, begin: int) -> Batch:
            return {name: array[begin : begin + self.batch_size] for name, array in arrays.items()}

        return self.handed_out(self._ahead(self.read), cut)

    def chunks(self) -> Iterator[Batch]:
        """Yield the rows of one epoch as dicts of arrays. Each dict has the rows of one or more batches.

        The caller must call ended() when it hands out the last batch.
        """
        progress, epoch, steps = self._begin(), self.start.epoch, len(self)
        self._steps = _AHEAD
        for chunk, waited_s in self._ahead(self.read):
            self._note_left_out(progress, chunk)
            progress.batch(chunk.rows, chunk.size_bytes, waited_s, chunk.place, steps=-(-chunk.rows // self.batch_size))
            yield chunk.data
        if not steps:
            self.ended(epoch)

    def ended(self, epoch: int) -> None:
        """Move on to the next epoch. This is called when the last batch of `epoch` is handed to the rank's own code."""
        if self.start.epoch == epoch:
            self.start, self._steps = Position(self.start.epoch + 1, self.start.seed), 0
            if self._progress is not None:
                self._progress.end()

    def handed_out(
        self, chunks: Iterable[tuple[Chunk[Held], float]], cut: Callable[[Held, int], Held]
    ) -> Iterator[Held]:
        """Cut the chunks of an epoch into batches. `chunks` yields each chunk with the seconds spent waiting for it."""
        epoch, steps = self.start.epoch, len(self)
        progress = self._begin()
        self._steps = 0
        for chunk, waited_s in chunks:
            self._note_left_out(progress, chunk)
            for begin in range(0, chunk.rows, self.batch_size):
                rows = min(self.batch_size, chunk.rows - begin)
                progress.batch(rows, chunk.size_bytes * rows // chunk.rows, 0.0 if begin else waited_s, chunk.place)
                self._steps += 1
                if self._steps == steps:
                    # Code that counts its steps does not ask for a further batch, so the lines after the last `yield`
                    # might never run.
                    self.ended(epoch)
                yield cut(chunk.data, begin)
        if not steps:  # no batch was handed out: the rest of a resumed epoch, for example, can be less than a batch
            self.ended(epoch)

    def read(self, worker: int = 0, workers: int = 1, *, whole: bool = False) -> Generator[Chunk[Batch], None, None]:
        """Read one epoch of this rank in the calling thread or process, and yield it in chunks.

        Of n = `workers` workers, the one with number `worker` (from 0) reads every n-th buffer. A chunk has the rows of
        one buffer. With a transform, a chunk is one batch, unless `whole` is true.
        """
        layout, names = self.layout, list(self.spec)
        shard, spare = self.plan()[self.rank], None
        ranges, left_out = (*shard.ranges, *shard.pad), list[str]()
        length = self.window or _buffer_rows(self.batch_size, self.dataset)

        def bad_rows(numbers: Sequence[int] | Array) -> BadRows:
            return self._bad_rows(lambda row: self._place(ranges, int(numbers[row])), left_out)

        for window, order, rows, before in self._windows(worker, workers):
            where, begun = window.place, before // length * length
            left_out.clear()
            bad = bad_rows(range(begun, begun + window.rows))
            arrays, size_bytes = layout.arrays(window.batches, window.rows, order, rows, where, bad)
            if layout.transform is None:
                yield Chunk(arrays, rows, size_bytes, where, tuple(left_out))
                continue
            made = []
            for begin in range(0, rows, self.batch_size):
                part = min(self.batch_size, rows - begin)
                batch = {name: array[begin : begin + part] for name, array in arrays.items()}
                step = f"step {(before + begin) // self.batch_size + 1} (read up to {where})"
                numbers = range(before, before + rows) if order is None else begun + order
                result, spare = layout.transformed_rows(batch, part, step, bad_rows(numbers[begin:]), spare)
                made.append(result)
                if not whole:
                    yield Chunk(made.pop(), part, size_bytes * part // rows, where, tuple(left_out))
                    left_out.clear()
            if whole:
                joined = {name: np.concatenate([batch[name] for batch in made]) for name in names}
                yield Chunk(joined, rows, size_bytes, where, tuple(left_out))

    def _bad_rows(self, place: Callable[[int], str], left_out: list[str]) -> BadRows:
        # tfrecords() has no where= and on_error=.
        return BadRows(place, self.on_error == "skip", left_out, self.dataset.form is None)

    def _place(self, ranges: Sequence[RowRange], number: int) -> str:
        """Say where a row is stored. `number` counts the rows of `ranges` from 0."""
        for row_range in ranges:
            if number < row_range.rows:
                break
            number -= row_range.rows
        path, row = self.dataset.files[row_range.file].path, row_range.start + number
        which = f"{row:,} of those that pass the filter" if self.dataset.condition is not None else f"{row:,}"
        return f"{path}, row group {row_range.row_group}, row {which} (counted from 0)"

    def _note_left_out(self, progress: ReadProgress, chunk: Chunk[Any]) -> None:
        """Name the rows that were left out, or raise DataError if they are too many."""
        for words in chunk.left_out:
            progress.left_out.append(words)
            if len(progress.left_out) > self.most:
                raise too_many(progress.left_out, self.most, self.dataset.name)
            if len(progress.left_out) <= NAMED:
                tell(f"left out a row: {words}")

    def _ahead(self, read: Callable[[], Generator[Chunk[Held], None, None]]) -> Ahead[Chunk[Held]]:
        return Ahead(read, self.prefetch * (1 if self.layout.transform is None else TRANSFORMED_AHEAD))

    def _begin(self) -> ReadProgress:
        """Report that an epoch begins and, the first time, which data is read."""
        dataset = self.dataset
        if self._progress is None:
            self._progress = ReadProgress(
                name=dataset.name,
                kind=dataset.kind,
                columns=dataset.columns,
                where=dataset.where,
                version=dataset.version_words,
                files=len(dataset.files),
                row_groups=dataset.row_groups,
                rows=dataset.rows,
                size_bytes=dataset.size_bytes,
                batch_size=self.batch_size,
            )
        shard = self.plan()[self.rank]
        route = Route(
            (Piece(row_range.file, row_range.row_group, row_range.rows) for row_range in (*shard.ranges, *shard.pad)),
            lambda file: dataset.files[file].path,
            shard.read,
            self.window,
        )
        self._progress.begin(self.start.epoch, self._end(shard) - shard.read, shard.steps, route)
        return self._progress

    def _end(self, shard: Shard) -> int:
        """Return how many rows of its shard the rank will have read at the end of the epoch."""
        if self.remainder == "join" and shard.steps:
            return shard.rows
        return shard.read + shard.steps * self.batch_size

    def _windows(self, worker: int = 0, workers: int = 1) -> Iterator[Buffer]:
        shard = self.plan()[self.rank]
        if not shard.steps:  # with "join", the position can be after this rank's last row
            return
        before, _ = planning.begun(self.start, self.size, self.window, self.batch_size)
        key = (self.start.seed, self.start.epoch, len(before.legs), self.rank)
        length = self.window or _buffer_rows(self.batch_size, self.dataset, 1)
        end = self._end(shard)
        first, inside = divmod(shard.read, length)  # `inside` rows of the first window have been read
        numbers = range(first + worker, -(-end // length), workers)
        ranges: Sequence[RowRange] = (*shard.ranges, *shard.pad)
        if workers > 1 or first:
            ranges = [
                part for number in numbers for part in planning.cut(ranges, number * length, (number + 1) * length)
            ]
        for number, window in zip(numbers, windows(self.dataset, ranges, length), strict=False):
            order = None
            if self.window:
                order = np.arange(window.rows)
                # Shuffle only the shard's own rows. The rows that pad the last batch stay at the end.
                own = min(window.rows, max(0, shard.rows - number * length))
                order[:own] = planning.shuffled(own, self.window, key, number)
            rows, begin = min(window.rows, end - number * length), number * length
            if inside and number == first:
                order = np.roll(np.arange(window.rows) if order is None else order, -inside)
                rows, begin = rows - inside, begin + inside
            yield Buffer(window, order, rows, begin)

    def _read_arrow(self) -> Generator[Chunk[pa.Table], None, None]:
        for window, order, rows, _ in self._windows():
            table = pa.Table.from_batches(window.batches)
            ordered = table.slice(0, rows) if order is None else table.take(order[:rows])
            yield Chunk(ordered, rows, table.nbytes, window.place)

    def __sparkring_content__(self) -> tuple[Any, ...]:
        return (
            self.dataset.version,
            self.batch_size,
            self.layout,
            self.window,
            self.remainder,
            self.start,
            self.on_error,
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process reports its own progress, and makes the plan again, which is quick.
        return {**self.__dict__, "_progress": None, "_planned": None}


def _advise(dataset: Dataset) -> None:
    """On the first of several ranks, say that each of them has asked an object store for the footers of many files."""
    here = world.world()
    footers = here.size * len(dataset.files)
    if here.size > 1 and here.rank == 0 and footers >= MANY_FOOTERS and not dataset.local:
        tell(
            f"each of {here.size:,} ranks has read the footers of {len(dataset.files):,} files of {dataset.name}: call "
            "shards() in the notebook instead of in the cell, and they are read once"
        )


def _nulls(dataset: Dataset, making: Making) -> frozenset[str]:
    """Return the columns whose dtype is another one because they have nulls."""
    depends = [
        column.name for column in dataset.schema if changes_with_nulls(column.type) and column.name not in making.fill
    ]
    return having_nulls(dataset, depends)


def _whole(name: str, value: Any, least: int, what: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise DataError(f"{name}={value!r}: expected {what}, a whole number of at least {least}.")
    return number


def _window(shuffle: bool | int, batch_size: int, dataset: Dataset) -> int:
    """Return the number of rows to shuffle at a time: a multiple of `batch_size`, or 0 if rows are not shuffled."""
    if shuffle is True:
        return _buffer_rows(batch_size, dataset)
    rows = 0 if shuffle is False else _whole("shuffle", shuffle, 0, "True, False or a number of rows")
    return rows and max(1, rows // batch_size) * batch_size


def _buffer_rows(batch_size: int, dataset: Dataset, groups: int = SHUFFLED_GROUPS) -> int:
    """Return the default number of rows in a window: whole batches, at least one.

    In remote storage, a window has the rows of about `groups` row groups, however small they are. Each row group is
    read with requests of its own, and the first batch comes when the first window is complete.
    """
    rows = min(SHUFFLED_ROWS, int(SHUFFLED_BYTES / max(1.0, dataset.row_bytes())))
    if not dataset.local:
        rows = min(rows, groups * dataset.rows // dataset.row_groups)
    return max(1, rows // batch_size) * batch_size


def _open(
    source: Source | DataFrame | Dataset,
    names: Sequence[str] | None,
    where: Where,
    cache: str | os.PathLike[str] | None,
    version: int | None,
    timestamp: str | datetime.datetime | None,
) -> Dataset:
    from sparkring.data.tables import resolved

    if isinstance(source, Dataset):
        return source
    source, table_name = resolved(source)
    if hasattr(source, "sparkSession"):
        from sparkring.data.frames import name_of, nested_types
        from sparkring.data.materialise import materialise

        if version is not None or timestamp is not None:
            raise DataError("version= and timestamp= are for Delta tables, by their paths or names.")
        frame: DataFrame = source
        copy = materialise(frame, cache=cache, say=tell)
        name = table_name or name_of(names or frame.columns)
        dataset = open_dataset(copy.location.written, names, where, name=name)
        kinds = {name: kind for name, kind in nested_types(frame).items() if name in dataset.columns}
        return replace(dataset, spark=kinds)
    for path in [source] if isinstance(source, str | bytes) or not isinstance(source, Sequence) else source:
        if not isinstance(path, str | os.PathLike):
            from sparkring.capture.picklability import type_name

            raise DataError(f"shards() reads a path or a Spark DataFrame, not a `{type_name(path)}`.")
    return open_dataset(source, names, where, name=table_name, version=version, timestamp=timestamp)
