"""Tests of the schedule, which decides which item runs next, and whether a failed item is tried again."""

from __future__ import annotations

from sparkring.engine.foreach.schedule import Item, Schedule
from sparkring.history.events import Failure, GpuFault

RAISED = Failure("exception", "ValueError: no", error="builtins.ValueError")
MISTAKE = Failure("code", "TypeError: no", error="builtins.TypeError")
KILLED = Failure("signal", "killed by SIGKILL", signal="SIGKILL")
NO_MEMORY = Failure("out of memory", "out of memory: killed by SIGKILL")
NO_GPU_MEMORY = Failure("out of memory", "no", error="torch.OutOfMemoryError", gpu=GpuFault("out of memory"))
TOO_LONG = Failure("timed out", "did not end within 2 s")


def schedule(items: int, at_once: int, **settings) -> Schedule:
    """Return a schedule to which all items have been added."""
    found = Schedule(at_once, **settings)
    for number in range(items):
        found.add(Item(number, str(number)))
    found.exhausted = True
    return found


def begun(found: Schedule, *free: int) -> list[tuple[int, int, int]]:
    """Return the item, attempt and slot of each attempt that begins when these slots are free."""
    return [(each.item.number, each.number, each.slot) for each in found.assign(free)]


def test_items_are_taken_one_by_one():
    """An item is taken from the iterable only when a slot is free for it, so an endless iterable works."""
    found, taken = Schedule(2), 0
    free = {0, 1}
    for _ in range(10):
        while found.wants_item(free):
            found.add(Item(taken, ""))
            taken += 1
            free -= {each.slot for each in found.assign(sorted(free))}
        assert len(found.running) == 2
        slot = min(found.running)
        assert found.ended(slot) == "finished"
        free.add(slot)
        assert not found.over
    assert taken == 11
    found.exhausted = True
    found.ended(*found.running)
    assert found.over
    assert schedule(0, 2).over


def test_at_most_so_many_at_once():
    found = schedule(5, 2)
    assert begun(found, 0, 1, 2) == [(0, 1, 0), (1, 1, 1)]
    assert begun(found, 2) == []
    found.ended(1)
    assert begun(found, 1, 2) == [(2, 1, 1)]


def test_what_is_tried_again():
    """By default, an item is tried once more if its process died. After an exception, this needs --retries."""
    raised = ["failed", "again", "again"]
    for failure, verdicts in {RAISED: raised, NO_GPU_MEMORY: raised, KILLED: ["again"] * 3}.items():
        for retries, verdict in zip((None, 1, 2), verdicts, strict=True):
            found = schedule(1, 1, retries=retries)
            begun(found, 0)
            assert found.ended(0, failure) == verdict, (failure, retries)
    for failure in (MISTAKE, RAISED, KILLED, NO_MEMORY, TOO_LONG):
        found = schedule(1, 2, retries=0)
        begun(found, 0, 1)
        assert found.ended(0, failure) == "failed"
        assert found.over
    found = schedule(1, 1, retries=5)
    begun(found, 0)
    assert found.ended(0, MISTAKE) == "failed", "the same code raises it again"
    found = schedule(1, 1, retries=2)
    for number in (1, 2):
        assert begun(found, 0) == [(0, number, 0)]
        assert found.ended(0, TOO_LONG) == "again"
    assert begun(found, 0) == [(0, 3, 0)]
    assert found.ended(0, TOO_LONG) == "failed"


def test_it_is_tried_again_elsewhere():
    """A retry begins at once, before items that have not begun, and on another slot if one is free."""
    found = schedule(3, 2, retries=1)
    begun(found, 0, 1)
    assert found.ended(0, RAISED) == "again"
    assert begun(found, 0, 2) == [(0, 2, 2)]
    found = schedule(2, 2, retries=1)
    begun(found, 0, 1)
    found.ended(0, RAISED)
    assert begun(found, 0) == [(0, 2, 0)], "better than waiting"


def test_ranks_that_could_not_be_started_cost_no_attempt():
    found = schedule(1, 1)
    begun(found, 0)
    found.give_back(*found.running[0])
    assert begun(found, 0) == [(0, 1, 0)]


def test_short_items_that_a_slot_has_besides():
    """A slot may be given more items than it runs at once. Items that it returns run next, as if untried."""
    found = schedule(5, 2)
    assert begun(found, 0, 1) == [(0, 1, 0), (1, 1, 1)]
    assert begun(found, 2) == [], "two slots have items"
    assert begun(found, 0) == [(2, 1, 0)]
    assert begun(found, 0) == [(3, 1, 0)]
    found.limit = 1
    assert found.ended(1) == "finished"
    assert begun(found, 1) == [], "slot 0 still has items"
    found.limit = 2
    found.give_back(found.running[0][2])
    found.give_back(found.running[0][1])
    assert found.ended(0, KILLED) == "again"
    assert begun(found, 1) == [(0, 2, 1)]
    assert begun(found, 1) == [(2, 1, 1)]
    assert begun(found, 0) == [(3, 1, 0)]


def test_fewer_at_once_when_the_memory_is_exhausted():
    """Each time, only half as many items run at once, until an item fails while it runs alone."""
    found = schedule(9, 8)
    begun(found, *range(8))
    assert [found.ended(slot, NO_MEMORY) for slot in (0, 1)] == ["again", "again"]
    assert found.limit == 4, "both began when there were eight"
    assert begun(found, 0, 1) == [], "six are still running"
    for slot in range(2, 8):
        found.ended(slot)
    assert [each for each, _, _ in begun(found, *range(8))] == [1, 0, 8]
    assert found.ended(0, NO_MEMORY) == "again"
    assert found.limit == 1
    found.ended(1)
    found.ended(2)
    (again,) = found.assign([0])
    assert (again.item.number, again.number) == (1, 3)
    assert found.ended(0, NO_MEMORY) == "failed"
    assert found.limit == 1
    assert found.over


def test_fail_fast():
    """After an item has failed for good, no item begins. The pool ends the running items."""
    found = schedule(5, 2, retries=1, fail_fast=True)
    begun(found, 0, 1)
    assert found.ended(0, RAISED) == "again"
    begun(found, 0)
    assert not found.over
    assert found.ended(0, RAISED) == "failed"
    assert found.called_off
    assert found.over
    assert begun(found, 0) == []
    assert not found.wants_item([0])
    found = Schedule(2, fail_fast=True)
    found.has_failed = True
    assert not found.wants_item([0])
