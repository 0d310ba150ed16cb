"""An execution: one request on some ranks of a gang, what they returned, and which ranks failed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from sparkring.capture.first_imports import first_imports
from sparkring.capture.packages import CodeImports
from sparkring.history.events import Event, Failure, RankFailed, RankFinished, RankStopped
from sparkring.launchers.base import Code
from sparkring.runtime.resume_point import Here
from sparkring.wire.messages import (
    Buffers,
    CellCode,
    CollectivesEnded,
    Done,
    Importing,
    ModelWeights,
    ModuleFiles,
    PackedValue,
    RankNews,
    Run,
    StreamCode,
    TrainsAlone,
    Work,
)

# After a failure, wait this long before deciding which failure is the cause. A report that another rank was killed or
# lost may still arrive, and the loss of that rank is then the cause.
SETTLE_S = 0.15


class Request(NamedTuple):
    """What the ranks should run, and with which framework. The gang adds to `run` what differs from rank to rank.

    `sent` contains the names whose values are sent, and `modules` the packages that ranks import to rebuild values.
    `imports` are modules that a function of sparkring imports before it runs any code of the user.
    `timeline` says whether the framework should record a timeline. `restarts` is how often this run has been restarted
    so far, and `max_restarts` is the limit. If the request is for an item, `work` is what the ranks run; a gang sends
    `work` only once, before the first item. `parts` are the parts of `run` for each rank, if they differ. `uses` are
    the names whose values the ranks need to load what is sent. `own_modules` are the user's modules, for ranks that
    may not have them, and `code_imports` are the modules that the code imports there.
    """

    run: Run
    framework: str
    modules: frozenset[str] = frozenset()
    sent: tuple[str, ...] = ()
    timeline: bool = False
    restarts: int = 0
    max_restarts: int = 0
    work: Work | None = None
    parts: Mapping[int, Buffers] = {}
    imports: tuple[str, ...] = ()
    uses: frozenset[str] = frozenset()
    own_modules: ModuleFiles | None = None
    code_imports: CodeImports = CodeImports()

    def code(self) -> Code:
        """Return the code that the ranks will run, without large buffers."""
        orders = [order for order in (self.run, self.work) if order is not None]
        cells = [order.what for order in orders if isinstance(order.what, CellCode | StreamCode)]
        scripts = [script for order in orders for script in getattr(order.what, "scripts", ())]
        texts = [code.source.encode() for code in (*cells, *scripts)]
        texts += [bytes(order.parts[0]) for order in orders if order.parts]
        environment = {name: value for order in orders for name, value in order.environment.items()}
        imports = [name for cell in cells for name in first_imports(cell.source)]
        notebook = {name: value for order in orders for name, value in order.notebook.environment.items()}
        return Code(texts, environment, [*sorted(self.modules), *self.imports, *imports], notebook)

    def going_on(self, here: Here) -> Request:
        """Return the same request, for ranks that save their checkpoints and continue as `here` says."""
        return self._replace(run=self.run._replace(checkpoints=here))


class Value(NamedTuple):
    """A value that a rank returned, as `packed` describes it: the pickle with its buffers, and the pickled shards."""

    packed: PackedValue
    parts: Buffers
    shards: Buffers


def cause_priority(failure: Failure) -> int:
    """Return how well another rank's death explains the failure. The failure with the lowest number is the cause.

    Return 0 if another rank's death cannot have caused the failure, 2 if it probably has, and 1 otherwise.
    """
    if failure.cause == "echo":
        return 2
    return 0 if failure.cause == "lost" or failure.signal == "SIGKILL" else 1


class Execution:
    """One request on `ranks`. Gang.submit() makes it, and the gang then updates it."""

    def __init__(self, request: Request, ranks: tuple[int, ...]) -> None:
        self.request = request
        self.ranks = ranks
        self.values: dict[int, dict[str, Value]] = {}  # by rank, then by name; "" stands for the last expression
        self.missing: list[str] = []  # names to pull that `ranks[0]` does not have; no other rank is asked
        # By rank, the names that are new there, and those that are no longer there, according to the rank's report.
        self.bound: dict[int, tuple[str, ...]] = {}
        self.gone: dict[int, tuple[str, ...]] = {}
        self.loaded: set[int] = set()  # ranks that have reported that they loaded all values that were sent
        self.failures: dict[int, Failure] = {}
        self.stopped: set[int] = set()  # ranks on which an interrupt has ended the request
        self.memory_bytes: dict[int, int] = {}  # by rank; ranks without a report are missing
        self.interrupted = False
        self.seconds = 0.0  # how long the slowest rank took; 0 until a rank has finished or failed
        self.given_back = False  # whether the member gave the request back before running it
        self.importing: dict[int, float] = {}  # when a rank last reported an import that delays an interrupt
        self.weights: dict[int, ModelWeights] = {}  # by rank, the sums of the weights at the end
        self.alone: dict[int, TrainsAlone] = {}  # by rank, what the ranks that train alone have reported last
        self.collectives_ended = False  # whether a rank has ended its collectives, as requested
        self._decide_at: float | None = None  # when the wait for further failures ends; None if there is no wait

    @property
    def done(self) -> bool:
        """Whether every rank has run the request to completion."""
        return len(self.values) == len(self.ranks)

    @property
    def running(self) -> list[int]:
        """The ranks that have not yet finished, failed or been stopped."""
        return [
            rank for rank in self.ranks if not (rank in self.values or rank in self.failures or rank in self.stopped)
        ]

    @property
    def failed_rank(self) -> int | None:
        """The rank whose failure ends the execution; None if no rank has failed, or if more failures may arrive."""
        if not self.failures or (self._decide_at is not None and time.monotonic() < self._decide_at):
            return None
        # If several failures have the same priority, min() returns the one that arrived first: dicts keep the order.
        return min(self.failures, key=lambda rank: cause_priority(self.failures[rank]))

    @property
    def decides_in_s(self) -> float | None:
        """The seconds until `failed_rank` is decided if no more reports arrive; None if there is nothing to decide."""
        return None if self._decide_at is None else max(0.01, self._decide_at - time.monotonic())

    def heard(self, rank: int, news: RankNews) -> None:
        self.bound[rank], self.gone[rank] = news.names_bound, news.names_gone
        self.memory_bytes[rank] = news.memory_bytes
        self.seconds = max(self.seconds, news.seconds)
        if news.loaded:
            self.loaded.add(rank)

    def held_up(self, rank: int, report: Importing | CollectivesEnded) -> None:
        """Record why an interrupt of the rank is delayed."""
        if isinstance(report, Importing):
            self.importing[rank] = time.monotonic()
        else:
            self.collectives_ended = True

    def finished(self, rank: int, done: Done) -> list[Event]:
        parts, values = done.parts, {}
        for packed in done.values:
            taken, parts = parts[: packed.parts], parts[packed.parts :]
            count = len(taken) - packed.shards
            values[packed.name] = Value(packed, taken[:count], taken[count:])
        self.values[rank] = values
        self.missing += done.missing
        return [RankFinished(time.time(), rank, done.repr)]

    def failed(self, rank: int, failure: Failure) -> list[Event]:
        """Record that a rank has failed, and return the events: none if it had already failed or been stopped.

        A rank that dies after it has finished the request counts as failed: other ranks may still be waiting for it.
        """
        if rank not in self.running and rank not in self.values:
            return []
        if self.interrupted and failure.cause in ("interrupt", "echo"):
            self.stopped.add(rank)  # the interrupt stopped it, as intended
            return [RankStopped(time.time(), rank)]
        self.failures[rank] = failure
        if cause_priority(failure) == 0:
            self._decide_at = None
        elif len(self.failures) == 1 < len(self.ranks):
            self._decide_at = time.monotonic() + SETTLE_S
        return [RankFailed(time.time(), rank, failure)]
