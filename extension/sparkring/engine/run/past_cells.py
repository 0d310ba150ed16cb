"""Keeps the cells that have run on a warm gang, so that a gang that takes its place can be given the same variables."""

from __future__ import annotations

import ast
import builtins
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from sparkring.capture.names import names_read
from sparkring.capture.syntax import parsed
from sparkring.gangs.execution import Execution, Request
from sparkring.wire.messages import CellCode

# The values of a cell are not kept if they exceed CELL_BYTES. The oldest cells are dropped if all values together
# exceed ALL_BYTES, or if there are more than MOST cells.
CELL_BYTES, ALL_BYTES, MOST = 16 * 1024**2, 64 * 1024**2, 1_000
# Calls of functions of these packages can prepare a process, as `dist.init_process_group()` and `hvd.init()` do.
PREPARING = frozenset({"deepspeed", "horovod", "jax", "keras", "numpy", "random", "tensorflow", "torch"})


class PastCell(NamedTuple):
    """A cell that has run to its end on `ranks`. `request` is None if the values that were sent with
    the cell were too large to keep. To load these values, the ranks need their values of the names in `uses`."""

    source: str
    sent: tuple[str, ...]
    uses: frozenset[str]
    ranks: tuple[int, ...]
    request: Request | None
    size_bytes: int

    @property
    def title(self) -> str:
        return self.source.strip().partition("\n")[0]


class PastCells:
    """The cells that have run on a gang, oldest first."""

    def __init__(self) -> None:
        self._cells: deque[PastCell] = deque()
        self._bytes = 0

    def add(self, execution: Execution) -> None:
        """Keep the cell of an execution that has ended well, with a copy of the values that were sent with it."""
        run, request = execution.request.run, execution.request
        if not isinstance(run.what, CellCode):
            return
        size_bytes, kept = sum(memoryview(part).nbytes for part in run.parts), None
        if size_bytes <= CELL_BYTES:
            # The parts are copied, since they share memory with the notebook's arrays, which the notebook may change.
            kept = request._replace(run=run._replace(parts=tuple(map(bytes, run.parts)), pull=()))
        self._cells.append(
            PastCell(run.what.source, request.sent, request.uses, execution.ranks, kept, size_bytes if kept else 0)
        )
        self._bytes += self._cells[-1].size_bytes
        while self._bytes > ALL_BYTES or len(self._cells) > MOST:
            self._bytes -= self._cells.popleft().size_bytes

    def that_define(self, needed: Iterable[str], modules: Mapping[str, str]) -> list[PastCell]:
        """Return the cells to run again, in their order, so that the names in `needed` get values on new ranks.

        These are the cells that have bound these names, those that have bound what such cells read, and those that only
        prepare the process. `modules` maps the notebook's names of modules to the names of the modules.
        """
        wanted, cells = set(needed), []
        imported = dict(modules)
        for cell in self._cells:
            imported.update(_imports(parsed(cell.source)))
        for cell in reversed(self._cells):
            names = names_read(cell.source)
            if wanted & {*names.bound, *cell.sent} or _only_prepares(cell.source, imported):
                cells.append(cell)
                wanted |= {*names.required, *names.optional}.difference(cell.sent) | cell.uses
        return cells[::-1]


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that imports bind, each with the module from which it comes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, node.module or ""


def _only_prepares(source: str, imported: Mapping[str, str]) -> bool:
    """Return whether a cell does nothing but prepare the process: `dist.init_process_group()`, `hvd.init()`.

    Such a cell calls functions of the PREPARING packages. Otherwise, it may only import, set environment variables, and
    bind and print the results of such calls. No call may use a value from another cell, such as a model: a cell with
    `torch.save(model, path)` does not prepare anything.
    """
    preparing = {name for name, module in imported.items() if module.partition(".")[0] in PREPARING}
    prepares, own = False, set[str]()
    for statement in parsed(source).body:
        match statement:
            case ast.Import() | ast.ImportFrom():
                continue
            case ast.Expr(value=ast.Call(func=function)):
                first = _first_name(function)
                prepares |= first in preparing
                fits = first in preparing or first == "print"
            case ast.Assign(targets=[ast.Name(id=name)]):
                own.add(name)
                fits = True
            case ast.Assign(targets=[ast.Subscript(value=ast.Attribute(attr="environ"))]):
                fits = True
            case _:
                fits = False
        read = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if not fits or not all(name in own or name in imported or hasattr(builtins, name) for name in read):
            return False
    return prepares


def _first_name(expression: ast.expr) -> str:
    """Return `a` for the expression `a.b.c`; '' if it does not begin with a name."""
    while isinstance(expression, ast.Attribute):
        expression = expression.value
    return expression.id if isinstance(expression, ast.Name) else ""
