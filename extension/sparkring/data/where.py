"""Reads row filters that are written as text: `speed > 3 and city in ('Ulm', 'Bonn')`."""

from __future__ import annotations

import ast
import decimal
import difflib
import functools
import math
import operator
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from sparkring.errors import DataError

Where: TypeAlias = "str | Sequence[Any] | pc.Expression | None"

_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}  # in upper or lower case: SQL writes TRUE, NULL

_COMPARED: dict[type[ast.cmpop], Any] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]]
_MIRRORED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}  # 3 < x is x > 3


def compile_where(where: Where, schema: pa.Schema) -> tuple[pc.Expression | None, str]:
    """Return the filter `where` as an Arrow expression and as text, or (None, '') if there is no filter.

    A filter can be a string of comparisons of columns with values, joined by `and`, `or` and `not`. Dates are written
    as strings: `day >= '2026-01-31'`. A filter can also be a list in the form of pyarrow's `filters`, or an Arrow
    expression. Raise DataError if the filter cannot be read; its message names the part that is wrong.
    """
    if where is None or (isinstance(where, str) and not where.strip()):
        return None, ""
    if isinstance(where, str):
        return _Reader(where, schema).expression(), where.strip()
    if isinstance(where, pc.Expression):
        return where, str(where)
    import pyarrow.parquet as pq

    try:
        found = pq.filters_to_expression(list(where))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"where={where!r}: {error}. Write it as a string, as in where=\"speed > 3 and city == 'Ulm'\"."
        ) from None
    return found, str(found)


def nearest(name: str, names: Sequence[str]) -> str:
    """Return the end of an error message about a missing column: a similar name or, if there is none, all names."""
    close = difflib.get_close_matches(name, names, 1, 0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    shown = ", ".join(f"`{each}`" for each in names[:12])
    return f"the columns are {shown}{', …' if len(names) > 12 else ''}."


class _Reader:
    """Converts the text of a filter to an Arrow expression. Python's own parser reads the text."""

    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text = " ".join(text.split())
        self._schema = schema

    def expression(self) -> pc.Expression:
        try:
            tree = ast.parse(self._text, mode="eval")
        except (SyntaxError, ValueError) as error:
            hint = " For equality, write ==." if re.search(r"(?<![=!<>])=(?!=)", self._text) else ""
            raise self._refused(f"{getattr(error, 'msg', error)}.{hint}") from None
        return self._condition(tree.body)

    def _refused(self, why: str) -> DataError:
        return DataError(f"the filter `{self._text}` cannot be read: {why}")

    def _constant(self, node: ast.expr) -> ast.expr:
        """Return the constant that the name true, false, null or none stands for; return any other node unchanged."""
        if not isinstance(node, ast.Name) or node.id in self._schema.names or node.id.lower() not in _CONSTANTS:
            return node
        return ast.Constant(_CONSTANTS[node.id.lower()])

    def _condition(self, node: ast.expr) -> pc.Expression:
        node = self._constant(node)
        match node:
            case ast.BoolOp(op=op, values=values):
                join = operator.and_ if isinstance(op, ast.And) else operator.or_
                return functools.reduce(join, map(self._condition, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self._condition(operand)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return functools.reduce(operator.and_, map(self._compared, [left, *comparators], ops, comparators))
            case ast.Name(id=name):
                if pa.types.is_boolean(self._field(name).type):
                    return pc.field(name)
        raise self._refused(
            f"`{ast.unparse(node)}` is not a comparison. A filter takes columns, numbers and strings with == != < <= > "
            ">= in, is None, and, or, not."
        )

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> pc.Expression:
        left, right = self._constant(left), self._constant(right)
        column = next((side.id for side in (left, right) if isinstance(side, ast.Name)), None)
        if column is None:
            raise self._refused(f"`{ast.unparse(left)}` is not compared with a column.")
        kind = self._field(column).type
        if isinstance(op, ast.Is | ast.IsNot) or (isinstance(right, ast.Constant) and right.value is None):
            if not (isinstance(left, ast.Name) and isinstance(right, ast.Constant) and right.value is None):
                raise self._refused("`is` is for None only: `speed is not None`.")
            is_null = pc.field(column).is_null()
            return ~is_null if isinstance(op, ast.IsNot | ast.NotEq) else is_null
        if isinstance(op, ast.In | ast.NotIn):
            if not (isinstance(left, ast.Name) and isinstance(right, ast.Tuple | ast.List | ast.Set)):
                raise self._refused("`in` takes a column and a list: `city in ('Ulm', 'Bonn')`.")
            values = [self._value(each, kind, column) for each in right.elts]
            kind = _plain(kind)
            # A number that is still of another type equals none of the column's values, which cannot hold it.
            found = pc.field(column).isin(pa.array([each.as_py() for each in values if each.type == kind], kind))
            return ~found if isinstance(op, ast.NotIn) else found
        number = _number_of(right if isinstance(left, ast.Name) else left)
        if pa.types.is_integer(_plain(kind)) and number is not None:
            compared = type(op) if isinstance(left, ast.Name) else _MIRRORED.get(type(op), type(op))
            return _integers(pc.field(column), compared, number, _plain(kind))
        return _COMPARED[type(op)](self._side(left, kind, column), self._side(right, kind, column))

    def _side(self, node: ast.expr, kind: pa.DataType, column: str) -> pc.Expression:
        if isinstance(node, ast.Name):
            self._field(node.id)
            return pc.field(node.id)
        return pc.scalar(self._value(node, kind, column))

    def _value(self, node: ast.expr, kind: pa.DataType, column: str) -> pa.Scalar:
        try:
            value = ast.literal_eval(self._constant(node))
        except ValueError:
            raise self._refused(f"`{ast.unparse(node)}` is neither a column nor a number or string.") from None
        kind = _plain(kind)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            if number and _is_number(kind):
                return _number(value, kind)
            if not number:
                found = pa.scalar(value)
                return found if found.type == kind else found.cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, OverflowError):
            pass
        raise self._refused(f"`{column}` is {kind}, but {value!r} is not.")

    def _field(self, name: str) -> pa.Field:
        if name not in self._schema.names:
            raise DataError(
                f"the filter `{self._text}` names the column `{name}`, which does not exist: "
                f"{nearest(name, self._schema.names)}"
            )
        return self._schema.field(name)


def _number_of(node: ast.expr) -> int | float | None:
    """Return the number that a node stands for, or None if it is not a number."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integers(column: pc.Expression, op: type[ast.cmpop], number: float, kind: pa.DataType) -> pc.Expression:
    """Return the comparison of a column of integers with a number, as one with an integer of the column's type.

    If the type cannot hold the number, Arrow would convert the column to another type, which may not hold its values.
    """
    bits, signed = kind.bit_width, pa.types.is_signed_integer(kind)
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    if least <= number <= most and number == int(number):
        return _COMPARED[op](column, pc.scalar(pa.scalar(int(number), kind)))
    never, always = column < pc.scalar(pa.scalar(least, kind)), column >= pc.scalar(pa.scalar(least, kind))
    if op in (ast.Eq, ast.NotEq):
        return never if op is ast.Eq else always
    upwards = op in (ast.Gt, ast.GtE)
    if not least < number < most:
        return always if upwards == (number <= least) else never
    below = pc.scalar(pa.scalar(math.floor(number), kind))
    return column > below if upwards else column <= below


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column's values."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _number(value: float, kind: pa.DataType) -> pa.Scalar:
    """Return a number to compare with a column of type `kind`: as this type if it can hold the number exactly.

    Otherwise, the number keeps its own type: a cast would lose a fraction, and 300 can be compared with int8.
    """
    if pa.types.is_decimal(kind):
        try:
            return pa.scalar(decimal.Decimal(repr(value)), kind)
        except pa.ArrowInvalid:
            return pa.scalar(float(value))  # Arrow compares decimals of different scales incorrectly
    if pa.types.is_floating(kind):
        value = float(value)  # Arrow does not compare floats with integers above 2^53
    # By default, integers become int64, which does not hold the largest ones.
    found = pa.scalar(value, kind if isinstance(value, int) and value >= 2**63 else None)
    try:
        cast = found.cast(kind)
        return cast if cast.cast(found.type) == found else found
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return found


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
