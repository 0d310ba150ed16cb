"""Makes Petastorm's readers, which here read this rank's shard by default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkring.compat.petastorm_warnings import silence
from sparkring.data.petastorm import transform
from sparkring.data.petastorm.converter import SparkDatasetConverter
from sparkring.data.petastorm.own_name import unaccompanied
from sparkring.data.petastorm.plan import Path, bound, plan_reader
from sparkring.data.petastorm.source import in_words, open_source
from sparkring.data.petastorm.watching import watch

if TYPE_CHECKING:
    from petastorm.reader import Reader


def make_reader(
    dataset_url: Path | list[str], *arguments: Any, batch_size: int | None = None, **options: Any
) -> Reader:
    """Return a reader made by Petastorm's make_reader. It yields rows of a data set, each as a namedtuple.

    The data set must have been written with materialize_dataset(). `batch_size` is the size of the batches that your
    code will make from the rows. The reader does not make these batches: the number is used only to count steps, and
    to check that all ranks have the same number of steps. All other arguments are Petastorm's.
    Raise DataError if there are no files, if a file is not Parquet, if the data has no Unischema, if there are fewer
    row groups than shards, or if a transform does not return what it declares. Raise PathError or OptionsError if an
    argument is invalid.
    """
    return _make("make_reader", (dataset_url, *arguments), options, batch_size)


def make_batch_reader(
    dataset_url_or_urls: Path | list[str], *arguments: Any, batch_size: int | None = None, **options: Any
) -> Reader:
    """Return a reader made by Petastorm's make_batch_reader. It yields each row group as a namedtuple of arrays.

    The reader reads any Parquet files, with or without a Unischema. `batch_size` has the same meaning as in
    make_reader. The errors are those of make_reader, except that data without a Unischema is not an error.
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

    If `batched` is false, the spec's function gets one row as a dict, as in make_reader. If it is true, the function
    gets up to eight rows as a pandas DataFrame, as in make_batch_reader. By default, `batched` is true unless the data
    has a Unischema. If the check fails, raise a DataError that names the field, what was expected and what was found.

    make_reader and make_batch_reader make the same check, with one difference: they allow the function to change a
    field that the spec does not name, because some code that uses the readers accepts such a change.
    """
    silence()
    urls = list(source.file_urls) if hasattr(source, "file_urls") else source
    name = source.cache_dir_url if isinstance(source, SparkDatasetConverter) else ""
    reader = "make_reader" if batched is False else "make_batch_reader"
    data_source = open_source(bound(reader, (urls,), {"schema_fields": schema_fields}), name)
    as_batch = not data_source.has_unischema if batched is None else batched
    transform.check(transform_spec, data_source, schema_fields, batched=as_batch, every_change=True)


def _make(function: str, arguments: tuple[Any, ...], options: dict[str, Any], batch_size: int | None) -> Reader:
    import petastorm

    silence()
    plan = plan_reader(function, arguments, options, batch_size)
    with in_words(plan.source.name), unaccompanied():
        reader = getattr(petastorm, function)(**plan.options)
    watch(reader, plan)
    return reader
