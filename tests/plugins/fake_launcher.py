"""A launcher without processes: its members are threads that connect to the driver and exchange messages with it.

With it, tests see what the driver does with messages, failures and restarts without starting ranks. A member runs a
function of the test in place of the cell.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator

from sparkring.executor.orders import Ticket
from sparkring.gangs.execution import Request
from sparkring.gangs.gang import Gang
from sparkring.history.events import Event
from sparkring.launchers.base import Launcher
from sparkring.wire.channel import ChannelClosed, dial
from sparkring.wire.messages import (
    CellCode,
    Done,
    EndItem,
    EnterWorld,
    Exited,
    Failed,
    Gathered,
    GiveBack,
    GivenBack,
    Hello,
    Interrupt,
    Leave,
    Message,
    PackedValue,
    RankNews,
    Run,
    Stack,
    Stop,
    TakeStack,
    Work,
    decode,
    encode,
)
from sparkring.worker.rank.failures import as_failure

NEWS = RankNews((), True, 40_000)


def received(message: Message) -> Message:
    """Return the message as the other end of a connection gets it."""
    fields, parts = encode(message)
    return decode(type(message), json.loads(json.dumps(fields)), parts)


class Exit(BaseException):
    """A cell raises this to make its rank's process end with a code, or by a signal."""

    def __init__(self, code: int | None = None, signal: int | None = None) -> None:
        self.exited = Exited(code, signal, False, 0)


class Vanish(BaseException):
    """A cell raises this to break off its member's connection."""


class FakeRank:
    """A rank that runs `cell(rank)`.

    It has the `world`, the `work` (in a pool) and the `request` that the driver sent. `interrupted` and `ended` are
    events. `attempt` is the number of the launcher that started it, from 1. It reports that it uses `memory_bytes`, and
    that each request took `seconds`.
    """

    memory_bytes, seconds = 0, 0.0

    def __init__(self, ticket: Ticket, cell: Callable[[FakeRank], object], attempt: int) -> None:
        self.attempt = attempt
        self.ticket = ticket
        self.home = dial(ticket.host, ticket.port, bytes.fromhex(ticket.secret))
        self.interrupted = threading.Event()
        self.ended = threading.Event()
        self.requests: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self.gathered: queue.SimpleQueue[Gathered] = queue.SimpleQueue()
        # As in a member, the end of a request is sent and the next one begins in one step. Otherwise, the request that
        # the driver takes for the current one could be given back.
        self.step = threading.RLock()
        self.busy, self.waiting = False, collections.deque[Run]()
        self.cell = cell
        hello = Hello(ticket.member, os.getpid(), "host", "127.0.0.1", "lo", 40_000, "", (), None)
        self.home.send(hello._replace(launch=ticket.launch, attempt=ticket.attempt))
        self.threads = [threading.Thread(target=target) for target in (self.listen, self.work)]
        for thread in self.threads:
            thread.start()

    def tell(self, message: Message) -> None:
        self.home.send(message)

    def exit(self, code: int | None = None, signal: int | None = None) -> None:
        """End the rank's process while no cell is running."""
        self.tell(Exited(code, signal, False, 0))

    def listen(self) -> None:
        """Do what the driver says, in a thread, until the connection ends."""
        try:
            while True:
                match order := self.home.receive():
                    case EnterWorld():
                        self.world = order.world
                    case Work():
                        self.work = order
                    case Run():
                        with self.step:
                            self.waiting.append(order)
                            self.begin_next()
                    case Interrupt() | EndItem():
                        self.interrupted.set()
                    case Gathered():
                        self.gathered.put(order)
                    case GiveBack():
                        self.give_back()
                    case TakeStack():
                        self.tell(Stack("running", ""))
                    case Leave():
                        self.requests.put(None)
                    case Stop():
                        self.tell(Exited(None, order.signal, False, 0))
                        self.home.close()
        except ChannelClosed:
            pass
        finally:
            self.interrupted.set()
            self.ended.set()
            self.requests.put(None)

    def give_back(self) -> None:
        """Give back the requests that have not begun."""
        with self.step:
            self.tell(GivenBack(len(self.waiting)))
            self.waiting.clear()

    def begin_next(self) -> None:
        """Begin the oldest waiting request, unless one is running."""
        if self.waiting and not self.busy:
            self.busy = True
            self.interrupted.clear()
            self.requests.put(self.waiting.popleft())

    def work(self) -> None:
        """Run one request after another, in a thread."""
        try:
            while (request := self.requests.get()) is not None:
                self.request = request
                end = self.run()
                with self.step:
                    self.tell(end)
                    self.busy = False
                    self.begin_next()
            self.tell(Exited(0, None, False, 0))
        except Exit as end:
            self.tell(end.exited)
        except (Vanish, ChannelClosed):
            self.home.close()

    def run(self) -> Message:
        """Run the cell, and return the message that ends the request."""
        try:
            value = self.cell(self)
        except (Exception, KeyboardInterrupt) as error:
            return Failed(as_failure(error), self.news)
        return Done((PackedValue("", type(value).__name__, 1, ""),), (), repr(value), self.news, (pickle.dumps(value),))

    @property
    def news(self) -> RankNews:
        return NEWS._replace(memory_bytes=self.memory_bytes, seconds=self.seconds)


class FakeLauncher(Launcher):
    """Starts FakeRanks that run `cell`."""

    def __init__(self, cell: Callable[[FakeRank], object], attempt: int = 1) -> None:
        self.cell = cell
        self.attempt = attempt
        self.ranks: list[FakeRank] = []

    def start(self, size: int, ticket: Ticket) -> None:
        self.ranks = [FakeRank(ticket._replace(member=member), self.cell, self.attempt) for member in range(size)]

    def problem(self, wait_s: float = 0.0) -> None:
        return None

    def stop(self, grace_s: float, *, joined: bool) -> None:
        for rank in self.ranks:
            rank.home.close()
            for thread in rank.threads:
                thread.join()


class OneByOne(FakeLauncher):
    """Starts nothing: the test calls join() for each member. It gives back what members hold if `short` is true."""

    one_by_one = True

    short = False

    def start(self, size: int, ticket: Ticket) -> None:
        self.ticket = ticket

    def start_again(self, ticket: Ticket) -> float:
        self.ticket, self.short = ticket, False
        return 0.0

    def gives_back(self, waited_s: float) -> bool:
        return self.short

    def join(self, member: int, attempt: int = 0) -> FakeRank:
        """Start an attempt of the task of a member."""
        self.ranks.append(FakeRank(self.ticket._replace(member=member, attempt=attempt), self.cell, attempt))
        return self.ranks[-1]


CELL = Request(Run(CellCode(""), parts=(b"",)), "plain")


@contextlib.contextmanager
def running(cell: Callable[[FakeRank], object], size: int = 2) -> Iterator[Gang]:
    """Start a gang whose ranks run `cell` for each request."""
    with contextlib.closing(Gang(FakeLauncher(cell), size)) as found:
        found.start()
        yield found


def events_until(condition: Callable[[], object], gang: Gang) -> list[Event]:
    """Return the events of poll() until the condition holds."""
    found: list[Event] = []
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, found
        found += gang.poll(0.05)
    return found
