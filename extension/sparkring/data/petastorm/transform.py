"""Calls a TransformSpec on the first rows, before a worker starts, to check that it returns what it declares.

Otherwise, a wrong shape or dtype would raise an error in a worker's thread. With TensorFlow, a wrong dtype might not
even raise an error: TensorFlow casts the values to the declared dtype, and fractions are lost.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.errors import DataError

if TYPE_CHECKING:
    from sparkring.data.petastorm.source import ReaderSource

_BATCH_ROWS = 8


class Seen(NamedTuple):
    """The shape of a value and its NumPy dtype, or its Python type if it has no dtype."""

    dtype: Any
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return _type_text(self.dtype, self.shape)


def check(spec: Any, source: ReaderSource, schema_fields: Any, *, batched: bool, every_change: bool) -> None:
    """Raise DataError if `spec` does not turn the first rows of `source` into what it declares.

    If `batched` is true, the spec's function is called as make_batch_reader calls it, otherwise as make_reader does. If
    `every_change` is true, it is also an error if the function changes a field that `edit_fields` does not name.
    """
    before = view(source.schema, schema_fields)
    declared = _declared(spec, before, source.name)
    sample = _sample(source, before, batched)
    earlier = {name: _seen(values) for name, values in _columns(sample, batched).items()}
    result = sample if spec.func is None else _apply(spec.func, sample, source.name, batched)
    columns = {name: values for name, values in _columns(result, batched).items() if name not in spec.removed_fields}
    _check_names(columns, declared, source.name)
    edited = {field[0] for field in spec.edit_fields}
    for name, values in columns.items():
        if name in edited:
            for value in values:
                _check_value(value, declared.fields[name], source.name, batched)
        elif every_change and name in earlier and earlier[name] and _seen(values):
            _check_unchanged(name, earlier[name][0], _seen(values)[0], declared.fields[name].shape, source.name)


def view(schema: Any, schema_fields: Any) -> Any:
    """Return a Unischema of only the fields that `schema_fields` (patterns, fields or an NGram) selects.

    If `schema_fields` is None or an empty list, return the whole schema. Raise DataError if no field matches.
    """
    if schema_fields is None or (isinstance(schema_fields, list) and not schema_fields):
        return schema
    if is_ngram(schema_fields):
        ngram = copy.deepcopy(schema_fields)
        ngram.resolve_regex_field_names(schema)
        schema_fields = list(ngram.get_field_names_at_all_timesteps())
    try:
        selection = schema.create_schema_view(schema_fields)
    except ValueError as error:
        raise DataError(f"schema_fields: {' '.join(str(error).split())[:300]}") from error
    if not selection.fields:
        raise DataError(f"schema_fields={schema_fields!r} matches no column. Columns: {', '.join(schema.fields)}.")
    return selection


def is_ngram(schema_fields: Any) -> bool:
    """Return whether `schema_fields` is a Petastorm NGram, rather than a list of fields or patterns."""
    return hasattr(schema_fields, "resolve_regex_field_names")


def _declared(spec: Any, before: Any, name: str) -> Any:
    """Return the schema that `spec` declares for the transformed rows. `before` is the schema of the rows."""
    from petastorm.transform import transform_schema

    there = {*before.fields, *(field[0] for field in spec.edit_fields)}
    unknown = [field for field in spec.selected_fields or () if field not in there]
    if unknown:
        raise DataError(
            f"{name}: selected_fields names {unknown[0]!r}, which is neither a column nor in edit_fields. Columns: "
            f"{', '.join(sorted(there))}."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Petastorm gives these warnings again when the reader is made
        return transform_schema(before, spec)


def _sample(source: ReaderSource, before: Any, batched: bool) -> Any:
    """Return the first rows in the form that the spec's function gets: a DataFrame if `batched`, otherwise a dict."""
    import pyarrow as pa
    from petastorm.utils import decode_row
    from pyarrow import parquet

    piece = source.pieces[next(index for index, rows in enumerate(source.rows) if rows)]
    keys = dict(piece.partition_keys or ())
    with source.fs.open(piece.path, "rb") as file:
        batches = parquet.ParquetFile(file).iter_batches(
            _BATCH_ROWS if batched else 1,
            row_groups=[piece.row_group],
            columns=[name for name in before.fields if name not in keys],
        )
        table = pa.Table.from_batches([next(batches)])
    for level, (name, index) in enumerate(piece.partition_keys or ()):
        if name in before.fields:
            values = source.partitions.levels[level].dictionary
            indices = pa.array([index] * len(table), pa.int32())
            table = table.append_column(name, pa.DictionaryArray.from_arrays(indices, values))
    if batched:
        return table.to_pandas()
    return decode_row(table.to_pandas(integer_object_nulls=True).to_dict("records")[0], before)


def _apply(function: Any, sample: Any, name: str, batched: bool) -> Any:
    what = "the first rows" if batched else "the first row"
    try:
        result = function(sample)
    except Exception as error:  # the user's transform can raise any exception
        frames = traceback.extract_tb(error.__traceback__)[1:]
        where = f" (in {frames[0].name}, line {frames[0].lineno})" if frames else ""
        text = str(error).strip().splitlines()
        raise DataError(f"{name}: the transform failed on {what}: {type(error).__name__}"
                        f"{': ' + text[0] if text else ''}{where}.") from error  # fmt: skip
    if (batched and not hasattr(result, "columns")) or (not batched and not isinstance(result, dict)):
        kind, reader = ("a pandas DataFrame", "make_batch_reader") if batched else ("a dict", "make_reader")
        raise DataError(f"{name}: the transform returned {type(result).__name__}. With {reader}, its function gets "
                        f"{kind} and must return {kind}.")  # fmt: skip
    return result


def _columns(rows: Any, batched: bool) -> dict[str, list[Any]]:
    """Return the values of each field of a DataFrame, or of a dict of single values."""
    if not batched:
        return {str(name): [value] for name, value in rows.items()}
    return {str(name): [rows[name].iloc[number] for number in range(len(rows))] for name in rows.columns}


def _check_names(columns: dict[str, list[Any]], declared: Any, name: str) -> None:
    missing = [field for field in declared.fields if field not in columns]
    if missing:
        raise DataError(f"{name}: the transform did not return the field {missing[0]!r}, which its TransformSpec "
                        f"declares. Got: {', '.join(columns) or 'none'}.")  # fmt: skip
    more = [field for field in columns if field not in declared.fields]
    if more:
        raise DataError(f"{name}: the transform returned the field {more[0]!r}, which its TransformSpec does not "
                        "declare: name it in edit_fields or removed_fields, or drop it. Expected: "
                        f"{', '.join(declared.fields)}.")  # fmt: skip


def _check_value(value: Any, field: Any, name: str, batched: bool) -> None:
    if _is_null(value):
        if not field.nullable:
            raise DataError(f"{name}: after the transform, field {field.name!r} is None; expected "
                            f"{_type_text(field.numpy_dtype, field.shape)}, not nullable.")  # fmt: skip
        return
    actual = _see(value)
    as_expected = _same_shape(actual.shape, field.shape) and _same_dtype(actual.dtype, field.numpy_dtype)
    if as_expected and batched and field.shape:
        import numpy as np

        as_expected = isinstance(value, np.ndarray) or (len(field.shape) == 1 and isinstance(value, list))
    if not as_expected:
        of = f" ({type(value).__module__}.{type(value).__name__})" if hasattr(value, "shape") else ""
        raise DataError(f"{name}: after the transform, field {field.name!r} is {actual}{of}; its TransformSpec "
                        f"declares {_type_text(field.numpy_dtype, field.shape)}.")  # fmt: skip
    if batched and len(field.shape) > 1:
        _check_flattens(value, field, name)


def _check_flattens(value: Any, field: Any, name: str) -> None:
    """Raise DataError if the workers of make_batch_reader, which flatten arrays, would not accept this one."""
    if None in field.shape:
        raise DataError(f"{name}: the TransformSpec declares {_type_text(field.numpy_dtype, field.shape)} for field "
                        f"{field.name!r}: with make_batch_reader, an array of several dimensions must have the same "
                        "shape in all rows. Declare this shape.")  # fmt: skip
    if not value.flags.c_contiguous:
        raise DataError(f"{name}: after the transform, the numbers of field {field.name!r} are not in row-major order "
                        "in memory, for example because the array was transposed: return "
                        "np.ascontiguousarray(array).")  # fmt: skip


def _check_unchanged(field: str, before: Seen, after: Seen, shape: tuple[int | None, ...], name: str) -> None:
    same = before.dtype == after.dtype or not (_is_number(before.dtype) and _is_number(after.dtype))
    if not same or (before.shape != after.shape and not _same_shape(after.shape, shape)):
        raise DataError(
            f"{name}: the transform changes field {field!r} from {before} to {after}, which its TransformSpec does "
            "not declare: name it in edit_fields."
        )


def _seen(values: list[Any]) -> list[Seen]:
    return [_see(value) for value in values if not _is_null(value)][:1]


def _see(value: Any) -> Seen:
    import numpy as np

    if isinstance(value, (str, bytes, bool, int, float, Decimal)) and not isinstance(value, np.generic):
        return Seen(type(value), ())
    if isinstance(value, (list, tuple)) or hasattr(value, "__array__"):
        array = np.asarray(value)
        return Seen(array.dtype, array.shape)
    return Seen(type(value), ())


def _same_shape(shape: tuple[int, ...], declared: tuple[int | None, ...]) -> bool:
    return len(shape) == len(declared) and all(want in (None, got) for got, want in zip(shape, declared, strict=True))


def _same_dtype(actual: Any, declared: Any) -> bool:
    """Return whether the dtype or Python type `actual` fits the `declared` dtype.

    A Python number fits a dtype of any width. For text and times, arrays of dtype object also fit.
    """
    import numpy as np

    if declared is Decimal:
        return actual is Decimal or actual == np.dtype(object)
    wanted = np.dtype(declared)
    if isinstance(actual, type):
        kinds = {bool: "b", int: "iu", float: "f", str: "USO", bytes: "SUO"}
        return wanted.kind in kinds.get(actual, "MO")
    if wanted.kind in "USO":
        return actual.kind in "USO"
    if wanted.kind == "M":
        return actual.kind in "MO"
    return bool(actual == wanted)


def _is_number(dtype: Any) -> bool:
    import numpy as np

    return isinstance(dtype, np.dtype) and dtype.kind in "biufc"


def _is_null(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NaTType", "NAType")


def _type_text(dtype: Any, shape: tuple[int | None, ...]) -> str:
    import numpy as np

    if dtype is None or dtype is Decimal or (isinstance(dtype, type) and not issubclass(dtype, np.generic)):
        name = getattr(dtype, "__name__", "None")
    else:
        name = np.dtype(dtype).name if np.dtype(dtype).kind not in "US" else "text"
    return f"{name} of shape {tuple(shape)}" if shape else name
