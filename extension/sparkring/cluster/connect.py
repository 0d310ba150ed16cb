"""Asks a session of Spark Connect, which has no SparkContext, and may be without Java on this machine.

Spark Connect does not say what Spark is running. So the slots in use, and the progress of stages, are not known.
"""

from __future__ import annotations

import contextlib
import inspect
import ipaddress
import os
import pickle
import re
import secrets
import socket
import sys
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkring.cluster.base import CONNECTS_S, UNKNOWN_SLOTS, Address, Answer, Cluster, Grouping, pandas_unused
from sparkring.cluster.formation import executor_cores, executor_slots
from sparkring.errors import DataError, LaunchError
from sparkring.executor.archive import archive
from sparkring.executor.artifacts import Artifact
from sparkring.executor.orders import HOST_SETTING, PORT_SETTING
from sparkring.executor.tasks import Task, in_arrow
from sparkring.history.describe import counted
from sparkring.runtime.storage import locate

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# How long the server may take to answer a question that needs no job, and to cancel jobs.
_ANSWERS_S, _CANCELS_S, _LOOKS_S = 30.0, 5.0, 0.1
_DATABRICKS = "DATABRICKS_RUNTIME_VERSION"  # the variable that notebooks there have
# Each of these settings replaces the number of cores as the number of partitions of a range.
_PARALLELISM = ("spark.sql.leafNodeDefaultParallelism", "spark.default.parallelism")

# The archive of sparkring's code in each session that has been sent it, with pynvml and without.
_archives: weakref.WeakKeyDictionary[Any, dict[bool, Artifact]] = weakref.WeakKeyDictionary()
_sent_files: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()  # by session
_connections: weakref.WeakKeyDictionary[Any, _Connection] = weakref.WeakKeyDictionary()  # by session
_sending = threading.Lock()


def active_session() -> SparkSession | None:
    """Return the notebook's session of Spark Connect, which may have been stopped; None if there is none."""
    module = sys.modules.get("pyspark.sql.connect.session")
    if module is None:
        return None
    try:
        session: SparkSession = module.SparkSession.active()
    except Exception:  # there is no session, or pyspark 3.4 cannot tell
        return None
    return session


def _is_here(host: str) -> bool:
    """Return whether `host` is an address of this machine, or a name for one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as sock:
            sock.bind(address)
    except OSError:
        return False
    return True


def is_connect(session: Any) -> bool:
    """Return whether a session belongs to Spark Connect."""
    return any(base.__module__.startswith("pyspark.sql.connect.") for base in type(session).__mro__)


class _Connection:
    """Knows whether a channel of grpc is connected to its server."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._connected = False
        self._lost_at: float | None = None  # when lost_s() first saw that there is no connection
        channel.subscribe(self._note, try_to_connect=True)

    def lost_s(self) -> float:
        """Return for how many seconds there has been no connection, and try to connect again.

        The time counts from the first call without a connection: after half an hour without calls, grpc closes a
        connection by itself.
        """
        if self._connected:
            return 0.0
        began = self._lost_at
        if began is None:
            began = self._lost_at = time.monotonic()
        self._channel.unsubscribe(self._note)  # a connection that was lost or idle is made again only for a new call
        self._channel.subscribe(self._note, try_to_connect=True)
        return time.monotonic() - began

    def _note(self, state: Any) -> None:
        self._connected = state.name == "READY"
        if self._connected:
            self._lost_at = None


@dataclass(frozen=True)
class Connect(Cluster):
    """The Spark application behind a session of Spark Connect."""

    session: SparkSession

    calls_back = False

    @property
    def master(self) -> str:
        return self.setting("spark.master")

    @property
    def title(self) -> str:
        return " ".join(filter(None, [self.master, f"through Spark Connect at {self._server}"]))

    @property
    def _server(self) -> str:
        return str(self.session.client.host)

    def setting(self, name: str, default: str = "") -> str:
        try:
            value = self.session.conf.get(name, None)  # Spark would refuse '' as the value of a setting with a type
        except Exception as error:  # pyspark and grpc have several classes for errors
            if "CONFIG_NOT_AVAILABLE" not in str(error):  # Databricks hides most settings of serverless compute
                raise
            value = None
        return default if value is None else str(value)

    def is_stopped(self) -> bool:
        try:
            self.within(_ANSWERS_S, lambda: self.setting("spark.app.id"))  # pyspark would remember the version
            return bool(self.session.is_stopped)
        except Exception:  # pyspark and grpc have several classes for this error
            return True

    def within(self, limit_s: float, ask: Callable[[], Answer], gives_up: Callable[[], bool] = bool) -> Answer:
        """pyspark retries for minutes if the server does not answer."""
        began, answer = time.monotonic(), Future[Answer]()

        def run() -> None:
            try:
                answer.set_result(ask())
            except Exception as error:  # raised again by result()
                answer.set_exception(error)

        if self.is_reachable():
            threading.Thread(target=run, name="sparkring-connect", daemon=True).start()
            while not (answer.done() or time.monotonic() - began > limit_s or gives_up() or not self.is_reachable()):
                wait([answer], _LOOKS_S)
        if not answer.done():
            raise TimeoutError("the server of Spark Connect does not answer")
        return answer.result()

    def is_reachable(self, limit_s: float = CONNECTS_S) -> bool:
        if self.session not in _connections:
            _connections[self.session] = _Connection(self.session.client._channel)
        return _connections[self.session].lost_s() < limit_s

    def address(self) -> Address:
        """This machine's address on the way to the server, beside which the executors usually are.

        If the server is on this machine, for example in the same pod, this is the address at which the executors reach
        the server.
        """
        try:
            family, *_, server = socket.getaddrinfo(self._server, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(server)  # sends nothing
                host = str(probe.getsockname()[0])
        except OSError as error:
            raise LaunchError(
                f"this machine has no address for executors, because it cannot reach the server {self._server}: "
                f"{error.strerror or error}. {self.reachable_by}"
            ) from error
        if ipaddress.ip_address(host).is_loopback and not self.is_local:
            of_server = self.setting("spark.driver.host").strip("[]")
            host = of_server if of_server and _is_here(of_server) else host
        return Address(self.setting(HOST_SETTING, host), host, int(self.setting(PORT_SETTING) or 0))

    def total_slots(self, gpus: int = 0) -> int:
        """Only the number of cores is known: it is how many partitions Spark gives to a range."""
        if written := re.fullmatch(r"local(?:\[(\d+)(?:,\d+)?\])?", self.master):
            cores = int(written[1] or 1)
        elif any(map(self.setting, _PARALLELISM)):
            return UNKNOWN_SLOTS
        else:
            plan = str(self.session.sql(f"EXPLAIN SELECT * FROM range({1 << 40})").collect()[0][0])
            if (splits := re.search(r"splits=(?:Some\()?(\d+)", plan)) is None:
                return UNKNOWN_SLOTS
            cores = int(splits[1])
        cores_each = int(self.setting("spark.task.cpus", "1"))
        if self.is_driver_alone or (
            cores_each == 1 and not gpus and not self.setting("spark.task.resource.gpu.amount")
        ):
            return cores // cores_each
        in_one = executor_cores(self)
        return cores // in_one * executor_slots(self, gpus) if in_one else UNKNOWN_SLOTS

    def profile(self, gpus: int) -> Any:
        if "profile" not in inspect.signature(type(self.session.range(1)).mapInArrow).parameters:
            raise LaunchError(
                f"on Spark Connect, pyspark 4.0 or newer can give each task {counted(gpus, 'GPU')}: use it, or start "
                f"Spark with spark.task.resource.gpu.amount={gpus}."
            )
        profile = super().profile(gpus)
        profile.id  # noqa: B018 - pyspark then makes it on the server, for which it needs this thread's session
        return profile

    @property
    def elsewhere(self) -> str:
        if _DATABRICKS not in os.environ and "databricks" not in self._server:
            return ""
        return (
            "On Databricks, -n 2 needs compute with dedicated access: Python functions of other compute have no "
            "network. -n -2 starts processes where the notebook's Python runs."
        )

    @property
    def reachable_by(self) -> str:
        return self.elsewhere or (
            f"Set {HOST_SETTING} to an address of this machine that they can reach, or {PORT_SETTING} to a port that "
            f'the firewall lets through, as in spark.conf.set("{PORT_SETTING}", 40123).'
        )

    # ── Jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin_group(self, group: str, what: str) -> None:
        self.session.addTag(group)

    def cancel(self, group: str) -> None:
        with contextlib.suppress(Exception):  # pyspark and grpc have several classes for this error
            self.within(_CANCELS_S, lambda: self.session.interruptTag(group))

    def collect(self, size: int, task: Task, *, barrier: bool = False, gpus: int = 0) -> list[Any]:
        numbers = self.session.range(0, size, 1, size)
        rows = self.collect_rows(numbers, in_arrow(task), "value binary", barrier=barrier, gpus=gpus)
        return [pickle.loads(row[0]) for row in rows]

    def collect_rows(self, frame: DataFrame, task: Task, schema: str, *, barrier: bool, gpus: int) -> list[Any]:
        of_tasks = {"profile": self.profile(gpus)} if gpus else {}  # pyspark 3.5 has no such argument
        with pandas_unused():
            return list(frame.mapInArrow(task, schema, barrier=barrier, **of_tasks).collect())

    @property
    def python(self) -> str:
        return "a Python of their own"

    def shared(self, value: tuple[Any, ...]) -> Artifact:
        """A plan may have 128 MB, but an artifact is sent in pieces."""
        name = f"sparkring-{secrets.token_hex(8)}.pickle"
        with tempfile.TemporaryDirectory(prefix="sparkring-") as folder:
            path = os.path.join(folder, name)
            with open(path, "wb") as file:
                pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
            self.session.addArtifacts(path, file=True)
        return Artifact(name)

    def send_file(self, path: str) -> Artifact:
        with _sending:
            sent = _sent_files.setdefault(self.session, set())
            if path not in sent:
                self.session.addArtifacts(path, file=True)
                sent.add(path)
        return Artifact(os.path.basename(path))

    def archive(self, *, with_nvml: bool) -> Artifact:
        with _sending:
            sent = _archives.setdefault(self.session, {})
            if with_nvml not in sent:
                sent[with_nvml] = self.shared((zlib.compress(archive(with_nvml)),))
            return sent[with_nvml]

    # ── DataFrames ───────────────────────────────────────────────────────────────────────────────────────────────────

    def partitions(self, frame: DataFrame) -> int:
        """Return the number of partitions, which Spark Connect does not say: a job computes them."""

        def one(batches: Iterable[Any]) -> Iterator[Any]:
            import pyarrow

            for _ in batches:
                pass
            yield pyarrow.RecordBatch.from_pydict({"partition": pyarrow.array([0], pyarrow.int32())})

        # mapInArrow() looks columns up by name, which fails if a name has a dot or if two columns have the same name.
        return int(frame.toDF(*map(str, range(len(frame.columns)))).mapInArrow(one, "partition int").count())

    def grouping(self, grouped: Any, frame: DataFrame) -> Grouping:
        kind = str(grouped._group_type)  # there is no public way to this, nor to the keys
        if kind != "groupby":
            return Grouping(kind, [])
        grouped.count().schema  # noqa: B018 - this raises Spark's error if there is no such column
        exact = self.setting("spark.sql.caseSensitive") == "true"
        fold: Callable[[str], str] = str if exact else str.lower
        numbers = {fold(name): number for number, name in enumerate(frame.columns)}
        keys: list[int | Column] = []
        for column in grouped._grouping_cols:
            name = str(getattr(column._expr, "_unparsed_identifier", ""))
            if quoted := re.fullmatch("`((?:[^`]|``)+)`", name):
                name = quoted[1].replace("``", "`")
            elif "." in name:  # a field of a struct
                name = ""
            keys.append(numbers.get(fold(name), column))
        return Grouping(kind, keys)

    def proleptic(self, frame: DataFrame) -> DataFrame:
        name = "spark.sql.parquet.datetimeRebaseModeInWrite"
        if self.setting(name) == "LEGACY":
            raise DataError(f"with {name}=LEGACY, Spark writes other dates than those before 1582-10-15: unset it.")
        return frame

    # ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def copy_folder(self, source: str, target: str) -> None:
        one, other = locate(source), locate(target)
        for folder in (one, locate(target.rpartition("/")[0])):  # Spark has written to one of them
            if not folder.fs.exists(folder.path):
                raise DataError(
                    f"{folder.written} is not on this machine: use a path that this machine and Spark's share."
                )
        for path in one.fs.find(one.path):
            name = path.removeprefix(one.path).lstrip("/")
            other.fs.makedirs((other / name).path.rpartition("/")[0], exist_ok=True)
            other.fs.pipe_file((other / name).path, one.fs.cat_file(path))
