"""Gives a rank in a Spark task the context of its task, as if the rank were Spark's own Python worker.

Spark's contexts need no Java process. BarrierTaskContext talks to the executor through a local socket. To connect, it
needs only the socket's port and a secret, or the socket's path. So it also works in the rank, which is another process
on the same machine.
"""

from __future__ import annotations

import functools
import pickle

from sparkring.worker.rank.imports import when_imported


def provide(context: str) -> None:
    """Make TaskContext.get(), BarrierTaskContext.get() and SparkFiles work as soon as the rank has imported pyspark.

    `context` is the field of the Ticket; '' if the rank is in no Spark task.
    """
    if context:
        when_imported("pyspark", functools.partial(_restore, context))


def _restore(context: str, module: object) -> None:
    from pyspark import SparkFiles, TaskContext

    kind, values, shared, folder = pickle.loads(bytes.fromhex(context))
    for name, value in shared.items():
        setattr(kind, name, value)
    SparkFiles._root_directory, SparkFiles._is_running_on_worker = folder, True
    restored = kind._getOrCreate()
    vars(restored).update(values)
    TaskContext._setTaskContext(restored)
