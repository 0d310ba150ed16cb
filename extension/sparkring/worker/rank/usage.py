"""Measures how much time, CPU time and memory an item uses on a rank, and how much it reads, for %%foreach --plan.

At short intervals, a thread checks the memory of the rank and of the processes that the item has started. The thread
can miss short peaks of these processes, but not a peak of the rank itself, because the system records it.
"""

from __future__ import annotations

import builtins
import math
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.executor.processes import descendants
from sparkring.runtime import limits, report
from sparkring.wire.messages import ItemMeasured, NextItem, Run
from sparkring.worker.member import gpus, process
from sparkring.worker.rank import preloads

if TYPE_CHECKING:
    from sparkring.worker.rank.items import ItemWork

LOOK_EVERY_S = 0.02
LOOKS_IN = 30  # the checks take at most about 1 / LOOKS_IN of the time


def measured(work: ItemWork, request: Run, item: NextItem, namespace: Mapping[str, Any]) -> Any:
    """Run an item, and return its value. If the item raises no error, tell the driver what it has used."""
    free_bytes = process.available_bytes()
    imports, memory, began = _Imports(), _MemoryWatch(work.held_bytes), _spent()
    with memory, imports:
        value = work.compute(request, item)
    used = _spent().less(began).less(imports.spent).less(memory.spent)
    children_s = sum(map(process.cpu_seconds, descendants(os.getpid())))  # of children that are still running
    model = max(map(measured_model, [value, *namespace.values()]))  # the model with the most parameters
    batch_size = namespace.get("batch_size")
    report.tell(
        ItemMeasured(
            seconds=used.seconds,
            import_s=imports.spent.seconds,
            cpu_s=max(0.0, used.cpu_s + children_s),
            read_bytes=max(0, used.read_bytes),
            own_bytes=memory.own_bytes,
            shared_bytes=memory.shared_bytes,
            free_bytes=free_bytes and free_bytes + memory.imported_bytes,
            cores=limits.cores(),
            gpu_bytes=memory.gpu_bytes,
            parameters=model.parameters,
            parameter_bytes=model.size_bytes,
            batch_size=batch_size if type(batch_size) is int and batch_size > 0 else 0,
        )
    )
    return value


class _Spent(NamedTuple):
    """The resources used until a moment, or between two moments."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    read_bytes: int = 0

    def plus(self, other: _Spent) -> _Spent:
        return _Spent(self.seconds + other.seconds, self.cpu_s + other.cpu_s, self.read_bytes + other.read_bytes)

    def less(self, other: _Spent) -> _Spent:
        return _Spent(self.seconds - other.seconds, self.cpu_s - other.cpu_s, self.read_bytes - other.read_bytes)


def _spent() -> _Spent:
    """Return what this process and its exited children have used so far."""
    children = os.times()
    cpu_s = time.process_time() + children.children_user + children.children_system
    return _Spent(time.perf_counter(), cpu_s, process.read_bytes())


def _spent_here() -> _Spent:
    """Return what this thread has used so far."""
    return _Spent(time.perf_counter(), time.thread_time(), process.read_bytes("thread-self"))


class _Imports:
    """A context manager that adds up the resources used by this thread's imports, which later items need not repeat."""

    def __init__(self) -> None:
        self.spent = _Spent()
        self._thread = threading.get_ident()
        self._under_way = False
        self._real = builtins.__import__

    def __enter__(self) -> None:
        builtins.__import__ = self._import

    def __exit__(self, *_: object) -> None:
        # If the item has installed its own import function, leave it in place. It calls this one.
        if builtins.__import__ == self._import:
            builtins.__import__ = self._real

    def _import(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        if self._under_way or name in sys.modules or threading.get_ident() != self._thread:
            return self._real(name, *arguments, **keywords)
        began = _spent_here()
        self._under_way = True
        try:
            return self._real(name, *arguments, **keywords)
        finally:
            self._under_way = False
            self.spent = self.spent.plus(_spent_here().less(began))


class _MemoryWatch:
    """A context manager that watches the memory of this process, its children and its member.

    The member is the process that started this one. After the block, `own_bytes`, `shared_bytes` and `gpu_bytes` have
    the same meaning as in ItemMeasured. `imported_bytes` is the part of `shared_bytes` that a spare process holds.
    `spent` holds the resources used by the monitoring itself. The argument `held_bytes` is the size of the values in
    shared memory, which take memory even while they are not mapped.
    """

    def __init__(self, held_bytes: int) -> None:
        self.own_bytes = self.imported_bytes = self.gpu_bytes = 0
        self.spent = _Spent()
        self._held_bytes = held_bytes
        self._file_bytes = 0  # the most RAM that mapped files were seen to take
        self._mapped_bytes = 0  # the most RAM that own and shared memory together were seen to take
        self._others = {os.getppid()}  # this item's processes, except the rank, when last checked
        self._gpus_before = _gpu_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sparkring-memory", daemon=True)

    @property
    def shared_bytes(self) -> int:
        return self._file_bytes + self.imported_bytes

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.own_bytes += max(0, process.memory(os.getpid()).peak - self._file_bytes - self._mapped_bytes)

    def _watch(self) -> None:
        pause_s = 0.0
        while not self._over.wait(max(LOOK_EVERY_S, pause_s)):
            began = time.thread_time()
            self._look()
            pause_s = LOOKS_IN * (time.thread_time() - began)
        self._look()
        self.spent = _spent_here()._replace(seconds=0.0)

    def _look(self) -> None:
        rank = process.memory(os.getpid())
        # A forked process shares its parent's memory until it writes to it: children share this process's memory, and
        # this process shares the member's. So only the private memory of the other processes is added. A process that
        # did not exist at the last check is left out: until it runs its own program, it may use this process's memory
        # (vfork).
        member = os.getppid()
        there = {member, *process.family(member)} - {os.getpid()}
        others = sum(map(process.private_bytes, there & self._others))
        self._others = there
        # All items share the memory of what a spare process had imported before it forked the member. If the rank
        # writes to a part of this memory, the rank gets its own copy of the part, and the spare process still holds the
        # original.
        imported = process.inherited_bytes() if preloads.ahead else 0
        self.imported_bytes = max(self.imported_bytes, imported)
        self._mapped_bytes = max(self._mapped_bytes, rank.own + rank.shared)
        self._file_bytes = max(self._file_bytes, rank.files)
        self.own_bytes = max(self.own_bytes, rank.own - imported + max(rank.shared, self._held_bytes) + others)
        grown = (used - self._gpus_before.get(address, 0) for address, used in _gpu_bytes().items())
        self.gpu_bytes = max(self.gpu_bytes, 0, *grown)


def _gpu_bytes() -> dict[str, int]:
    """Return how much memory is in use on each GPU that this process sees."""
    return {gpu.address: gpu.used_bytes or 0 for gpu in gpus.found(os.environ.get("CUDA_VISIBLE_DEVICES"))}


class _Model(NamedTuple):
    parameters: int = 0
    size_bytes: int = 0


def measured_model(value: Any) -> _Model:
    """Return the number and the size of the parameters of a Keras or PyTorch model; zeros for any other value."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        tensors = list(value.parameters())
        return _Model(sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in tensors))
    for name in ("keras", "tf_keras"):
        keras = sys.modules.get(name)
        if keras is not None and isinstance(value, keras.Model) and value.built:
            sizes = [(math.prod(weight.shape), _bits(weight.dtype)) for weight in value.weights]
            return _Model(sum(count for count, _ in sizes), sum(count * bits for count, bits in sizes) // 8)
    return _Model()


def _bits(dtype: Any) -> int:
    """Return how many bits a number of this type has, according to the type's name: 32 for float32."""
    number = re.search(r"\d+$", getattr(dtype, "name", str(dtype)))
    return int(number[0]) if number else 32
