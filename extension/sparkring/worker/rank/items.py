"""The work of a pool on a rank: runs it for one item after another, each as if it were the first.

What was captured stays packed, and is unpacked anew for each item, into a `__main__` that is empty but for the item's
own values. So nothing that an item binds or changes reaches the next one. Large arrays are not copied for that: each
item maps the same memory, and only the pages that it writes to become its own. What an item changes in a module, in the
environment or on disk stays.
"""

from __future__ import annotations

import gc
import mmap
import os
import sys
import tempfile
from typing import Any

from sparkring.capture import packing
from sparkring.runtime import world
from sparkring.wire import messages
from sparkring.worker.member import process
from sparkring.worker.rank import collectives, seeds, shell
from sparkring.worker.rank.cell import CompiledCell, compile_cell

RANKS_APART = 0x9E3779B1  # between the seeds of an item's ranks, which draw different numbers, as unseeded ones would
COLLECT_AFTER_BYTES = 64 * 1024**2  # collecting garbage takes longer than a short item: only after so much growth


class ItemWork:
    """What `order` says is to be run for each item, in `namespace`, which is now as each item is to find it."""

    def __init__(self, order: messages.Work, namespace: dict[str, Any], filename: str) -> None:
        self._order = order
        self._namespace = namespace
        self._filename = filename
        self._at_first = dict(namespace)
        payload, *buffers = order.parts
        self._payload = bytes(payload)
        self._buffers = [_Shared(buffer) for buffer in buffers]
        self._order = order._replace(parts=())  # it would be a second copy
        self._cell: CompiledCell | None = None
        self._collected_bytes = 0

    def whole(self, item: messages.Run) -> messages.Run:
        """The request of an item, with what is the same for all items."""
        work = self._order
        return item._replace(
            source=work.source,
            autolog=work.autolog,
            environment={**item.environment, **work.environment},
            notebook=work.notebook,
            scripts=work.scripts,
        )

    def compute(self, item: messages.Run) -> Any:
        """Run the work for an item; returns its value."""
        collectives.release()  # those of the item before, on all ranks of the slot
        self._clear()
        _new_sessions()
        seeds.begin((item.seed + world.world().rank * RANKS_APART) % (1 << 32))
        payload, *buffers = item.parts
        copies = [buffer.copy_on_write() for buffer in self._buffers]
        if self._order.what == "call":
            function, _ = packing.unpack_call(self._payload, copies)
            (value,) = packing.unpack_values(payload, buffers)
            return function(value)
        shell.scripts.update((script.line, script) for script in self._order.scripts)
        packing.unpack_names(self._payload, self._namespace, copies)
        packing.unpack_names(payload, self._namespace, buffers)
        if self._cell is None:
            self._cell = compile_cell(self._order.source, self._filename)
        return self._cell.run(self._namespace)

    def end(self) -> int:
        """Drop what an item has left behind; returns the memory of the process, in bytes."""
        self._clear()
        used_bytes = process.resident_bytes()
        if used_bytes > self._collected_bytes + COLLECT_AFTER_BYTES:
            gc.collect()
            self._collected_bytes = used_bytes = process.resident_bytes()
        return used_bytes

    def _clear(self) -> None:
        self._namespace.clear()  # not a new dict: the old one would wait for the garbage collector
        self._namespace.update(self._at_first)


def _new_sessions() -> None:
    """Have Keras forget the models of the item before, and number layers from 1 again."""
    for name in ("keras", "tf_keras"):
        module = sys.modules.get(name)
        if module is not None:
            module.backend.clear_session()


class _Shared:
    """Memory of which each item gets a copy that takes room only where the item writes to it."""

    def __init__(self, data: messages.Buffer) -> None:
        view = memoryview(data)
        self._size = view.nbytes
        self._file = os.memfd_create("sparkring") if hasattr(os, "memfd_create") else _unnamed_file()
        while view:
            view = view[os.write(self._file, view) :]

    def copy_on_write(self) -> memoryview:
        return memoryview(mmap.mmap(self._file, self._size, flags=mmap.MAP_PRIVATE))


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
