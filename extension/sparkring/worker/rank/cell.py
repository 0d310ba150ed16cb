"""Runs the code of a cell on a rank, as IPython would run it in a notebook."""

from __future__ import annotations

import ast
import types
from typing import Any, NamedTuple

from sparkring.capture.source_lines import keep_lines


class CompiledCell(NamedTuple):
    """The code of a cell. If the cell ends with an expression, `expression` holds it, and `code` does not."""

    code: types.CodeType
    expression: types.CodeType | None

    def run(self, namespace: dict[str, Any]) -> Any:
        """Run the cell in `namespace`, and return the value of its last expression, or None."""
        _execute(self.code, namespace)
        return None if self.expression is None else _execute(self.expression, namespace)


def compile_cell(source: str, filename: str) -> CompiledCell:
    """Compile a cell, in which `await` may occur outside functions. Keep its lines for tracebacks."""
    keep_lines(filename, source)
    tree, expression = ast.parse(source, filename), None
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        del tree.body[-1]
        expression = compile(ast.Expression(last.value), filename, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return CompiledCell(compile(tree, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), expression)


def _execute(code: types.CodeType, namespace: dict[str, Any]) -> Any:
    value = eval(code, namespace)
    if code.co_flags & 0x80:  # CO_COROUTINE: there is an await outside functions
        import asyncio  # not at the top: the import takes 30 ms, and most cells do not need it

        async def wait() -> Any:
            return await value

        return asyncio.run(wait())
    return value
