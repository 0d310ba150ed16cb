"""Asks a classic session of Spark, through its SparkContext and Java."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from sparkring.cluster import plans
from sparkring.cluster.base import Address, Cluster, Grouping, ParquetFiles, StageStatus, pandas_unused
from sparkring.cluster.java_errors import root_cause
from sparkring.errors import LaunchError
from sparkring.executor.archive import archive
from sparkring.executor.artifacts import Artifact
from sparkring.executor.orders import HOST_SETTING, PORT_SETTING
from sparkring.executor.tasks import Task
from sparkring.history.describe import counted

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

LOOPBACK = "127.0.0.1"

_changing_python, _sending = threading.Lock(), threading.Lock()
_sent_files: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()  # by SparkContext


def active_context() -> SparkContext | None:
    """Return the notebook's SparkContext, which may have been stopped; None if there is none."""
    import pyspark

    return pyspark.SparkContext._active_spark_context if hasattr(pyspark, "SparkContext") else None


def has_run() -> bool:
    """Return whether pyspark has started Java in this process."""
    import pyspark

    return pyspark.SparkContext._gateway is not None


def active_cluster() -> Classic | None:
    """Return the notebook's session, which may have been stopped; None if there is none."""
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is not None:
        return Classic.of(session)
    context = active_context()
    if context is None:
        return None
    return Classic(context) if _is_stopped(context) else Classic(context, SparkSession(context))


def _is_stopped(context: SparkContext) -> bool:
    return context._jsc is None or bool(context._jsc.sc().isStopped())


@dataclass(frozen=True)
class Classic(Cluster):
    """The Spark application of a SparkContext. If it has been stopped, there may be no `session`."""

    _context: SparkContext
    session: SparkSession = field(default=None, compare=False)

    shows_stages: ClassVar[bool] = True

    @classmethod
    def of(cls, session: SparkSession) -> Classic:
        """Return the cluster of a session."""
        return cls(session.sparkContext, session)

    @property
    def master(self) -> str:
        return str(self._context.master)

    @property
    def runs_this_python(self) -> bool:
        return self.is_local

    def setting(self, name: str, default: str = "") -> str:
        return str(self._context.getConf().get(name, default))

    def is_stopped(self) -> bool:
        return _is_stopped(self._context)

    def java_version(self) -> str:
        return str(self._context._jvm.System.getProperty("java.version"))

    def address(self) -> Address:
        host = LOOPBACK if self.is_local else self.setting("spark.driver.host", LOOPBACK)
        bind_host = LOOPBACK if self.is_local else self.setting("spark.driver.bindAddress", host)
        host = self.setting(HOST_SETTING, host)
        # Spark writes IPv6 addresses in brackets.
        return Address(host.strip("[]"), bind_host.strip("[]"), int(self.setting(PORT_SETTING) or 0))

    # ── Slots ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _java(self) -> Any:
        assert self._context._jsc is not None
        return self._context._jsc.sc()

    def total_slots(self, gpus: int = 0) -> int:
        java = self._java
        default = java.resourceProfileManager().defaultResourceProfile()
        return int(java.maxNumConcurrentTasks(self.profile(gpus)._java_resource_profile if gpus else default))

    def profile(self, gpus: int) -> Any:
        profile = super().profile(gpus)
        try:
            self._java.resourceProfileManager().addResourceProfile(profile._java_resource_profile)
        except Exception as error:  # py4j's error: whether Spark can do this depends on its version and the master
            raise LaunchError(
                f"Spark cannot give each task {counted(gpus, 'GPU')} here: {root_cause(str(error))} Start the session "
                f"with spark.task.resource.gpu.amount={gpus}."
            ) from error
        return profile

    def hosts(self) -> list[str]:
        return [str(name).rpartition(":")[0] for name in _items(self._java.getExecutorMemoryStatus().keysIterator())]

    def ages_s(self) -> tuple[float, float, float]:
        now, added_s, lost_s = time.time(), math.inf, math.inf
        for executor in _items(self._java.statusStore().executorList(False).iterator()):
            if executor.id() == "driver":
                continue
            added_s = min(added_s, now - executor.addTime().getTime() / 1000)
            if executor.removeTime().isDefined():
                lost_s = min(lost_s, now - executor.removeTime().get().getTime() / 1000)
        return now - self._context.startTime / 1000, added_s, lost_s

    # ── Stages ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def stage_ids(self, group: str) -> set[int]:
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
        return {stage for job in jobs if job is not None for stage in job.stageIds}

    def active_stages(self) -> list[int]:
        return list(self._context.statusTracker().getActiveStageIds())

    def stage(self, number: int) -> StageStatus | None:
        info = self._context.statusTracker().getStageInfo(number)
        if info is None:
            return None
        return StageStatus(str(info.name), info.numTasks, info.numActiveTasks, info.numCompletedTasks)

    # ── Jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def thread(self, target: Callable[..., None], name: str, *arguments: Any) -> threading.Thread:
        from pyspark import InheritableThread

        thread: threading.Thread = InheritableThread(target=target, args=arguments, name=name, daemon=True)
        return thread

    def begin_group(self, group: str, what: str) -> None:
        self._context.setJobGroup(group, f"sparkring: {what}", interruptOnCancel=True)

    def cancel(self, group: str) -> None:
        self._context.cancelJobGroup(group)

    def collect(self, size: int, task: Task, *, barrier: bool = False, gpus: int = 0) -> list[Any]:
        with self.own_python():
            numbers = self._context.parallelize(range(size), size)
            stage = (numbers.barrier() if barrier else numbers).mapPartitions(task)
            if gpus:
                stage = stage.withResources(self.profile(gpus))
            stage._jrdd  # noqa: B018 - reading it makes Spark note the Python that `with` has set
        return list(stage.collect())

    def collect_rows(self, frame: DataFrame, task: Task, schema: str, *, barrier: bool, gpus: int) -> list[Any]:
        with self.own_python(), pandas_unused():
            rows = frame.mapInArrow(task, schema, barrier=barrier)
        return list(rows.rdd.withResources(self.profile(gpus)).collect() if gpus else rows.collect())

    @property
    def python(self) -> str:
        return str(self._context.pythonExec)

    @contextlib.contextmanager
    def own_python(self) -> Iterator[None]:
        """Otherwise, local executors would use PYSPARK_PYTHON or `python3`, which may be a different Python."""
        if not self.is_local:
            yield
            return
        with _changing_python:
            before, self._context.pythonExec = self._context.pythonExec, sys.executable
            try:
                yield
            finally:
                self._context.pythonExec = before

    def shared(self, value: tuple[Any, ...]) -> Any:
        return self._context.broadcast(value)

    def send_file(self, path: str) -> Artifact:
        with _sending:
            sent = _sent_files.setdefault(self._context, set())
            if path not in sent:
                self._context.addFile(path)
                sent.add(path)
        return Artifact(os.path.basename(path))

    def archive(self, *, with_nvml: bool) -> bytes:
        return archive(with_nvml)

    # ── DataFrames ───────────────────────────────────────────────────────────────────────────────────────────────────

    def partitions(self, frame: DataFrame) -> int:
        # select() makes a new DataFrame for each call, because a DataFrame remembers how its shuffles ended. If a
        # shuffle was interrupted, the same DataFrame would not repeat the shuffle.
        return int(frame.select("*").rdd.getNumPartitions())

    def grouping(self, grouped: Any, frame: DataFrame) -> Grouping:
        match = re.search(r"type: (\w+)\]?$", str(grouped._jgd.toString()))
        kind = "groupby" if match is None else match[1].lower()
        return Grouping(kind, plans.keys(grouped, frame) if kind == "groupby" else [])

    def proleptic(self, frame: DataFrame) -> DataFrame:
        """By default, Spark before 4.0 refuses to write them. With the setting LEGACY, they would be other dates."""
        return plans.with_setting(frame, "spark.sql.parquet.datetimeRebaseModeInWrite", "CORRECTED")

    def describe(self, frame: DataFrame) -> str:
        return str(frame._jdf.queryExecution().analyzed().toString()).partition("\n")[0]

    def plan_facts(self, frame: DataFrame) -> list[str]:
        return plans.facts(frame)

    def parquet_files(self, frame: DataFrame, names: list[str]) -> ParquetFiles | None:
        return plans.parquet_files(frame, names)

    def unknown_column(self, frame: DataFrame) -> tuple[str, str] | None:
        from pyspark.sql.types import _parse_datatype_json_string

        for column in frame._jdf.schema().fields():
            try:
                _parse_datatype_json_string(column.dataType().json())
            except Exception:  # pyspark has several classes for this error
                return str(column.name()), str(column.dataType().simpleString())
        return None

    # ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def copy_folder(self, source: str, target: str) -> None:
        jvm: Any = self._context._jvm
        hadoop, settings = jvm.org.apache.hadoop.fs, self._context._jsc.hadoopConfiguration()
        one, other = hadoop.Path(source), hadoop.Path(target)
        hadoop.FileUtil.copy(one.getFileSystem(settings), one, other.getFileSystem(settings), other, False, settings)


def _items(iterator: Any) -> Iterator[Any]:
    """Yield the items of an iterator of Scala."""
    while iterator.hasNext():
        yield iterator.next()
