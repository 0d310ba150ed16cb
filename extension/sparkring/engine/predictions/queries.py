"""The records of Spark queries that use a column of predictions. The items of such a record are the partitions.

    model process ── GpuUsed, ModelUsed ──▶ Listener ── a thread per connection ──▶ _Query ──▶ Recorder

A DataFrame that predict() has returned may be used at any time, so one listener waits as long as this process lives.
Waiting takes no processor time. A query begins with the first report of a model process. The query ends when Spark is
no longer running any of its stages and, in addition, another query begins, the last model process disconnects, or Spark
has run nothing for a while. A model process disconnects when no task has been connected for a while.

The model processes of a stream do not report its tasks. But if they take up new checkpoints, they stay connected until
they exit, and the stream has a record, whose items are the model processes (serving.py). The record ends when the
streaming query has ended. This is looked up now and then in a thread of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.capture.versions import versions
from sparkring.cluster.slots import slots
from sparkring.engine.predictions.serving import Serving
from sparkring.engine.run.recorder import Recorder
from sparkring.engine.run.view import background_view
from sparkring.errors import LaunchError
from sparkring.history import describe, events, run_store
from sparkring.history.record import QUICK_S
from sparkring.launchers.tunnel import why_needed
from sparkring.runtime.kernel import tell
from sparkring.wire.channel import ChannelClosed, Connection, Listener
from sparkring.wire.messages import Failure, GpuUsed, ModelUsed, TaskScored
from sparkring.worker.model.reporter import EVERY_S

if TYPE_CHECKING:
    from sparkring.cluster.base import Cluster, StageStatus

_MOST = 1_000  # how many model processes can be connected at once
_LOOK_EVERY_S = 0.25
_IDLE_S = 1.0  # a query has ended if Spark has run nothing for so long
_LAST_REPORT_S = EVERY_S + 0.5  # after the end of a streaming query, the last reports arrive within this time


class _Column(NamedTuple):
    """A column of predictions. `title` and `code` are for the records of the queries that use the column."""

    cluster: Cluster
    title: str
    code: str


@dataclass
class _Partition:
    """A partition of a stage, which is an item of the record.

    `task` is Spark's id for the partition's last attempt. `connections` holds the last report about this attempt from
    each connection, by process and connection number. `slot` is None while the record does not show the item as
    running.
    """

    item: int
    name: str
    task: int = -1
    attempt: int = 0
    slot: int | None = None
    is_over: bool = False
    failure: Failure | None = None
    connections: dict[tuple[str, int], TaskScored] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(connection.rows for connection in self.connections.values())

    @property
    def seconds(self) -> float:
        return max(connection.seconds for connection in self.connections.values())

    @property
    def state(self) -> str:
        """The state of the attempt. A task has several connections if Spark computes the column in several places."""
        states = {connection.state for connection in self.connections.values()}
        return next(state for state in ("running", "failed", "closed", "finished") if state in states)


class _Query:
    """A query that is recorded and shown. Its tasks use one column, in one or more stages."""

    def __init__(self, column: _Column, with_model: set[str], report: ModelUsed) -> None:
        self._cluster = column.cluster
        self._with_model = with_model  # the processes that are known to have loaded the model
        self._last = time.time()
        self._at_once = self._slots()
        self._holders: list[_Partition | None] = [None] * self._at_once
        self._first_item: dict[int, int] = {}  # the number of the item for partition 0, by stage
        self._items = 0
        self._partitions: dict[tuple[int, int], _Partition] = {}
        self._scored: dict[tuple[str, int], TaskScored] = {}  # the last reports, including those about failed attempts
        self._loads: dict[str, float | None] = {} if report.load_s is not None else {_process(report): None}
        self._loaded: dict[str, float] = {}  # only the processes that loaded the model for this query
        self._scoring = 0.0  # when the first rows were scored
        self._serving = Serving(self._at_once)  # the processes that take up new checkpoints
        self._gpus: dict[tuple[str, str], GpuUsed] = {}  # the last reports, by process and address
        self._waiting: list[_Partition] = []  # partitions without a slot in the record
        self._idle_since = 0.0  # since when neither a task nor a stage of Spark has been running; 0 if one is running
        self.ends_with_stream = False  # whether a thread waits for the end of the streaming query
        started = events.RunStarted(
            self._last,
            run_store.new_id(),
            column.title,
            column.code,
            self._at_once,
            "spark",
            "plain",
            "all",
            warm=report.load_s is not None,
            versions=versions(),
        )
        self._events: list[events.Event] = []
        first = self._planned()._replace(noun="partition")
        self.recorder = Recorder(background_view(), started, first=[first])

    def add(self, report: ModelUsed, tasks: list[TaskScored], gpus: Mapping[str, GpuUsed]) -> None:
        """Record the report of a model process about these tasks. `gpus` are the process's GPUs by address."""
        self._last = time.time()
        process = _process(report)
        self._note_load(process, report, gpus)
        self._idle_since = 0.0
        if report.checkpoint is not None:
            self._events += self._serving.add(report, report.checkpoint, self._last)
        for address, gpu in gpus.items():
            if self._gpus.get((process, address)) != gpu:
                self._gpus[process, address] = gpu
                self._events.append(events.ModelGpuUsed(self._last, report.host, report.pid, gpu))
        changed = {id(waiting): waiting for waiting in self._waiting}
        for task in tasks:
            self._scored[process, task.connection] = task
            if task.rows and not self._scoring:
                self._scoring = max(self.recorder.record.started, self._last - task.seconds)
            partition = self._partition(task)
            if task.task != partition.task:
                self._leave(partition, "again")
                partition.task, partition.connections = task.task, {}
                partition.attempt += 1
            partition.connections[process, task.connection] = task
            changed[id(partition)] = partition
        self._waiting = [
            candidate for candidate in changed.values() if not candidate.is_over and not self._show(candidate, report)
        ]
        self._save()

    def lose(self, report: ModelUsed) -> None:
        """Record that a process has disconnected. A process that was killed cannot report how its tasks ended."""
        for partition in self._partitions.values():
            for key, connection in partition.connections.items():
                if key[0] == _process(report) and connection.state == "running":
                    partition.connections[key] = connection._replace(state="closed")
        self._events += self._serving.end(self._last, report)

    def _note_load(self, process: str, report: ModelUsed, gpus: Iterable[str]) -> None:
        if process in self._loads and self._loads[process] == report.load_s:
            return
        which = f"process {report.pid}" + (f", GPU {', '.join(gpus)}" if gpus else "")
        if process in self._loads and report.checkpoint is None and report.load_s is not None:
            text = f"{report.host} has loaded the model in {describe.duration(report.load_s)} ({which})"
            self._events.append(events.Notice(self._last, text))
        if report.load_s is not None and process not in self._with_model:
            self._with_model.add(process)
            self._loaded[process] = report.load_s
        self._loads[process] = report.load_s
        self._events.append(self._planned())

    def _planned(self) -> events.ItemsPlanned:
        """Return how many partitions there are, and where the model is being loaded."""
        hosts = {process.rpartition(":")[0] for process, load_s in self._loads.items() if load_s is None}
        waits_for = f"the model is being loaded on {describe.counted(len(hosts), 'machine')}" if hosts else ""
        return events.ItemsPlanned(self._last, self._at_once, total=self._items or None, waits_for=waits_for)

    def _partition(self, task: TaskScored) -> _Partition:
        if task.stage not in self._first_item:
            info = self._stage(task.stage)
            self._first_item[task.stage] = self._items
            self._items += task.partition + 1 if info is None else info.tasks
            self._events.append(self._planned())
        place = task.stage, task.partition
        if place not in self._partitions:
            first = next(iter(self._first_item)) == task.stage
            name = f"partition {task.partition}" if first else f"partition {task.partition} of stage {task.stage}"
            self._partitions[place] = _Partition(self._first_item[task.stage] + task.partition, name)
        return self._partitions[place]

    # ── The items of the record ──────────────────────────────────────────────────────────────────────────────────────

    def _show(self, partition: _Partition, report: ModelUsed) -> bool:
        """Record the state of a partition, and return True. If all slots are taken, return False."""
        if partition.failure is not None and partition.state == "failed":  # the failure has already been recorded
            return True
        if partition.slot is None and not self._enter(partition, report):
            return False
        assert partition.slot is not None
        rate = partition.rows / max(partition.seconds, 1e-6)
        values = {describe.ROWS: float(partition.rows), describe.ROWS_RATE: rate}
        self._events.append(events.Metrics(values, time=self._last, rank=partition.slot))
        if partition.state == "finished":
            self._leave(partition, "finished")
        elif partition.state == "failed":
            error = next(
                connection.error for connection in partition.connections.values() if connection.state == "failed"
            )
            partition.failure = Failure("exception", error)
            self._leave(partition, "again")
        return True

    def _enter(self, partition: _Partition, report: ModelUsed) -> bool:
        """Give the partition a slot in the record. Return whether a slot was free."""
        for slot, holder in enumerate(self._holders):
            if holder is not None and holder.state == "closed":
                self._leave(holder, "finished")  # Spark did not need the remaining rows of the partition
            if self._holders[slot] is None:
                self._holders[slot], partition.slot = partition, slot
                self._events += [
                    events.RankStarted(self._last, slot, report.host, report.pid),
                    events.ItemStarted(self._last, partition.item, partition.name, slot, partition.attempt),
                ]
                return True
        return False

    def _leave(self, partition: _Partition, ending: events.ItemEnding) -> None:
        """Record that the partition's attempt has ended, if its start was recorded."""
        if partition.slot is None:
            return
        self._holders[partition.slot] = None
        partition.slot = None
        self._end_item(partition, ending)

    def _end_item(self, partition: _Partition, ending: events.ItemEnding) -> None:
        partition.is_over = ending != "again"
        failure = partition.failure if ending in ("failed", "again") else None
        ended = events.ItemEnded(self._last, partition.item, ending, failure=failure, seconds=partition.seconds)
        self._events.append(ended)

    def _save(self) -> None:
        """Pass the new events on to the record, all at once."""
        news, self._events = self._events, []
        self.recorder.add(news)

    # ── The end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def stream(self) -> str:
        """Spark's id of the streaming query that uses the column; '' if none does, or if it is not known yet."""
        return self._serving.stream

    def is_active(self) -> bool:
        """Return whether a task is connected, or Spark is still running one of the stages."""
        if any(partition.state == "running" for partition in self._partitions.values()):
            return True
        with contextlib.suppress(Exception):  # py4j raises various errors if the session has been stopped
            return not self._first_item.keys().isdisjoint(self._cluster.active_stages())
        return False

    def has_ended(self) -> bool:
        """Return whether no task and no stage of Spark has been running for a while.

        Between two stages of a query, none may be running for a moment. Return False if Spark does not know its stages.
        """
        if not self._first_item or self._stage(max(self._first_item)) is None:
            return False
        is_busy = self.is_active()
        with contextlib.suppress(Exception):  # py4j raises various errors if the session has been stopped
            is_busy = is_busy or bool(self._cluster.active_stages())
        self._idle_since = 0.0 if is_busy else self._idle_since or time.monotonic()
        return not is_busy and time.monotonic() - self._idle_since > _IDLE_S

    def end(self) -> None:
        """Close the record. A task whose connection was closed counts as finished if its stage is complete."""
        infos = {stage: self._stage(stage) for stage in self._first_item}
        complete = {stage: not info or info.completed >= info.tasks for stage, info in infos.items()}
        for (stage, _), partition in self._partitions.items():
            if partition.is_over:
                continue
            if partition.slot is None:
                self._events.append(
                    events.ItemStarted(self._last, partition.item, partition.name, -1, partition.attempt)
                )
            partition.slot = None
            self._end_item(
                partition, "failed" if partition.state == "failed" else "finished" if complete[stage] else "stopped"
            )
        self._events += self._serving.end(self._last)
        outcome: events.Ending = "finished"
        if not all(complete.values()):
            failed = any(partition.failure and partition.state == "failed" for partition in self._partitions.values())
            outcome = "failed" if failed else "interrupted"
        elif self._partitions:  # partitions without rows do not count, since no model process saw them
            self._events.append(events.ItemsPlanned(self._last, self._at_once, total=len(self._partitions)))
        self._save()
        summary, seconds = self._summary(), self._last - self.recorder.record.started
        if outcome == "finished" and not (self.recorder.record.warm and seconds < QUICK_S):
            self.recorder.notice(summary)
        errors = [partition.failure.summary for partition in self._partitions.values() if partition.failure]
        message = describe.dotted(summary, *errors[:1]) if outcome == "failed" else summary
        self.recorder.close(outcome, message, at=self._last)

    def _summary(self) -> str:
        """Return a line about the whole query."""
        seconds = max(self._last - self.recorder.record.started, 1e-6)
        rows: Counter[str] = Counter()
        for (process, _), task in self._scored.items():
            rows[process.rpartition(":")[0]] += task.rows
        nulls = sum(task.nulls for task in self._scored.values())
        for host, scored, without in self._serving.rows():
            rows[host] += scored
            nulls += without
        changes = self._serving.changes
        scoring_s = max(self._last - (self._scoring or self.recorder.record.started), 1e-6)
        rates = ", ".join(f"{host} {count / scoring_s:,.0f}" for host, count in rows.items()) if len(rows) > 1 else ""
        rate = describe.items_rate(self.recorder.record, self._last) or f"{rows.total() / scoring_s:,.0f} rows/s"
        slowest = max(self._partitions.values(), key=lambda partition: partition.seconds, default=None)
        return describe.dotted(
            f"{describe.counted(rows.total(), 'row')} scored in {describe.duration(seconds)}",
            f"{rate} ({rates})" if rates else rate,
            f"{nulls:,} without a prediction" if nulls else "",
            f"model loaded in {', '.join(map(describe.duration, self._loaded.values()))}" if self._loaded else "",
            f"{describe.counted(changes, 'newer checkpoint')} used" if changes else "",
            f"slowest: {slowest.name} ({describe.duration(slowest.seconds)})" if slowest else "",
        )

    def _stage(self, stage: int) -> StageStatus | None:
        """Return Spark's information about a stage, or None if there is none."""
        with contextlib.suppress(Exception):  # py4j raises various errors if the session has been stopped
            return self._cluster.stage(stage)
        return None

    def _slots(self) -> int:
        with contextlib.suppress(Exception):  # py4j raises various errors if the session has been stopped
            return max(1, slots(self._cluster).likely)
        return 1


def _process(report: ModelUsed) -> str:
    return f"{report.host}:{report.pid}"


# ── Listening ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Watch:
    """Listens to the model processes of this process's queries."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._listeners: dict[str, Listener] = {}  # by the address on which they listen
        self._columns: dict[str, _Column] = {}
        self._with_model = defaultdict[str, set[str]](set)  # the processes that have loaded the model, by column
        self._queries: dict[str, dict[str | None, _Query]] = {}  # by column and by Spark's id (None during loading)
        self._connected: Counter[str] = Counter()  # how many model processes of each column are connected
        self._not_shown: list[Cluster] = []  # the user knows that queries of these are not shown
        self._changing = threading.Lock()
        self._closing = threading.Event()

    def order(self, column: _Column) -> dict[str, Any] | None:
        """Return what a column's model processes need in order to report.

        Return None if this process cannot listen, or if executors cannot connect to it.
        """
        if unreached := why_needed(column.cluster):
            if column.cluster not in self._not_shown:
                self._not_shown.append(column.cluster)
                tell(f"queries with predictions have no live view: {unreached}")
            return None
        host, bind_host, port = column.cluster.address()
        with self._changing:
            try:
                if bind_host not in self._listeners:
                    self._listeners[bind_host] = Listener(bind_host, port, self._secret, self._hear, most=_MOST)
            except OSError:
                return None
            key = secrets.token_hex(8)
            self._columns[key] = column
            port = self._listeners[bind_host].port
        return {"host": host, "port": port, "secret": self._secret.hex(), "column": key}

    def close(self) -> None:
        """Stop listening, and end the queries that have not ended."""
        self._closing.set()
        for listener in self._listeners.values():
            listener.close()
        for queries in self._queries.values():
            for query in queries.values():
                query.end()

    def _hear(self, connection: Connection) -> None:
        heard: ModelUsed | None = None
        gpus: dict[str, GpuUsed] = {}
        try:
            while True:
                report = connection.receive()
                if isinstance(report, GpuUsed):
                    gpus[report.address] = report
                    continue
                if not isinstance(report, ModelUsed) or report.column not in self._columns:
                    break
                with self._changing:
                    self._connected[report.column] += heard is None
                    heard = report
                    self._add(report, gpus)
        except ChannelClosed:
            pass
        except LaunchError as error:  # the record cannot be saved
            tell(f"the query is not shown: {error}")
        finally:
            if heard is not None:
                self._disconnect(heard)

    def _add(self, report: ModelUsed, gpus: Mapping[str, GpuUsed]) -> None:
        """Pass the report to the queries of its tasks. When a query begins, end the queries that are over."""
        queries = self._queries.setdefault(report.column, {})
        if not report.tasks:
            if not queries:
                stream = "" if report.checkpoint is None else report.checkpoint.stream
                if stream and not self._is_running(report.column, stream):
                    return  # the query has ended, but the process still takes up checkpoints
                queries[None] = self._begin(report)
            query = list(queries.values())[-1]
            query.add(report, [], gpus)
            if query.stream and not query.ends_with_stream:
                query.ends_with_stream = True
                threading.Thread(target=self._end_stream, args=(report.column, query), daemon=True).start()
        for name in dict.fromkeys(task.query for task in report.tasks):
            if None in queries:
                queries[name] = queries.pop(None)
            if name not in queries:
                self._end_over(queries)
                queries[name] = self._begin(report)
            queries[name].add(report, [task for task in report.tasks if task.query == name], gpus)

    def _begin(self, report: ModelUsed) -> _Query:
        query = _Query(self._columns[report.column], self._with_model[report.column], report)
        threading.Thread(target=self._follow, args=(report.column, query), daemon=True).start()
        return query

    def _follow(self, column: str, query: _Query) -> None:
        """Keep the view of a query up to date. End the query once Spark has: its model processes stay connected."""
        queries = self._queries[column]
        while not self._closing.wait(_LOOK_EVERY_S):
            with self._changing:
                if query not in queries.values():
                    return
                if query.has_ended():
                    queries.pop(next(name for name, other in queries.items() if other is query)).end()
                    return
                query.recorder.add([])

    def _is_running(self, column: str, stream: str) -> bool:
        """Return whether Spark is running a streaming query."""
        with contextlib.suppress(Exception):  # py4j raises various errors if the session has been stopped
            return any(query.id == stream for query in self._columns[column].cluster.session.streams.active)
        return False

    def _end_stream(self, column: str, query: _Query) -> None:
        """Wait until Spark has ended the streaming query, and end its record."""
        queries = self._queries[column]
        while self._is_running(column, query.stream) and not self._closing.wait(_LOOK_EVERY_S):
            with self._changing:
                if query not in queries.values():  # the model processes have exited
                    return
        self._closing.wait(_LAST_REPORT_S)
        with self._changing:
            for name in [name for name, other in queries.items() if other is query]:
                queries.pop(name).end()

    def _end_over(self, queries: dict[str | None, _Query]) -> None:
        for name in [name for name, query in queries.items() if not query.is_active()]:
            queries.pop(name).end()

    def _disconnect(self, report: ModelUsed) -> None:
        """Record that a model process has disconnected. After the last one, wait until the column's queries end."""
        queries = self._queries[report.column]
        with self._changing:
            self._connected[report.column] -= 1
            for query in queries.values():
                query.lose(report)
        while not self._closing.is_set():
            with self._changing:
                if not self._connected[report.column]:
                    self._end_over(queries)
                if self._connected[report.column] or not queries:
                    return
            self._closing.wait(_LOOK_EVERY_S)


_watch: _Watch | None = None


def watch(cluster: Cluster, title: str, code: str) -> dict[str, Any] | None:
    """Record and show the queries of a new column. Return what its model processes need in order to report.

    Return None if this process cannot listen, or cannot be reached. The queries are then not shown.
    """
    global _watch
    _watch = _watch or _Watch()
    return _watch.order(_Column(cluster, title, code))


@atexit.register
def close() -> None:
    """Stop listening. Queries of the existing columns are no longer shown."""
    global _watch
    if _watch is not None:
        _watch.close()
        _watch = None


def _forget() -> None:
    """Leave the listener to the parent of this forked process."""
    global _watch
    _watch = None


os.register_at_fork(after_in_child=_forget)
