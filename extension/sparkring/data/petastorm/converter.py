"""Petastorm's Spark converter: made in the notebook, used in a cell."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sparkring.data import owners
from sparkring.data.petastorm.plan import Path, Plan, plan_reader
from sparkring.data.petastorm.quiet import silence
from sparkring.data.petastorm.source import in_words
from sparkring.data.petastorm.watching import watch
from sparkring.errors import OptionsError
from sparkring.runtime.storage import Location, locate
from sparkring.runtime.world import world

_PARENT_CACHE_DIR_URL = "petastorm.spark.converter.parentCacheDirUrl"
# This file in a converter's folder names the process that made the folder. Spark and Petastorm ignore it. Petastorm
# removes the folder when the process ends normally. If the process was killed, the next one on this host that makes a
# converter removes the folder.
_OWNER = "_sparkring_owner.json"
_NAME = re.compile(r"\d{14}-appid-.+")  # the names that Petastorm gives to such folders


def make_spark_converter(
    df: Any, *arguments: Any, parent_cache_dir_url: Path | None = None, **options: Any
) -> SparkDatasetConverter:
    """Petastorm's make_spark_converter: writes a Spark DataFrame as Parquet, for ranks to read.

    The cache folder is made in `parent_cache_dir_url`, which all ranks must be able to reach. The default is the Spark
    setting petastorm.spark.converter.parentCacheDirUrl; a value given here changes this setting. The other arguments
    (`parquet_row_group_size_bytes`, `compression_codec`, `dtype`) are Petastorm's: by default, floats become float32,
    and MLlib's vectors become 1-D arrays. The cache folder is removed by delete() or when the notebook's process ends.
    If the process is killed, the folder is removed when the next process on the same host makes a converter in the same
    parent folder. OptionsError: no parent folder is given. PathError: it is invalid.
    """
    silence()
    from petastorm.spark import make_spark_converter as real

    settings = df.sparkSession.conf
    parent = parent_cache_dir_url or settings.get(_PARENT_CACHE_DIR_URL, None)
    if not parent:
        raise OptionsError(
            "make_spark_converter needs a folder that all ranks can reach, in which to write the rows, for example "
            "parent_cache_dir_url='dbfs:/tmp/petastorm'."
        )
    url = _cache_url(parent)
    settings.set(_PARENT_CACHE_DIR_URL, url)
    _remove_abandoned(url)
    made = real(df, *arguments, **options)
    _claim(made.cache_dir_url)
    return SparkDatasetConverter(made.cache_dir_url, tuple(made.file_urls), made.dataset_size)


@dataclass(frozen=True)
class SparkDatasetConverter:
    """The rows of a DataFrame as Parquet files; made in the notebook, used in a cell. `len()` is the number of rows.

    Only the paths are sent to the ranks, and ranks do not remove the files. Call delete() in the notebook when no run
    needs them any more.
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

        A `batch_size` of None means 32, and a `num_epochs` of None means no limit; the very last batch may be smaller.
        `reader_options` and errors are those of make_batch_reader. With TensorFlow, a transform must declare every
        change of dtype.
        """
        plan = self._planned(reader_options, batch_size or 32, num_epochs, workers_count, every_change=True)
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
        """A loader of dicts of torch tensors, as a context manager. The arguments are as in make_tf_dataset."""
        plan = self._planned(reader_options, batch_size, num_epochs, workers_count)
        manager = self._petastorms().make_torch_dataloader(
            batch_size, num_epochs, workers_count, shuffling_queue_capacity, data_loader_fn,
            **plan.chosen(reader_options),
        )  # fmt: skip
        with _entered(manager, plan) as loader:
            yield loader

    def delete(self) -> None:
        """Remove the cache folder. OptionsError: called on one of several ranks, since the others may be reading it."""
        if world().size > 1:
            raise OptionsError(
                "delete() on a rank would remove files that other ranks are still reading: call it in the notebook "
                "after the run."
            )
        self._petastorms().delete()

    def _petastorms(self) -> Any:
        from petastorm.spark import SparkDatasetConverter as Real

        return Real(self.cache_dir_url, list(self.file_urls), self.dataset_size)

    def _planned(
        self,
        reader_options: dict[str, Any],
        batch_size: int,
        num_epochs: int | None,
        workers_count: int | None,
        every_change: bool = False,
    ) -> Plan:
        given = {**reader_options, "num_epochs": num_epochs, "workers_count": workers_count or 4}
        # The shard is set even if there is only one rank, because Petastorm compares it with Horovod's rank.
        return plan_reader("make_batch_reader", (list(self.file_urls),), given, batch_size,
                     name=self.cache_dir_url, shard_one=True, every_change=every_change)  # fmt: skip


def _cache_url(path: Path) -> str:
    """A URL that is valid for both Spark and Petastorm. On Databricks, file:///dbfs/… replaces dbfs:/…."""
    written = os.fspath(path)
    if written.startswith("hdfs:"):
        return written
    found = locate(written)
    return f"file://{found.path}" if found.local else found.for_spark()


def _claim(cache_dir_url: str) -> None:
    """Record this process as the owner of the folder, in a file in the folder. Errors are ignored."""
    with contextlib.suppress(Exception):  # each of fsspec's packages has its own errors
        folder = locate(cache_dir_url)
        folder.fs.pipe_file((folder / _OWNER).path, json.dumps(owners.me()).encode())


def _remove_abandoned(parent_url: str) -> None:
    """Remove the folders in the parent folder whose owner ran on this host and has ended."""
    with contextlib.suppress(Exception):  # nothing depends on the removal
        parent = locate(parent_url)
        for path in parent.fs.ls(parent.path, detail=False):
            folder = parent / os.path.basename(path.rstrip("/"))
            if _NAME.fullmatch(os.path.basename(folder.path)) and _abandoned(folder):
                folder.fs.rm(folder.path, recursive=True)


def _abandoned(folder: Location) -> bool:
    try:
        return owners.has_ended(json.loads(folder.fs.cat_file((folder / _OWNER).path))) is True
    except (OSError, ValueError, KeyError, TypeError):  # not made by sparkring, or half-written: keep the folder
        return False


@contextlib.contextmanager
def _entered(manager: Any, plan: Plan) -> Iterator[Any]:
    """Enter Petastorm's context manager and watch its reader. If entering it fails, the reader's workers are ended."""
    with contextlib.ExitStack() as stack:
        try:
            with in_words(plan.source.name):
                made = stack.enter_context(manager)
        except Exception:  # raised again, after the workers of the unfinished reader have ended
            reader = getattr(manager, "reader", None)
            if reader is not None:
                reader.stop()
                reader.join()
            raise
        watch(manager.reader, plan)
        yield made
