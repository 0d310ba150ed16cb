"""What sparkring asks of Spark. classic.py asks a classic session, connect.py a session of Spark Connect."""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from sparkring.executor.orders import MAKE_REACHABLE
from sparkring.executor.tasks import Task

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from sparkring.executor.artifacts import Artifact

Answer = TypeVar("Answer")
CONNECTS_S = 5.0  # how long it may take to connect to the server, or to connect again
SERVER_LOST_S = 30.0  # jobs go on if the network is down for less than this
UNKNOWN_SLOTS = 1 << 31  # more tasks than Spark can count

# The resource profiles of tasks, by session and by the number of GPUs. With dynamic allocation, each starts executors.
_profiles: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def pandas_unused() -> Iterator[None]:
    """Hide pyspark 4.3's warning about pandas 3, for calls of pyspark that do not use pandas.

    The notebook's own calls that do use pandas, such as the definition of a pandas UDF, still cause the warning.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
        yield


class StageStatus(NamedTuple):
    """A stage that Spark knows: what Spark calls it, and how many tasks it has, is running and has completed."""

    name: str
    tasks: int
    active: int
    completed: int


class Address(NamedTuple):
    """How executors reach this process: at `host`. It listens on `bind_host`, at `port` or, if this is 0, at any."""

    host: str
    bind_host: str
    port: int


class Grouping(NamedTuple):
    """The result of df.groupBy(…). `kind` is groupby, rollup, cube, pivot or the like.

    `keys` has, for each key of groupby, the number of the DataFrame's column or, if the key is an expression, the
    expression as a column.
    """

    kind: str
    keys: list[int | Column]


class ParquetFiles(NamedTuple):
    """The Parquet files that a DataFrame reads, as Spark spells them. `filtered` says whether it lacks some rows."""

    paths: list[str]
    filtered: bool


class Cluster(ABC):
    """The Spark application of a session. Two of them are equal if they stand for the same application.

    Methods that are not abstract return what is right if Spark does not say more.
    """

    session: SparkSession
    calls_back: ClassVar[bool] = True  # whether foreachBatch() can call functions of this process

    # ── The session ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def master(self) -> str:
        """Spark's master, such as local[4] or spark://…; '' if it is not known."""

    @property
    def title(self) -> str:
        """What messages call the cluster."""
        return self.master

    @property
    def is_local(self) -> bool:
        """Whether the executors are on the driver's machine."""
        return self.master.startswith("local")

    @property
    def runs_this_python(self) -> bool:
        """Whether ranks run this process's Python, with its packages and files, as far as is known."""
        return False

    @property
    def is_driver_alone(self) -> bool:
        """Whether the driver itself runs the tasks."""
        return re.match(r"local(\[|$)", self.master) is not None

    @abstractmethod
    def setting(self, name: str, default: str = "") -> str:
        """Return a setting with which the session was made, or `default` if it was not set."""

    @abstractmethod
    def is_stopped(self) -> bool:
        """Return whether the session has been stopped, or can no longer be reached."""

    def is_reachable(self, limit_s: float = CONNECTS_S) -> bool:
        """Return whether there is a connection to the session's server, or was one less than `limit_s` ago."""
        return True

    def java_version(self) -> str:
        """Return the version of the driver's Java; '' if it is not known."""
        return ""

    @abstractmethod
    def address(self) -> Address:
        """Return how executors reach this process."""

    @property
    def elsewhere(self) -> str:
        """Where ranks can run instead, if Spark refuses to run them; '' if that is not known."""
        return ""

    @property
    def reachable_by(self) -> str:
        """The advice for executors that cannot reach this process."""
        return MAKE_REACHABLE

    def within(self, limit_s: float, ask: Callable[[], Answer], gives_up: Callable[[], bool] = bool) -> Answer:
        """Return ask(). Raise TimeoutError if Spark does not answer within `limit_s`, or if gives_up() becomes true."""
        return ask()

    # ── Slots ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def total_slots(self, gpus: int = 0) -> int:
        """Return how many tasks Spark can run at once, or UNKNOWN_SLOTS if it does not say. This runs no job.

        With `gpus`, these are tasks of profile(gpus).
        """

    def profile(self, gpus: int) -> Any:
        """Return the resource profile of tasks that get `gpus` GPUs each, whatever the session's settings give them.

        Raise LaunchError if this Spark cannot do that. The first call must come from the user's thread.
        """
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        profiles = _profiles.setdefault(self.session, {})
        if gpus not in profiles:
            needs = TaskResourceRequests().cpus(int(self.setting("spark.task.cpus", "1"))).resource("gpu", gpus)
            profiles[gpus] = ResourceProfileBuilder().require(needs).build
        return profiles[gpus]

    def hosts(self) -> list[str]:
        """Return the driver's host and then that of each executor, or [] if they are not known."""
        return []

    def ages_s(self) -> tuple[float, float, float]:
        """Return how many seconds ago the session was made, an executor was last added, and one was last lost.

        Infinity stands for never, and for what is not known.
        """
        return float("inf"), float("inf"), float("inf")

    # ── Stages ───────────────────────────────────────────────────────────────────────────────────────────────────────

    shows_stages: ClassVar[bool] = False  # whether the next three methods know what Spark is running

    def stage_ids(self, group: str) -> set[int]:
        """Return the ids of the stages of a group's jobs, including the stages that they depend on."""
        return set()

    def active_stages(self) -> list[int]:
        """Return the ids of the stages that Spark has begun, or that are ready to begin."""
        return []

    def stage(self, number: int) -> StageStatus | None:
        """Return the state of the stage with this id, or None if it is not known."""
        return None

    # ── Jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def thread(self, target: Callable[..., None], name: str, *arguments: Any) -> threading.Thread:
        """Return a thread that may start Spark jobs and has not been started."""
        return threading.Thread(target=target, args=arguments, name=name, daemon=True)

    @abstractmethod
    def begin_group(self, group: str, what: str) -> None:
        """Put the jobs that this thread starts from now on into a group. Where it can, Spark shows `what` for them."""

    @abstractmethod
    def cancel(self, group: str) -> None:
        """End the running jobs of a group. This misses a job that has not begun."""

    @abstractmethod
    def collect(self, size: int, task: Task, *, barrier: bool = False, gpus: int = 0) -> list[Any]:
        """Run a stage of `size` tasks, and return what they yield. Each calls task(rows), with rows of no meaning.

        The tasks of a barrier stage start together. With `gpus`, they have profile(gpus). Local executors run this
        kernel's Python.
        """

    @abstractmethod
    def collect_rows(self, frame: DataFrame, task: Task, schema: str, *, barrier: bool, gpus: int) -> list[Any]:
        """Run `task` on each partition, as mapInArrow() does, and return its rows."""

    @property
    @abstractmethod
    def python(self) -> str:
        """The Python that executors are configured to run."""

    def own_python(self) -> contextlib.AbstractContextManager[None]:
        """Within this context, DataFrames and stages are made whose local executors run this kernel's Python."""
        return contextlib.nullcontext()

    @abstractmethod
    def shared(self, value: tuple[Any, ...]) -> Any:
        """Send a large value to the executors once. Its attribute `value` is the value there."""

    @abstractmethod
    def send_file(self, path: str) -> Artifact:
        """Send a file to the executors, once in a session. Its name must not be that of another file."""

    @abstractmethod
    def archive(self, *, with_nvml: bool) -> Any:
        """Return the archive of sparkring's code as a task gets it: for unpacked()."""

    # ── DataFrames ───────────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def partitions(self, frame: DataFrame) -> int:
        """Return the number of partitions. To find this number, Spark may have to run all stages but the last."""

    @abstractmethod
    def grouping(self, grouped: Any, frame: DataFrame) -> Grouping:
        """Return by what `frame` is grouped. Raise Spark's own error if it cannot be."""

    @abstractmethod
    def proleptic(self, frame: DataFrame) -> DataFrame:
        """Return the same rows, for which Spark writes dates before 1582-10-15 to Parquet as they are."""

    def describe(self, frame: DataFrame) -> str:
        """Return a line about what computes a DataFrame."""
        return str(frame)

    def plan_facts(self, frame: DataFrame) -> list[str]:
        """Return everything that determines the rows, in a fixed order, or [] if it is not known."""
        return []

    def parquet_files(self, frame: DataFrame, names: list[str]) -> ParquetFiles | None:
        """Return the files that store these columns as they are in the DataFrame, or None if it is not known."""
        return None

    def unknown_column(self, frame: DataFrame) -> tuple[str, str] | None:
        """Return the name and Spark's type of a column whose type pyspark does not know, or None."""
        return None

    # ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def copy_folder(self, source: str, target: str) -> None:
        """Copy a folder. Both are paths for Spark, or file:// for this machine."""
