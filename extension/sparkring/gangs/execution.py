"""An execution: one request on some ranks of a gang, what they returned, and which ranks failed."""

from __future__ import annotations

import time
from typing import NamedTuple

from sparkring.history.events import Event, Failure, RankFailed, RankFinished, RankStopped
from sparkring.runtime.resume_point import Here
from sparkring.wire.messages import Buffers, Done, RankNews, Run, Work

SETTLE_S = 0.15  # after an exception, wait this long for news of a rank that died: its death is then the cause


class Request(NamedTuple):
    """What ranks are to run, and with which framework; `run` does not yet have what differs from rank to rank.

    `modules` are the packages that ranks import for the values, `sent` the names whose values are sent. `timeline`:
    the framework is to record one. `restarts` is the number of restarts so far in this run, of at most `max_restarts`.
    `work` is what an item's request needs; a gang's ranks are sent it once.
    """

    run: Run
    framework: str
    modules: frozenset[str] = frozenset()
    sent: tuple[str, ...] = ()
    timeline: bool = False
    restarts: int = 0
    max_restarts: int = 0
    work: Work | None = None

    def going_on(self, here: Here) -> Request:
        """The same request for ranks that save to, and continue from, the checkpoints of `here`."""
        return self._replace(run=self.run._replace(checkpoints=here))


class Value(NamedTuple):
    """A value that came back, still packed: its parts, or why it could not be packed."""

    type_name: str
    parts: Buffers
    error: str


def cause_priority(failure: Failure) -> int:
    """A failure's priority as the cause of an execution's end: of several failures, the lowest is the cause.

    0 if another rank's end cannot have caused it, 2 if it looks like a consequence of one, 1 otherwise.
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
        self.names: set[str] = set()  # names that the ranks have bound, as far as they have reported
        self.loaded: set[int] = set()  # the ranks that have loaded all that was sent, as far as they have reported
        self.failures: dict[int, Failure] = {}
        self.stopped: set[int] = set()  # ranks that returned from an interrupt
        self.memory_bytes: dict[int, int] = {}  # what the ranks held after the request, as far as they have reported
        self.interrupted = False
        self._decide_at: float | None = None

    @property
    def done(self) -> bool:
        """Whether every rank has run the request to its end."""
        return len(self.values) == len(self.ranks)

    @property
    def running(self) -> list[int]:
        """The ranks that have neither finished nor failed nor been stopped."""
        return [
            rank for rank in self.ranks if not (rank in self.values or rank in self.failures or rank in self.stopped)
        ]

    @property
    def failed_rank(self) -> int | None:
        """The rank whose failure ends the execution; None if there is none, or it is not decided yet."""
        if not self.failures or (self._decide_at is not None and time.monotonic() < self._decide_at):
            return None
        # The first to fail, unless it only echoes another: dicts keep the order of arrival.
        return min(self.failures, key=lambda rank: cause_priority(self.failures[rank]))

    @property
    def decides_in_s(self) -> float | None:
        """In how many seconds failed_rank is decided without further news; None if no decision is pending."""
        return None if self._decide_at is None else max(0.01, self._decide_at - time.monotonic())

    def heard(self, rank: int, news: RankNews) -> None:
        self.names.update(news.names_bound)
        self.memory_bytes[rank] = news.memory_bytes
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
        """Note that a rank has failed, and return the events; none if it had already failed or been stopped.

        The death of a rank that has finished counts as well: others may wait for it.
        """
        if rank not in self.running and rank not in self.values:
            return []
        if self.interrupted and failure.cause in ("interrupt", "echo"):
            self.stopped.add(rank)  # it did as it was told
            return [RankStopped(time.time(), rank)]
        self.failures[rank] = failure
        if cause_priority(failure) == 0:
            self._decide_at = None
        elif len(self.failures) == 1 < len(self.ranks):
            self._decide_at = time.monotonic() + SETTLE_S
        return [RankFailed(time.time(), rank, failure)]
