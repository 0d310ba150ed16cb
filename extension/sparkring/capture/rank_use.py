"""Decides whether code divides the work by the number of the rank, so that each rank is meant to work alone.

Code may use its rank and still be meant for a ring: to print or save on rank 0 only, to choose a GPU, or to connect.
Such uses do not count. Any other use counts, because a wrong "no" would lead to a wrong warning.
"""

from __future__ import annotations

import ast
import re
import types
from typing import Any

from sparkring.capture.syntax import parsed

_NAME = re.compile(r"(\w*_)?rank|world|process_index|partitionId")  # of a variable, an attribute or a function
_VARIABLE = re.compile(r"\w*_RANK|RANK|TF_CONFIG")  # in the environment
# The calls that may get the rank in a program for a ring: they print, connect, or choose a GPU or the ring's rows.
_HARMLESS_CALLS = re.compile(
    "DistributedSampler|barrier|cuda|debug|device|display|info|init_process_group|log|log_to_driver|print|set_device|to"
    "|tqdm|warning|write"
)
_HARMLESS_KEYWORDS = re.compile("desc|device|device_ids|disable|output_device|position|rank|verbose")


def divides_by_rank(source: str) -> bool:
    """Return whether the code uses its rank for more than output, devices and connections.

    Code that cannot be parsed counts as such code.
    """
    try:
        tree = parsed(source)
    except (SyntaxError, ValueError):
        return True
    visitor = _Uses()
    visitor.visit(tree)
    return visitor.any


def may_divide_by_rank(code: types.CodeType) -> bool:
    """Return whether compiled code mentions its rank at all. This is faster than divides_by_rank()."""
    names = (*code.co_names, *code.co_varnames, *code.co_freevars)
    texts = (constant for constant in code.co_consts if isinstance(constant, str))
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (
        any(map(_NAME.fullmatch, names)) or any(map(_VARIABLE.fullmatch, texts)) or any(map(may_divide_by_rank, inner))
    )


class _Uses(ast.NodeVisitor):
    """Sets `any` if the visited code uses the rank to divide the work."""

    def __init__(self) -> None:
        self.any = False

    def visit_Name(self, node: ast.Name) -> None:
        self.any |= isinstance(node.ctx, ast.Load) and _NAME.fullmatch(node.id) is not None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if _NAME.fullmatch(node.attr):
            self.any = True
        elif not (isinstance(node.value, ast.Call) and _called(node.value) == "world" and node.attr == "size"):
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        self.any |= isinstance(node.value, str) and _VARIABLE.fullmatch(node.value) is not None

    def visit_Call(self, node: ast.Call) -> None:
        if _HARMLESS_CALLS.fullmatch(_called(node)):
            if isinstance(node.func, ast.Attribute):
                self.visit(node.func.value)
        else:
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if not _HARMLESS_KEYWORDS.fullmatch(node.arg or ""):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not all(map(_only_names_rank, node.targets)):
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
        for part in parts:  # the value of the cell may contain the rank
            if not _is_rank(part):
                self.visit(part)

    def visit_If(self, node: ast.If) -> None:
        """Code that only rank 0 runs, such as `torch.save(…)`, does not count if it assigns nothing."""
        if _is_first(node.test) and not node.orelse and not any(map(_assigns, node.body)):
            return
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        first = node.values[0] if node.values else None
        if not (isinstance(first, ast.Constant) and str(first.value).startswith("cuda")):
            self.generic_visit(node)


def _called(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Name(name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
    return ""


def _is_rank(node: ast.AST) -> bool:
    """Whether `node` is the rank itself: `rank`, `hvd.rank()`, `world().rank`, `int(os.environ["RANK"])`."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return _NAME.fullmatch(name) is not None
        case ast.Call(func=ast.Name("int"), args=[argument]):
            return _is_rank(argument) or any(
                isinstance(part, ast.Constant) and _VARIABLE.fullmatch(str(part.value)) for part in ast.walk(argument)
            )
        case ast.Call(func=function):
            return _is_rank(function)
    return False


def _is_first(node: ast.AST) -> bool:
    """Whether `node` asks for the rank 0, or for a rank other than 0."""
    match node:
        case ast.Compare(left=left, comparators=[right]):
            sides: list[Any] = [left, right]
            return any(map(_is_rank, sides)) and any(isinstance(s, ast.Constant) and s.value == 0 for s in sides)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _is_rank(operand)
        case ast.BoolOp(values=values):
            return any(map(_is_first, values))
    return _is_rank(node)


def _assigns(statement: ast.stmt) -> bool:
    kinds = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr
    return any(isinstance(part, kinds) for part in ast.walk(statement))


def _only_names_rank(target: ast.expr) -> bool:
    """Whether an assignment to `target` only gives the rank, or the number of ranks, a name."""
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    return len(names) == len(parts) and all(
        _NAME.fullmatch(name) or re.fullmatch(r"(\w*_)?size|device", name) for name in names
    )
