"""Petastorm under its own names, with this rank's shard by default.

    from sparkring.data.petastorm import make_reader, make_batch_reader, make_spark_converter, SparkDatasetConverter

is all that a notebook has to change. What these do beside what Petastorm's own do:

- `cur_shard` and `shard_count` are this rank's and the number of ranks unless they are given; in the notebook's
  process nothing is shared out. A rank that is to read everything says cur_shard=0, shard_count=1.
- Paths are written as elsewhere in sparkring: `dbfs:/x`, `/dbfs/x`, a folder on this machine, any URL.
- The footers are read before a worker starts: a path that is not there, too few row groups, a TransformSpec that does
  not give what it declares are a DataError then; ranks with unequal numbers of steps are told in a warning.
- A reader whose worker dies raises, and goes on raising, where Petastorm's own waits for ever.
- How far each rank has read is told to the notebook.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import inspect
import math
import os
import queue
import random
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.data import petastorm_cache, petastorm_transform
from sparkring.data.progress import Progress
from sparkring.data.quiet import silence
from sparkring.errors import DataError, OptionsError, PathError
from sparkring.place import world
from sparkring.storage import locate

if TYPE_CHECKING:
    from petastorm.reader import Reader

Path = str | os.PathLike[str]

_PARENT_CACHE_DIR_URL = "petastorm.spark.converter.parentCacheDirUrl"
_DEAD_AND_SILENT_S = 0.3  # what a worker says before it ends is read first
_DEAD_S = 1.5
_ROWS_AT_ONCE = 32


def __getattr__(name: str) -> Any:
    """What Petastorm has beside its readers, for code that takes all its names from one place."""
    if name in ("TransformSpec", "NoDataAvailableError"):
        import petastorm.errors

        return petastorm.TransformSpec if name == "TransformSpec" else petastorm.errors.NoDataAvailableError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def row_group_shard(row_group_rows: Sequence[int], shard_count: int) -> list[int]:
    """Rows of each of Petastorm's `shard_count` shards, where row group i has `row_group_rows[i]` rows.

    Row group i belongs to shard i modulo `shard_count`, whatever the seed and the shuffling.
    """
    return [sum(row_group_rows[shard::shard_count]) for shard in range(shard_count)]


# ── What is made ──────────────────────────────────────────────────────────────────────────────────────────────────────


def make_reader(
    dataset_url: Path | list[str], *arguments: Any, batch_size: int | None = None, **options: Any
) -> Reader:
    """Petastorm's make_reader: reads rows that were written under materialize_dataset(), each a namedtuple.

    `batch_size` is what the rows will be batched into; it is used to tell steps, and whether all ranks get as many.
    Everything else is Petastorm's. DataError: nothing there, no Unischema, a file that is no Parquet, fewer row groups
    than shards, a transform that does not give what it declares. PathError, OptionsError: the arguments themselves.
    """
    return _make("make_reader", (dataset_url, *arguments), options, batch_size)


def make_batch_reader(
    dataset_url_or_urls: Path | list[str], *arguments: Any, batch_size: int | None = None, **options: Any
) -> Reader:
    """Petastorm's make_batch_reader: reads any Parquet files, a row group at a time, as a namedtuple of arrays.

    `batch_size` and errors as in make_reader.
    """
    return _make("make_batch_reader", (dataset_url_or_urls, *arguments), options, batch_size)


def make_spark_converter(
    df: Any, *arguments: Any, parent_cache_dir_url: Path | None = None, **options: Any
) -> SparkDatasetConverter:
    """Petastorm's make_spark_converter: writes a Spark DataFrame as Parquet, for ranks to read.

    `parent_cache_dir_url` is the folder in which the cache folder is made, which all ranks must see; it becomes the
    Spark setting petastorm.spark.converter.parentCacheDirUrl, which serves where it is not given. The others
    (`parquet_row_group_size_bytes`, `compression_codec`, `dtype`) are Petastorm's: by default floats become float32,
    and MLlib's vectors 1-D arrays. The cache folder is removed by delete(), when the notebook's process ends, and, if
    that was killed, when the next one on the same host makes a converter in the same parent folder. OptionsError if
    there is no parent folder, PathError for one that cannot be.
    """
    silence()
    from petastorm.spark import make_spark_converter as real

    settings = df.sparkSession.conf
    parent = parent_cache_dir_url or settings.get(_PARENT_CACHE_DIR_URL, None)
    if not parent:
        raise OptionsError("make_spark_converter has to know where to keep the rows, in a folder that all ranks see: "
                           "parent_cache_dir_url='dbfs:/tmp/petastorm', for example.")  # fmt: skip
    url = _cache_url(parent)
    settings.set(_PARENT_CACHE_DIR_URL, url)
    petastorm_cache.remove_abandoned(url)
    made = real(df, *arguments, **options)
    petastorm_cache.claim(made.cache_dir_url)
    return SparkDatasetConverter(made.cache_dir_url, tuple(made.file_urls), made.dataset_size)


@dataclass(frozen=True)
class SparkDatasetConverter:
    """The rows of a DataFrame as Parquet files; made in the notebook, used in a cell. `len()` is the number of rows.

    It travels as the paths only: a rank that has used it removes nothing when it ends. The notebook does, with
    delete(), when no run needs the files any more.
    """

    cache_dir_url: str
    file_urls: tuple[str, ...]
    dataset_size: int

    PARENT_CACHE_DIR_URL_CONF = _PARENT_CACHE_DIR_URL

    def __len__(self) -> int:
        return self.dataset_size

    @contextlib.contextmanager
    def make_tf_dataset(
        self,
        batch_size: int | None = None,
        prefetch: int | None = None,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int | None = None,
        **reader_options: Any,
    ) -> Iterator[Any]:
        """A tf.data.Dataset of namedtuples of tensors, as a context manager: `with converter.make_tf_dataset() as d`.

        `batch_size` None is 32, `num_epochs` None is endless; the last batch of all is the rest. `reader_options` are
        make_batch_reader's. Errors as there; under TensorFlow, a transform must declare every change of a dtype.
        """
        plan = self._plan(reader_options, batch_size or 32, num_epochs, workers_count, every_change=True)
        manager = self._petastorms().make_tf_dataset(
            batch_size, prefetch, num_epochs, workers_count, shuffling_queue_capacity, **plan.chosen(reader_options)
        )
        with _entered(manager, plan) as dataset:
            yield dataset

    @contextlib.contextmanager
    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int = 0,
        data_loader_fn: Callable[..., Any] | None = None,
        **reader_options: Any,
    ) -> Iterator[Any]:
        """A loader of dicts of torch tensors, as a context manager; the arguments as in make_tf_dataset."""
        plan = self._plan(reader_options, batch_size, num_epochs, workers_count)
        manager = self._petastorms().make_torch_dataloader(
            batch_size, num_epochs, workers_count, shuffling_queue_capacity, data_loader_fn,
            **plan.chosen(reader_options),
        )  # fmt: skip
        with _entered(manager, plan) as loader:
            yield loader

    def delete(self) -> None:
        """Remove the cache folder. OptionsError on one rank of several: the others may be reading it."""
        if world().size > 1:
            raise OptionsError("delete() on a rank removes the files under the other ranks' hands: call it in the "
                               "notebook when the run is over.")  # fmt: skip
        self._petastorms().delete()

    def _petastorms(self) -> Any:
        from petastorm.spark import SparkDatasetConverter as Real

        return Real(self.cache_dir_url, list(self.file_urls), self.dataset_size)

    def _plan(
        self,
        reader_options: dict[str, Any],
        batch_size: int,
        num_epochs: int | None,
        workers_count: int | None,
        every_change: bool = False,
    ) -> _Plan:
        given = {**reader_options, "num_epochs": num_epochs, "workers_count": workers_count or 4}
        # Petastorm compares the shard with Horovod's rank even when there is one rank only.
        return _plan("make_batch_reader", (list(self.file_urls),), given, batch_size,
                     name=self.cache_dir_url, shard_one=True, every_change=every_change)  # fmt: skip


def check_transform(
    transform_spec: Any,
    source: Path | list[str] | SparkDatasetConverter,
    *,
    schema_fields: Any = None,
    batched: bool | None = None,
) -> None:
    """See whether a TransformSpec gives what it declares, on the first rows of `source`: a path, URLs, or a converter.

    Its function gets one row as a dict, as under make_reader, or eight as a pandas DataFrame where `batched`, as
    under make_batch_reader; by default what the data are for. DataError names the field, what is expected and what
    came. The readers of this module look at it themselves, except for a change to a field that it does not declare,
    which not every consumer minds.
    """
    silence()
    urls = list(source.file_urls) if hasattr(source, "file_urls") else source
    name = source.cache_dir_url if isinstance(source, SparkDatasetConverter) else ""
    reader = "make_reader" if batched is False else "make_batch_reader"
    found = _open(_bound(reader, (urls,), {"schema_fields": schema_fields}), name)
    as_batch = not found.has_unischema if batched is None else batched
    petastorm_transform.check(transform_spec, found, schema_fields, batched=as_batch, every_change=True)


# ── Before a reader is made ───────────────────────────────────────────────────────────────────────────────────────────


class Source(NamedTuple):
    """A data set as Petastorm sees it; row groups in Petastorm's order, their rows and bytes by the footers."""

    name: str
    fs: Any
    pieces: list[Any]  # one per row group: path, row_group, partition_keys
    rows: list[int]
    sizes_bytes: list[int]
    groups_in: dict[str, int]
    schema: Any
    has_unischema: bool
    partitions: Any

    @property
    def version(self) -> str:
        """A digest of the footers' account of every row group."""
        groups = zip(self.pieces, self.rows, self.sizes_bytes, strict=True)
        told = [(piece.path, piece.row_group, rows, size_bytes) for piece, rows, size_bytes in groups]
        return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()

    def place(self, index: int) -> str:
        """Row group `index` as people name it."""
        piece = self.pieces[index]
        of = self.groups_in[piece.path]
        return f"{os.path.basename(piece.path)}, row group {piece.row_group + 1} of {of}"


class _Plan(NamedTuple):
    """A reader that can be made: all arguments of Petastorm's function, and what is known of its shard."""

    source: Source
    options: dict[str, Any]
    batched: bool
    batch_size: int | None
    columns: list[str]

    @property
    def groups(self) -> list[int]:
        """The indexes of this shard's row groups, in Petastorm's order before it shuffles them."""
        count = self.options["shard_count"] or 1
        indexes = list(range(len(self.source.rows)))
        if self.options["shard_count"] and self.options["seed"] is not None:
            random.Random(self.options["seed"]).shuffle(indexes)
        return [index for index in indexes if index % count == (self.options["cur_shard"] or 0)]

    @property
    def counted(self) -> bool:
        """Do the footers tell how many rows will come?"""
        chosen = (self.options["predicate"], self.options["rowgroup_selector"])
        return all(option is None for option in chosen) and not _is_ngram(self.options["schema_fields"])

    def chosen(self, given: dict[str, Any]) -> dict[str, Any]:
        """The options to call a converter with: those that were given, and those that were found for them."""
        found = ("cur_shard", "shard_count", "seed")
        return {**given, **{name: self.options[name] for name in found}}

    def steps(self, rows: int) -> int | None:
        return math.ceil(rows / self.batch_size) if self.batch_size else None


def _make(function: str, arguments: tuple[Any, ...], options: dict[str, Any], batch_size: int | None) -> Reader:
    import petastorm

    silence()
    plan = _plan(function, arguments, options, batch_size)
    with _in_words(plan.source.name):
        reader = getattr(petastorm, function)(**plan.options)
    _watch(reader, plan)
    return reader


def _plan(
    function: str,
    arguments: tuple[Any, ...],
    given: dict[str, Any],
    batch_size: int | None,
    *,
    name: str = "",
    shard_one: bool = False,
    every_change: bool = False,
) -> _Plan:
    """Look at everything that can be known before a worker starts; the errors of this module come from here."""
    silence()
    if batch_size is not None and batch_size < 1:
        raise OptionsError(f"batch_size is {batch_size}; it must be at least 1.")
    options = _bound(function, arguments, given)
    _share_out(options, shard_one)
    source = _open(options, name)
    batched = function == "make_batch_reader"
    if not batched and not source.has_unischema:
        raise DataError(f"{source.name} was not written with Petastorm's materialize_dataset: there is no Unischema "
                        "beside the files. Read it with make_batch_reader.")  # fmt: skip
    columns = list(petastorm_transform.view(source.schema, options["schema_fields"]).fields)
    spec = options["transform_spec"]
    if spec is not None:
        petastorm_transform.check(spec, source, options["schema_fields"], batched=batched, every_change=every_change)
    if options["shuffle_row_groups"] and options["seed"] is None and not options["shuffle_rows"]:
        options["seed"] = secrets.randbits(31)  # as good as none, but so the order is known
    plan = _Plan(source, options, batched, batch_size, columns)
    if options["shard_count"]:
        _check_shards(plan)
    return plan


def _bound(function: str, arguments: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """All arguments of Petastorm's `function` by name, the defaults too, the URL as Petastorm wants it."""
    import petastorm

    bound = inspect.signature(getattr(petastorm, function)).bind(*arguments, **given)
    bound.apply_defaults()
    options = dict(bound.arguments)
    url = next(iter(options))
    if options["filesystem"] is None and not options["storage_options"]:
        many = isinstance(options[url], list)
        options[url] = [_url(each) for each in options[url]] if many else _url(options[url])
    return options


def _url(path: Path) -> str:
    written = os.fspath(path)
    if written.startswith("hdfs:"):  # Petastorm has its own ways to HDFS
        return written
    found = locate(written)
    if not found.local:
        return str(found.fs.unstrip_protocol(found.path))
    if set("?#") & set(found.path):
        raise PathError(f"{written}: Petastorm takes what follows a ? or # for no part of the path. Rename the folder.")
    return f"file://{found.path}"


def _cache_url(path: Path) -> str:
    """The same for what Spark writes and Petastorm reads: on Databricks that is the mount, not dbfs:/."""
    written = os.fspath(path)
    if written.startswith("hdfs:"):
        return written
    found = locate(written)
    return f"file://{found.path}" if found.local else found.for_spark()


def _share_out(options: dict[str, Any], shard_one: bool) -> None:
    """Set this rank's shard where none is given; OptionsError for one that cannot be."""
    here = world()
    shard, count = options["cur_shard"], options["shard_count"]
    if shard is None and count is None:
        if here.size > 1 or shard_one:
            options.update(cur_shard=here.rank, shard_count=here.size)
    elif shard is None or count is None:
        raise OptionsError("cur_shard and shard_count go together: give both, or neither for this rank's shard.")
    elif not 0 <= shard < count:
        raise OptionsError(f"cur_shard={shard} is no shard of shard_count={count}: they count from 0.")
    else:
        options.update(cur_shard=int(shard), shard_count=int(count))


def _open(options: dict[str, Any], name: str = "") -> Source:
    """Read the footers, through the file system that Petastorm will use."""
    from petastorm.errors import NoDataAvailableError
    from petastorm.etl import dataset_metadata
    from petastorm.fs_utils import get_filesystem_and_path_or_paths
    from pyarrow import parquet

    url = next(iter(options.values()))
    name = name or (url if isinstance(url, str) else f"{url[0]} and {len(url) - 1} more" if len(url) > 1 else url[0])
    name = name.removeprefix("file://")
    with _in_words(name, also=(OSError, ValueError, RuntimeError, NoDataAvailableError)):
        fs, paths = get_filesystem_and_path_or_paths(
            url, options["hdfs_driver"], storage_options=options["storage_options"], filesystem=options["filesystem"]
        )
        for path in [paths] if isinstance(paths, str) else paths:
            if not fs.exists(path):
                raise DataError(f"{name}: there is nothing at {path}{_as_seen_here()}.")
        dataset = parquet.ParquetDataset(
            paths, filesystem=fs, validate_schema=False, metadata_nthreads=10, filters=options["filters"]
        )
        if not dataset.pieces:
            raise DataError(f"{name} holds no Parquet files.")
        footers = _footers(fs, [piece.path for piece in dataset.pieces])
        if dataset.metadata or dataset.common_metadata:
            pieces = dataset_metadata.load_row_groups(dataset)
        else:
            pieces = [group for piece in dataset.pieces for group in _split(piece, footers[piece.path])]
        try:
            schema, has_unischema = dataset_metadata.get_schema(dataset), True
        except dataset_metadata.PetastormMetadataError:
            schema, has_unischema = dataset_metadata.infer_or_load_unischema(dataset), False
        groups = [footers[piece.path].row_group(piece.row_group) for piece in pieces]
        found = Source(
            name, fs, pieces, [group.num_rows for group in groups], [group.total_byte_size for group in groups],
            {path: footer.num_row_groups for path, footer in footers.items()}, schema, has_unischema,
            dataset.partitions,
        )  # fmt: skip
    if not any(found.rows):
        raise DataError(f"{name} has no rows: {len(footers)} files, all of them empty.")
    return found


def _split(piece: Any, footer: Any) -> list[Any]:
    from pyarrow import parquet

    return [
        parquet.ParquetDatasetPiece(piece.path, row_group=index, partition_keys=piece.partition_keys)
        for index in range(footer.num_row_groups)
    ]


def _footers(fs: Any, paths: list[str]) -> dict[str, Any]:
    """The footer of every file, by its path; DataError names the one that has none."""
    from pyarrow import parquet

    def read(path: str) -> Any:
        try:
            with fs.open(path, "rb") as file:
                return parquet.read_metadata(file)
        except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
            raise DataError(f"{path} cannot be read as Parquet: {_first_line(error)}") from error

    with concurrent.futures.ThreadPoolExecutor(min(16, len(paths))) as pool:
        return dict(zip(paths, pool.map(read, paths), strict=True))


def _check_shards(plan: _Plan) -> None:
    """DataError where a shard has no row group; a warning where shards give unequal numbers of steps."""
    source, count = plan.source, plan.options["shard_count"]
    if len(source.rows) < count:
        raise _too_few_row_groups(source, count)
    epochs = plan.options["num_epochs"]
    if plan.options["cur_shard"] or not plan.batch_size or not plan.counted or epochs is None:
        return  # the first rank says it for all; and who reads endlessly never runs out
    steps = [math.ceil(rows * epochs / plan.batch_size) for rows in row_group_shard(source.rows, count)]
    most, least = max(steps), min(steps)
    if most != least:
        last = "the last step" if most - least == 1 else f"the last {most - least}"
        warnings.warn(
            f"{source.name}: rank {steps.index(most)} gets {most} steps of {plan.batch_size} rows, rank "
            f"{steps.index(least)} gets {least}: an allreduce in {last} hangs or fails. Petastorm gives out whole "
            "row groups; sparkring.shards splits evenly.",
            stacklevel=_level_of_user(),
        )


def _too_few_row_groups(source: Source, count: int) -> DataError:
    smaller = max(1, sum(source.sizes_bytes) // (2 * count))
    return DataError(
        f"{source.name} has {_some(len(source.rows), 'row group')} in {_some(len(source.groups_in), 'file')}, too few "
        f"for {count} ranks: Petastorm gives out whole row groups. Write it with smaller ones "
        f"(make_spark_converter(df.repartition({2 * count}), …) or parquet_row_group_size_bytes={smaller}), or use "
        "sparkring.shards, which splits row groups."
    )


@contextlib.contextmanager
def _in_words(name: str, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """What Petastorm and pyarrow raise about the data, in one sentence."""
    from petastorm.errors import NoDataAvailableError
    from petastorm.etl.dataset_metadata import PetastormMetadataError

    try:
        yield
    except (DataError, PathError):
        raise
    except PetastormMetadataError as error:
        raise DataError(f"{name}: its _common_metadata does not tell the row groups ({_first_line(error)}). "
                        "Petastorm's petastorm-generate-metadata.py writes it anew.") from error  # fmt: skip
    except (NoDataAvailableError, *also) as error:
        raise DataError(f"{name}: {_first_line(error)}") from error


def _as_seen_here() -> str:
    """For paths that are there for the notebook and not for a rank."""
    here = world()
    if here.size == 1:
        return ""
    return f" on {here.node}, where rank {here.rank} runs; data must lie where all ranks see them"


# ── While it reads ────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _entered(manager: Any, plan: _Plan) -> Iterator[Any]:
    """What Petastorm's context manager gives, watched; its reader's workers end with it even if it cannot be made."""
    with contextlib.ExitStack() as stack:
        try:
            with _in_words(plan.source.name):
                made = stack.enter_context(manager)
        except Exception:
            reader = getattr(manager, "reader", None)
            if reader is not None:
                reader.stop()
                reader.join()
            raise
        _watch(manager.reader, plan)
        yield made


def _watch(reader: Reader, plan: _Plan) -> None:
    """Put ourselves between the reader and its queue of results, where the reader's own iteration comes by."""
    source, options = plan.source, plan.options
    progress = Progress(
        name=source.name,
        kind="petastorm",
        columns=plan.columns,
        where=_where(options),
        version=source.version,
        files=len(source.groups_in),
        row_groups=len(source.rows),
        rows=sum(source.rows),
        size_bytes=sum(source.sizes_bytes),
        batch_size=plan.batch_size or 0,
    )
    reader._results_queue_reader = _Results(reader._results_queue_reader, _Tally(progress, plan))
    pool = reader._workers_pool
    if hasattr(pool, "_results_receiver_poller"):
        pool._results_receiver_poller = _Poller(pool._results_receiver_poller, _Deaths(source.name, pool))
    elif hasattr(pool, "_stop_event"):
        _guard(pool._results_queue, _Deaths(source.name, pool))


class _Results:
    """The reader's queue of results, with a tally of what came out of it, and a memory of what went wrong."""

    def __init__(self, real: Any, tally: _Tally) -> None:
        self._real = real
        self._tally = tally
        self._failed: Exception | None = None

    @property
    def batched_output(self) -> bool:
        return bool(self._real.batched_output)

    def read_next(self, pool: Any, schema: Any, ngram: Any) -> Any:
        if self._failed is not None:  # Petastorm would wait for workers that have ended
            raise DataError(f"the reader has failed before: {_first_line(self._failed)}") from self._failed
        began = time.monotonic()
        try:
            item = self._real.read_next(pool, schema, ngram)
        except StopIteration:
            self._tally.end()
            raise
        except Exception as error:  # of the user's transform, of the files
            self._failed = error
            raise
        self._tally.add(item, time.monotonic() - began)
        return item


class _Tally:
    """Counts what a reader gives, epoch by epoch, and tells it.

    Petastorm's epochs overlap: its workers begin the next one before the last row group of this one is there. An epoch
    here is so many rows as the shard has, or so many row groups where a transform may change how many rows they have.
    """

    def __init__(self, progress: Progress, plan: _Plan) -> None:
        self._progress = progress
        self._batched = plan.batched
        self._batch_size = plan.batch_size
        rows = [plan.source.rows[index] for index in plan.groups]
        parts = plan.options["shuffle_row_drop_partitions"]
        results = sum(min(each, parts) for each in rows)  # row groups, or parts of them
        spec = plan.options["transform_spec"]
        self._by_result = plan.batched and spec is not None and spec.func is not None
        whole = results if self._by_result else sum(rows)
        self._whole = whole if plan.counted and whole else math.inf
        self._rows_planned = sum(rows) if plan.counted else None
        steps = plan.steps(sum(rows))
        self._steps_planned = (results if plan.batched and steps is None else steps) if plan.counted else None
        self._places = _places(plan) if plan.counted else iter(())
        self._place, self._place_rows = "", 0
        self._results, self._waited_s = 0, 0.0  # what is not counted yet
        self._rows = self._size_bytes = self._epoch = 0  # what is not told yet, and of which epoch
        self._begin()

    def _begin(self) -> None:
        self._epoch += 1
        self._done: float = 0
        self._ended = False
        self._progress.begin(self._epoch, self._rows_planned, self._steps_planned)

    def add(self, item: Any, waited_s: float) -> None:
        """One result, for which somebody has waited so long."""
        self._results += 1
        self._waited_s += waited_s
        # To count is a fifth of what Petastorm takes for a row: they are counted a few at a time, as large as the last.
        if not self._batched and self._results < min(_ROWS_AT_ONCE, self._whole - self._done % self._whole):
            return
        rows = len(item[0]) if self._batched and len(item) else self._results
        size_bytes = sum(map(_size_bytes, item)) if isinstance(item, tuple) else 0
        self._size_bytes += size_bytes if self._batched else size_bytes * rows
        self._count(rows)

    def _count(self, rows: int) -> None:
        if self._batched or self._place_rows <= 0:
            self._place, self._place_rows = next(self._places, ("", 0))
        self._place_rows -= rows
        # In a thread of TensorFlow's nobody waits who would otherwise compute.
        waited_s = self._waited_s if threading.current_thread() is threading.main_thread() else 0.0
        self._results, self._waited_s = 0, 0.0
        while rows or self._by_result:
            if self._ended:
                self._begin()
            taken = rows if self._by_result else int(min(rows, self._whole - self._done))
            self._done += 1 if self._by_result else taken
            self._tell(taken, waited_s)
            rows, waited_s = rows - taken, 0.0
            if self._done >= self._whole:
                self._end()
            if self._by_result:
                break

    def _tell(self, rows: int, waited_s: float) -> None:
        """So many rows more of this epoch: as steps if their size is known, else as one."""
        self._rows += rows
        batch_size = self._batch_size or self._rows
        while batch_size and self._rows >= batch_size:
            self._progress.batch(batch_size, self._size_bytes, waited_s, self._place)
            self._rows, self._size_bytes, waited_s = self._rows - batch_size, 0, 0.0

    def end(self) -> None:
        """There is nothing more to read."""
        if self._results:
            self._count(self._results)
        self._end()

    def _end(self) -> None:
        if self._ended or not self._done:
            return
        self._ended = True
        if self._rows:
            self._progress.batch(self._rows, self._size_bytes, 0.0, self._place)
        self._rows = self._size_bytes = 0
        self._progress.end()


def _places(plan: _Plan) -> Iterator[tuple[str, int]]:
    """Where the results come from, one after another, and how many rows each has.

    This is the order in which Petastorm hands row groups to its workers; one that is slow is overtaken by the others.
    """
    options, source = plan.options, plan.source
    if options["shuffle_row_groups"] and options["seed"] is None:
        return
    parts = options["shuffle_row_drop_partitions"]
    items = [(index, part) for index in plan.groups for part in range(parts)]
    import numpy as np

    shuffled = np.random.RandomState(options["seed"])
    while any(source.rows[index] for index, _ in items):
        if options["shuffle_row_groups"]:
            order = list(range(len(items)))
            shuffled.shuffle(order)
            items = [items[number] for number in order]
        for index, part in items:
            if part < source.rows[index]:
                yield source.place(index), math.ceil(source.rows[index] / min(parts, source.rows[index]))


class _Deaths:
    """Knows when to give up on workers that have ended without a word.

    Petastorm sees an exception in a worker, and nothing else: not sys.exit() in a transform, not a process that the
    system has killed. It waits for their results for ever.
    """

    def __init__(self, name: str, pool: Any) -> None:
        self._name = name
        self._pool = pool
        self._since = 0.0

    def look(self, *, silent: bool) -> None:
        """DataError if a worker has been dead for a while; sooner where there is nothing else to read."""
        dead = [self._ended(worker) for worker in self._pool._workers]
        reasons = [reason for reason in dead if reason]
        if not reasons:
            return
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since > (_DEAD_AND_SILENT_S if silent else _DEAD_S):
            raise DataError(f"{self._name}: {len(reasons)} of the {len(dead)} workers of Petastorm's reader ended "
                            f"without a result ({reasons[0]}).")  # fmt: skip

    @staticmethod
    def _ended(worker: Any) -> str:
        if not hasattr(worker, "poll"):
            return "" if worker.is_alive() else "a thread; sys.exit() in a transform does that, and so does stop()"
        code = worker.poll()
        if code is None:
            return ""
        return f"a process, killed by signal {-code}" if code < 0 else f"a process, with exit code {code}"


class _Poller(NamedTuple):
    """What the reader of a process pool waits with."""

    real: Any
    deaths: _Deaths

    def poll(self, timeout_ms: float) -> Any:
        found = self.real.poll(timeout_ms)
        self.deaths.look(silent=not found)
        return found


def _guard(results: queue.Queue[Any], deaths: _Deaths) -> None:
    """The same for a thread pool."""
    real = results.get

    def get(block: bool = True, timeout: float | None = None) -> Any:
        try:
            found = real(block, timeout)
        except queue.Empty:
            deaths.look(silent=True)
            raise
        if not isinstance(found, Exception):
            deaths.look(silent=False)
        return found

    results.get = get  # type: ignore[method-assign]


# ── Words and numbers ─────────────────────────────────────────────────────────────────────────────────────────────────


def _is_ngram(schema_fields: Any) -> bool:
    return hasattr(schema_fields, "resolve_regex_field_names")


def _where(options: dict[str, Any]) -> str:
    """The filters in words, '' for none."""
    found = [repr(options["filters"])] if options["filters"] else []
    chosen = (options["predicate"], options["rowgroup_selector"])
    return " and ".join(found + [type(each).__name__ for each in chosen if each is not None])


def _size_bytes(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return int(getattr(value, "nbytes", 8))


def _level_of_user() -> int:
    """How far up the caller of this module is, as warnings.warn counts."""
    level, frame = 1, inspect.currentframe()
    frame = frame.f_back if frame else None
    while frame is not None and frame.f_code.co_filename in (__file__, contextlib.__file__):
        level, frame = level + 1, frame.f_back
    return level


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _some(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
