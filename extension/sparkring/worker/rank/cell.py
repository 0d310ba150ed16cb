"""Runs the code of a cell on a rank, as IPython runs one in a notebook."""

from __future__ import annotations

import ast
import types
from typing import Any, NamedTuple

from sparkring.capture.source_lines import keep_lines


class CompiledCell(NamedTuple):
    """The code of a cell in two parts.

    If the cell ends with an expression, this is `expression`, and `code` is the rest of the cell. Otherwise,
    `expression` is None, and `code` is the whole cell.
    """

    code: types.CodeType
    expression: types.CodeType | None

    def run(self, namespace: dict[str, Any]) -> Any:
        """Run the cell in `namespace`, and return the value of its last expression, or None."""
        _execute(self.code, namespace)
        return None if self.expression is None else _execute(self.expression, namespace)


def run_cell(source: str, namespace: dict[str, Any], filename: str) -> Any:
    """Run a cell's code in `namespace`.

    Return the value of the cell's last statement if that is an expression, otherwise None.
    """
    return compile_cell(source, filename).run(namespace)


def compile_cell(source: str, filename: str) -> CompiledCell:
    """Compile a cell.

    Tracebacks and inspect.getsource() find the cell's lines, even after the cell has ended. `await` works outside
    functions, as in a notebook.
    """
    keep_lines(filename, source)
    tree = ast.parse(source, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    code = compile(tree, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if last is None:
        return CompiledCell(code, None)
    assert isinstance(last, ast.Expr)
    expression = ast.Expression(last.value)
    return CompiledCell(code, compile(expression, filename, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))


def _execute(code: types.CodeType, namespace: dict[str, Any]) -> Any:
    value = eval(code, namespace)
    if code.co_flags & 0x80:  # CO_COROUTINE: there was an await outside any function
        import asyncio  # not at the top: the import takes 30 ms, and most cells do not need it

        async def wait() -> Any:
            return await value

        return asyncio.run(wait())
    return value
