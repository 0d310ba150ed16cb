"""Does a pool's work on a rank: runs a cell or a function for one item after another, each as if it were the first.

The captured values stay packed on the rank. For each item, `__main__` is emptied, and the captured values and the
item's own values are unpacked into it. Large arrays are not copied: all items map the same memory, and only the pages
that an item writes to are copied. Changes that an item makes to a module, to the environment or on disk are not undone.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

from sparkring.capture import packing
from sparkring.runtime import world
from sparkring.wire import messages
from sparkring.worker.member import process
from sparkring.worker.rank import collectives, seeds, shell
from sparkring.worker.rank.cell import CompiledCell, compile_cell

# The seeds of an item's neighbouring ranks differ by this much, because ranks must draw different numbers.
RANKS_APART = 0x9E3779B1
# Collect garbage only when the process's memory has grown by this much, since this can take longer than a short item.
COLLECT_AFTER_BYTES = 64 * 1024**2


class ItemWork:
    """Runs `code`, the work of `order`, for each item in `namespace`, the rank's `__main__`.

    Before each item, `namespace` is reset to its content at the time of __init__(). `filename` is the cell's name in
    tracebacks.
    """

    def __init__(
        self,
        order: messages.Work,
        code: messages.CellCode | messages.FunctionCall,
        namespace: dict[str, Any],
        filename: str,
    ) -> None:
        self._code = code
        self._namespace = namespace
        self._filename = filename
        self._at_first = dict(namespace)
        payload, *buffers = order.parts
        self._payload = bytes(payload)
        self._buffers = SharedBuffers(buffers)
        self.order = order._replace(parts=())  # without the parts, which would be a second copy in memory
        self.held_bytes = self._buffers.size
        self._cell: CompiledCell | None = None
        self._collected_bytes = 0
        self._memory = process.Resident()

    def compute(self, request: messages.Run, item: messages.NextItem) -> Any:
        """Run the work for an item, whose values are in the request. Return the item's value."""
        collectives.release()  # end the collectives of the previous item; all ranks of the slot do so
        self._clear()
        _new_sessions()
        seeds.begin((item.seed + world.world().rank * RANKS_APART) % (1 << 32))
        payload, *buffers = request.parts
        copies, first = self._buffers.copies_on_write(), packing.LoadedObjects()
        code = self._code
        if isinstance(code, messages.FunctionCall):
            function, _ = packing.unpack_call(self._payload, copies, first)
            (value,) = packing.unpack_values(payload, buffers, first)
            del first  # it holds what was only needed to load the values
            return function(value)
        packing.unpack_names(self._payload, self._namespace, copies, first)
        packing.unpack_names(payload, self._namespace, buffers, first)
        del first
        shell.begin_cell((*code.scripts, *item.scripts), self._namespace)
        if self._cell is None:
            self._cell = compile_cell(code.source, self._filename)
        return self._cell.run(self._namespace)

    def end(self) -> int:
        """Drop what the item has left in `__main__`, and return how much memory the process now holds."""
        self._clear()
        used_bytes = self._memory.bytes()
        if used_bytes > self._collected_bytes + COLLECT_AFTER_BYTES:
            gc.collect()
            self._collected_bytes = used_bytes = self._memory.bytes()
        return used_bytes

    def _clear(self) -> None:
        self._namespace.clear()  # if a new dict were made, the old one would stay until garbage is collected
        self._namespace.update(self._at_first)


def _new_sessions() -> None:
    """Make Keras forget the models of the previous item, and number layers from 1 again."""
    for name in ("keras", "tf_keras"):
        module = sys.modules.get(name)
        if module is not None:
            module.backend.clear_session()


class SharedBuffers:
    """Buffers that each item gets copies of. A copy takes memory only for the pages that the item writes to.

    All buffers are in one file, because a process can have only so many files open, and each map of a file holds a file
    descriptor of its own. Each buffer begins on a new page. `size` is the size of the file in bytes.
    """

    def __init__(self, buffers: Sequence[messages.Buffer]) -> None:
        self.size = 0
        self._places: list[slice] = []
        if buffers:
            self._file = os.memfd_create("sparkring") if hasattr(os, "memfd_create") else _unnamed_file()
        for buffer in buffers:
            view = memoryview(buffer)
            begin = math.ceil(self.size / mmap.PAGESIZE) * mmap.PAGESIZE
            self.size = begin + view.nbytes
            self._places.append(slice(begin, self.size))
            while view:
                view = view[os.pwrite(self._file, view, self.size - view.nbytes) :]

    def copies_on_write(self) -> list[memoryview]:
        """Return a copy of each buffer."""
        if not self._places:
            return []
        whole = memoryview(mmap.mmap(self._file, self.size, flags=mmap.MAP_PRIVATE))
        return [whole[place] for place in self._places]


def _unnamed_file() -> int:
    import tempfile  # not at the top: the import takes 3 ms, and Linux does not need it

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
