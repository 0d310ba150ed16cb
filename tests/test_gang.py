"""Tests of how a gang handles messages. Its members are threads of this process."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator

import pytest
from fake_launcher import CELL, Exit, FakeLauncher, FakeRank, OneByOne, Vanish, events_until, running
from texts import mentions
from waiting import DEADLINE_S, until

from sparkring.errors import MemberLost
from sparkring.gangs import gang as gangs
from sparkring.gangs.execution import Execution
from sparkring.gangs.inbox import QUEUE_MESSAGES
from sparkring.history import events
from sparkring.wire.channel import PREFIX, ChannelClosed, dial
from sparkring.wire.messages import CellCode, Gather, GpuUsed, Hello, Output, Stack

CALLS = ("barrier", "allGather")  # what each rank calls when they do not agree


def ended(execution: Execution) -> bool:
    return execution.done or execution.failed_rank is not None


def test_requests_one_after_another(watch):
    """Ranks get numbers when all have connected. Each request has its own outcome, even on only some ranks."""
    with running(lambda rank: (rank.world.rank, rank.world.local_size, rank.request.what.source)) as gang:
        first = gang.submit(CELL._replace(run=CELL.run._replace(what=CellCode("one"))))
        found = events_until(lambda: first.done, gang)
        assert [event.member for event in found if isinstance(event, events.MemberJoined)] in ([0, 1], [1, 0])
        started = [(event.rank, event.host) for event in found if isinstance(event, events.RankStarted)]
        assert started == [(0, "host"), (1, "host")]
        assert {event.value for event in found if isinstance(event, events.RankFinished)} == {
            "(0, 2, 'one')",
            "(1, 2, 'one')",
        }
        second = gang.submit(CELL._replace(run=CELL.run._replace(what=CellCode("two"))), [1])
        found = events_until(lambda: second.done, gang)
        assert [event.value for event in found if isinstance(event, events.RankFinished)] == ["(1, 2, 'two')"]
        gang.leave()
        events_until(lambda: gang.gone, gang)
        assert not gang.deaths


def test_no_output_is_lost_however_much_waits(watch):
    """One poll takes a bounded number of messages, and leaves the others in the queue."""
    lines = [f"line {number}\n".encode() for number in range(5 * QUEUE_MESSAGES)]

    def cell(rank: FakeRank) -> None:
        for line in lines:
            rank.tell(Output("stdout", line))

    with running(cell, 1) as gang:
        execution = gang.submit(CELL)
        polls = []
        while not execution.done:
            polls.append(gang.poll(1.0))
    assert [event.data for poll in polls for event in poll if isinstance(event, events.Output)] == lines
    assert max(map(len, polls)) <= QUEUE_MESSAGES + 3, "RankStarted, MemberJoined and one more"


def test_each_request_begins_with_how_the_gpus_were_used(watch):
    """Members report only changes, so a cell's record begins with the last reports from earlier cells."""
    told = iter([True, False])

    def cell(rank: FakeRank) -> None:
        if next(told):
            rank.tell(GpuUsed("0", "NVIDIA", 5, 9, 40))

    with running(cell, 1) as gang:
        for _ in range(2):
            execution = gang.submit(CELL)
            (used,) = (e for e in events_until(lambda: execution.done, gang) if isinstance(e, events.GpuUsed))  # noqa: B023
            assert used == events.GpuUsed("0", "NVIDIA", 5, 9, 40, time=used.time, rank=0)


def test_the_cause_is_found_among_several_failures(watch):
    """A rank's death is the cause of the exception on another rank, even if the exception arrives first."""

    class HorovodInternalError(RuntimeError):
        pass

    def cell(rank: FakeRank) -> None:
        if rank.world.rank:
            raise HorovodInternalError
        raise Exit(signal=9)

    with running(cell) as gang:
        execution = gang.submit(CELL)
        events_until(lambda: ended(execution), gang)
        assert execution.failed_rank == 0
        assert execution.failures[0].summary == "killed by SIGKILL"
        assert list(gang.deaths) == [0]


def test_an_interrupt(watch):
    """Ranks that respond to an interrupt are `stopped`, not `failed`. A rank that had finished keeps its value."""

    def cell(rank: FakeRank) -> int:
        if rank.world.rank:
            assert rank.interrupted.wait(DEADLINE_S)
            raise KeyboardInterrupt
        return 7

    with running(cell) as gang:
        execution = gang.submit(CELL)
        events_until(lambda: execution.values, gang)
        gang.interrupt()
        events_until(lambda: not execution.running, gang)
        assert (execution.stopped, list(execution.values), execution.failures) == ({1}, [0], {})


def test_a_connection_that_breaks_off(watch):
    """If a connection breaks off, its rank counts as lost, and the failure names the node."""

    def cell(rank: FakeRank) -> None:
        if rank.world.rank == 1:
            raise Vanish
        rank.interrupted.wait(DEADLINE_S)

    with running(cell) as gang:
        execution = gang.submit(CELL)
        events_until(lambda: ended(execution), gang)
        assert execution.failures[1].cause == "lost"
        assert execution.failures[1].cause == "lost"
    assert mentions(execution.failures[1].summary, "lost on host", "connection")


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"message": "Output", "stream": "stdout", "sizes": []}, "Output: 0 parts instead of 1"),
        ({"message": "Gossip", "sizes": []}, "a frame's header is not valid"),
        ({"message": "Leave", "sizes": []}, "Leave is not for the driver"),
    ],
)
def test_what_is_no_message_ends_that_peer(header, said, watch):
    """A peer that sends something that the driver does not accept counts as lost. The other ranks continue."""

    def cell(rank: FakeRank) -> int:
        if rank.world.rank == 1:
            raw = json.dumps(header).encode()
            rank.home._sock.sendall(PREFIX.pack(len(raw), 0) + raw)
            rank.interrupted.wait(DEADLINE_S)
        return 7

    with running(cell) as gang:
        execution = gang.submit(CELL)
        events_until(lambda: ended(execution) and execution.values, gang)
        assert execution.failed_rank == 1
        assert said in execution.failures[1].summary
        assert list(execution.values) == [0]


def test_a_member_that_comes_twice(watch):
    """A second member with the same number is refused, and so is an invalid number. The first member continues."""

    def cell(rank: FakeRank) -> int:
        turned_away = 0
        for member in (0, 1):
            ticket = rank.ticket
            with contextlib.closing(dial(ticket.host, ticket.port, bytes.fromhex(ticket.secret))) as impostor:
                impostor.send(Hello(member, 1, "host", "127.0.0.1", "lo", 1, "", (), None))
                with contextlib.suppress(ChannelClosed):
                    impostor.receive()
                turned_away += 1
        return turned_away

    with running(cell, 1) as gang:
        execution = gang.submit(CELL)
        found = events_until(lambda: execution.done, gang)
        assert [event.value for event in found if isinstance(event, events.RankFinished)] == ["2"]
        assert not gang.deaths


@contextlib.contextmanager
def one_by_one(cell: Callable[[FakeRank], object]) -> Iterator[tuple[OneByOne, gangs.Gang, Execution]]:
    """Yield a launcher of two members, which the test starts, its gang, and an execution of the cell."""
    launcher = OneByOne(cell)
    with contextlib.closing(gangs.Gang(launcher, 2)) as gang:
        gang.start()
        yield launcher, gang, gang.submit(CELL)


def until_missing(gang: gangs.Gang, *members: int) -> list[events.Event]:
    return events_until(lambda: gang._members.missing == list(members), gang)


def present(found: list[events.Event]) -> list[int]:
    """Return how many members there are after each event that changes their number."""
    change = {events.MemberJoined: 1, events.MemberLeft: -1}
    return list(itertools.accumulate(change[type(event)] for event in found if type(event) in change))


@pytest.mark.parametrize("waits", [True, False], ids=["an attempt that waits", "a later attempt"])
def test_a_member_that_is_lost_before_all_are_up_is_replaced(watch, waits):
    """Another attempt of its task takes its place, whether it connects before or after the loss."""
    with one_by_one(lambda rank: rank.attempt) as (launcher, gang, execution):
        first = launcher.join(0)
        found = until_missing(gang, 1)
        if waits:
            launcher.join(0, 1)
            found += events_until(lambda: gang._members._others, gang)
        first.home.close()
        if waits:
            found += events_until(lambda: not gang._members._others, gang)
        else:
            found += until_missing(gang, 0, 1)
            launcher.join(0, 1)
        launcher.join(1)
        found += events_until(lambda: execution.done, gang)
        assert {event.rank: event.value for event in found if isinstance(event, events.RankFinished)} == {
            0: "1",
            1: "0",
        }
        assert present(found) == [1, 0, 1, 2]


def test_another_attempt_never_becomes_a_second_member(watch):
    """It waits until the gang ends. A member that is lost when all are up is not replaced."""

    def cell(rank: FakeRank) -> None:
        if rank.world.rank == 1:
            raise Vanish
        rank.interrupted.wait(DEADLINE_S)

    with one_by_one(cell) as (launcher, gang, execution):
        launcher.join(0)
        launcher.join(1)
        until(lambda: 1 in gang._members.connections, "otherwise, the copy may become the member")
        copy = launcher.join(1, 1)
        found = events_until(lambda: execution.failed_rank is not None and gang._members._others, gang)
        assert execution.failed_rank == 1
        assert execution.failures[1].cause == "lost"
        assert not copy.ended.is_set()
        assert present(found) == [1, 2]
    assert copy.ended.wait(DEADLINE_S)
    assert not hasattr(copy, "world")


def test_members_that_wait_too_long_give_back_what_they_hold(watch):
    """All of them end. Late members of that launch are refused, and the next launch has new members."""
    with one_by_one(lambda rank: rank.ticket.launch) as (launcher, gang, execution):
        before, first = launcher.ticket, launcher.join(0)
        found = until_missing(gang, 1)
        launcher.short = True
        found += events_until(lambda: launcher.ticket is not before and first.ended.is_set(), gang)
        after, launcher.ticket = launcher.ticket, before
        late = launcher.join(1)
        found += events_until(late.ended.is_set, gang)
        launcher.ticket = after
        launcher.join(0)
        launcher.join(1)
        found += events_until(lambda: execution.done, gang)
        assert [event.value for event in found if isinstance(event, events.RankFinished)] == ["1", "1"]
        assert present(found) == [1, 0, 1, 2]
        (notice,) = [event.text for event in found if isinstance(event, events.Notice)]
        assert notice.startswith("1 of 2 ranks")


def test_ranks_that_wait_for_each_other(watch):
    """The driver answers when all ranks have called barrier() or allGather(), with their texts in order."""

    def cell(rank: FakeRank) -> list[tuple[str, ...]]:
        answers = []
        for what, text in (("allGather", f"from {rank.world.rank}"), ("barrier", ""), (CALLS[rank.world.rank], "")):
            rank.tell(Gather(what, text))
            answer = rank.gathered.get(timeout=DEADLINE_S)
            answers.append((answer.mismatch, *answer.texts))
        return answers

    with running(cell) as gang:
        execution = gang.submit(CELL)
        found = events_until(lambda: execution.done, gang)
        values = {event.value for event in found if isinstance(event, events.RankFinished)}
        assert values == {repr([(False, "from 0", "from 1"), (False, "", ""), (True, "", "")])}


def test_a_silent_member_is_given_up(watch, monkeypatch):
    """A member that has sent nothing for too long counts as lost."""
    monkeypatch.setattr(gangs, "SILENT_LIMIT_S", 0.4)
    with running(lambda rank: rank.interrupted.wait(DEADLINE_S), 1) as gang:
        execution = gang.submit(CELL)
        events_until(lambda: ended(execution), gang)
        assert mentions(execution.failures[0].summary, "no message", "process")


def test_members_that_do_not_come(watch, monkeypatch):
    """The error names the first member that is missing."""
    monkeypatch.setattr(FakeLauncher, "start", lambda self, size, ticket: None)
    monkeypatch.setattr(FakeLauncher, "give_up_after_s", 0.0)
    with running(lambda rank: None) as gang, pytest.raises(MemberLost, match=r"2 of 2 ranks .*not start.*member 0"):
        gang.poll(0.0)


def test_stacks(watch):
    """The rank's current line of the cell is found in its stack."""

    def cell(rank: FakeRank) -> None:
        rank.tell(Stack("waiting", 'Thread 0x1 (most recent call first):\n  File "<cell>", line 3 in f\n'))

    with running(cell, 1) as gang:
        execution = gang.submit(CELL)
        (taken,) = (e for e in events_until(lambda: execution.done, gang) if isinstance(e, events.StackTaken))
        assert (taken.state, taken.cell_line) == ("waiting", 3)
