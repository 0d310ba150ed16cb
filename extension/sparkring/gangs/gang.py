"""A gang: N ranks that are connected to the driver, whichever launcher started them.

`Members` knows which members have connected, `Inbox` receives their messages, `Outbox` sends messages to them, and
`RequestSender` makes each request into messages. A gang runs one request after another, each as an Execution: a cold
gang runs one request, a warm gang many. A gang of one rank can be sent requests in advance.
"""

from __future__ import annotations

import collections
import enum
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sparkring.errors import LaunchError, MemberLost
from sparkring.executor.orders import Ticket
from sparkring.frameworks import FRAMEWORKS
from sparkring.gangs.execution import Execution, Request
from sparkring.gangs.gpus import GangGpus
from sparkring.gangs.inbox import Arrival, Inbox
from sparkring.gangs.members import Members
from sparkring.gangs.outbox import Outbox
from sparkring.gangs.reports import as_event, exit_failure
from sparkring.gangs.sender import RequestSender
from sparkring.history import describe, events
from sparkring.history.events import Event, Failure
from sparkring.launchers.base import Launcher
from sparkring.runtime.world import World
from sparkring.wire import messages
from sparkring.wire.channel import Connection

SILENT_LIMIT_S = 30.0  # a member that sends nothing for this long counts as lost: members send a Beat every 2 s
# A member reads the file of a timeline slowly. So wait this long for the next piece of the timeline and, after the last
# piece, for the Exited message.
TIMELINE_S = 20.0
LOST_WAIT_S = 2.0  # wait this long for the reason why a member was lost: Spark learns the reason only a moment later


class Joining(NamedTuple):
    """Members are being launched since `since`. `early` are messages from members that have no rank yet.

    `moved` is when the last of the members joined or was lost, and `most` is how many have been joined at once.
    """

    since: float
    early: list[Arrival]
    moved: float
    most: int = 0


class End(enum.Enum):
    """How the ranks were asked to end. From then on, the exit of a rank is not a failure."""

    LEAVING = "leaving"  # by themselves: there are no more requests
    STOPPING = "stopping"  # by a signal, also in the middle of a request


class Gang:
    """A gang of `size` ranks. start() launches the ranks, submit() gives them a request, and close() ends them.

    After each submit(), call poll() until the Execution is over. poll() returns events, which say what has happened.
    The first request can be submitted before start(). If more requests were submitted with submit_ahead(), keep calling
    poll(): the call that returns the last events of one Execution returns no events of the next.

    `on_arrival()` is called, in another thread, when there is something to poll, so that a caller can wait for several
    gangs at once.
    """

    def __init__(self, launcher: Launcher, size: int, on_arrival: Callable[[], object] = lambda: None) -> None:
        self.launcher = launcher
        self.execution: Execution | None = None
        self.taking_back = False
        self._ahead: collections.deque[Execution] = collections.deque()  # the executions after the current one
        self._members = Members(size)
        self._inbox = Inbox(size, self._members.admit, on_arrival)
        self._outbox = Outbox(self._members.connections)
        self._sender = RequestSender(self._members, self._outbox)
        self._gpus = GangGpus(self._members)
        self._arrived: collections.deque[Arrival] = collections.deque()  # messages that poll() has not processed yet
        self._untold: list[Event] = []  # events of submit(), which the next poll() returns
        self._joining: Joining | None = _joining()  # None once the gang is up
        self._going: set[int] = set()  # ranks that have got SIGTERM, and stay until a checkpoint is saved
        self._save_points: dict[int, int] = {}  # by rank, the number of the next save point
        self._gathering: dict[int, messages.Gather] = {}  # by rank, the calls of barrier() and allGather() that wait
        self._ticket = Ticket(-1, "", 0, "")  # what all members get, once the gang has been started
        self._end: End | None = None
        self._timeline_until: float | None = None

    # ── lifetime ──────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Listen for members and launch them, but do not wait for them. Raise LaunchError if that fails."""
        launcher, secret = self.launcher, secrets.token_bytes(32)
        try:
            port = self._inbox.open(launcher.bind_host, launcher.port, secret)
        except OSError as error:
            advice = "Set spark.driver.host (or spark.driver.bindAddress) to an address of this machine."
            if launcher.port:
                advice = "Set spark.sparkring.driver.port to a free port, or leave it unset."
            where = f"{launcher.bind_host}:{launcher.port}"
            raise LaunchError(f"the driver cannot listen on {where}: {error.strerror or error}. {advice}") from error
        self._joining = _joining()
        # The driver already listens, so a member can connect as soon as it runs.
        self._ticket = Ticket(-1, launcher.host, port, secret.hex(), sys.prefix)
        launcher.start(self.size, self._ticket)

    def submit(self, request: Request, ranks: Sequence[int] = ()) -> Execution:
        """Have `ranks` (all if empty) run `request` as soon as the gang is up; no other request may be running.

        Raise LaunchError if the ranks' Python lacks packages that the request needs, or has different versions of them.
        If members have yet to connect, poll() raises this error later.
        """
        notices = self._check_packages(request)
        self.execution = Execution(request, tuple(ranks) or tuple(range(self.size)))
        if self.launcher.code is None:
            code = request.code()
            self.launcher.code = code._replace(texts=()) if self.up else code  # a warm gang need not keep the texts
        if self.up:
            self._untold += [*notices, *self._begin(self.execution)]
        return self.execution

    def _check_packages(self, request: Request) -> list[Event]:
        """Return notices about the packages of the ranks' Python. Raise LaunchError if it cannot run the request."""
        notices = self._members.check_packages(request.modules, request.code_imports)
        return [events.Notice(time.time(), text, once=True) for text in notices]

    def submit_ahead(self, request: Request) -> Execution:
        """Submit the request of an item, to run after the requests that were submitted earlier.

        The gang must be up and have one rank. After take_back(), or if an earlier request fails, the member gives this
        request back without having run it. Call send_ahead() after one or several calls.
        """
        execution = Execution(request, (0,))
        self._ahead.append(execution)
        self._sender.send(execution, hold=True)
        return execution

    def send_ahead(self) -> None:
        """Send the requests that were submitted ahead and have not been sent yet, all at once."""
        self._outbox.send_held()

    def take_back(self) -> None:
        """Ask the member to give back the requests that it has not begun.

        Until it has answered, `taking_back` is True. For each execution that it gives back, `given_back` is then True.
        """
        self.taking_back = True
        self._outbox.send_all(messages.GiveBack())

    def poll(self, timeout_s: float) -> list[Event]:
        """Return what has happened. Wait up to `timeout_s` for the first event, then return all that are available."""
        events, self._untold = self._untold, []
        if self._ahead and self._over:
            self.execution = self._ahead.popleft()
            events += self._begun(self.execution)
        if self.execution is not None and self.execution.decides_in_s is not None:
            timeout_s = min(timeout_s, self.execution.decides_in_s)
        if not self._arrived:
            self._arrived.extend(self._inbox.take(0.0 if events else timeout_s))
        # Stop between two executions: what follows belongs to the next, which begins with the next call.
        while self._arrived and not (self._ahead and self._over):
            events += self._take(self._arrived.popleft())
        return events + self._watch()

    def wake(self) -> None:
        """Wake a poll() that is waiting in another thread."""
        self._inbox.wake()

    def close(self) -> None:
        """End the remaining processes, wait for them to exit, and release all resources. A second call does nothing."""
        if self.closed:
            return
        self._end = End.STOPPING
        self._gpus.close()
        try:
            self._inbox.close(self._take, self._end_members)
        finally:
            self._outbox.join()  # last: a thread that is stuck in a send ends only when the connection is closed

    def _end_members(self) -> None:
        if not self.gone:
            self._outbox.send_all(messages.Stop(signal.SIGKILL, 0.0))
        # If the outbox is busy, a member is stuck and will not read Stop, so waiting longer would be useless.
        self.launcher.stop(0.5 if self._outbox.busy else 3.0, joined=bool(self._members.connections))

    # ── state ─────────────────────────────────────────────────────────────────

    @property
    def size(self) -> int:
        return self._members.size

    @property
    def up(self) -> bool:
        """Whether all members have connected and have been given their World."""
        return bool(self._members.worlds)

    @property
    def gone(self) -> bool:
        """Whether every rank's process has exited."""
        return len(self._members.exited) == self.size

    @property
    def closed(self) -> bool:
        return self._inbox.closed

    @property
    def _over(self) -> bool:
        """Whether the current request has ended on all ranks."""
        return self.execution is None or not self.execution.running

    @property
    def worlds(self) -> list[World]:
        """The World of each member; empty until the gang is up."""
        return self._members.worlds

    @property
    def deaths(self) -> dict[int, Failure]:
        """The ranks whose processes exited without being asked to, and why."""
        return self._members.deaths

    @property
    def timeline_pending(self) -> bool:
        """Whether the timeline of a rank that has exited is still being sent."""
        return self._timeline_until is not None and time.monotonic() < self._timeline_until

    def place_of(self, rank: int) -> tuple[int, str, int]:
        """Return the rank, its node and its process id."""
        return self._members.place_of(rank)

    # ── orders ────────────────────────────────────────────────────────────────

    def interrupt(self) -> None:
        """Interrupt the ranks that are still running the request, as Ctrl-C would."""
        if self.execution is not None and self.up:
            for execution in (self.execution, *self._ahead):  # the next one may already be running
                execution.interrupted = True
            for rank in self.execution.running:
                self._outbox.send(self._members.member_of[rank], messages.Interrupt())

    def end_item(self) -> None:
        """Have the ranks end the item that they are running. The item then does not count as failed."""
        if self.execution is not None and self.up:
            self.execution.interrupted = True
            self._outbox.send_all(messages.EndItem())

    def answer(self, rank: int, answer: messages.Answer) -> None:
        """Send the answer to what the rank has asked with input()."""
        self._outbox.send(self._members.member_of[rank], answer)

    def release(self) -> None:
        """Have every rank end its collectives, so that no rank is left waiting in one."""
        self._outbox.send_all(messages.Release())

    def leave(self) -> None:
        """Tell the ranks to exit; there are no more requests."""
        self._end = self._end or End.LEAVING
        self._outbox.send_all(messages.Leave())

    def stop(self, number: int, grace_s: float) -> None:
        """Send the signal `number` to every rank's process group, and kill the remaining processes after `grace_s`."""
        self._end = End.STOPPING
        self._outbox.send_all(messages.Stop(int(number), grace_s))

    def ask_for_stacks(self) -> None:
        """Ask every member for its rank's stack; the answers arrive as StackTaken events."""
        self._outbox.send_all(messages.TakeStack())

    # ── what members report ───────────────────────────────────────────────────

    def _take(self, arrival: Arrival) -> list[Event]:
        if not self._members.is_current(arrival.member, arrival.connection):
            if arrival.report is None:
                self._members.drop(arrival.member, arrival.connection)
            return []
        if arrival.report is None:
            return self._lost(arrival.member, arrival.end, arrival.connection)
        if isinstance(arrival.report, messages.Hello):
            return self._joined(arrival.report)
        if self._joining is not None:
            self._joining.early.append(arrival)  # _enter_world() processes it when the member has its rank
            return []
        return self._reported(self._members.worlds[arrival.member].rank, arrival.report)

    def _joined(self, hello: messages.Hello) -> list[Event]:
        if hello.member in self._members.hellos:  # it has taken the place of a lost member before this message was read
            return []
        self._members.hellos[hello.member] = hello
        if self._joining is not None:
            most = max(self._joining.most, len(self._members.hellos))
            self._joining = self._joining._replace(moved=time.monotonic(), most=most)
        joined: list[Event] = [events.MemberJoined(time.time(), hello.member, hello.host)]
        if self._end is End.STOPPING:  # the other members were told to stop before this one connected
            self._outbox.send(hello.member, messages.Stop(signal.SIGKILL, 0.0))
        elif not self._members.missing:
            joined += self._enter_world()
        return joined

    def _enter_world(self) -> list[Event]:
        """Give each member its rank, now that all have joined. If there is a request already, begin it."""
        execution = self.execution
        # If there is a request, submit() came before the members and their Hello.
        notices = [] if execution is None else self._check_packages(execution.request)
        by_node = execution is None or FRAMEWORKS[execution.request.framework].by_node
        for member, order in self._members.place(by_node=by_node, pins_gpus=self.launcher.pins_gpus).items():
            self._outbox.send(member, order)
        self._gpus.open()
        self.launcher.note_gpus(self._members.gpus_on(socket.gethostname()))
        joining, self._joining = self._joining, None
        news = notices + ([] if execution is None else self._begin(execution))
        for arrival in joining.early if joining is not None else ():
            news += self._take(arrival)
        return news

    def _reported(self, rank: int, report: messages.Report) -> list[Event]:
        match report:
            case messages.Hello() | messages.Beat():
                return []
            case messages.GivenBack():
                self.taking_back = False
                for _ in range(min(report.requests, len(self._ahead))):
                    self._ahead.popleft().given_back = True
                return []
            case messages.Done():
                self._heard(rank, report.news)
                return [] if self.execution is None else self.execution.finished(rank, report)
            case messages.Failed():
                self._heard(rank, report.news)
                return self._failed(rank, report.failure)
            case messages.Importing() | messages.CollectivesEnded():
                if self.execution is not None:
                    self.execution.held_up(rank, report)
                return []
            case messages.StoredKey():
                for other, member in self._members.member_of.items():
                    if other != rank:
                        self._outbox.send(member, report)
                return []
            case messages.Gather():
                return self._gather(rank, report)
            case messages.TrainsAlone():
                if self.execution is not None:
                    self.execution.alone[rank] = report
                return []
            case messages.ModelWeights():
                if self.execution is not None:
                    self.execution.weights[rank] = report
                return []
            case messages.HostGoing():
                return self._host_goes(rank, report)
            case messages.SavePoint():
                self._save_point(rank, report)
                return []
            case messages.Exited():
                return self._exited(rank, exit_failure(report))
            case messages.GpuTrouble():
                self._gpus.note_trouble(rank, report)
                return [events.Notice(time.time(), describe.gpu_trouble(report, rank))]
            case messages.TimelinePart():
                self._timeline_until = time.monotonic() + TIMELINE_S
        event = as_event(time.time(), rank, report)
        if isinstance(event, events.GpuUsed):
            self._gpus.note_used(event)
        return [event]

    def _gather(self, rank: int, call: messages.Gather) -> list[Event]:
        """Record that the rank waits for the others. If it is the last one, let all of them go on."""
        ranks = () if self.execution is None else self.execution.ranks
        self._gathering[rank] = call
        if all(one in self._gathering for one in ranks):
            calls = [self._gathering.pop(one) for one in ranks]
            mismatch = len({call.what for call in calls}) > 1
            answer = messages.Gathered(tuple(call.text for call in calls), mismatch)
            for one in ranks:
                self._outbox.send(self._members.member_of[one], answer)
        return []

    def _host_goes(self, rank: int, report: messages.HostGoing) -> list[Event]:
        """Have all ranks save: the host of `rank` is shutting down. If the gang ends anyway, end the rank at once."""
        member = self._members.member_of[rank]
        if self._end is End.STOPPING or self._over or self.execution is None:
            self._outbox.send(member, messages.Stop(signal.SIGKILL, 0.0) if self._end else messages.GoNow())
            return []
        is_first = not self._going
        self._going.add(rank)
        if is_first:
            for running in self.execution.running:
                self._outbox.send(self._members.member_of[running], messages.SaveSoon())
        host = self._members.worlds[member].node
        return [events.Notice(time.time(), describe.host_goes(rank, host, report.grace_s))]

    def _save_point(self, rank: int, point: messages.SavePoint) -> None:
        """When all ranks have answered, have them save at the same point; when they have saved, let ranks go."""
        self._save_points[rank] = point.number
        running = [] if self.execution is None else self.execution.running
        if point.saved:
            for gone in self._going:
                self._outbox.send(self._members.member_of[gone], messages.GoNow())
        elif all(one in self._save_points for one in running):
            for one in running:
                number = max(self._save_points.values())
                self._outbox.send(self._members.member_of[one], messages.SaveSoon(number))

    def _heard(self, rank: int, news: messages.RankNews) -> None:
        endpoints = self._members.endpoints  # the previous port may be in use by now
        endpoints[rank] = endpoints[rank]._replace(port=news.port)
        self.launcher.note_imports(news.imported)
        if self.execution is not None:
            self.execution.heard(rank, news)

    # ── requests ──────────────────────────────────────────────────────────────

    def _begin(self, execution: Execution) -> list[Event]:
        self._sender.send(execution)
        return self._begun(execution)

    def _begun(self, execution: Execution) -> list[Event]:
        """Return the events for the beginning of an execution."""
        now = time.time()
        self._gathering.clear()
        self._going.clear()
        self._save_points.clear()
        begun = [events.RankStarted(now, *self.place_of(rank)) for rank in execution.ranks]
        return [*begun, *self._gpus.begin(execution.ranks)]

    # ── failures and exits ────────────────────────────────────────────────────

    def _failed(self, rank: int, failure: Failure) -> list[Event]:
        if self.execution is None or (self._end is End.STOPPING and failure.cause == "interrupt"):
            return []  # there is no request, or the rank was interrupted because the gang is stopping
        return self.execution.failed(rank, self._gpus.explained(rank, failure))

    def _exited(self, rank: int, failure: Failure) -> list[Event]:
        if rank in self._members.exited:
            return []
        self._members.exit(rank, failure if self._end is None else None)
        failed = self._failed(rank, failure) if self._end is None else []
        return [*failed, events.RankExited(time.time(), rank)]

    def _lost(self, member: int, how: str, connection: Connection | None = None) -> list[Event]:
        """Record that a lost member's rank is gone, unless its Exited message has arrived.

        `how` says how the member was lost. If the gang was not up yet, another attempt may take the member's place.

        Raise LaunchError if the gang was not up yet, is not being stopped, and lost members are not replaced: the
        launcher's error if the launcher knows why members have exited, otherwise MemberLost.
        """
        if not self.up:
            if self._end is End.STOPPING:
                return []
            if self.launcher.one_by_one and self._joining is not None:
                self._joining = self._joining._replace(moved=time.monotonic())
                following = self._members.drop(member, connection)
                return [events.MemberLeft(time.time(), member), *(self._joined(following) if following else [])]
            host = self._members.hellos[member].host
            lost = MemberLost(f"member {member} on {host} was lost before all {self.size} ranks were up: {how}.")
            problem = self.launcher.problem(LOST_WAIT_S)
            if problem is None and self.launcher.starts_over:
                return []
            raise problem or lost
        world = self._members.worlds[member]
        if world.rank in self._members.exited:
            return []  # its Exited message came first
        reason = None if self._end is End.STOPPING else self.launcher.problem(LOST_WAIT_S)
        summary = f"lost on {world.node}: {how}"
        return self._exited(world.rank, Failure("lost", summary, advice=str(reason or "")))

    def _watch(self) -> list[Event]:
        """Check for problems that no message reports: that the launch has failed, or that a member is silent."""
        if self._end is End.STOPPING:
            return []
        if self._joining is not None:
            return self._watch_launch(self._joining)
        news: list[Event] = []
        for member, silent_s in self._members.silences().items():
            # While a member is passing a large payload on to its rank, it cannot send a Beat, so silence is normal.
            if silent_s > SILENT_LIMIT_S and not self._outbox.sends_to(member):
                news += self._lost(member, f"no message from its process for {silent_s:.0f} s")
        return news

    def _watch_launch(self, joining: Joining) -> list[Event]:
        launcher, now = self.launcher, time.monotonic()
        problem = launcher.problem()
        if problem is not None:
            raise problem
        if now - joining.since > launcher.give_up_after_s:
            short, missing = self.size - joining.most, self._members.missing
            raise MemberLost(
                f"{short} of {self.size} ranks did not start within {launcher.give_up_after_s:.0f} s (first missing: "
                f"member {missing[0]}). {launcher.why_missing()}"
            )
        if launcher.starts_over:
            return self._start_over(joining)[0]
        if self._members.hellos and launcher.gives_back(now - joining.moved):
            why = launcher.waits_for()
            left, pause_s = self._start_over(joining)
            text = describe.slots_given_back(len(left), self.size, why, pause_s)
            return [*left, events.Notice(time.time(), text)]
        return []

    def _start_over(self, joining: Joining) -> tuple[list[Event], float]:
        """End the members that wait for others, and launch all of them again later.

        Return the events, one for each member that has ended, and the length of the pause.
        """
        joined = sorted(self._members.hellos)
        self._outbox.send_all(messages.Stop(signal.SIGKILL, 0.0))
        pause_s = self.launcher.start_again(self._ticket._replace(launch=self._members.start_over()))
        self._joining = joining._replace(early=[], moved=time.monotonic())
        return [events.MemberLeft(time.time(), member) for member in joined], pause_s


def _joining() -> Joining:
    now = time.monotonic()
    return Joining(now, [], now)
