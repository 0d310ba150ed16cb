"""Gives a rank in a Spark task the context of its task, as if the rank were Spark's own Python worker.

Spark's contexts need no Java process. BarrierTaskContext talks to the executor through a local socket. To connect, it
needs only the socket's port and a secret, or the socket's path. So it also works in the rank, which is another process
on the same machine.

The tasks of a ring may be ordinary ones, for which Spark has no barrier. Their context has the methods of
BarrierTaskContext, too. The ranks then wait for each other at the driver.
"""

from __future__ import annotations

import functools
import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any, Literal

from sparkring.wire.messages import Gather, Gathered
from sparkring.worker.rank.imports import when_imported

Tell = Callable[[Gather], None]

peers: tuple[str, ...] = ()  # where each rank can be reached, as host:port
_answers: queue.SimpleQueue[Gathered] = queue.SimpleQueue()
_calling = threading.Lock()  # two threads of a rank must not wait at the same time


def provide(context: str, tell: Tell) -> None:
    """Make TaskContext.get(), BarrierTaskContext.get() and SparkFiles work as soon as the rank has imported pyspark.

    `context` is the field of the Ticket; '' if the rank is in no Spark task. `tell` sends a message to the driver.
    """
    if context:
        when_imported("pyspark", functools.partial(_restore, context, tell))


def begin() -> None:
    """Begin a request. Forget an answer to a call of the previous one, which was interrupted."""
    while not _answers.empty():
        _answers.get()


def take(answer: Gathered) -> None:
    """Take the driver's answer. Any thread may call this function."""
    _answers.put(answer)


def _restore(context: str, tell: Tell, module: object) -> None:
    from pyspark import BarrierTaskContext, SparkFiles, TaskContext

    kind, values, shared, folder, in_ring = pickle.loads(bytes.fromhex(context))
    for name, value in shared.items():
        setattr(kind, name, value)
    SparkFiles._root_directory, SparkFiles._is_running_on_worker = folder, True
    if in_ring and not issubclass(kind, BarrierTaskContext):
        kind = _context_of_ring(BarrierTaskContext, tell)
    restored = kind._getOrCreate()
    vars(restored).update(values)
    TaskContext._setTaskContext(restored)


def _context_of_ring(base: Any, tell: Tell) -> Any:
    """Return a subclass of BarrierTaskContext whose ranks wait for each other at the driver."""
    from pyspark import BarrierTaskInfo

    def gather(what: Literal["barrier", "allGather"], message: str = "") -> list[str]:
        with _calling:
            tell(Gather(what, message))
            answer = _answers.get()
        if answer.mismatch:
            raise RuntimeError("some ranks have called context.barrier(), and others context.allGather().")
        return list(answer.texts)

    class RingTaskContext(base):  # type: ignore[misc]
        """The context of a task in a ring of ordinary tasks."""

        def barrier(self) -> None:
            """Wait until all ranks have called this."""
            gather("barrier")

        def allGather(self, message: str = "") -> list[str]:
            """Wait until all ranks have called this, and return their messages, in the order of ranks."""
            if not isinstance(message, str):
                raise TypeError("Argument `message` must be of type `str`")
            return gather("allGather", message)

        def getTaskInfos(self) -> list[Any]:
            """Return where each rank can be reached."""
            return [BarrierTaskInfo(address) for address in peers]

    return RingTaskContext
