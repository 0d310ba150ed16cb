"""Runs the code of a cell on a rank, as IPython would run it in a notebook."""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any, NamedTuple

from sparkring.capture.source_lines import keep_lines


class CompiledCell(NamedTuple):
    """The code of a cell. If the cell ends with an expression, this expression is the last of the `codes`."""

    codes: tuple[types.CodeType, ...]

    def run(self, namespace: dict[str, Any]) -> Any:
        """Run the cell in `namespace`, and return the value of its last expression, or None."""
        if any(map(_awaits, self.codes)):
            import asyncio  # not at the top: the import takes 30 ms, and most cells do not need it

            return asyncio.run(_run_with_awaits(self.codes, namespace))
        value = None
        for code in self.codes:
            value = eval(code, namespace)
        return value


def compile_cell(source: str, filename: str) -> CompiledCell:
    """Compile a cell, in which `await` may occur outside functions. Keep its lines for tracebacks."""
    keep_lines(filename, source)
    tree, expression = ast.parse(source, filename), None
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        del tree.body[-1]
        expression = ast.Expression(last.value)
    # With dont_inherit, the __future__ import of this module does not apply to the cell.
    codes = [compile(tree, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)]
    if expression is not None:
        codes.append(compile(expression, filename, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True))
    return CompiledCell(tuple(codes))


async def _run_with_awaits(codes: tuple[types.CodeType, ...], namespace: dict[str, Any]) -> Any:
    """Run a cell in one event loop, so that its last expression can await a task that the lines above have started."""
    value = None
    for code in codes:
        value = eval(code, namespace)
        if _awaits(code):
            value = await value
    return value


def _awaits(code: types.CodeType) -> bool:
    """Return whether there is an `await` outside functions."""
    return bool(code.co_flags & inspect.CO_COROUTINE)
