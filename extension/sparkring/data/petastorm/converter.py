"""Petastorm's Spark converter, which is made in the notebook's process and used by ranks."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sparkring.capture.picklability import type_name
from sparkring.compat.petastorm_warnings import silence
from sparkring.data.folders import has_ended, read_json, this_process, write_json
from sparkring.data.petastorm.own_name import unaccompanied
from sparkring.data.petastorm.plan import Path, ReaderPlan, plan_reader
from sparkring.data.petastorm.source import in_words
from sparkring.data.petastorm.watching import watch
from sparkring.errors import DataError, OptionsError, PathError
from sparkring.runtime.storage import locate
from sparkring.runtime.world import world

_PARENT_CACHE_DIR_URL = "petastorm.spark.converter.parentCacheDirUrl"
# This file, which Spark and Petastorm ignore, names the process that made a converter's folder. Petastorm removes the
# folder when the process ends normally. If the process was killed, the next process on this host that makes a converter
# removes the folder.
_OWNER, _LAYOUT = "_sparkring_owner.json", 1
_NAME = re.compile(r"\d{14}-appid-.+")  # the names that Petastorm gives to converters' folders


def make_spark_converter(
    df: Any, *arguments: Any, parent_cache_dir_url: Path | None = None, **options: Any
) -> SparkDatasetConverter:
    """Write a Spark DataFrame as Parquet with Petastorm's make_spark_converter, so that ranks can read its rows.

    The Parquet files are written to a new folder in `parent_cache_dir_url`, which all ranks must be able to reach. The
    default is the Spark setting petastorm.spark.converter.parentCacheDirUrl; a value given here changes this setting.
    The other arguments (`parquet_row_group_size_bytes`, `compression_codec`, `dtype`) are Petastorm's. With their
    defaults, floats become float32, and MLlib's vectors become 1-D arrays. The new folder is removed by the
    converter's delete() or when the notebook's process ends. If the process is killed, the folder is removed when
    another process on the same host makes a converter in the same parent folder. Raise OptionsError if no parent
    folder is given, PathError if its path is invalid, and DataError if `df` is not a Spark DataFrame.
    """
    silence()
    if not hasattr(df, "sparkSession"):
        raise DataError(f"make_spark_converter takes a Spark DataFrame, not a `{type_name(df)}`.")
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
    with contextlib.suppress(Exception):  # each of fsspec's packages raises its own errors
        write_json(locate(made.cache_dir_url) / _OWNER, _LAYOUT, this_process())
    return SparkDatasetConverter(made.cache_dir_url, tuple(made.file_urls), made.dataset_size)


@dataclass(frozen=True)
class SparkDatasetConverter:
    """The rows of a DataFrame as Parquet files, for ranks to read. `len()` is the number of rows.

    The ranks get only the paths of the files, and do not remove the files. When no run needs the files any more, call
    delete() in the notebook.
    """

    cache_dir_url: str
    file_urls: tuple[str, ...]
    dataset_size: int

    PARENT_CACHE_DIR_URL_CONF = _PARENT_CACHE_DIR_URL

    def __len__(self) -> int:
        return self.dataset_size

    def make_tf_dataset(
        self,
        batch_size: int | None = None,
        prefetch: int | None = None,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int | None = None,
        **reader_options: Any,
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that yields a tf.data.Dataset: `with converter.make_tf_dataset() as dataset`.

        Each batch is a namedtuple of tensors. A `batch_size` of None means 32, and a `num_epochs` of None means no
        limit. The last batch of the last epoch may be smaller. `reader_options` and errors are those of
        make_batch_reader. With TensorFlow, a transform must declare every field whose dtype or shape it changes,
        because TensorFlow silently casts values to the declared dtype.
        """
        plan = self._planned(reader_options, batch_size or 32, num_epochs, workers_count, every_change=True)
        manager = self._petastorms().make_tf_dataset(
            batch_size, prefetch, num_epochs, workers_count, shuffling_queue_capacity, **plan.chosen(reader_options)
        )
        return _entered(manager, plan)

    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int = 0,
        data_loader_fn: Callable[..., Any] | None = None,
        **reader_options: Any,
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that yields a loader, whose batches are dicts of torch tensors.

        The arguments that make_tf_dataset() also takes have the same meaning here.
        """
        plan = self._planned(reader_options, batch_size, num_epochs, workers_count)
        manager = self._petastorms().make_torch_dataloader(
            batch_size, num_epochs, workers_count, shuffling_queue_capacity, data_loader_fn,
            **plan.chosen(reader_options),
        )  # fmt: skip
        return _entered(manager, plan)

    def delete(self) -> None:
        """Remove the folder with the Parquet files.

        Raise OptionsError if this is called on one of several ranks, because other ranks may still be reading the
        files.
        """
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
    ) -> ReaderPlan:
        given = {**reader_options, "num_epochs": num_epochs, "workers_count": workers_count or 4}
        # `shard_one` sets the shard even if there is only one rank. Without a shard, Petastorm's converter would warn
        # that the shard differs from HOROVOD_RANK and HOROVOD_SIZE, if these variables are set.
        return plan_reader("make_batch_reader", (list(self.file_urls),), given, batch_size,
                     name=self.cache_dir_url, shard_one=True, every_change=every_change)  # fmt: skip


def _cache_url(path: Path) -> str:
    """Return `path` as a URL for both Spark and Petastorm. On Databricks, dbfs:/x becomes file:///dbfs/x.

    Raise PathError if Spark would encode characters of the path in the URLs of files, which Petastorm does not decode.
    """
    written = os.fspath(path)
    if written.startswith("hdfs:"):
        return written
    location = locate(written)
    encoded = re.search(r"[\s%\"#*?<>\\^`{|}\[\]]", location.path)
    if encoded:
        raise PathError(
            f"{written}: Petastorm cannot find a converter's files if the path of the folder contains the character "
            f"{encoded[0]!r}. Use another folder."
        )
    return f"file://{location.path}" if location.local else location.for_spark()


def _remove_abandoned(parent_url: str) -> None:
    """Remove the folders of converters whose processes ran on this host and have ended."""
    with contextlib.suppress(Exception):  # a folder that is not removed only takes up space
        parent = locate(parent_url)
        for path in parent.fs.ls(parent.path, detail=False):
            folder = parent / os.path.basename(path.rstrip("/"))
            owner = read_json(folder / _OWNER, _LAYOUT) if _NAME.fullmatch(os.path.basename(folder.path)) else {}
            if owner and has_ended(owner):
                folder.fs.rm(folder.path, recursive=True)


@contextlib.contextmanager
def _entered(manager: Any, plan: ReaderPlan) -> Iterator[Any]:
    """Enter Petastorm's context manager, watch its reader, and yield what the context manager yields."""
    with contextlib.ExitStack() as stack:
        try:
            with in_words(plan.source.name), unaccompanied():
                made = stack.enter_context(manager)
        except Exception:  # raised again after stopping the reader's workers, which Petastorm leaves running
            reader = getattr(manager, "reader", None)
            if reader is not None:
                reader.stop()
                reader.join()
            raise
        watch(manager.reader, plan)
        yield made
