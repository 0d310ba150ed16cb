"""Finds names of the notebook in text: in strings that are evaluated as code, in templates, and in annotations.

A string is searched only if code uses it in a way that reads variables, for example as an argument of eval(), or in
`df.query("x > @limit")`. So a word in a docstring or in printed text does not cause data to be sent.

An annotation may be a string, too. `typing.get_type_hints` looks up the names in this string on the ranks.
"""

from __future__ import annotations

import ast
import contextlib
import re
import string
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from sparkring.capture.names import IMPLICIT, names_read
from sparkring.capture.syntax import parsed

# Code that contains none of these words need not be searched.
MARKS = re.compile(r"\b(?:eval|exec|query|evaluate|globals|locals|vars)\b")

_AT = re.compile(r"(?<![\w@])@([A-Za-z_]\w*)")  # a variable in a pandas query: `@limit`
_PERCENT = re.compile(r"%\(([A-Za-z_]\w*)\)")  # a variable in a template: `%(limit)s`


class StringName(NamedTuple):
    """A name in a string, and the line where the string is used."""

    name: str
    line: int


def names_in_strings(tree: ast.AST, values: Mapping[str, object]) -> list[StringName]:
    """Find the names in strings that code evaluates, and in templates that it fills in from globals().

    `values` are the notebook's variables. A variable may hold such a string, or a module that has an eval(), such as
    pandas.
    """
    return list(_Strings(tree, values).find())


class _Strings:
    """The strings that code uses: literals, strings that it assigns to a name, and variables of the notebook."""

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
        """Return the names in the string that `node` evaluates or fills in; none if it does neither."""
        match node:
            case ast.Call(ast.Name("eval" | "exec"), [code, *_]):
                return _in_code(self.text(code))
            case ast.Call(ast.Attribute(ast.Name(module), "eval" | "evaluate"), [code, *_]) if self.is_module(module):
                return _in_code(_AT.sub(r"\1", self.text(code)))  # pandas.eval, numexpr.evaluate
            case ast.Call(ast.Attribute(_, "query" | "eval"), arguments, keywords):
                return _AT.findall(" ".join(map(self.text, [*arguments, *(keyword.value for keyword in keywords)])))
            case ast.Call(ast.Attribute(text, "format"), _, keywords):
                return _in_format(self.text(text)) if any(_is_scope(keyword.value) for keyword in keywords) else ()
            case ast.Call(ast.Attribute(text, "format_map"), [scope]) if _is_scope(scope):
                return _in_format(self.text(text))
            case ast.Call(ast.Name("Template") | ast.Attribute(_, "Template"), [text]) if self.scope_used:
                placeholders = string.Template.pattern.finditer(self.text(text))
                return [
                    placeholder["named"] or placeholder["braced"]
                    for placeholder in placeholders
                    if placeholder["named"] or placeholder["braced"]
                ]
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
        """Return as much of an expression's text as is known without running the code."""
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
    """Return whether a node is a call that returns a dict of variables, such as `globals()`."""
    match node:
        case ast.Call(ast.Name("globals" | "locals" | "vars"), [], []):
            return True
    return False


def _in_code(text: str) -> Iterable[str]:
    try:
        names = names_read(text.strip())
    except (SyntaxError, ValueError):  # ValueError: a null character
        return ()
    return [*names.required, *names.optional]


def _in_format(text: str) -> Iterable[str]:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field]
    except ValueError:  # a single brace
        return ()
    return [re.split(r"[.\[]", field)[0] for field in fields]


# ── Annotations ──────────────────────────────────────────────────────────────────────────────────────────────────────


def names_in_hints_of(value: object) -> set[str]:
    """Return the names in the string annotations of a function or class, including strings inside annotations."""
    if not isinstance(value, (type, types.FunctionType)):
        return set()
    try:
        annotations = vars(value).get("__annotations__") if isinstance(value, type) else value.__annotations__
    except Exception:  # from Python 3.14 on, annotations are evaluated here and may raise anything
        return set()
    hints = annotations.values() if isinstance(annotations, dict) else ()
    return {name for text in _texts(hints) for name in _in_hint(text)}


def names_in_hints(source: str) -> set[str]:
    """Return the names in a cell's string annotations. With the __future__ import, all annotations are strings."""
    names: set[str] = set()
    tree = parsed(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    are_text = any(alias.name == "annotations" for node in imports for alias in node.names)
    for node in ast.walk(tree):
        for key in ("annotation", "returns"):
            hint = getattr(node, key, None)
            for part in ast.walk(hint) if isinstance(hint, ast.expr) else ():
                if isinstance(part, ast.Name) and are_text:
                    names.add(part.id)
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    names.update(_in_hint(part.value))
    return names


def _texts(annotations: Iterable[object]) -> Iterator[str]:
    for annotation in annotations:
        if isinstance(annotation, str):
            yield annotation
        elif isinstance(annotation, typing.ForwardRef):
            yield annotation.__forward_arg__
        else:
            arguments = getattr(annotation, "__args__", ())
            yield from _texts(arguments if isinstance(arguments, tuple) else ())


def _in_hint(text: str) -> Iterator[str]:
    # A string in an annotation need not be a type: in typing.Annotated or typing.Literal, it may be any text.
    with contextlib.suppress(SyntaxError):
        yield from (part.id for part in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(part, ast.Name))
