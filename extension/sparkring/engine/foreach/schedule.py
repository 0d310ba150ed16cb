"""Decides which item runs next, and what to do when an attempt has ended. Uses no processes and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from sparkring.history.events import Failure
from sparkring.wire.messages import Buffers, Script

_DIED = ("exit", "signal", "lost")  # these causes mean that the process died, perhaps not because of its item

Verdict = Literal["finished", "failed", "again"]


class Item(NamedTuple):
    """One item: its number (from 0), a short description, the packed values, and the key of its kept result.

    `scripts` are the scripts that only this item runs. If the item is a trial of a search, `parameters` holds its
    parameters as they are recorded. `modules` are those that ranks import to rebuild the values.
    """

    number: int
    name: str
    parts: Buffers = ()
    key: str = ""
    scripts: tuple[Script, ...] = ()
    parameters: Mapping[str, float | str] = {}
    modules: frozenset[str] = frozenset()


class ItemAttempt(NamedTuple):
    """An attempt to run an item. `number` counts the item's attempts from 1.

    While the attempt is running, `slot` is its slot, and `limit` is how many items could run at once when it began.
    While the attempt is waiting, `slot` is the last slot in which the item failed or that gave the attempt back, or -1
    if there is no such slot.
    """

    item: Item
    number: int = 1
    slot: int = -1
    limit: int = 0


class Schedule:
    """Keeps the waiting attempts and the attempts that are in slots (`running`), and decides which attempt runs next.

    A slot runs its attempts one after another. `limit` is how many items may run at once. `retries` is how often a
    failed item is tried again. If `retries` is None, an item is tried again once if its process died, and never after
    an exception. `has_failed` says whether an item has failed for good; the pool also sets it for an item that could
    not begin. With `fail_fast`, no more items begin after that.
    """

    def __init__(self, at_once: int, retries: int | None = None, *, fail_fast: bool = False) -> None:
        self.limit = at_once
        self.running: dict[int, list[ItemAttempt]] = {}
        self.exhausted = False  # whether all items have been added
        self.has_failed = False
        self._retries = retries
        self._fail_fast = fail_fast
        self._waiting: list[ItemAttempt] = []

    @property
    def called_off(self) -> bool:
        """Whether the run is over because an item has failed and `fail_fast` is set."""
        return self._fail_fast and self.has_failed

    @property
    def over(self) -> bool:
        """Whether the run is over: it was called off, or no item is running or waiting and no more will be added."""
        return self.called_off or (self.exhausted and not self._waiting and not self.running)

    def wants_item(self, free: Iterable[int]) -> bool:
        """Whether the pool should add another item: no attempt is waiting, and one of the `free` slots has room."""
        return not (self.exhausted or self.called_off or self._waiting) and bool(self._allowed(free))

    @property
    def waits(self) -> bool:
        """Whether an attempt is waiting for a slot."""
        return bool(self._waiting) and not self.called_off

    def needed(self, left: int | None) -> int:
        """Return how many slots are in use or needed. `left` is how many more items can be added, if known."""
        more = 0 if self.exhausted else self.limit if left is None else max(0, left)
        return min(self.limit, sum(map(len, self.running.values())) + len(self._waiting) + more)

    def add(self, item: Item) -> None:
        """Add the next item. It waits until assign() gives it a slot."""
        self._waiting.append(ItemAttempt(item))

    def assign(self, free: Iterable[int]) -> list[ItemAttempt]:
        """Give waiting attempts to the `free` slots, and return these attempts in order.

        A slot with room for several attempts occurs several times in `free`. If possible, an item that failed in one
        slot is tried again in another.
        """
        free, given = list(free), []
        while self._waiting and not self.called_off and (candidates := self._allowed(free)):
            attempt = self._waiting.pop(0)
            slot = next((candidate for candidate in candidates if candidate != attempt.slot), candidates[0])
            free.remove(slot)
            given.append(attempt._replace(slot=slot, limit=self.limit))
            self.running.setdefault(slot, []).append(given[-1])
        return given

    def give_back(self, attempt: ItemAttempt) -> None:
        """Put an attempt back among the waiting ones, because its slot did not run it. The attempt keeps its number."""
        self._take_from(attempt.slot, attempt)
        self._waiting.insert(0, attempt)

    def _allowed(self, free: Iterable[int]) -> list[int]:
        """Return the `free` slots that may be given an attempt. At most `limit` slots may have attempts."""
        is_full = len(self.running) >= self.limit
        return [slot for slot in free if slot in self.running or not is_full]

    def _take_from(self, slot: int, attempt: ItemAttempt) -> None:
        self.running[slot].remove(attempt)
        if not self.running[slot]:
            del self.running[slot]

    def ended(self, slot: int, failure: Failure | None = None) -> Verdict:
        """Record how a slot's attempt has ended. If the verdict is "again", another attempt follows."""
        attempt = self.running[slot][0]
        self._take_from(slot, attempt)
        if failure is None:
            return "finished"
        if _ran_out_of_memory(failure) and attempt.limit == self.limit:
            # Lower the limit only if it has not changed since this attempt began. When memory runs out, several
            # processes may be killed at about the same time, which should lower the limit only once.
            self.limit = max(1, (len(self.running) + 1) // 2)
        if not self._retried(attempt, failure):
            self.has_failed = True
            return "failed"
        self._waiting.insert(0, attempt._replace(number=attempt.number + 1))
        return "again"

    def _retried(self, attempt: ItemAttempt, failure: Failure) -> bool:
        """Whether the item of `attempt` should be tried again after this failure."""
        if failure.cause == "code" or self._retries == 0:
            return False  # with "code", the same code would raise the same exception
        if _ran_out_of_memory(failure) and attempt.limit > 1:
            return True  # try it again, whatever `retries` says, until it has run alone
        died = failure.cause in _DIED and not failure.error  # with an `error`, the item itself has called sys.exit()
        return attempt.number <= (int(died) if self._retries is None else self._retries)


def _ran_out_of_memory(failure: Failure) -> bool:
    """Whether the machine's memory ran out. A GPU's memory does not count, since most items have a GPU of their own."""
    return failure.cause == "out of memory" and failure.gpu is None
