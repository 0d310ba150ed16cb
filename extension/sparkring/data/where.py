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
from typing import Any, NamedTuple, TypeAlias

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
_LIKE = "_like_"  # the function in Python's text that stands for LIKE
_SHOWN = 24  # how many letters of a filter an error shows
_FORM = "[('store', '=', 1), ('city', 'in', ['Ulm', 'Bonn'])]"


def compile_where(where: Where, schema: pa.Schema) -> tuple[pc.Expression | None, str]:
    """Return the filter `where` as an Arrow expression and as text, or (None, '') if there is no filter.

    A filter can be a string of comparisons of columns with values, joined by `and`, `or` and `not`, as in Python or in
    SQL (AND, `=`, `<>`, IS NULL, BETWEEN, LIKE). Names of columns may be in backticks. Dates are written as strings, as
    in `day >= '2026-01-31'`. With SQL's operators, no row with a null passes NOT IN, as in Spark; `not in` includes
    nulls. A filter can also be a list in the form of pyarrow's `filters`, or an Arrow expression. Raise DataError if
    the filter cannot be read; its message names the part that is wrong, and its place in the text.
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


class _Translated(NamedTuple):
    """A part of Python's text, and where its origin is in the filter."""

    text: str
    at: int


class _Reader:
    """Converts the text of a filter to an Arrow expression. Python's own parser reads the text."""

    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text = text.strip()
        self._schema = schema
        self._is_sql = False  # whether the filter has operators that only SQL has, or in upper case
        self._quoted: list[str] = []  # the names in backticks, in Python's text called _column_0_, _column_1_, …
        self._translated = ""  # Python's text, and where in it each token begins
        self._begins: list[tuple[int, _Translated]] = []

    def expression(self) -> pc.Expression:
        try:
            tree = ast.parse(self._python(), mode="eval")
        except (SyntaxError, ValueError) as error:
            reason = self._written(str(getattr(error, "msg", error)))
            raise self._refused(
                f"{reason}. Write it as in SQL or Python, or as a list of conditions: where={_FORM}.",
                self._place((getattr(error, "offset", None) or len(self._translated) + 1) - 1),
            ) from None
        return self._condition(tree.body)

    def _refused(self, why: str, place: str | ast.expr = "") -> DataError:
        """Return the error. `place` is the end of a phrase that says where, or the node for which _place() makes it."""
        return DataError(f"the filter `{self._text}` cannot be read{self._of(place)}: {why}")

    def _of(self, place: str | ast.expr) -> str:
        if isinstance(place, str):
            return place
        begin = getattr(place, "col_offset", None)  # in bytes; a node that was made here has none
        return "" if begin is None else self._place(len(self._translated.encode()[:begin].decode()))

    def _place(self, at: int) -> str:
        """Return where in the filter the letter `at` of Python's text comes from, as ` at character 9, `AND x``."""
        return self._at_token([token for begin, token in self._begins if begin <= at][-1])

    # ── From SQL to Python ────────────────────────────────────────────────────

    def _python(self) -> str:
        """Return the filter with Python's operators and names."""
        tokens: list[_Translated] = []
        for match in _TOKENS.finditer(self._text):
            token, kind = match[0], match.lastgroup
            if kind == "quoted":
                self._quoted.append(token[1:-1].replace("``", "`"))
                token = f"_column_{len(self._quoted) - 1}_"
            elif kind == "text":
                if tokens and tokens[-1].text.lower() in ("date", "timestamp", "timestamp_ntz"):
                    tokens.pop()  # DATE '2026-01-31'
                token = f"'{token[1:-1].replace(chr(39) * 2, chr(92) + chr(39))}'" if token[0] == "'" else token
            elif kind == "word" and token not in self._schema.names and token.lower() in _KEYWORDS:
                self._is_sql = self._is_sql or not token.islower()
                token = token.lower()
            self._is_sql = self._is_sql or token in _OPERATORS
            if kind != "space":
                tokens.append(_Translated(_OPERATORS.get(token, token), match.start()))
        at = 0
        while at < len(tokens):
            word = tokens[at].text
            if word not in self._schema.names and (replace := _REPLACED.get(word.lower())):
                self._is_sql = True
                replace(self, tokens, at)
            at += 1
        self._begins = [(0, _Translated("", len(self._text)))]
        text = ""
        for part in tokens:
            if text and "." not in (part.text, text[-1]):
                text += " "
            self._begins.append((len(text), part))
            text += part.text
        self._begins.append((len(text), _Translated("", len(self._text))))
        self._translated = text
        return text

    def _before(self, tokens: list[_Translated], at: int) -> tuple[int, list[_Translated], list[_Translated]]:
        """Return the number of the first token of `x NOT` before operator `at`, the tokens of x and those of NOT."""
        negated = tokens[at - 1 : at] if at and tokens[at - 1].text == "not" else []
        begin = end = at - len(negated)
        begin -= 1
        while begin > 1 and tokens[begin - 1].text == ".":  # a name with dots
            begin -= 2
        return begin, tokens[max(0, begin) : end], negated

    def _replace_between(self, tokens: list[_Translated], at: int) -> None:
        """Replace the tokens of `x BETWEEN 1 AND 5` by those of `(1 <= x <= 5)`, in place."""
        begin, column, negated = self._before(tokens, at)
        numbers = [1 + _is_minus(tokens, at + 1)]
        middle = at + 1 + numbers[0]
        numbers.append(1 + _is_minus(tokens, middle + 1))
        end = middle + 1 + numbers[1]
        if begin < 0 or middle >= len(tokens) or tokens[middle].text != "and" or end > len(tokens):
            raise self._refused(
                "BETWEEN is for a column and two values, as in `speed BETWEEN 3 AND 5`.", self._at_token(tokens[at])
            )
        opened, compared, closed = (_Translated(text, tokens[at].at) for text in ("(", "<=", ")"))
        low, high = tokens[at + 1 : middle], tokens[middle + 1 : end]
        tokens[begin:end] = [*negated, opened, *low, compared, *column, compared, *high, closed]

    def _replace_like(self, tokens: list[_Translated], at: int) -> None:
        """Replace the tokens of `x LIKE 'a%'` by those of a call, in place."""
        begin, column, negated = self._before(tokens, at)
        pattern = tokens[at + 1 : at + 2]
        if begin < 0 or not pattern or pattern[0].text[0] not in "'\"":
            raise self._refused("LIKE is for a column and a text, as in `city LIKE 'U%'`.", self._at_token(tokens[at]))
        like, opened, comma, closed = (_Translated(text, tokens[at].at) for text in (_LIKE, "(", ",", ")"))
        # Python would take away the backslashes, with which LIKE marks % and _ that stand for themselves.
        pattern = [_Translated(f"r{pattern[0].text}", pattern[0].at)]
        tokens[begin : at + 2] = [*negated, like, opened, *column, comma, *pattern, closed]

    def _at_token(self, token: _Translated) -> str:
        rest = self._text[token.at : token.at + _SHOWN].strip()
        return f" at character {token.at + 1}, `{rest}`" if rest else " at its end"

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
        return ast.copy_location(ast.Constant(_CONSTANTS[node.id.lower()]), node)

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
            case ast.Call(func=ast.Name(id=function), args=[column, ast.Constant(value=str(pattern))]) if (
                function == _LIKE
            ):
                return self._like(column, pattern.replace("\\'", "'"))
        name = self._name(node)
        if name is not None and pa.types.is_boolean(self._field(name, node).type):
            return pc.field(name)
        raise self._refused(
            f"`{self._unparsed(node)}` is not a comparison. A filter takes columns, numbers and strings with = == != "
            "<> < <= > >= in, between, like, is null, and, or, not.",
            node,
        )

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> pc.Expression:
        left, right = self._constant(left), self._constant(right)
        if self._name(left) is None and self._name(right) is None:  # SQL can have names in double quotes, too
            left, right = self._as_name(left), self._as_name(right)
        names = [self._name(side) for side in (left, right)]
        column = next((name for name in names if name is not None), None)
        if column is None:
            raise self._refused(f"`{self._unparsed(left)}` is not compared with a column.", left)
        named = left if names[0] is not None else right
        kind, is_list = self._field(column, named).type, isinstance(op, ast.In | ast.NotIn)
        if self._is_sql and not isinstance(op, ast.Is | ast.IsNot):
            parts = getattr(right, "elts", [right]) if is_list else [right]
            if any(isinstance(part, ast.Constant) and part.value is None for part in map(self._constant, parts)):
                raise self._refused(f"in SQL, no value is equal to NULL: write `{column} IS NULL`.", right)
        if isinstance(op, ast.Is | ast.IsNot) or (isinstance(right, ast.Constant) and right.value is None):
            if names[0] is None or not (isinstance(right, ast.Constant) and right.value is None):
                raise self._refused("`is` is for null only: `speed is not null`.", left)
            is_null = pc.field(column).is_null()
            return ~is_null if isinstance(op, ast.IsNot | ast.NotEq) else is_null
        if is_list:
            values = [right] if isinstance(right, ast.Constant) else getattr(right, "elts", None)
            if names[0] is None or values is None:
                raise self._refused("`in` takes a column and a list: `city in ('Ulm', 'Bonn')`.", left)
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

    def _like(self, node: ast.expr, pattern: str) -> pc.Expression:
        name = self._name(self._as_name(node))
        if name is None:
            raise self._refused("LIKE is for a column and a text, as in `city LIKE 'U%'`.", node)
        kind = _plain(self._field(name, node).type)
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise self._refused(f"LIKE is for text, but `{name}` is {kind}.", node)
        column = pc.field(name)
        if kind != self._schema.field(name).type:
            column = column.cast(kind)
        matches = pc.match_like(column, pattern)
        prefix = re.split(r"[%_\\]", pattern)[0]
        # Row groups are left out by comparisons only, so the beginning of the text is compared, too.
        if prefix:
            matches = (column >= pc.scalar(pa.scalar(prefix, kind))) & matches
        if prefix and prefix[-1] < "\ud7ff":  # letters that UTF-8 cannot have begin after this one
            beyond = prefix[:-1] + chr(ord(prefix[-1]) + 1)
            matches = (column < pc.scalar(pa.scalar(beyond, kind))) & matches
        return matches

    def _as_name(self, node: ast.expr) -> ast.expr:
        """Return the name of a column for a string that is equal to it."""
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in self._schema.names):
            return node
        self._quoted.append(node.value)
        return ast.Name(f"_column_{len(self._quoted) - 1}_")

    def _side(self, node: ast.expr, kind: pa.DataType, column: str) -> pc.Expression:
        name = self._name(node)
        if name is not None:
            self._field(name, node)
            return pc.field(name)
        return pc.scalar(self._value(node, kind, column))

    def _value(self, node: ast.expr, kind: pa.DataType, column: str) -> pa.Scalar:
        try:
            value = ast.literal_eval(self._constant(node))
        except ValueError:
            raise self._refused(f"`{self._unparsed(node)}` is neither a column nor a number or string.", node) from None
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
        raise self._refused(f"`{column}` is {kind}, but {value!r} is not.", node)

    def _field(self, name: str, node: ast.expr) -> pa.Field:
        if name not in self._schema.names:
            raise DataError(
                f"the filter `{self._text}` names the column `{name}`{self._of(node)}, which does not exist: "
                f"{nearest(name, self._schema.names)}"
            )
        return self._schema.field(name)


_REPLACED = {"between": _Reader._replace_between, "like": _Reader._replace_like}


def _is_minus(tokens: Sequence[_Translated], at: int) -> bool:
    return at < len(tokens) and tokens[at].text == "-"


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
