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


class PredictedColumn(NamedTuple):
    """A column of predictions or, with `of_struct`, a field of a struct.

    `written` is its type, as shown in error messages.
    """

    name: str
    kind: pa.DataType
    written: str
    of_struct: bool = False


def by_name(results: Results, names: Sequence[str], rows: int) -> dict[str, Any]:
    """Return a model's results for `rows` rows as a dict from the names of columns to arrays [rows, …].

    `names` are the names that the user has given. If `names` is empty, the model's own names are used, which may be
    those of a pandas DataFrame. A list can have a value for each row, which may be a dict, a tuple or an array; a list
    or tuple can also have an array for each column. Raise DataError if the names do not match the results.
    """
    if _is_frame(results) and (len(names) != 1 or names[0] in results.columns):
        results = {name: results[name] for name in results.columns}
    if isinstance(results, Mapping):
        named = {str(name): as_array(array) for name, array in results.items()}
        if len(names) == 1 and len(named) == 1:
            return dict(zip(names, named.values(), strict=True))
        missing = next((name for name in names if name not in named), None)
        if missing is not None:
            raise DataError(
                f"the model returned `{'`, `'.join(named)}`, but returns=… lists `{missing}`: in returns=…, use the "
                "names of the model's outputs."
            )
        return {name: named[name] for name in names} if names else named
    if isinstance(results, list) and results and all(isinstance(row, Mapping) for row in results):
        keys = [str(name) for name in results[0]]
        if any(row.keys() != results[0].keys() for row in results):
            raise DataError(
                f"the model returned a list of dicts, but not all of them have the keys of the first one, "
                f"`{'`, `'.join(keys)}`: every dict must have the same keys."
            )
        return by_name({name: [row[name] for row in results] for name in results[0]}, names, rows)
    if len(names) > 1 and _are_tuples(results, len(names)):
        columns = zip(*results, strict=True)
        return {name: as_array(list(column)) for name, column in zip(names, columns, strict=True)}
    if isinstance(results, list | tuple) and results and all(hasattr(result, "shape") for result in results):
        arrays = [as_array(result) for result in results]
        may_be_rows = isinstance(results, list) and len(arrays) == rows and len(names) < 2
        may_be_columns = all(array.ndim and len(array) == rows for array in arrays)
        if may_be_rows and not (may_be_columns and (rows == 1 or not names)):
            return {names[0] if names else DEFAULT_NAME: as_array(results)}
        if not names and len(arrays) == 1:
            return {DEFAULT_NAME: arrays[0]}
        if len(names) != len(arrays):
            expected = f", but returns=… lists {len(names)} columns" if names else " without names"
            stacked = " If they are the rows of one array, return np.stack(arrays)." if may_be_rows else ""
            raise DataError(
                f"the model returned {len(arrays)} arrays{expected}: name them, in the order of the arrays, with "
                f"returns={{'name': 'float', …}}.{stacked}"
            )
        return dict(zip(names, arrays, strict=True))
    if len(names) > 1:
        raise DataError(
            f"the model returned one array, but returns=… lists {len(names)} columns ({', '.join(names)}): name only "
            "one."
        )
    return {names[0] if names else DEFAULT_NAME: as_array(results)}


def _are_tuples(results: Results, length: int) -> bool:
    """Return whether the results are a list with a tuple of this length for each row."""
    if not (isinstance(results, list) and results):
        return False
    return all(isinstance(row, tuple) and len(row) == length for row in results)


def _is_frame(results: Results) -> bool:
    """Return whether the results are a pandas DataFrame, without importing pandas."""
    return hasattr(results, "columns") and hasattr(results, "iloc")


def as_array(value: Any) -> Any:
    """Return an array or tensor from any framework, or a list with a value for each row, as a NumPy array.

    If the rows have different lengths, or if text stands beside other values, the array holds an object for each row.
    Masked and missing values become None.
    """
    if isinstance(value, np.ma.MaskedArray):
        masked: Any = value
        value = masked.tolist()
    elif hasattr(value, "to_pylist"):  # an Arrow array
        value = value.to_pylist()
    elif hasattr(getattr(value, "dtype", None), "na_value"):  # a pandas Series of a type that has missing values
        value = value.astype(object).where(value.notna(), None).tolist()
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # NumPy does not have this type
            value = value.float()
    if isinstance(value, list | tuple) and any(hasattr(item, "detach") for item in value):
        value = [as_array(item) for item in value]
    try:
        array = np.asarray(value)
    except ValueError:  # the rows have different lengths, or some are None
        return _objects(value)
    except (TypeError, RuntimeError) as error:  # for example, a sparse tensor
        raise DataError(
            f"the model returned a `{type(value).__name__}`, which cannot become an array: {error}"
        ) from None
    if array.dtype.kind in "US" and isinstance(value, list | tuple):
        rows = np.asarray(value, object)
        if not all(isinstance(item, str | bytes) for item in rows.flat):  # NumPy has made text of numbers
            return _objects(value)
    return array


def _objects(rows: Any) -> Any:
    array = np.empty(len(rows), object)
    array[:] = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
    return array


def types_of(results: Results, names: Sequence[str], rows: int) -> dict[str, pa.DataType]:
    """Return the types of the columns that can hold a model's results for `rows` rows. `names` are as in by_name()."""
    types = {name: _type_of(name, array, rows) for name, array in by_name(results, names, rows).items()}
    if not types:
        raise DataError("the model returned no columns: it must return at least one array.")
    return types


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
        kind = pa.array(list(values) if values.dtype == object else values).type
    except (pa.ArrowException, TypeError, ValueError):
        raise DataError(
            f"the model returned {described(array)} for `{name}`, which no column can hold: let the model return an "
            "array of numbers or of text, or set returns=…."
        ) from None
    for _ in range(array.ndim - 1):
        kind = pa.list_(kind)
    return kind


def columns_of(results: Results, outputs: Sequence[PredictedColumn], rows: int) -> list[pa.Array]:
    """Return a model's results for `rows` rows as Arrow columns. Raise DataError if they do not fit `outputs`."""
    if len(outputs) == 1 and _has_parts(outputs[0].kind):  # a dict is then the value of a row, not a dict of columns
        return [_nested(results, outputs[0], rows)]
    arrays = by_name(results, [output.name for output in outputs], rows)
    return [_column(arrays[output.name], output, rows) for output in outputs]


def _has_parts(kind: pa.DataType) -> bool:
    """Return whether the values of a type are rows or maps, or arrays of these."""
    if pa.types.is_list(kind):
        return _has_parts(kind.value_type)
    return bool(pa.types.is_struct(kind) or pa.types.is_map(kind))


def _nested(results: Results, output: PredictedColumn, rows: int) -> pa.Array:
    """Return rows or maps: from a value for each row or, for rows, from a dict with an array for each field."""
    kind = output.kind
    if isinstance(results, Mapping) and results.keys() == {output.name}:
        results = results[output.name]
    if isinstance(results, Mapping) and pa.types.is_struct(kind) and results.keys() == {field.name for field in kind}:
        fields = [PredictedColumn(field.name, field.type, str(field.type)) for field in kind]
        return pa.StructArray.from_arrays(columns_of(results, fields, rows), fields=list(kind))
    array = as_array(results)
    _check_rows(output.name, array, rows)
    return _converted([_plain(value, kind, output) for value in array.tolist()], output, kind)


def _plain(value: Any, kind: pa.DataType, output: PredictedColumn) -> Any:
    """Return a value as Arrow expects it: maps as lists of pairs, rows as dicts, and no floats as decimals.

    Raise DataError if a row lacks a field.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if pa.types.is_decimal(kind) and isinstance(value, float):
        return _converted(np.array([value]), output, kind)[0].as_py()
    if pa.types.is_struct(kind) and isinstance(value, list | tuple) and len(value) == kind.num_fields:
        value = {field.name: item for field, item in zip(kind, value, strict=True)}
    if pa.types.is_list(kind) and isinstance(value, list | tuple):
        return [_plain(item, kind.value_type, output) for item in value]
    if not isinstance(value, Mapping):
        return value
    if pa.types.is_map(kind):
        return [(key, _plain(item, kind.item_type, output)) for key, item in value.items()]
    if pa.types.is_struct(kind):
        if value.keys() != {field.name for field in kind}:
            raise DataError(
                f"the model returned a dict with the keys {', '.join(map(repr, value))} for `{output.name}`, but the "
                f"type of this column is {output.written}: the keys must be the names of its fields."
            )
        return {field.name: _plain(value[field.name], field.type, output) for field in kind}
    return value


def _column(array: Any, output: PredictedColumn, rows: int) -> pa.Array:
    if _has_parts(output.kind):
        return _nested(array, output, rows)
    _check_rows(output.name, array, rows)
    inner, depth = output.kind, 0
    while pa.types.is_list(inner):
        inner, depth = inner.value_type, depth + 1
    if array.ndim == depth + 2 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim == 1 and array.dtype == object and depth:
        lists = [_plain(row, output.kind, output) for row in array] if pa.types.is_decimal(inner) else list(array)
        return _converted(lists, output, output.kind)
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


def _converted(values: Any, output: PredictedColumn, kind: pa.DataType) -> pa.Array:
    try:
        if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and pa.types.is_floating(kind):
            # kind.to_pandas_dtype() would need pandas, which sparkring does not require.
            return pa.array(values.astype(f"f{kind.bit_width // 8}", copy=False), kind)
        if not isinstance(values, np.ndarray):
            return pa.array(values, kind)
        column = pa.array(values)
        if pa.types.is_integer(column.type) and pa.types.is_decimal(kind):
            column = column.cast(pa.decimal128(38, kind.scale))  # Arrow needs a type with room for every integer
        return column.cast(kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise DataError(
            f"the model's values for `{output.name}` cannot be stored as {output.written}: {error}"
        ) from None


def _check_rows(name: str, array: Any, rows: int) -> None:
    if array.ndim == 0 or len(array) != rows:
        if array.ndim == 0 and array.dtype == object:
            value = array.item()
            got = "None" if value is None else f"a `{type(value).__name__}`"
            raise DataError(
                f"the model returned {got} for `{name}`: it must return an array or a list with a value for each of "
                f"the {rows:,} rows, or a dict of these."
            )
        got = "a single value" if array.ndim == 0 else f"{len(array):,} rows"
        raise DataError(
            f"the model returned {got} of `{name}` for {rows:,} rows: the result must have one row for each row of "
            f"the inputs, but its shape is {list(array.shape)}."
        )


def described(array: Any) -> str:
    """Return the type and the shape of an array as text."""
    return f"{array.dtype} of shape {['rows', *array.shape[1:]]}".replace("'", "")
