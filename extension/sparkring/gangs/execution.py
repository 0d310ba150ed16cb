"""An execution: one request on some ranks of a gang, what they returned, and which ranks failed."""

from __future__ import annotations

import time
from typing import NamedTuple

from sparkring.history.events import Event, Failure, RankFailed, RankFinished, RankStopped
from sparkring.runtime.resume_point import Here
from sparkring.wire.messages import Buffers, Done, RankNews, Run

SETTLE_S = 0.15  # after an exception, wait this long for a rank that died without a word: that is the cause


class Request(NamedTuple):
    """What ranks are to run, and for which framework: `run` is the same for all ranks, but for what is a rank's own.

    `modules` are the packages that ranks import for the values, `sent` the names that a cell is sent. `timeline`: the
    framework is to record one. `restarts` of at most `max_restarts` are those of the ranks so far in this run.
    """

    run: Run
    framework: str
    modules: frozenset[str] = frozenset()
    sent: tuple[str, ...] = ()
    timeline: bool = False
    restarts: int = 0
    max_restarts: int = 0

    def going_on(self, here: Here) -> Request:
        """The request for ranks whose checkpoints are `here`."""
        return self._replace(run=self.run._replace(checkpoints=here))


class Value(NamedTuple):
    """A value that came back, still packed: its parts, or why it could not be packed."""

    type_name: str
    parts: Buffers
    error: str


def cause_priority(failure: Failure) -> int:
    """Which of several failures is the cause, lowest first.

    0 for what no other rank's end can bring about, 2 for what looks like a consequence of one, 1 in between.
    """
    if failure.cause == "echo":
        return 2
    return 0 if failure.cause == "lost" or failure.signal == "SIGKILL" else 1


class Execution:
    """One request on `ranks`. Gang.submit() makes it, and the gang then updates it."""

    def __init__(self, request: Request, ranks: tuple[int, ...]) -> None:
        self.request = request
        self.ranks = ranks
        self.values: dict[int, dict[str, Value]] = {}  # by rank and name; "" is the last expression
        self.missing: list[str] = []  # names to pull that the first of the ranks does not have
        self.names: set[str] = set()  # that the ranks have bound, as far as they have told
        self.loaded: set[int] = set()  # the ranks that have taken in all that was sent, as far as they have told
        self.failures: dict[int, Failure] = {}
        self.stopped: set[int] = set()  # they came back from an interrupt
        self.interrupted = False
        self._decide_at: float | None = None

    @property
    def done(self) -> bool:
        """Whether every rank has run the request to its end."""
        return len(self.values) == len(self.ranks)

    @property
    def running(self) -> list[int]:
        """The ranks that have not come to any end yet."""
        return [
            rank for rank in self.ranks if not (rank in self.values or rank in self.failures or rank in self.stopped)
        ]

    @property
    def failed_rank(self) -> int | None:
        """The rank whose failure ends the execution, once that can be told."""
        if not self.failures or (self._decide_at is not None and time.monotonic() < self._decide_at):
            return None
        # The first to fail, unless it only echoes another: dicts keep the order of arrival.
        return min(self.failures, key=lambda rank: cause_priority(self.failures[rank]))

    @property
    def decides_in_s(self) -> float | None:
        """When failed_rank may be known without further news; None if that is not what it waits for."""
        return None if self._decide_at is None else max(0.01, self._decide_at - time.monotonic())

    def heard(self, rank: int, news: RankNews) -> None:
        self.names.update(news.names_bound)
        if news.loaded:
            self.loaded.add(rank)

    def finished(self, rank: int, done: Done) -> list[Event]:
        parts, values = done.parts, {}
        for packed in done.values:
            taken, parts = parts[: packed.parts], parts[packed.parts :]
            values[packed.name] = Value(packed.type_name, taken, packed.error)
        self.values[rank] = values
        self.missing += done.missing
        return [RankFinished(time.time(), rank, done.repr)]

    def failed(self, rank: int, failure: Failure) -> list[Event]:
        """The rank has ended before its time, unless that is known, or of no matter any more.

        A rank that dies after it has finished is of matter: others may wait for it.
        """
        if rank not in self.running and rank not in self.values:
            return []
        if self.interrupted and failure.cause in ("interrupt", "echo"):
            self.stopped.add(rank)  # it did as it was told
            return [RankStopped(time.time(), rank)]
        self.failures[rank] = failure
        if cause_priority(failure) == 0:
            self._decide_at = None
        elif len(self.failures) == 1:
            self._decide_at = time.monotonic() + SETTLE_S
        return [RankFailed(time.time(), rank, failure)]
