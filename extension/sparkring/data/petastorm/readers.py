"""Petastorm's own readers, with this rank's shard by default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkring.data.petastorm import transform
from sparkring.data.petastorm.converter import SparkDatasetConverter
from sparkring.data.petastorm.plan import Path, bound, plan_reader
from sparkring.data.petastorm.quiet import silence
from sparkring.data.petastorm.source import in_words, open_source
from sparkring.data.petastorm.watching import watch

if TYPE_CHECKING:
    from petastorm.reader import Reader


def make_reader(
    dataset_url: Path | list[str], *arguments: Any, batch_size: int | None = None, **options: Any
) -> Reader:
    """Petastorm's make_reader: reads rows that were written with materialize_dataset(), each as a namedtuple.

    `batch_size` is the size of the batches that will be made from the rows; it is used to count steps and to check that
    all ranks have the same number. All other arguments are Petastorm's. DataError: no files, no Unischema, a file that
    is not Parquet, fewer row groups than shards, or a transform that does not return what it declares. PathError,
    OptionsError: an invalid argument.
    """
    return _make("make_reader", (dataset_url, *arguments), options, batch_size)


def make_batch_reader(
    dataset_url_or_urls: Path | list[str], *arguments: Any, batch_size: int | None = None, **options: Any
) -> Reader:
    """Petastorm's make_batch_reader: reads any Parquet files, one row group at a time, as a namedtuple of arrays.

    `batch_size` and errors are as in make_reader.
    """
    return _make("make_batch_reader", (dataset_url_or_urls, *arguments), options, batch_size)


def check_transform(
    transform_spec: Any,
    source: Path | list[str] | SparkDatasetConverter,
    *,
    schema_fields: Any = None,
    batched: bool | None = None,
) -> None:
    """Check on the first rows of `source` (a path, URLs or a converter) that a TransformSpec returns what it declares.

    The spec's function gets one row as a dict, as in make_reader, or, with `batched`, eight rows as a pandas DataFrame,
    as in make_batch_reader. By default, `batched` is true unless the data has a Unischema. DataError names the field,
    what was expected and what was found. The readers of this module make the same check, but allow a field to change
    without a declaration, since some consumers accept this.
    """
    silence()
    urls = list(source.file_urls) if hasattr(source, "file_urls") else source
    name = source.cache_dir_url if isinstance(source, SparkDatasetConverter) else ""
    reader = "make_reader" if batched is False else "make_batch_reader"
    found = open_source(bound(reader, (urls,), {"schema_fields": schema_fields}), name)
    as_batch = not found.has_unischema if batched is None else batched
    transform.check(transform_spec, found, schema_fields, batched=as_batch, every_change=True)


def _make(function: str, arguments: tuple[Any, ...], options: dict[str, Any], batch_size: int | None) -> Reader:
    import petastorm

    silence()
    plan = plan_reader(function, arguments, options, batch_size)
    with in_words(plan.source.name):
        reader = getattr(petastorm, function)(**plan.options)
    watch(reader, plan)
    return reader
