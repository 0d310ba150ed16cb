"""A gang: N ranks that are connected to the driver, whichever launcher started them.

`Members` knows which members have connected, `Inbox` receives their messages, and `Outbox` sends messages to them. A
gang runs one request after another, each as an Execution: a cold gang runs one request, a warm gang many. A gang of one
rank can be sent requests in advance.
"""

from __future__ import annotations

import collections
import os
import secrets
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence

from sparkring.errors import LaunchError, MemberLost
from sparkring.executor.orders import Ticket
from sparkring.frameworks import FRAMEWORKS
from sparkring.frameworks.base import Framework, Start
from sparkring.gangs.execution import Execution, Request
from sparkring.gangs.inbox import Arrival, Inbox
from sparkring.gangs.members import Members
from sparkring.gangs.outbox import Outbox
from sparkring.gangs.reports import as_event, exit_failure, with_gpu_explained
from sparkring.history import describe, events
from sparkring.history.events import Event, Failure, GpuHolder
from sparkring.launchers.base import Launcher
from sparkring.runtime.world import World
from sparkring.wire import messages

SILENT_LIMIT_S = 30.0  # a member that sends nothing for this long counts as lost: members send a Beat every 2 s
# A member reads the file of a timeline slowly. So wait this long for the next piece of the timeline and, after the last
# piece, for the Exited message.
TIMELINE_S = 20.0
LOST_WAIT_S = 2.0  # wait this long for the reason why a member was lost: Spark learns the reason only a moment later


class Gang:
    """A gang of `size` ranks. start() launches the ranks, submit() gives them a request, and close() ends them.

    After each submit(), call poll() until the Execution is over. poll() returns events, which say what has happened.
    The first request can be submitted before start(). If more requests were submitted with submit_ahead(), keep calling
    poll(): the call that returns the last events of one Execution returns no events of the next.

    `on_arrival()` is called, in another thread, when there is something to poll, so that a caller can wait for several
    gangs at once.
    """

    def __init__(self, launcher: Launcher, size: int, on_arrival: Callable[[], object] = lambda: None) -> None:
        self.size = size
        self.launcher = launcher
        self.execution: Execution | None = None
        self._members = Members(size)
        self._inbox = Inbox(size, self._members.admit, on_arrival)
        self._outbox = Outbox(self._members.connections)
        self._frameworks: dict[str, Framework] = {}
        self._gpus: dict[tuple[int, str], events.GpuUsed] = {}  # last report on each GPU; members report changes
        self._gpu_troubles: dict[int, list[events.GpuTrouble]] = {}  # by rank; of this execution, and lost GPUs
        self.taking_back = False
        self._ahead: collections.deque[Execution] = collections.deque()  # the executions after the current one
        self._arrived: collections.deque[Arrival] = collections.deque()  # messages that poll() has not processed yet
        self._early: list[Arrival] = []  # messages from members that have no rank yet
        self._untold: list[Event] = []  # events of submit(), which the next poll() returns
        self._started = self._polled = time.monotonic()
        self._timeline_until = 0.0
        self._work: messages.Work | None = None  # the Work that was last sent to the ranks
        self._modules: dict[int, messages.ModuleFiles] = {}  # by member, what was last sent to its rank
        self._leaving = False
        self._stopping = False

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
        self._started = time.monotonic()
        launcher.start(self.size, Ticket(-1, launcher.host, port, secret.hex(), sys.prefix))

    def submit(self, request: Request, ranks: Sequence[int] = ()) -> Execution:
        """Have `ranks` (all if empty) run `request` as soon as the gang is up; no other request may be running.

        Raise LaunchError if the ranks' Python lacks packages that the request needs, or has different versions of them.
        If members have yet to connect, poll() raises this error later.
        """
        self._members.check_packages(request.modules)
        self.execution = Execution(request, tuple(ranks) or tuple(range(self.size)))
        if self.launcher.code is None:
            code = request.code()
            self.launcher.code = code._replace(texts=()) if self.up else code  # a warm gang need not keep the texts
        if self.up:
            self._untold += self._begin(self.execution)
        return self.execution

    def submit_ahead(self, request: Request) -> Execution:
        """Submit the request of an item, to run after the requests that were submitted earlier.

        The gang must be up and have one rank. After take_back(), or if an earlier request fails, the member gives this
        request back without having run it. Call send_ahead() after one or several calls.
        """
        execution = Execution(request, (0,))
        self._ahead.append(execution)
        self._send(execution, hold=True)
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
        found, self._untold = self._untold, []
        if self._ahead and self._over:
            self.execution = self._ahead.popleft()
            found += self._begun(self.execution)
        if self.execution is not None and self.execution.decides_in_s is not None:
            timeout_s = min(timeout_s, self.execution.decides_in_s)
        if not self._arrived:
            self._arrived.extend(self._inbox.take(0.0 if found else timeout_s))
        while self._arrived and not (self._ahead and self._over):
            found += self._take(self._arrived.popleft())
        return found + self._watch()

    def wake(self) -> None:
        """Wake a poll() that is waiting in another thread."""
        self._inbox.wake()

    def close(self) -> None:
        """End the remaining processes, wait for them to exit, and release all resources. A second call does nothing."""
        if self.closed:
            return
        self._stopping = True
        _up.discard(self)
        try:
            self._inbox.close(self._take, self._end_members)
        finally:
            for framework in self._frameworks.values():
                framework.close()
            self._outbox.join()

    def _end_members(self) -> None:
        if not self.gone:
            self._outbox.send_all(messages.Stop(signal.SIGKILL, 0.0))
        # If the outbox is busy, a member is stuck and will not read Stop, so waiting longer would be useless.
        self.launcher.stop(0.5 if self._outbox.busy else 3.0, joined=bool(self._members.connections))

    # ── state ─────────────────────────────────────────────────────────────────

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
        return time.monotonic() < self._timeline_until

    def place_of(self, rank: int) -> tuple[int, str, int]:
        """Return the rank, its node and its process id."""
        member = self._members.member_of[rank]
        return rank, self._members.worlds[member].node, self._members.hellos[member].pid

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
        self._leaving = True
        self._outbox.send_all(messages.Leave())

    def stop(self, number: int, grace_s: float) -> None:
        """Send the signal `number` to every rank's process group, and kill the remaining processes after `grace_s`."""
        self._stopping = True
        self._outbox.send_all(messages.Stop(int(number), grace_s))

    def ask_for_stacks(self) -> None:
        """Ask every member for its rank's stack; the answers arrive as StackTaken events."""
        self._outbox.send_all(messages.TakeStack())

    # ── what members report ───────────────────────────────────────────────────

    def _take(self, arrival: Arrival) -> list[Event]:
        if arrival.report is None:
            return self._lost(arrival.member, arrival.end)
        if isinstance(arrival.report, messages.Hello):
            return self._joined(arrival.report)
        if not self.up:
            self._early.append(arrival)  # _enter_world() processes it when the member has its rank
            return []
        return self._reported(self._members.worlds[arrival.member].rank, arrival.report)

    def _joined(self, hello: messages.Hello) -> list[Event]:
        self._members.hellos[hello.member] = hello
        joined: list[Event] = [events.MemberJoined(time.time(), hello.member, hello.host)]
        if self._stopping:  # the other members were told to stop before this one connected
            self._outbox.send(hello.member, messages.Stop(signal.SIGKILL, 0.0))
        elif not self._members.missing:
            joined += self._enter_world()
        return joined

    def _enter_world(self) -> list[Event]:
        """Give each member its rank, now that all have joined. If there is a request already, begin it."""
        execution = self.execution
        if execution is not None:
            self._members.check_packages(execution.request.modules)
        by_node = execution is None or FRAMEWORKS[execution.request.framework].by_node
        for member, order in self._members.place(by_node=by_node, pins_gpus=self.launcher.pins_gpus).items():
            self._outbox.send(member, order)
        _up.add(self)
        self.launcher.note_gpus(self._members.gpus_on(socket.gethostname()))
        found = [] if execution is None else self._begin(execution)
        for arrival in self._early:
            found += self._take(arrival)
        return found

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
            case messages.TrainsAlone():
                if self.execution is not None:
                    self.execution.alone[rank] = report
                return []
            case messages.Exited():
                return self._exited(rank, exit_failure(report))
            case messages.GpuTrouble():
                self._gpu_troubles.setdefault(rank, []).append(report)
                return [events.Notice(time.time(), describe.gpu_trouble(report, rank))]
            case messages.TimelinePart():
                self._timeline_until = time.monotonic() + TIMELINE_S
        event = as_event(time.time(), rank, report)
        if isinstance(event, events.GpuUsed):
            self._gpus[rank, event.address] = event
        return [event]

    def _heard(self, rank: int, news: messages.RankNews) -> None:
        endpoints = self._members.endpoints  # the previous port may be in use by now
        endpoints[rank] = endpoints[rank]._replace(port=news.port)
        self.launcher.note_imports(news.imported)
        if self.execution is not None:
            self.execution.heard(rank, news)

    # ── requests ──────────────────────────────────────────────────────────────

    def _begin(self, execution: Execution) -> list[Event]:
        self._send(execution)
        return self._begun(execution)

    def _send(self, execution: Execution, *, hold: bool = False) -> None:
        request = execution.request
        framework = self._framework(request.framework)
        if request.work is not None and request.work is not self._work:
            self._outbox.send_all(request.work)
            self._work = request.work
        for rank in execution.ranks:
            member = self._members.member_of[rank]
            if request.own_modules is not None and self._modules.get(member) != request.own_modules:
                self._outbox.send(member, request.own_modules)
                self._modules[member] = request.own_modules
            if request.timeline and framework.timeline is not None:
                self._outbox.send(member, messages.RecordTimeline(framework.timeline.variable, wanted=rank == 0))
            pulled = rank == execution.ranks[0]
            self._outbox.send(member, _order(request, framework, self._members.worlds[member], pulled), hold=hold)

    def _begun(self, execution: Execution) -> list[Event]:
        """Return the events for the beginning of an execution."""
        now = time.time()
        for rank in execution.ranks:
            self._gpu_troubles[rank] = [each for each in self._gpu_troubles.get(rank, ()) if each.lost]
        begun: list[Event] = [events.RankStarted(now, *self.place_of(rank)) for rank in execution.ranks]
        return begun + [used._replace(time=now) for (rank, _), used in self._gpus.items() if rank in execution.ranks]

    def _framework(self, name: str) -> Framework:
        if name not in self._frameworks:
            endpoints = self._members.endpoints
            self._frameworks[name] = FRAMEWORKS[name](self.launcher.host, self.launcher.bind_host, endpoints)
        return self._frameworks[name]

    # ── failures and exits ────────────────────────────────────────────────────

    def _failed(self, rank: int, failure: Failure) -> list[Event]:
        if self.execution is None or (self._stopping and failure.cause == "interrupt"):
            return []  # there is no request, or the rank was interrupted because the gang is stopping
        troubles = self._gpu_troubles.get(rank, [])
        if failure.gpu is not None or troubles:
            owners = _processes_on(self.place_of(rank)[1], self)
            failure = with_gpu_explained(rank, failure, troubles, owners)
        return self.execution.failed(rank, failure)

    def _exited(self, rank: int, failure: Failure) -> list[Event]:
        if rank in self._members.exited:
            return []
        asked_for = self._leaving or self._stopping
        self._members.exit(rank, None if asked_for else failure)
        found = [] if asked_for else self._failed(rank, failure)
        return [*found, events.RankExited(time.time(), rank)]

    def _lost(self, member: int, how: str) -> list[Event]:
        """Record that a lost member's rank is gone, unless its Exited message has arrived.

        `how` says how the member was lost.

        Raise LaunchError if the gang was not up yet and is not being stopped: the launcher's error if the launcher
        knows why members have exited, otherwise MemberLost.
        """
        if not self.up:
            if self._stopping:
                return []
            host = self._members.hellos[member].host
            lost = MemberLost(f"member {member} on {host} was lost before all {self.size} ranks were up: {how}.")
            raise self.launcher.problem(LOST_WAIT_S) or lost
        world = self._members.worlds[member]
        if world.rank in self._members.exited:
            return []  # its Exited message came first
        reason = None if self._stopping else self.launcher.problem(LOST_WAIT_S)
        summary = f"lost on {world.node}: {how}"
        return self._exited(world.rank, Failure("lost", summary, advice=str(reason or "")))

    def _watch(self) -> list[Event]:
        """Check for problems that no message reports: that the launch has failed, or that a member is silent."""
        now = time.monotonic()
        slept, self._polled = now - self._polled, now
        if self._stopping:
            return []
        if not self.up:
            self._watch_launch(now)
            return []
        if slept >= SILENT_LIMIT_S / 4:  # nobody called poll() for a while, or this process was suspended
            for connection in list(self._members.connections.values()):
                connection.heard_at = now
            return []
        found: list[Event] = []
        for member, silent_s in self._members.silences().items():
            # While a member is passing a large payload on to its rank, it cannot send a Beat, so silence is normal.
            if silent_s > SILENT_LIMIT_S and not self._outbox.sends_to(member):
                found += self._lost(member, f"no message from its process for {silent_s:.0f} s")
        return found

    def _watch_launch(self, now: float) -> None:
        launcher = self.launcher
        problem = launcher.problem()
        if problem is not None:
            raise problem
        if now - self._started > launcher.give_up_after_s:
            missing = self._members.missing
            raise MemberLost(
                f"{len(missing)} of {self.size} ranks did not start within {launcher.give_up_after_s:.0f} s (first "
                f"missing: member {missing[0]}). Members connect to the driver at {launcher.host}: check that they can "
                "reach this address."
            )


_up: weakref.WeakSet[Gang] = weakref.WeakSet()  # the gangs of this notebook that are up


def _processes_on(host: str, gang: Gang) -> dict[int, GpuHolder]:
    """Return what is known about processes on this host, by pid, for a failure of a rank of `gang`."""
    found = {os.getpid(): GpuHolder(os.getpid(), "", None, "notebook")} if host == socket.gethostname() else {}
    for each in list(_up):
        for rank in range(each.size):
            _, place, pid = each.place_of(rank)
            if place == host and each is gang:
                found[pid] = GpuHolder(pid, "", None, "rank", rank)
            elif place == host:
                found[pid] = GpuHolder(pid, "", None, "other gang")
    return found


def _order(request: Request, framework: Framework, world: World, pulled: bool) -> messages.Run:
    run = request.run
    environment = framework.environment(world, Start(run.checkpoints.run_id, request.restarts, request.max_restarts))
    if request.timeline and framework.timeline is not None:
        environment |= framework.timeline.beside
    return run._replace(
        parts=request.parts.get(world.rank, run.parts),
        pulled=pulled,
        barrier=framework.in_task,
        environment={**environment, **run.environment},
        defaults=framework.defaults(world),
    )
