"""Computes what `%shards` shows before a launch, for a path, a DataFrame or the result of shards(…)."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkring.capture.picklability import type_name
from sparkring.errors import DataError, OptionsError
from sparkring.runtime.kernel import tell

if TYPE_CHECKING:
    from sparkring.data.dataset import Dataset
    from sparkring.data.epoch_plan import Outlook
    from sparkring.data.plan import Remainder

BATCH_SIZE = 32  # the batch size if the user gives none and the value is not Shards, which have their own


def preview(
    value: Any,
    name: str,
    size: int,
    *,
    columns: tuple[str, ...] | None = None,
    where: str = "",
    batch_size: int | None = None,
    remainder: Remainder | None = None,
    epochs: int = 1,
    version: int | None = None,
    timestamp: str | None = None,
) -> Outlook:
    """Return what each of `size` ranks will read of `value`, which the user calls `name`.

    `value` is a path, a Spark DataFrame, a Dataset or Shards. `batch_size` and `remainder` default to the values that
    the Shards have and, for other types, to BATCH_SIZE and "drop". Raise OptionsError if `value` is of another type,
    and DataError or PathError if it cannot be read.
    """
    from sparkring.data.epoch_plan import outlook

    dataset = _dataset_of(value, name, columns, where, version, timestamp)
    batch_size = batch_size or getattr(value, "batch_size", None) or BATCH_SIZE
    remainder = remainder or getattr(value, "remainder", None) or "drop"
    return outlook(dataset, size, batch_size, remainder=remainder, epochs=epochs)


def can_be_previewed(value: Any) -> bool:
    """Return whether to suggest a variable with this value for `%shards`. Strings are left out: most are not paths."""
    kind = type(value)
    return (
        isinstance(value, os.PathLike)
        or hasattr(kind, "sparkSession")
        or kind.__name__ in ("Shards", "Records", "Dataset")
    )


def _dataset_of(
    value: Any, name: str, columns: tuple[str, ...] | None, where: str, version: int | None, timestamp: str | None
) -> Dataset:
    from sparkring.data.dataset import Dataset, open_dataset
    from sparkring.data.tables import resolved

    try:
        value, table_name = resolved(value)
    except DataError:
        if not name.isidentifier():
            raise
        raise OptionsError(
            f"%shards {name}: there is neither a variable nor a file, folder or table of that name."
        ) from None
    name = table_name or name
    opened = getattr(value, "dataset", value)
    if (version is not None or timestamp is not None) and not isinstance(value, str | os.PathLike):
        raise OptionsError(f"%shards {name}: --version and --timestamp are for the path of a Delta table.")
    if isinstance(opened, Dataset):
        if columns is not None or where:
            raise OptionsError(
                f"%shards {name}: `{name}` has its own columns and filter; leave out --columns and --where."
            )
        return opened
    if hasattr(value, "sparkSession"):
        from sparkring.data.materialise import materialise

        copy = materialise(value, name=name, say=tell)
        return replace(open_dataset(copy.location.written, columns, where or None), name=name)
    if not isinstance(value, str | os.PathLike | list | tuple):
        raise OptionsError(
            f"%shards takes a path, a Spark DataFrame or the result of sparkring.shards(…), but {name} is of type "
            f"{type_name(value)}."
        )
    is_at_version = version is not None or timestamp is not None
    records = None if table_name or is_at_version else _records_at(value, columns)
    if records is None:
        return open_dataset(value, columns, where or None, name=table_name, version=version, timestamp=timestamp)
    if where:
        raise OptionsError(f"%shards {name}: --where is for Parquet files, and these are TFRecord files.")
    return records


def _records_at(path: Any, columns: tuple[str, ...] | None) -> Dataset | None:
    """Return the TFRecord files at a path as a data set, or None if there are none."""
    try:
        module = importlib.import_module("sparkring.data.tfrecord.open")
    except ModuleNotFoundError:  # this product has been taken out
        return None
    records: Dataset | None = module.records_at(path, columns)
    return records
