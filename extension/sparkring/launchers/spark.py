"""Starts members as tasks of one Spark stage. A separate thread of the driver runs the stage.

Spark starts all tasks together, in a barrier stage, and gives each task the code, a ticket and the rows of its
partition. Everything else is sent through the members' own connections to the driver. The user's SparkSession is used
unchanged, and is never stopped. In a pool whose items have one rank each, each member is a task of an ordinary stage.
Such a task waits for a free slot like any other task, so dynamic allocation and lost executors do no harm.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Callable, Sequence
from sysconfig import get_platform
from typing import TYPE_CHECKING, TypeVar

from sparkring.cluster.java_errors import line_with, root_cause
from sparkring.cluster.python import SET_PYTHON, executors_python, lacking_package, wrong_python
from sparkring.cluster.slots import Say, Stage, check, check_gpus, check_ring, gpus_per, running, slots, waiting
from sparkring.errors import LaunchError, MemberLost, SlotsError
from sparkring.executor.environment import EnvironmentOrder
from sparkring.executor.orders import Ticket
from sparkring.executor.tasks import Task, task_for
from sparkring.history.describe import counted
from sparkring.launchers import gpus_in_use
from sparkring.launchers.base import Launcher, LaunchRequest
from sparkring.worker.member import gpus
from sparkring.worker.spark_task import MemberTask, run_member

if TYPE_CHECKING:
    from sparkring.cluster.base import Cluster

_Answer = TypeVar("_Answer")

COUNT_EVERY_S = 1.0
CANCEL_S, CANCEL_AGAIN_S = 10.0, 0.2  # for how long, and how often, stop() cancels the stage


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
        if data is not None:
            if "barrier" not in inspect.signature(type(data.frame).mapInArrow).parameters:
                raise LaunchError("--data needs Spark 3.5 or newer, where mapInArrow() supports barrier stages.")
            self.give_up_after_s = math.inf  # computing the DataFrame may take hours
        self._cluster = cluster
        self._barrier = size > 1 or not request.at_once
        self._environment = request.environment
        self._stage = Stage(self._cluster, request.title, size, persistent=request.persistent)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # This is the Python that executors are configured to run. If a package is missing in the tasks, _run() finds
        # out which Python the executors really run.
        self._python = self._cluster.python
        self._ended = False
        self._count_at = time.monotonic() + COUNT_EVERY_S
        self._starving: set[int] = set()
        self._warned_of: set[int] = set()
        check_gpus(self._cluster, size, request.gpus or 0)
        if request.at_once:
            self.give_up_after_s = math.inf
            if self._barrier:
                check_ring(self._cluster, size, say)
        else:
            check(self._cluster, size, data, say, here=request.here)
        self._environment_order: EnvironmentOrder | None = None
        if (pack := request.environment_pack) is not None:
            archive = self._cluster.send_file(pack.path)
            self._environment_order = EnvironmentOrder(archive, pack.lock, get_platform(), pack.unpacked_bytes)
        self._gpus = request.gpus
        self.pins_gpus = request.gpus == 0 or gpus_per(self._cluster, "task") > 0
        self.host, self.bind_host, self.port = self._cluster.address()

    def start(self, size: int, ticket: Ticket) -> None:
        running.add(self._stage)
        schema = None if self._data is None else self._data.schema()
        with_nvml = gpus_per(self._cluster, "task") > 0
        ring = size if self._barrier else 0
        archive = self._cluster.archive(with_nvml=with_nvml)
        order = MemberTask(archive, ticket, self._environment, self._gpus, ring, schema, self._environment_order)
        task = task_for(run_member, order)
        self._thread = self._cluster.thread(self._run, "sparkring-stage", size, task)
        self._thread.start()

    def _run(self, size: int, task: Task) -> None:
        try:
            self._cluster.begin_group(self._stage.group, self._stage.title)
            if self._data is None:
                values = self._cluster.collect(size, task, barrier=self._barrier)
            else:
                with self._cluster.own_python():
                    stage = self._data.stage(size, task)
                values = stage.collect()
            unreached = next((value for value in values if isinstance(value, str)), "")
            if unreached:
                self._error = LaunchError(f"{unreached} {self._cluster.reachable_by}")
        except Exception as error:  # problem() reports it, whatever it is
            self._error = error
            if lacking_package(str(error)):
                self._python = executors_python(self._cluster)
        finally:
            self._ended = True

    def problem(self, wait_s: float = 0.0) -> LaunchError | None:
        # Spark restarts a lost task of an ordinary stage, so the stage does not end, and waiting would be useless.
        if self._thread is not None and wait_s > 0 and self._barrier:
            self._thread.join(wait_s)
        if not self._ended:
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
        if "ConnectionError: sparkring: " in text:
            unreached = line_with(text, "ConnectionError: sparkring: ").partition("sparkring: ")[2]
            return LaunchError(f"{unreached} {self._cluster.reachable_by}")
        if self._data is not None and "SPARK-24820" in text:
            return LaunchError(
                f"`{self._data.name}` comes from a union, a coalesce or another narrow transformation, which "
                f"Spark cannot run in a barrier stage: use `{self._data.name}.repartition({self._size})`, or set "
                "another number of ranks with -n, so that sparkring repartitions the DataFrame."
            )
        if isinstance(self._error, LaunchError):
            return self._error
        if not self._barrier:
            return LaunchError(f"Spark ended the task of the item's process: {root_cause(text)}")
        return LaunchError(f"Spark ended the barrier stage: {root_cause(text)}")

    def _too_few(self) -> LaunchError | None:
        """Return an error if Spark has fewer slots left than there are members, otherwise None.

        The slots are counted because Spark does not report that it has lost an executor: the stage just waits.
        """
        now = time.monotonic()
        waits = self._data is None and self._barrier and self._cluster.shows_stages
        if not waits or now < self._count_at:
            return None
        self._count_at = now + COUNT_EVERY_S
        total = _ask(self._cluster.total_slots, self._size)
        if total >= self._size:
            return None
        return SlotsError(f"Spark has {total} task slots left for {self._size} ranks: an executor was lost.")

    def note_gpus(self, addresses: Sequence[str]) -> None:
        if addresses:
            gpus_in_use.hold(self, gpus.find(",".join(addresses)))

    def waits_for(self) -> str:
        if not self._cluster.shows_stages:
            return "Spark Connect does not say what Spark's slots are used for"
        capacity = _ask(lambda: slots(self._cluster, apart_from=self._stage.ids()), None)
        if capacity is None:
            return "Spark does not say what its slots are used for"
        if not capacity.total:
            return "Spark has no executors"
        if not capacity.busy or capacity.free >= self._size:
            first = f"computes what `{self._data.name}` depends on, and then starts" if self._data else "is starting"
            return f"Spark {first} the tasks"
        held = "; ".join(capacity.holders)
        if not self._barrier:
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
        if self._thread is None:
            return
        # If all tasks are waiting for slots, no member can exit on its own. If a member has joined, its task is
        # running, although Spark's status may still say otherwise.
        if self._thread.is_alive() and (joined or _ask(self._stage.active_tasks, 1)):
            self._thread.join(grace_s)
        deadline = time.monotonic() + CANCEL_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            _ask(lambda: self._cluster.cancel(self._stage.group), None)  # misses a job that has not begun
            self._thread.join(CANCEL_AGAIN_S)


def _ask(question: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
    """Return Spark's answer to a question, or `otherwise` if Spark does not answer."""
    try:
        return question()
    except Exception:  # py4j raises various errors if the session has been stopped
        return otherwise
