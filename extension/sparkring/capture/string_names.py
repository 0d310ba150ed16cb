"""Finds names of the notebook in strings that are evaluated as code or filled in: `df.query("x > @limit")`.

Only strings in places that use the notebook's variables count, such as an argument of eval(). A word in a docstring or
in printed text does not cause data to be sent.
"""

from __future__ import annotations

import ast
import re
import string
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from sparkring.capture.names import IMPLICIT, names_read

MARKS = re.compile(r"\b(?:eval|exec|query|evaluate|globals|locals|vars)\b")  # other text has no such strings

_SCOPES = ("globals", "locals", "vars")
_AT = re.compile(r"(?<![\w@])@([A-Za-z_]\w*)")  # pandas' mark for a variable
_PERCENT = re.compile(r"%\(([A-Za-z_]\w*)\)")


class StringName(NamedTuple):
    """A name in a string, and the line where the string is used."""

    name: str
    line: int


def names_in_strings(tree: ast.AST, values: Mapping[str, object]) -> list[StringName]:
    """Find the names in strings that code evaluates, or fills in from globals().

    `values` are the notebook's variables: they may hold such a string, or a module such as pandas.
    """
    return list(_Strings(tree, values).find())


class _Strings:
    """The strings of one tree: literals, strings that are assigned to a name, and those of the notebook."""

    def __init__(self, tree: ast.AST, values: Mapping[str, object]) -> None:
        self.nodes = list(ast.walk(tree))
        self.values = values
        self.assigned: dict[str, str] = {}
        self.modules: set[str] = set()
        self.scope_used = any(_is_scope(node) for node in self.nodes)
        for node in self.nodes:
            match node:
                case ast.Assign([ast.Name(name)], value) if text := self.text(value):
                    self.assigned[name] = f"{self.assigned.get(name, '')}\n{text}".strip()
                case ast.Import(names):
                    self.modules |= {alias.asname or alias.name for alias in names}

    def find(self) -> Iterator[StringName]:
        for node in self.nodes:
            for name in self.at(node):
                if name not in IMPLICIT:
                    yield StringName(name, getattr(node, "lineno", 0))

    def at(self, node: ast.AST) -> Iterable[str]:
        """The names in the strings that a node uses."""
        match node:
            case ast.Call(ast.Name("eval" | "exec"), [code, *_]):
                return _in_code(self.text(code))
            case ast.Call(ast.Attribute(ast.Name(module), "eval" | "evaluate"), [code, *_]) if self.is_module(module):
                return _in_code(_AT.sub(r"\1", self.text(code)))  # pandas.eval, numexpr.evaluate
            case ast.Call(ast.Attribute(_, "query" | "eval"), arguments, keywords):
                return _AT.findall(" ".join(map(self.text, [*arguments, *(each.value for each in keywords)])))
            case ast.Call(ast.Attribute(text, "format"), _, keywords):
                return _in_format(self.text(text)) if any(_is_scope(each.value) for each in keywords) else ()
            case ast.Call(ast.Attribute(text, "format_map"), [scope]) if _is_scope(scope):
                return _in_format(self.text(text))
            case ast.Call(ast.Name("Template") | ast.Attribute(_, "Template"), [text]) if self.scope_used:
                found = string.Template.pattern.finditer(self.text(text))
                return [each["named"] or each["braced"] for each in found if each["named"] or each["braced"]]
            case ast.BinOp(text, ast.Mod(), scope) if _is_scope(scope):
                return _PERCENT.findall(self.text(text))
            case ast.Subscript(scope, key) if _is_scope(scope):
                return [self.text(key)]
            case ast.Call(ast.Attribute(scope, "get"), [key, *_]) if _is_scope(scope):
                return [self.text(key)]
            case ast.Compare(key, [ast.In() | ast.NotIn()], [scope]) if _is_scope(scope):
                return [self.text(key)]
        return ()

    def text(self, node: ast.AST) -> str:
        """The text of an expression, as far as it is known; '' if it is not."""
        match node:
            case ast.Constant(str(text)):
                return text
            case ast.JoinedStr(parts):
                return "".join(self.text(part) if isinstance(part, ast.Constant) else "0" for part in parts)
            case ast.BinOp(left, ast.Add(), right):
                return self.text(left) + self.text(right)
            case ast.Name(name):
                held = self.values.get(name)
                return self.assigned.get(name) or (held if isinstance(held, str) else "")
        return ""

    def is_module(self, name: str) -> bool:
        return name in self.modules or issubclass(type(self.values.get(name)), types.ModuleType)


def _is_scope(node: ast.AST) -> bool:
    """Is this `globals()`, or one like it?"""
    match node:
        case ast.Call(ast.Name(name), [], []):
            return name in _SCOPES
    return False


def _in_code(text: str) -> Iterable[str]:
    try:
        found = names_read(text.strip())
    except (SyntaxError, ValueError):  # ValueError: a null character
        return ()
    return [*found.required, *found.optional]


def _in_format(text: str) -> Iterable[str]:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field]
    except ValueError:  # a single brace
        return ()
    return [re.split(r"[.\[]", field)[0] for field in fields]
