"""Measures how much CPU time and memory a rank uses, together with the processes that it has started.

On a system without /proc, nothing is measured.
"""

from __future__ import annotations

import os
import time

from sparkring.runtime import limits
from sparkring.wire.messages import RankUsed
from sparkring.worker.member import process

FIRST_AFTER_S, EVERY_S = 2.0, 5.0
# Finding the rank's processes takes long if the rank has many threads, and measuring private memory takes long if the
# processes are large. Each of the two takes at most about 1 / READS_IN of the time of a core.
READS_IN = 4_000


class Meter:
    """Reads repeatedly what the rank of this member uses."""

    def __init__(self, rank_pid: int) -> None:
        self._rank_pid = rank_pid
        self._read_at = time.monotonic()
        self._cpu_s = 0.0
        self._due = self._read_at + FIRST_AFTER_S if process.LINUX else float("inf")
        self._others: set[int] = set()  # the processes that the rank had started, at the last reading
        self._private: dict[int, int] = {}  # how much memory each of them had to itself
        self._private_due = 0.0
        self._machine = limits.cores(), process.total_bytes()

    def reading(self, now: float) -> RankUsed | None:
        """Return what the rank uses. Return None if the next reading is not due, or if the rank has ended."""
        if now < self._due:
            return None
        began = time.thread_time()
        others = {*process.family(os.getpid())} - {self._rank_pid}
        mine = os.times()  # includes processes that lost their parent and were reaped by this process
        cpu_s = mine.children_user + mine.children_system
        cpu_s += sum(map(process.cpu_seconds, (self._rank_pid, *others)))
        memory = process.memory(self._rank_pid)
        percent = round(100 * (cpu_s - self._cpu_s) / (now - self._read_at))
        self._cpu_s, self._read_at = cpu_s, now
        self._due = now + max(EVERY_S, READS_IN * (time.thread_time() - began))
        self._measure(others, now)
        held_bytes = memory.own + memory.shared + memory.files
        private_bytes = sum(self._private.get(pid, 0) for pid in others)
        if not held_bytes:
            return None
        return RankUsed(max(0, percent), held_bytes + private_bytes, *self._machine)

    def _measure(self, others: set[int], now: float) -> None:
        """If it is time, measure the private memory of the other processes.

        A forked process shares most of its memory with the process that forked it, so only private memory is added to
        the rank's memory. A process that did not exist at the last reading is left out: until it runs its own program,
        it may use the memory of its parent (vfork).
        """
        if now >= self._private_due:
            began = time.thread_time()
            self._private = {pid: process.private_bytes(pid) for pid in others & self._others}
            self._private_due = now + READS_IN * (time.thread_time() - began)
        self._others = others
