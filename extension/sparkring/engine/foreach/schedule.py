"""Decides which item runs next, and what follows when an attempt has ended. It knows no processes and no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from sparkring.history.events import Failure
from sparkring.wire.messages import Buffers

_DIED = ("exit", "signal", "lost")  # causes that say more about a process than about the item that it ran

Verdict = Literal["finished", "failed", "again"]


class Item(NamedTuple):
    """One item: its number, from 0, a short text of its values, the packed values, and the key of its result."""

    number: int
    name: str
    parts: Buffers = ()
    key: str = ""


class Attempt(NamedTuple):
    """An attempt (from 1) of an item. `slot` is where it runs, or where the attempt before it failed; -1 for nowhere.

    `limit` is how many items could run at once when it began.
    """

    item: Item
    number: int = 1
    slot: int = -1
    limit: int = 0


class Schedule:
    """The items of a run: those that wait, and those that run, by slot.

    `limit` is how many may run at once. `retries` is how often a failed item is tried again; None is once if its
    process died, and never after an exception. With `fail_fast`, no item begins once one has failed.
    """

    def __init__(self, at_once: int, retries: int | None = None, *, fail_fast: bool = False) -> None:
        self.limit = at_once
        self.running: dict[int, Attempt] = {}
        self.exhausted = False  # whether all items have been added
        self._retries = retries
        self._fail_fast = fail_fast
        self._waiting: list[Attempt] = []
        self._failed = False

    @property
    def called_off(self) -> bool:
        """Whether the run is over because an item has failed."""
        return self._fail_fast and self._failed

    @property
    def over(self) -> bool:
        """Whether nothing runs or waits, and nothing will."""
        return self.called_off or (self.exhausted and not self._waiting and not self.running)

    @property
    def wants_item(self) -> bool:
        """Whether there is room for an item that has not been added yet. Only then is one taken from the iterable."""
        return not (self.exhausted or self.called_off or self._waiting) and len(self.running) < self.limit

    def add(self, item: Item) -> None:
        """Add the next item; it waits until a slot is given to it."""
        self._waiting.append(Attempt(item))

    def assign(self, free: Iterable[int]) -> list[Attempt]:
        """The attempts that begin now, each on one of the `free` slots.

        An item that has failed goes to another slot than before, if another one is free.
        """
        free, begun = list(free), []
        while self._waiting and free and len(self.running) < self.limit and not self.called_off:
            found = self._waiting.pop(0)
            slot = next((each for each in free if each != found.slot), free[0])
            free.remove(slot)
            self.running[slot] = found._replace(slot=slot, limit=self.limit)
            begun.append(self.running[slot])
        return begun

    def give_back(self, slot: int) -> None:
        """Have the item of a slot begin again: its ranks could not be started, which is no attempt."""
        self._waiting.insert(0, self.running.pop(slot))

    def ended(self, slot: int, failure: Failure | None = None) -> Verdict:
        """Note how the attempt on a slot has ended; says whether the item is done with."""
        attempt = self.running.pop(slot)
        if failure is None:
            return "finished"
        if failure.cause == "out of memory" and attempt.limit == self.limit:
            # Not for those that began before the limit was lowered: several may be killed at the same time.
            self.limit = max(1, (len(self.running) + 1) // 2)
        if not self._retried(attempt, failure):
            self.failed()
            return "failed"
        self._waiting.insert(0, attempt._replace(number=attempt.number + 1))
        return "again"

    def failed(self) -> None:
        """Note that an item has failed for good, also one that could not begin."""
        self._failed = True

    def _retried(self, attempt: Attempt, failure: Failure) -> bool:
        """Whether there is another attempt of an item after this failure."""
        if failure.cause == "code" or self._retries == 0:
            return False  # the same code would raise the same exception
        if failure.cause == "out of memory" and attempt.limit > 1:
            return True  # until it has run alone, however many attempts that takes
        died = failure.cause in _DIED and not failure.error  # not sys.exit(), which the item itself has called
        return attempt.number <= (int(died) if self._retries is None else self._retries)
