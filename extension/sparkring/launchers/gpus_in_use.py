"""Knows which GPUs of this machine are used by ranks of this notebook, so that other ranks can be given other GPUs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from sparkring.worker.member.gpus import Gpu

_lock = threading.Lock()
_in_use: dict[object, tuple[str, ...]] = {}  # the UUIDs of the GPUs, by what uses them


def hold(holder: object, gpus: Iterable[Gpu]) -> None:
    """Record that `holder` uses these GPUs until release(holder)."""
    with _lock:
        _in_use[holder] = tuple(gpu.uuid for gpu in gpus if gpu.uuid)


def release(holder: object) -> None:
    """Record that `holder` no longer uses any GPU."""
    with _lock:
        _in_use.pop(holder, None)


def least_used_first(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs, ordered by the number of their holders, fewest first. Ties keep their order."""
    with _lock:
        times = Counter(uuid for uuids in _in_use.values() for uuid in uuids)
    return sorted(gpus, key=lambda gpu: times[gpu.uuid])
