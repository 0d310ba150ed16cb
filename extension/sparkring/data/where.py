"""Reads row filters that are written as text: `speed > 3 and city in ('Ulm', 'Bonn')`, or the same in SQL."""

from __future__ import annotations

import ast
import datetime
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

_TOKENS = re.compile(
    r"""(?P<quoted>`(?:[^`]|``)+`) | (?P<text>'(?:[^'\\]|\\.|\'\')*' | "(?:[^"\\]|\\.)*") | (?P<space>\s+)
    | (?P<word>[^\W\d]\w*) | (?P<other>\d[\w.]*(?:(?<=[eE])[+-]\d+)? | <> | [<>=!]= | .)""",
    re.VERBOSE | re.DOTALL,
)
_OPERATORS = {"=": "==", "<>": "!="}
_KEYWORDS = {"and", "or", "not", "in", "is"}
_FORM = "[('store', '=', 1), ('city', 'in', ['Ulm', 'Bonn'])]"


def compile_where(where: Where, schema: pa.Schema) -> tuple[pc.Expression | None, str]:
    """Return the filter `where` as an Arrow expression and as text, or (None, '') if there is no filter.

    A filter can be a string of comparisons of columns with values, joined by `and`, `or` and `not`, as in Python or in
    SQL (AND, `=`, `<>`, IS NULL, BETWEEN). Names of columns may be in backticks. Dates are written as strings, as in
    `day >= '2026-01-31'`. With SQL's operators, no row with a null passes NOT IN, as in Spark; `not in` includes nulls.
    A filter can also be a list in the form of pyarrow's `filters`, or an Arrow expression. Raise DataError if the
    filter cannot be read; its message names the part that is wrong.
    """
    if where is None or (isinstance(where, str) and not where.strip()):
        return None, ""
    if isinstance(where, str):
        return _Reader(where, schema).expression(), where.strip()
    if isinstance(where, pc.Expression):
        return where, str(where)
    import pyarrow.parquet as pq

    try:
        expression = pq.filters_to_expression(list(where))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"where={where!r}: {error}. Write it as a string, as in where=\"speed > 3 and city == 'Ulm'\"."
        ) from None
    return expression, str(expression)


def as_written(name: str) -> str:
    """Return the name of a column as a filter has it: in backticks unless it is an identifier."""
    return name if name.isidentifier() else f"`{name.replace('`', '``')}`"


def nearest(name: str, names: Sequence[str]) -> str:
    """Return the end of an error message about a missing column: a similar name or, if there is none, all names."""
    close = difflib.get_close_matches(name, names, 1, 0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    shown = ", ".join(f"`{column}`" for column in names[:12])
    return f"the columns are {shown}{', …' if len(names) > 12 else ''}."


class _Reader:
    """Converts the text of a filter to an Arrow expression. Python's own parser reads the text."""

    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text = text.strip()
        self._schema = schema
        self._is_sql = False  # whether the filter has operators that only SQL has, or in upper case
        self._quoted: list[str] = []  # the names in backticks, in Python's text called _column_0_, _column_1_, …

    def expression(self) -> pc.Expression:
        try:
            tree = ast.parse(self._python(), mode="eval")
        except (SyntaxError, ValueError) as error:
            reason = self._written(str(getattr(error, "msg", error)))
            raise self._refused(
                f"{reason}. Write it as in SQL or Python, or as a list of conditions: where={_FORM}."
            ) from None
        return self._condition(tree.body)

    def _refused(self, why: str) -> DataError:
        return DataError(f"the filter `{self._text}` cannot be read: {why}")

    # ── From SQL to Python ────────────────────────────────────────────────────

    def _python(self) -> str:
        """Return the filter with Python's operators and names."""
        tokens: list[str] = []
        for match in _TOKENS.finditer(self._text):
            token, kind = match[0], match.lastgroup
            if kind == "quoted":
                self._quoted.append(token[1:-1].replace("``", "`"))
                token = f"_column_{len(self._quoted) - 1}_"
            elif kind == "text":
                if tokens and tokens[-1].lower() in ("date", "timestamp", "timestamp_ntz"):
                    tokens.pop()  # DATE '2026-01-31'
                token = f"'{token[1:-1].replace(chr(39) * 2, chr(92) + chr(39))}'" if token[0] == "'" else token
            elif kind == "word" and token not in self._schema.names and token.lower() in _KEYWORDS:
                self._is_sql = self._is_sql or not token.islower()
                token = token.lower()
            self._is_sql = self._is_sql or token in _OPERATORS
            if kind != "space":
                tokens.append(_OPERATORS.get(token, token))
        for at, token in enumerate(tokens):
            if token.lower() == "between" and token not in self._schema.names:
                self._is_sql = True
                self._replace_between(tokens, at)
        return " ".join(tokens).replace(" . ", ".")

    def _replace_between(self, tokens: list[str], at: int) -> None:
        """Replace the tokens of `x BETWEEN 1 AND 5` by those of `(1 <= x <= 5)`, in place. Their number stays equal."""
        negated = tokens[at - 1 : at] == ["not"]
        begin = at - 1 - negated
        numbers = [1 + (tokens[at + 1 : at + 2] == ["-"])]
        middle = at + 1 + numbers[0]
        numbers.append(1 + (tokens[middle + 1 : middle + 2] == ["-"]))
        end = middle + 1 + numbers[1]
        if begin < 0 or tokens[middle : middle + 1] != ["and"] or end > len(tokens):
            raise self._refused("BETWEEN is for a column and two values, as in `speed BETWEEN 3 AND 5`.")
        low, high = " ".join(tokens[at + 1 : middle]), " ".join(tokens[middle + 1 : end])
        condition = f"{'not ' * negated}({low} <= {tokens[begin]} <= {high})"
        tokens[begin:end] = [condition, *[""] * (end - begin - 1)]

    def _written(self, text: str) -> str:
        """Return a part of Python's text with the names as the user has written them."""
        return re.sub(r"_column_(\d+)_", lambda match: self._quoted[int(match[1])], text)

    def _unparsed(self, node: ast.expr) -> str:
        return self._written(ast.unparse(node))

    def _name(self, node: ast.expr) -> str | None:
        """Return the name of the column that a node stands for, or None. A name may have dots."""
        if isinstance(node, ast.Name):
            return self._written(node.id)
        if isinstance(node, ast.Attribute):
            return self._unparsed(node)
        return None

    # ── From Python to Arrow ──────────────────────────────────────────────────

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
            case ast.UnaryOp(op=ast.Not(), operand=ast.Compare(left=left, ops=[ast.In()], comparators=[right])):
                return self._compared(left, ast.NotIn(), right)  # `not x in (1, 2)`
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self._condition(operand)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return functools.reduce(operator.and_, map(self._compared, [left, *comparators], ops, comparators))
        name = self._name(node)
        if name is not None and pa.types.is_boolean(self._field(name).type):
            return pc.field(name)
        raise self._refused(
            f"`{self._unparsed(node)}` is not a comparison. A filter takes columns, numbers and strings with = == != "
            "<> < <= > >= in, between, is null, and, or, not."
        )

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> pc.Expression:
        left, right = self._constant(left), self._constant(right)
        if self._name(left) is None and self._name(right) is None:  # SQL can have names in double quotes, too
            left, right = self._as_name(left), self._as_name(right)
        names = [self._name(side) for side in (left, right)]
        column = next((name for name in names if name is not None), None)
        if column is None:
            raise self._refused(f"`{self._unparsed(left)}` is not compared with a column.")
        kind, is_list = self._field(column).type, isinstance(op, ast.In | ast.NotIn)
        if self._is_sql and not isinstance(op, ast.Is | ast.IsNot):
            parts = getattr(right, "elts", [right]) if is_list else [right]
            if any(isinstance(part, ast.Constant) and part.value is None for part in map(self._constant, parts)):
                raise self._refused(f"in SQL, no value is equal to NULL: write `{column} IS NULL`.")
        if isinstance(op, ast.Is | ast.IsNot) or (isinstance(right, ast.Constant) and right.value is None):
            if names[0] is None or not (isinstance(right, ast.Constant) and right.value is None):
                raise self._refused("`is` is for null only: `speed is not null`.")
            is_null = pc.field(column).is_null()
            return ~is_null if isinstance(op, ast.IsNot | ast.NotEq) else is_null
        if is_list:
            values = [right] if isinstance(right, ast.Constant) else getattr(right, "elts", None)
            if names[0] is None or values is None:
                raise self._refused("`in` takes a column and a list: `city in ('Ulm', 'Bonn')`.")
            scalars = [self._value(value, kind, column) for value in values]
            kind = _plain(kind)
            # A number that is still of another type equals none of the column's values, which cannot hold it.
            matches = pc.field(column).isin(
                pa.array([scalar.as_py() for scalar in scalars if scalar.type == kind], kind)
            )
            if isinstance(op, ast.NotIn):
                return ~matches & pc.field(column).is_valid() if self._is_sql else ~matches
            return matches
        number = _number_of(right if names[0] is not None else left)
        if pa.types.is_integer(_plain(kind)) and number is not None:
            compared = type(op) if names[0] is not None else _MIRRORED.get(type(op), type(op))
            return _integers(pc.field(column), compared, number, _plain(kind))
        return _COMPARED[type(op)](self._side(left, kind, column), self._side(right, kind, column))

    def _as_name(self, node: ast.expr) -> ast.expr:
        """Return the name of a column for a string that is equal to it."""
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in self._schema.names):
            return node
        self._quoted.append(node.value)
        return ast.Name(f"_column_{len(self._quoted) - 1}_")

    def _side(self, node: ast.expr, kind: pa.DataType, column: str) -> pc.Expression:
        name = self._name(node)
        if name is not None:
            self._field(name)
            return pc.field(name)
        return pc.scalar(self._value(node, kind, column))

    def _value(self, node: ast.expr, kind: pa.DataType, column: str) -> pa.Scalar:
        try:
            value = ast.literal_eval(self._constant(node))
        except ValueError:
            raise self._refused(f"`{self._unparsed(node)}` is neither a column nor a number or string.") from None
        kind = _plain(kind)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            if number and _is_number(kind):
                return _number(value, kind)
            if pa.types.is_timestamp(kind) and kind.tz is not None and isinstance(value, str):
                # A time without a zone is in the zone of this process, as in Spark.
                return pa.scalar(datetime.datetime.fromisoformat(re.sub("[Zz]$", "+00:00", value)).astimezone(), kind)
            if not number:
                scalar = pa.scalar(value)
                return scalar if scalar.type == kind else scalar.cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, OverflowError, ValueError):
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
    scalar = pa.scalar(value, kind if isinstance(value, int) and value >= 2**63 else None)
    try:
        cast = scalar.cast(kind)
        return cast if cast.cast(scalar.type) == scalar else scalar
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return scalar


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
