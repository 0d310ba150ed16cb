"""Starts members as tasks of one Spark stage. A separate thread of the driver runs the stage.

Spark gives each task the code, a ticket and the rows of its partition. Everything else is sent through the members' own
connections to the driver. The user's SparkSession is used unchanged, and is never stopped.

Spark starts the tasks of a barrier stage together (Formation.BARRIER). Where it cannot, the tasks are ordinary ones
(Formation.ORDINARY), which start when there is a slot: so dynamic allocation starts executors for them, and does not
end these executors while the members run. If some members wait for too long for the others, all of them end, and the
stage is run again after a pause, since two rings may hold what the other one waits for.
"""

from __future__ import annotations

import inspect
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from sysconfig import get_platform
from typing import TYPE_CHECKING, TypeVar

from sparkring.cluster.base import SERVER_LOST_S, UNKNOWN_SLOTS
from sparkring.cluster.formation import (
    Formation,
    dynamic_allocation,
    formation_of,
    gpus_per,
    idle_s,
    most_slots,
    profile_gpus,
    refuses_barrier,
)
from sparkring.cluster.java_errors import line_with, root_cause
from sparkring.cluster.jobs import interruptibly
from sparkring.cluster.python import SET_PYTHON, executors_python, lacking_package, wrong_python
from sparkring.cluster.slots import Say, Stage, check, check_gpus, check_ring, running, slots, waiting
from sparkring.errors import LaunchError, MemberLost, SlotsError
from sparkring.executor.environment import EnvironmentOrder
from sparkring.executor.orders import Ticket
from sparkring.executor.tasks import task_for
from sparkring.history import describe
from sparkring.history.describe import counted
from sparkring.launchers import gpus_in_use
from sparkring.launchers.base import Launcher, LaunchRequest
from sparkring.launchers.tunnel import TunnelRoute, why_needed
from sparkring.runtime.kernel import tell_progress
from sparkring.worker.member import gpus
from sparkring.worker.spark_task import MemberTask, partitions_differ, run_member

if TYPE_CHECKING:
    from sparkring.cluster.base import Cluster

_Answer = TypeVar("_Answer")
_UNREACHED = "ConnectionError: sparkring: "  # how the error of a barrier stage names a member that cannot connect

COUNT_EVERY_S, LOOK_S = 1.0, 0.1
CANCEL_S, CANCEL_AGAIN_S = 10.0, 0.2  # for how long, and how often, stop() cancels the stage
# Members give their slots back if nothing has changed for at least JOIN_S, or for as long as an executor may be idle.
# The pause before the next start is longer than that, so that another application can get their executors.
JOIN_S = 30.0
LONGEST_PAUSE_S = 300.0
ORDINARY_GIVE_UP_S = 600.0  # a cluster that grows may need minutes for a new machine
MOST_STARTS = 5  # with --data, where there is no limit on the time


class SparkLauncher(Launcher):
    """Starts each member in a Spark task. If the request has data, Spark gives partition i to task i.

    The members of a pool (`request.at_once` is not 0) wait for slots. So their start does not fail because slots are
    busy, and there is no limit on how long the start takes.

    If members cannot start in the session, SparkLauncher() raises LaunchError or SlotsError, before any job runs. With
    `say`, it first waits for a lost executor's replacement, and says so.
    """

    slow_after_s = 2.0
    give_up_after_s = 300.0

    def __init__(self, cluster: Cluster, request: LaunchRequest, say: Say | None = None) -> None:
        size, data = request.size, request.data
        self._size = size
        self._data = data
        if data is not None and "barrier" not in inspect.signature(type(data.frame).mapInArrow).parameters:
            raise LaunchError("--data needs Spark 3.5 or newer, where mapInArrow() supports barrier stages.")
        self._cluster = cluster
        self._is_ring = size > 1 or not request.at_once
        self._environment = request.environment
        self._stage = Stage(self._cluster, request.title, size, persistent=request.persistent)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # This is the Python that executors are configured to run. If a package is missing in the tasks, _run() finds
        # out which Python the executors really run.
        self._python = self._cluster.python
        self._ended = False
        self._next: Ticket | None = None  # with it, the stage runs again when the current one has been cancelled
        self._cancel_at = math.inf  # when to cancel the current stage next
        self._pause_s, self._starts = 0.0, 1
        self._patience = random.uniform(1.0, 2.0)
        self._most_slots = 0  # the most slots that Spark has had when members waited for others
        self._stopping = threading.Event()
        self._settled = threading.Event()  # the stage has ended, or its members could not connect
        self._all_up = False
        self._count_at = time.monotonic() + COUNT_EVERY_S
        self._starving: set[int] = set()
        self._warned_of: set[int] = set()
        self._gpus = request.gpus
        check_gpus(cluster, size, request.gpus or 0)
        self._profile_gpus = profile_gpus(cluster, request.gpus)
        if not self._is_ring:
            self._formation = Formation.ORDINARY  # a single task needs no other
        elif request.at_once:
            self._formation = formation_of(cluster, check_ring(cluster, size, request.gpus, say).total)
        else:
            capacity = check(cluster, size, request.gpus, data, say, here=request.here)
            self._formation = formation_of(cluster, capacity.total)
        if data is not None or request.at_once:
            self.give_up_after_s = math.inf  # computing the DataFrame may take hours
        elif self._formation is Formation.ORDINARY:
            self.give_up_after_s = ORDINARY_GIVE_UP_S
        self._environment_order: EnvironmentOrder | None = None
        if (pack := request.environment_pack) is not None:
            what = f"sending the environment to the executors ({describe.size(pack.size_bytes)})"
            archive = interruptibly(cluster, what, lambda: cluster.send_file(pack.path), tell_progress)
            self._environment_order = EnvironmentOrder(archive, pack.lock, get_platform(), pack.unpacked_bytes)
        self.pins_gpus = request.gpus == 0 or self._profile_gpus > 0 or gpus_per(self._cluster, "task") > 0
        self.host, self.bind_host, self.port = self._cluster.address()
        self._route = TunnelRoute(self._cluster)

    @property
    def one_by_one(self) -> bool:  # type: ignore[override]
        return self._formation is Formation.ORDINARY

    def start(self, size: int, ticket: Ticket) -> None:
        running.add(self._stage)
        schema = None if self._data is None else self._data.schema()
        self._thread = self._cluster.thread(self._run, "sparkring-stage", size, ticket, schema)
        self._thread.start()

    def _run(self, size: int, ticket: Ticket, schema: bytes | None) -> None:
        try:
            self._cluster.begin_group(self._stage.group, self._stage.title)
            with_nvml = self._profile_gpus > 0 or gpus_per(self._cluster, "task") > 0
            archive = self._cluster.archive(with_nvml=with_nvml)
            ring = size if self._is_ring else 0
            order = MemberTask(
                archive, ticket, self._environment, self._gpus, ring, False, schema, self._environment_order
            )
            if unreached := why_needed(self._cluster):
                self._route.open(ticket.port, unreached)
            while True:
                barrier, unreached = self._formation is Formation.BARRIER, ""
                try:
                    ticket = self._route.ticket(order.ticket)
                    unreached = self._run_stage(size, order._replace(ticket=ticket, barrier=barrier))
                except Exception as error:
                    if barrier and refuses_barrier(str(error)):
                        self._formation = Formation.ORDINARY
                        continue
                    if self._next is None:
                        raise
                if self._next is None and not unreached:
                    break
                if unreached and self._route.is_open:
                    both = "executors can connect neither to this machine nor to one another"
                    raise LaunchError(f"{both}: {unreached} {self._cluster.reachable_by}")
                if unreached:
                    self.starts_over = True
                    self._settled.set()
                    self._route.open(order.ticket.port, unreached)
                    while self._next is None:
                        if self._stopping.wait(LOOK_S):
                            return
                if self._next is not None:
                    self._cancel_at = math.inf
                    if self._stopping.wait(self._pause_s):
                        return
                    order, self._next = order._replace(ticket=self._next), None
        except Exception as error:  # problem() reports it, whatever it is
            self._error = error
            if lacking_package(str(error)):
                self._python = executors_python(self._cluster)
        finally:
            self._ended = True
            self._settled.set()

    def _run_stage(self, size: int, order: MemberTask) -> str:
        """Run the members until they exit. If one could not connect to the ticket's address, return why."""
        task = task_for(run_member, order)
        try:
            values: Sequence[object] = ()
            if self._data is None:
                values = self._cluster.collect(size, task, barrier=order.barrier, gpus=self._profile_gpus)
            else:
                self._data.run(size, task, barrier=order.barrier, gpus=self._profile_gpus)
        except Exception as error:  # Spark, py4j and grpc raise various errors
            if _UNREACHED not in str(error):
                raise
            return line_with(str(error), _UNREACHED).partition("sparkring: ")[2]
        return next((value for value in values if isinstance(value, str)), "")

    def gives_back(self, waited_s: float) -> bool:
        if self._formation is Formation.BARRIER or self._next is not None or self._size == 1:
            return False
        if self._data is not None and time.monotonic() >= self._count_at:
            self._count_at = time.monotonic() + COUNT_EVERY_S
            # A member has connected, so the last stage, which runs the members, has begun.
            stages: set[int] = _ask(self._stage.ids, set())
            status = _ask(lambda: self._cluster.stage(max(stages)), None) if stages else None
            if status is not None and status.active and status.tasks < self._size:
                raise LaunchError(partitions_differ(status.tasks, self._size))
        limit_s = self._patience * max(JOIN_S, idle_s(self._cluster))
        if _ask(self._stage.active_tasks, 0) >= self._size:  # all have a slot and are starting, or some run twice
            limit_s *= 3
        if waited_s < limit_s:
            return False
        _, added_s, _ = _ask(self._cluster.ages_s, (math.inf,) * 3)
        if added_s <= limit_s:
            return False
        if self._data is not None and self._starts >= MOST_STARTS:
            raise LaunchError(
                f"some of {self._size} ranks did not start, in {self._starts} attempts. If `{self._data.name}` has "
                f"fewer partitions, use .repartition({self._size}). {self.why_missing()}"
            )
        return True

    def start_again(self, ticket: Ticket) -> float:
        if self.starts_over:
            self._settled.clear()
            self.starts_over, self._pause_s, self._next = False, 0.0, ticket
            return 0.0
        # Each pause is random, and may be longer than the one before: so two rings do not meet again and again.
        pause_s = max(JOIN_S, idle_s(self._cluster)) * random.uniform(1.0, 1.0 + self._starts)
        self._pause_s = min(pause_s, LONGEST_PAUSE_S)
        self._patience = random.uniform(1.0, 2.0)
        self._starts += 1
        self._count_slots()
        self._next, self._cancel_at = ticket, 0.0
        return self._pause_s

    def why_missing(self) -> str:
        if self._formation is Formation.BARRIER:
            return super().why_missing()
        total = self._count_slots()
        if total >= UNKNOWN_SLOTS:
            return (
                f"It does not say how many slots there are: add executors, or use fewer ranks. {super().why_missing()}"
            )
        if total >= self._size:
            return f"{self.waits_for().capitalize()}. {super().why_missing()}"
        _, limit = _ask(lambda: most_slots(self._cluster, self._profile_gpus), (0.0, ""))
        return (
            f"Spark has had {counted(total, 'task slot')}, and no more come ({limit or self._cluster.title}). The "
            "cluster may be full, or a queue of YARN or a quota of Kubernetes may limit them: add executors, or use "
            f"fewer ranks{f' (-n {total})' if total else ''}."
        )

    def _count_slots(self) -> int:
        """Return the most slots that there have been. In the pause between two starts, Spark may end all executors."""
        self._most_slots = max(self._most_slots, _ask(self._count_slots_now, self._size))
        return self._most_slots

    def _count_slots_now(self) -> int:
        return self._cluster.total_slots(self._profile_gpus)

    def problem(self, wait_s: float = 0.0) -> LaunchError | None:
        # Spark restarts a lost task of an ordinary stage, so the stage does not end, and waiting would be useless.
        if wait_s > 0 and self._formation is Formation.BARRIER:
            self._settled.wait(wait_s)
        if not self._cluster.is_reachable(SERVER_LOST_S):  # pyspark tries again for minutes
            return MemberLost("the server of Spark Connect does not answer: it has ended, or the network is down.")
        if self._route.problem:
            return MemberLost(f"{self._route.problem}.")
        if not self._ended:
            self._cancel_if_due()
            return self._too_few()
        if self._error is None:
            # The stage ended without an error, so its ranks have ended. But if the stage reads an empty DataFrame, it
            # had no task to run, and no rank has started.
            return LaunchError(f"Spark ran no task: `{self._data.name}` is empty.") if self._data else None
        text = str(self._error)
        if (wrong := wrong_python(text, self._python)) is not None:
            return LaunchError(f"{wrong} {SET_PYTHON}")
        if "RuntimeError: sparkring: " in text:
            return MemberLost(line_with(text, "RuntimeError: sparkring: ").partition("sparkring: ")[2])
        if isinstance(self._error, LaunchError):
            return self._error
        if not self._is_ring:
            return LaunchError(f"Spark ended the task of the item's process: {root_cause(text)}")
        what = "barrier stage" if self._formation is Formation.BARRIER else "stage"
        return LaunchError(f"Spark ended the {what}: {root_cause(text)} {self._cluster.elsewhere}".rstrip())

    def _cancel_if_due(self) -> None:
        """Cancel the stage that start_again() has given up. A cancellation misses a job that has not begun."""
        if time.monotonic() >= self._cancel_at:
            self._cancel_at = time.monotonic() + CANCEL_AGAIN_S
            _ask(lambda: self._cluster.cancel(self._stage.group), None)

    def _too_few(self) -> LaunchError | None:
        """Return an error if Spark has fewer slots left than there are members, otherwise None.

        The slots are counted because Spark does not report that it has lost an executor: the stage just waits.
        """
        now = time.monotonic()
        waits = self._data is None and self._formation is Formation.BARRIER and self._cluster.shows_stages
        if not waits or now < self._count_at:
            return None
        self._count_at = now + COUNT_EVERY_S
        total = _ask(self._count_slots_now, self._size)
        if total >= self._size:
            return None
        return SlotsError(f"Spark has {total} task slots left for {self._size} ranks: an executor was lost.")

    def note_gpus(self, addresses: Sequence[str]) -> None:
        self._all_up = True
        if addresses:
            gpus_in_use.hold(self, gpus.find(",".join(addresses)))

    def waits_for(self) -> str:
        if not self._cluster.shows_stages:
            return "Spark Connect does not say what Spark's slots are used for"
        capacity = _ask(lambda: slots(self._cluster, self._gpus, apart_from=self._stage.ids()), None)
        if capacity is None:
            return "Spark does not say what its slots are used for"
        if not capacity.total:
            return "Spark has no executors"
        if capacity.total < self._size and self._formation is Formation.ORDINARY:
            return f"Spark has {counted(capacity.total, 'task slot')} so far"
        if not capacity.busy or capacity.free >= self._size:
            first = f"computes what `{self._data.name}` depends on, and then starts" if self._data else "is starting"
            then = "" if self._environment_order is None else ", and the executors unpack the environment"
            return f"Spark {first} the tasks{then}"
        held = "; ".join(capacity.holders)
        if self._formation is Formation.ORDINARY:
            return f"{capacity.busy} of {counted(capacity.total, 'task slot')} are busy ({held})"
        return (
            f"Spark starts a barrier stage when all its slots are free; {capacity.busy} of {capacity.total} are busy: "
            f"{held}"
        )

    def warning(self) -> str:
        """Return a warning if a Spark job of the user has begun to wait for slots that the gang holds; otherwise ''."""
        capacity = None if self._ended or not self._cluster.shows_stages else _ask(lambda: slots(self._cluster), None)
        if capacity is None:
            return ""
        if dynamic_allocation(self._cluster) and capacity.total < most_slots(self._cluster)[0]:
            return ""  # executors start for the job
        behind: dict[int, str] = {} if capacity.free else _ask(lambda: waiting(self._cluster, self._stage.ids()), {})
        # A stage that has just been submitted runs no tasks yet, so it looks like a waiting stage. Therefore a stage
        # counts only if the previous call also found it waiting.
        starving, self._starving = set(behind) & self._starving - self._warned_of, set(behind)
        if not starving:
            return ""
        self._warned_of |= starving
        jobs = ", ".join(f"stage {stage} ({behind[stage]})" for stage in sorted(starving))
        return (
            f"Spark's {jobs} waits for task slots: the {self._stage.title} holds {self._size} of {capacity.total}. "
            "Interrupt the job and stop the gang (%gang stop), or start a session with more slots than the gang needs."
        )

    def stop(self, grace_s: float, *, joined: bool) -> None:
        running.discard(self._stage)
        gpus_in_use.release(self)
        self._stopping.set()
        if self._thread is None:
            return
        # If all tasks are waiting for slots, no member can exit on its own. If a member has joined, its task is
        # running, although Spark's status may still say otherwise. Ordinary tasks may start one by one.
        begun = self._all_up if self.one_by_one else joined or _ask(self._stage.active_tasks, 1)
        if self._thread.is_alive() and begun:
            self._thread.join(grace_s)
        deadline = time.monotonic() + CANCEL_S
        while self._thread.is_alive() and time.monotonic() < deadline and self._cluster.is_reachable():
            _ask(lambda: self._cluster.cancel(self._stage.group), None)  # misses a job that has not begun
            self._thread.join(CANCEL_AGAIN_S)
        self._route.close()


def _ask(question: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
    """Return Spark's answer to a question, or `otherwise` if Spark does not answer."""
    try:
        return question()
    except Exception:  # py4j raises various errors if the session has been stopped
        return otherwise
