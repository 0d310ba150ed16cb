"""Trains on the micro-batches of a stream: runs the cell for each of them, and saves checkpoints of its state.

Unlike the items of a pool, the micro-batches share `__main__`: the cell finds the variables as the previous batch has
left them.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.capture import packing
from sparkring.history import stacks
from sparkring.runtime import report, world
from sparkring.wire import messages
from sparkring.worker.rank import seeds, shell
from sparkring.worker.rank.cell import CompiledCell, compile_cell
from sparkring.worker.rank.items import RANKS_APART

if TYPE_CHECKING:  # unpickling an order imports these modules, which need more packages than a rank must have
    from sparkring.checkpointing.stream_state import StreamState
    from sparkring.data.keys import KeyedRows
    from sparkring.data.micro_batches import Rows

BOUND = ("batch", "batch_id", "key")  # the names that a rank binds before the cell runs


class Begin(NamedTuple):
    """Order to begin or continue the stream. `state` chooses, restores and saves the state.

    With `arrow`, `batch` is an Arrow table. With `keyed`, the cell runs once for each key in the rank's rows.
    """

    state: StreamState | None = None
    arrow: bool = False
    keyed: bool = False


class Begun(NamedTuple):
    """Answer to Begin: the names of the state, and the batch and the position of the checkpoint that was restored.

    If the ranks have not trained on any batch yet, `restored` is -1.
    """

    state: tuple[str, ...] = ()
    restored: int = -1
    position: str = ""


class Train(NamedTuple):
    """Order to train on a share of a micro-batch. `nulls` are columns with nulls, on this rank or on others.

    `position` says where the stream continues after this batch. It is saved together with the state if `save` is true.
    """

    batch_id: int
    rows: Rows | KeyedRows
    nulls: frozenset[str]
    position: str
    save: bool


class Save(NamedTuple):
    """An order to save the state after a micro-batch; -1 stands for the state before the first one."""

    batch_id: int
    position: str


class Trained(NamedTuple):
    """The answer to Train and Save: the seconds that the rank took to read its rows, to run the cell and to save."""

    reading_s: float = 0.0
    training_s: float = 0.0
    saving_s: float = 0.0


class BatchWork:
    """For each micro-batch, runs `code`, the cell of `order`, in `namespace`, the rank's `__main__`.

    `cell` numbers the cell.
    """

    def __init__(self, order: messages.Work, code: messages.StreamCode, namespace: dict[str, Any], cell: int) -> None:
        self.code = code
        self.cell = cell
        self.order = order
        self._namespace = namespace
        self._compiled: CompiledCell | None = None
        self._begin = Begin()

    def compute(self, request: messages.Run, batch: messages.NextBatch) -> Begun | Trained:
        """Carry out the order that the request contains."""
        payload, *buffers = request.parts
        # Unpickling is safe: the order comes from the driver, which has proved that it knows the gang's secret.
        order = pickle.loads(payload, buffers=buffers)
        match order:
            case Begin():
                return self._carry_on(order)
            case Train():
                return self._train(order, batch.seed)
            case Save():
                return Trained(saving_s=self._save(order.batch_id, order.position))
        raise AssertionError(order)

    def _carry_on(self, order: Begin) -> Begun:
        if self.order.parts:  # otherwise, this is the second attempt of a run, whose values are already there
            payload, *buffers = self.order.parts
            packing.unpack_names(payload, self._namespace, buffers)
        shell.begin_cell(self.code.scripts, self._namespace)
        self.order = self.order._replace(parts=())
        self._begin = order
        self._compiled = compile_cell(self.code.source, stacks.cell_name(self.cell))
        assert order.state is not None
        restored, position = order.state.begin(self.code.source, self._namespace, BOUND)
        return Begun(order.state.names, restored, position)

    def _train(self, order: Train, seed: int) -> Trained:
        assert self._compiled is not None
        assert self._begin.state is not None
        began = time.perf_counter()
        self._namespace["batch_id"] = order.batch_id
        parts = list(self._parts(order))
        read = time.perf_counter()
        with report.at_step(order.batch_id):
            for part in parts:
                with self._begin.state.of_key(part.names.get("key")):
                    self._namespace.update(part.names)
                    seeds.begin((seed + part.seed) % (1 << 32))
                    self._compiled.run(self._namespace)
        trained = time.perf_counter()
        saving_s = self._save(order.batch_id, order.position) if order.save else 0.0
        return Trained(read - began, trained - read, saving_s)

    def _save(self, batch_id: int, position: str) -> float:
        """Save the state. Return how long that took, in seconds."""
        assert self._begin.state is not None
        began = time.perf_counter()
        self._begin.state.save(batch_id, position)
        return time.perf_counter() - began

    def _parts(self, order: Train) -> Iterator[_Part]:
        """Yield what the cell runs on: the rows of one key after another or, without keys, all rows of the rank."""
        rows: Any = order.rows
        if self._begin.keyed:
            for part in rows.of_keys(order.nulls, arrow=self._begin.arrow):
                yield _Part({"batch": part.batch, "key": part.key}, part.digest)
        else:
            batch = rows.table() if self._begin.arrow else rows.columns(order.nulls)
            yield _Part({"batch": batch}, world.world().rank * RANKS_APART)


class _Part(NamedTuple):
    """Values of names for which the cell runs once. `seed` is added to the seed of the micro-batch."""

    names: dict[str, Any]
    seed: int
