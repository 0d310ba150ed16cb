"""Converts a model's results to Arrow columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sparkring.errors import DataError

DEFAULT_NAME = "prediction"  # the column of predictions, if neither the user nor the model names it

# The value that a model has returned: one array, a dict of arrays, or a sequence of arrays.
Results = Any


class Output(NamedTuple):
    """A column of predictions or, with `of_struct`, a field of a struct.

    `written` is its type, as shown in error messages.
    """

    name: str
    kind: pa.DataType
    written: str
    of_struct: bool = False


def by_name(results: Results, names: Sequence[str]) -> dict[str, Any]:
    """Return a model's results as a dict from the names of columns to arrays [rows, …].

    `names` are the names that the user has given. If `names` is empty, the model's own names are used. Raise DataError
    if the names do not match the results.
    """
    if isinstance(results, Mapping):
        found = {str(name): as_array(array) for name, array in results.items()}
        missing = [name for name in names if name not in found]
        if len(names) == 1 and len(found) == 1:
            return dict(zip(names, found.values(), strict=True))
        if missing:
            raise DataError(
                f"the model returned `{'`, `'.join(found)}`, but returns=… lists `{missing[0]}`: in returns=…, use the "
                "names of the model's outputs."
            )
        return {name: found[name] for name in names} if names else found
    if isinstance(results, list) and results and isinstance(results[0], Mapping):  # a dict for each row
        return by_name({name: np.asarray([row[name] for row in results]) for name in results[0]}, names)
    if isinstance(results, list | tuple) and results and all(hasattr(each, "shape") for each in results):
        arrays = [as_array(each) for each in results]
        if not names and len(arrays) == 1:
            return {DEFAULT_NAME: arrays[0]}
        if len(names) != len(arrays):
            raise DataError(
                f"the model returned {len(arrays)} arrays without names: name them, in the order of the arrays, "
                "with returns={'name': 'float', …}."
            )
        return dict(zip(names, arrays, strict=True))
    if len(names) > 1:
        raise DataError(
            f"the model returned one array, but returns=… lists {len(names)} columns ({', '.join(names)}): name only "
            "one."
        )
    return {names[0] if names else DEFAULT_NAME: as_array(results)}


def as_array(value: Any) -> Any:
    """Return an array or tensor from any framework as a NumPy array."""
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # NumPy does not have this type
            value = value.float()
    return np.asarray(value)


def types_of(results: Results, names: Sequence[str], rows: int) -> dict[str, pa.DataType]:
    """Return the types of the columns that can hold a model's results for `rows` rows. `names` are as in by_name()."""
    return {name: _type_of(name, array, rows) for name, array in by_name(results, names).items()}


def _type_of(name: str, array: Any, rows: int) -> pa.DataType:
    _check_rows(name, array, rows)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]  # usual for models with one output
    values = array.reshape(-1)
    if values.dtype.kind == "u":  # Spark has no unsigned integers
        values = values.astype({1: np.int16, 2: np.int32}.get(values.dtype.itemsize, np.int64))
    elif values.dtype == np.float16:
        values = values.astype(np.float32)
    try:
        kind = pa.array(values).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        raise DataError(
            f"the model returned {described(array)} for `{name}`, which no column can hold: let the model return an "
            "array of numbers or of text, or set returns=…."
        ) from None
    for _ in range(array.ndim - 1):
        kind = pa.list_(kind)
    return kind


def columns_of(results: Results, outputs: Sequence[Output], rows: int) -> list[pa.Array]:
    """Return a model's results for `rows` rows as Arrow columns. Raise DataError if they do not fit `outputs`."""
    found = by_name(results, [output.name for output in outputs])
    return [_column(found[output.name], output, rows) for output in outputs]


def _column(array: Any, output: Output, rows: int) -> pa.Array:
    _check_rows(output.name, array, rows)
    inner, depth = output.kind, 0
    while pa.types.is_list(inner):
        inner, depth = inner.value_type, depth + 1
    if array.ndim == depth + 2 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim == 1 and array.dtype == object and depth:
        return _converted(list(array), output, output.kind)
    if array.ndim != depth + 1:
        raise DataError(
            f"the model returned {described(array)} for `{output.name}`, but the type of this column is "
            f"{output.written}, which needs "
            f"{'one value' if not depth else f'{depth} dimension' + 's' * (depth > 1)} for each row: set another type "
            "with returns=…."
        )
    column = _converted(array.reshape(-1), output, inner)
    for axis in range(array.ndim - 1, 0, -1):
        offsets = np.arange(math.prod(array.shape[:axis]) + 1, dtype=np.int32) * np.int32(array.shape[axis])
        column = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), column)
    return column if column.type == output.kind else column.cast(output.kind)


def _converted(values: Any, output: Output, kind: pa.DataType) -> pa.Array:
    try:
        if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and pa.types.is_floating(kind):
            # kind.to_pandas_dtype() would need pandas, which sparkring does not require.
            return pa.array(values.astype(f"f{kind.bit_width // 8}", copy=False), kind)
        return pa.array(values).cast(kind) if isinstance(values, np.ndarray) else pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
        raise DataError(
            f"the model's values for `{output.name}` cannot be stored as {output.written}: {error}"
        ) from None


def _check_rows(name: str, array: Any, rows: int) -> None:
    if array.ndim == 0 or len(array) != rows:
        got = "a single value" if array.ndim == 0 else f"{len(array):,} rows"
        raise DataError(
            f"the model returned {got} of `{name}` for {rows:,} rows: the result must have one row for each row of "
            f"the inputs, but its shape is {list(array.shape)}."
        )


def described(array: Any) -> str:
    """Return the type and the shape of an array as text."""
    return f"{array.dtype} of shape {['rows', *array.shape[1:]]}".replace("'", "")
