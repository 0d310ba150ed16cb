"""Trains on the micro-batches of a stream: runs the cell for each of them, and saves checkpoints of its state.

Unlike the items of a pool, the micro-batches share `__main__`: what one batch changes, the next batch finds. The state
that a checkpoint keeps is chosen once, when the stream begins, unless the user has named it.
"""

from __future__ import annotations

import ast
import pickle
import time
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from sparkring.capture import packing
from sparkring.capture.names import global_names, names_read
from sparkring.data.micro_batches import Rows
from sparkring.errors import CheckpointError
from sparkring.history import stacks
from sparkring.runtime import report, world
from sparkring.runtime.resume_point import here
from sparkring.wire import messages
from sparkring.worker.rank import seeds, shell
from sparkring.worker.rank.cell import CompiledCell, compile_cell
from sparkring.worker.rank.items import RANKS_APART

BOUND = ("batch", "batch_id")  # the names that a rank binds before the cell runs


class Begin(NamedTuple):
    """Order to begin or continue the stream: choose the state, and restore it if there is a checkpoint.

    `state` are the names of the state that the user has given; if there are none, the rank chooses them. `keep` and
    `sharded` are as in checkpoints(). With `arrow`, `batch` is an Arrow table.
    """

    state: tuple[str, ...]
    keep: int | None
    sharded: bool
    arrow: bool


class Begun(NamedTuple):
    """Answer to Begin: the names of the state, and the batch and the position of the checkpoint that was restored.

    If there was no checkpoint, `restored` is None.
    """

    state: tuple[str, ...] = ()
    restored: int | None = None
    position: str = ""


class Train(NamedTuple):
    """Order to train on a share of a micro-batch. `nulls` are columns with nulls, on this rank or on others.

    `position` says where the stream continues after this batch. It is saved together with the state if `save` is true.
    """

    batch_id: int
    rows: Rows
    nulls: frozenset[str]
    position: str
    save: bool


class Save(NamedTuple):
    """Order to save the state after a micro-batch on which the ranks have trained, because the stream ends."""

    batch_id: int
    position: str


class Trained(NamedTuple):
    """Answer to Train: how long the rank took to read its rows, to run the cell and to save, in seconds."""

    reading_s: float
    training_s: float
    saving_s: float


class BatchWork:
    """Runs the cell of `order` for each micro-batch in `namespace`, the rank's `__main__`. `cell` is its number."""

    def __init__(self, order: messages.Work, namespace: dict[str, Any], cell: int) -> None:
        self.cell = cell
        self._order = order
        self._namespace = namespace
        self._compiled: CompiledCell | None = None
        self._begin = Begin((), None, False, False)
        self._store: Any = None
        self._names: tuple[str, ...] = ()

    def whole(self, batch: messages.Run) -> messages.Run:
        """Return the request for a micro-batch, and fill in the fields that are the same for all batches."""
        work = self._order
        return batch._replace(
            source=work.source,
            autolog=work.autolog,
            environment={**batch.environment, **work.environment},
            notebook=work.notebook,
        )

    def compute(self, batch: messages.Run) -> Begun | Trained | None:
        """Carry out the order that the request contains."""
        payload, *buffers = batch.parts
        # Unpickling is safe: the order comes from the driver, which has proved that it knows the gang's secret.
        order = pickle.loads(payload, buffers=buffers)
        match order:
            case Begin():
                return self._carry_on(order)
            case Train():
                return self._train(order, batch.seed)
            case Save():
                self._store.save(order.batch_id, self._state(order.position))
        return None

    def _carry_on(self, order: Begin) -> Begun:
        payload, *buffers = self._order.parts
        packing.unpack_names(payload, self._namespace, buffers)
        shell.scripts.update((script.line, script) for script in self._order.scripts)
        self._order = self._order._replace(parts=())
        self._begin = order
        self._compiled = compile_cell(self._order.source, stacks.cell_name(self.cell))
        if not here().directory:
            return Begun()
        from sparkring.checkpointing.store import checkpoints  # not at the top: streams without checkpoints

        self._names = order.state or tuple(_state_of(self._order.source, self._namespace))
        if not self._names:
            raise CheckpointError(
                "the cell uses no model, optimizer or other value that a checkpoint could save: name the variables "
                "that the cell changes, as in --state weights, or leave --checkpoint-dir out."
            )
        self._store = checkpoints(keep=order.keep, sharded=order.sharded, background=False)
        if not here().resume:
            self._check()
            return Begun(self._names)
        state = self._state("")
        step = self._store.restore(state)
        self._namespace.update(state["state"])
        return Begun(self._names, step, state["position"])

    def _train(self, order: Train, seed: int) -> Trained:
        assert self._compiled is not None
        began = time.perf_counter()
        rows, names = order.rows, self._namespace
        names.update(batch=rows.table() if self._begin.arrow else rows.columns(order.nulls), batch_id=order.batch_id)
        read = time.perf_counter()
        seeds.begin((seed + world.world().rank * RANKS_APART) % (1 << 32))
        with report.at_step(order.batch_id):
            self._compiled.run(names)
        trained = time.perf_counter()
        if order.save and self._store is not None:
            self._store.save(order.batch_id, self._state(order.position))
        return Trained(read - began, trained - read, time.perf_counter() - trained)

    def _state(self, position: str) -> dict[str, Any]:
        missing = [name for name in self._names if name not in self._namespace]
        if missing:
            raise CheckpointError(
                f"the ranks have no variable `{missing[0]}`, which is part of the stream's state: run the cell that "
                "defines it on the gang, or name the state with --state."
            )
        return {"state": {name: self._namespace[name] for name in self._names}, "position": position}

    def _check(self) -> None:
        """Raise CheckpointError if the state cannot be saved, before the first batch changes it."""
        from sparkring.checkpointing import parts, tree

        for name, value in self._state("")["state"].items():
            try:
                tree.flatten(parts.tree_of(value, name), name)
            except CheckpointError as error:
                raise CheckpointError(f"{error} Name the variables to save, as in --state model,optimizer.") from None


# ── The choice of the state ───────────────────────────────────────────────────────────────────────────────────────────


def _state_of(source: str, namespace: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the state of a cell, sorted.

    The state consists of the models, optimizers and other objects with a state that the cell, or a function that the
    cell uses, reads, and of the names that the cell both reads and changes by an assignment.
    """
    from sparkring.checkpointing import parts

    cell = names_read(source)
    read, written = _reached({*cell.required, *cell.optional}, namespace)
    changed = read & {*cell.bound, *_changed_items(source), *written}
    for name in sorted(read):
        if name in namespace and name not in BOUND and (name in changed or parts.has_state(namespace[name])):
            yield name


def _changed_items(source: str) -> Iterator[str]:
    """Yield the names in assignments to an item or an attribute, such as `counts` in `counts[key] += 1`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            inner: ast.expr = node
            while isinstance(inner, ast.Subscript | ast.Attribute):
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield inner.id


def _reached(names: Iterable[str], namespace: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return the names that exist, with those that functions and classes of `__main__` among their values read.

    The second set has the names to which these functions assign values.
    """
    found: set[str] = set()
    written: set[str] = set()
    waiting = [name for name in names if name in namespace]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            for code in _codes(namespace[name]):
                used = global_names(code)
                written |= used.writes
                waiting += [each for each in used.reads if each in namespace]
    return found, written


def _codes(value: Any) -> Iterator[types.CodeType]:
    """Yield the code of a function, of a tf.function, or of the methods of a class; nothing for other values."""
    function = getattr(value, "python_function", value)
    function = getattr(function, "__wrapped__", function)
    if isinstance(function, types.FunctionType) and function.__module__ == "__main__":
        yield function.__code__
    elif isinstance(value, type) and value.__module__ == "__main__":
        yield from (each.__code__ for each in vars(value).values() if isinstance(each, types.FunctionType))
