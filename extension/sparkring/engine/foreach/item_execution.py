"""One attempt to run an item on the ranks of a slot: from the moment the gang has it until it is known how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle

from sparkring.engine.foreach.schedule import ItemAttempt
from sparkring.engine.run.result import unpack_results
from sparkring.gangs.execution import Execution
from sparkring.gangs.gang import Gang
from sparkring.history import describe, events
from sparkring.history.events import Event, Failure
from sparkring.wire.messages import Buffers

TIMEOUT_GRACE_S = 1.0  # after interrupting an item that took too long, wait this long before killing its ranks
# To end an item, the pool interrupts its ranks. If some ranks are still running the item RELEASE_AFTER_S later, the
# collectives are ended. After END_GRACE_S, the ranks are killed.
RELEASE_AFTER_S, END_GRACE_S = 0.2, 3.0


class Ended(NamedTuple):
    """How an attempt has ended: with a value, or with a failure.

    `text` is a short repr of the value, and `packed` is the value as the rank sent it. `metrics` contains the last
    value of each metric that the item reported. `pruned` says whether end_item() ended the attempt. `notices` say what
    is different about the value here.
    """

    value: Any = None
    text: str = ""
    failure: Failure | None = None
    packed: Buffers = ()
    metrics: Mapping[str, float] = {}
    seconds: float = 0.0
    pruned: bool = False
    notices: Sequence[str] = ()


class Running(NamedTuple):
    """All ranks are up, and have the item since `since`."""

    since: float


class Overdue(NamedTuple):
    """The item's time was up, so it was interrupted. If it is still running at `kill_at`, its ranks are killed."""

    since: float
    kill_at: float


class Pruned(NamedTuple):
    """end_item() was called at `at`. `released` says whether collectives have been ended, so that the item can end."""

    since: float
    at: float
    released: bool = False


class ItemExecution:
    """An attempt, and the gang's `execution` of it; None until a gang has the attempt.

    `state` is None until the item begins. It then is Running, and may become Overdue or Pruned, but not both. A state
    does not say that the item has ended: ended() does.
    """

    def __init__(self, attempt: ItemAttempt, timeout_s: float | None, execution: Execution | None = None) -> None:
        self.attempt = attempt
        self.execution = execution
        self.state: Running | Overdue | Pruned | None = None
        self._timeout_s = timeout_s
        self._text = ""
        self._metrics: dict[str, float] = {}
        self._line: int | None = None  # the cell's line that was running when the item's time was up

    @property
    def is_running(self) -> bool:
        """Whether a rank is still running the item."""
        return self.execution is not None and bool(self.execution.running)

    def begin(self) -> None:
        """Record that all ranks have been sent the item, so that its time begins."""
        self.state = Running(time.monotonic())

    def prune(self, gang: Gang) -> None:
        """Have the ranks end the item, unless it is ending already."""
        if isinstance(self.state, Running) and self.is_running:
            self.state = Pruned(self.state.since, time.monotonic())
            gang.end_item()

    def watch(self, gang: Gang) -> None:
        """Interrupt an item whose time is up. End the collectives of a pruned item that is still running."""
        if self.execution is None or not self.is_running:
            return
        now = time.monotonic()
        match self.state:
            case Running(since) if self._timeout_s is not None and now > since + self._timeout_s:
                self.state = Overdue(since, now + TIMEOUT_GRACE_S)
                gang.ask_for_stacks()
                gang.interrupt()
            case Pruned(released=False) as pruned if (
                len(self.execution.ranks) > 1 and now > pruned.at + RELEASE_AFTER_S
            ):
                self.state = pruned._replace(released=True)
                gang.release()

    def has_taken(self, seconds: float) -> bool:
        """Return whether the item has been running for longer than `seconds`."""
        return self.state is not None and time.monotonic() > self.state.since + seconds

    def hear(self, event: Event) -> None:
        """Keep what an event of the gang says about the item."""
        match event:
            case events.RankFinished(rank=0):
                self._text = event.value
            case events.StackTaken(rank=0):
                self._line = event.cell_line
            case events.Metrics():
                # In a ring, reports of the first rank take precedence over those of other ranks.
                old, new = self._metrics, event.values
                self._metrics = {**new, **old} if event.rank else {**old, **new}

    def ended(self, folder: str, *, run_ends: bool) -> tuple[Ended, bool] | None:
        """Return how the attempt has ended, and whether the ranks that are left can be used again; None while it runs.

        What the item has returned, but cannot be rebuilt here, is saved in `folder`. With `run_ends`, the item was
        interrupted because the run ends.
        """
        execution, now = self.execution, time.monotonic()
        if execution is None:
            return None
        if execution.done:
            return self._finished(execution, folder), True
        state = self.state
        if isinstance(state, Overdue):  # whatever fails now, the interrupt may be the cause
            is_over = not execution.running or now > state.kill_at
            return (Ended(failure=self._too_late()), False) if is_over else None
        # After the end of the collectives, this end may be the cause of failures.
        if execution.failures and not (isinstance(state, Pruned) and state.released):
            if execution.failed_rank is None:
                return None  # a report that explains the failure may still arrive
            failure = execution.failures[execution.failed_rank]
            is_final = failure.cause == "out of memory" or (failure.gpu is not None and failure.gpu.is_final)
            return Ended(failure=failure, seconds=execution.seconds), failure.is_exception and not is_final
        if isinstance(state, Pruned):
            is_over = not execution.running or now > state.at + END_GRACE_S
            return (Ended(metrics=self._metrics, seconds=execution.seconds, pruned=True), True) if is_over else None
        if execution.stopped and not (execution.running or run_ends):
            return Ended(failure=_INTERRUPTED, seconds=execution.seconds), False
        return None

    def _too_late(self) -> Failure:
        limit = describe.duration(self._timeout_s or 0.0)
        where = f" (it was at cell line {self._line})" if self._line else ""
        return Failure("timed out", f"did not end within {limit}{where}")

    def _finished(self, execution: Execution, folder: str) -> Ended:
        first = execution.ranks[0]
        values, _, lost, notices = unpack_results(execution, folder, (first,), f"-item-{self.attempt.item.number}")
        if lost:
            advice = f"{lost[0].kept}. {_RETURN}"
            return Ended(failure=Failure("code", lost[0].problem.replace(" of rank 0", ""), advice=advice))
        sent, value = execution.values[first][""], values.get(first)
        # The parts of a value with sharded tensors are not enough to rebuild it.
        packed = (cloudpickle.dumps(value),) if sent.packed.shards else sent.parts
        return Ended(value, self._text, None, packed, self._metrics, execution.seconds, notices=notices)


# The failure of an item that got an interrupt meant for the item before it. After this cause, an item is tried again.
_INTERRUPTED = Failure("lost", "interrupted together with the item before it, which took too long")
_RETURN = "Return plain values or arrays, or save the object in the item and return its path."
