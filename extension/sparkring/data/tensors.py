"""Checks whether columns can become tensors. If a column cannot, the error tells the user what to do instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from sparkring.data.columns import is_object
from sparkring.data.where import as_written
from sparkring.errors import DataError

SHOWN = 60  # the most characters of a type's name to show in a message


def refused(name: str, kind: pa.DataType, *, nulls: bool, floats: bool) -> DataError | None:
    """Return the error for a column that no tensor can hold, or None if a tensor can hold it.

    `nulls` says whether the column has nulls; `floats` says whether its decimals, if it has any, become floats.
    """
    advice = _advice(name, kind, nulls=nulls, floats=floats)
    if not advice:
        return None
    written = str(kind) if len(str(kind)) <= SHOWN else f"{str(kind)[:SHOWN]}…"
    return DataError(f"column `{name}` is {written}{' with nulls' * nulls}, which no tensor can hold: {advice}.")


def check_values(name: str, array: Any) -> None:
    """Raise DataError if an array of strings, dates or times has nulls, which refused() may not find in advance."""
    if array.dtype.kind == "O" and any(value is None for value in array.flat):
        raise DataError(f"column `{name}` has nulls, which no tensor can hold: {_filling(name, repr(''))}.")
    if array.dtype.kind in "mM" and np.isnat(array).any():
        raise DataError(f"column `{name}` has nulls, which no tensor can hold: {_filling(name, '…')}.")


def as_int64(name: str, array: Any) -> Any:
    """Return dates and times as int64 nanoseconds (since 1970). Raise DataError if the values do not fit."""
    try:
        nanoseconds = array.astype(f"{array.dtype.kind}8[ns]")
        fits = bool((nanoseconds.astype(array.dtype) == array).all())
    except OverflowError:  # NumPy raises this from 2.5 on
        fits = False
    if not fits:
        limits = "1677-09-22 to 2262-04-11" if array.dtype.kind == "M" else "-106,751 to 106,751 days"
        raise DataError(
            f"column `{name}` has times from {array.min()} to {array.max()}, but a tensor holds them as int64 "
            f"nanoseconds, which range from {limits}: convert them to other numbers in transform=…, or leave these "
            "rows out with where=…."
        )
    return nanoseconds.view(np.int64)


def other_than_text(array: Any) -> str:
    """Return the name of the type of the first value in `array` that is neither str nor bytes, or ''."""
    return next((type(value).__name__ for value in array.flat if not isinstance(value, str | bytes)), "")


def _advice(name: str, kind: pa.DataType, *, nulls: bool, floats: bool) -> str:
    types = pa.types
    if is_object(kind):
        return (
            "turn its parts into columns in Spark, or into numbers with transform=…, or leave it out with columns=[…]"
        )
    inner = kind
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner = inner.value_type
    if types.is_dictionary(inner):
        inner = inner.value_type
    if types.is_decimal(inner):
        if floats:
            return ""
        cast = f'df.withColumn("{name}", df["{name}"].cast("double"))'
        return f'convert it to floats with dtype="float32" or, in Spark, with {cast}'
    if not nulls or types.is_integer(inner) or types.is_floating(inner) or types.is_time(inner):
        return ""
    values = ((types.is_boolean, "False"), (types.is_string, "''"), (types.is_date, "datetime.date(1970, 1, 1)"))
    return _filling(name, next((value for fits, value in values if fits(inner)), "…"))


def _filling(name: str, value: str) -> str:
    condition = f"{as_written(name)} is not None"
    return f"replace them with fill={{'{name}': {value}}}, or leave these rows out with where=\"{condition}\""
