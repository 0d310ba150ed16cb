"""Reports to the driver what a model process has scored, and how it uses its GPU, for the record of the query.

A separate thread talks to the driver, so predictions never wait for the driver. If the driver cannot be reached,
nothing is reported.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pyarrow as pa

from sparkring.wire.channel import dial
from sparkring.wire.messages import CheckpointUsed, ModelUsed, TaskScored
from sparkring.worker.member import gpus
from sparkring.worker.model.task import STREAM, TASK

EVERY_S, SHORTEST_S = 1.0, 0.1  # the time between two reports; the shorter one if no task is connected any more
QUIET_S = 1.5  # the connection to the driver is closed when no task has been connected for this long
_ERROR_CHARACTERS = 1_000


class Reporter:
    """Sends the changes in the model's tasks to the driver, in a thread. Without an `order`, it does nothing.

    The `order` holds the driver's address, the secret, and the key of the column. With `of_stream`, the process was
    started by a task of a stream: nothing is reported until another task uses the model. But if the model `follows` new
    checkpoints, the process reports which ones it uses, and stays connected to the driver.
    """

    def __init__(self, order: Mapping[str, Any] | None, *, of_stream: bool = False, follows: bool = False) -> None:
        self._order = order
        self._news = threading.Condition()
        self._reports_load = self._is_new = follows or not of_stream
        self._changed: dict[int, Task] = {}
        self._checkpoint: CheckpointUsed | None = None
        # How many known tasks are connected. Loading the model counts as one, and so does following checkpoints.
        self._open = 1 + follows
        self._load_s: float | None = None
        self._numbers = itertools.count()
        if order is not None:
            threading.Thread(target=self._report, args=(order,), name="sparkring-reporter", daemon=True).start()

    def loaded(self, seconds: float, step: int | None = None) -> None:
        """Record that the model has been loaded, or that loading it has failed.

        If it follows new checkpoints, `step` is the step of the first one.
        """
        with self._news:
            self._load_s = seconds
            if step is not None:
                self._checkpoint = CheckpointUsed(step, seconds, 0, 0, 0, "", "")
            self._is_new |= self._reports_load
            self._open -= 1
            self._news.notify_all()

    def swapped(self, step: int, seconds: float) -> None:
        """Record that the checkpoint of `step` is now used, and was loaded in this time."""
        self._note(lambda now: now._replace(step=step, load_s=seconds, earlier=now.earlier + 1, problem=""))

    def kept(self, problem: str) -> None:
        """Record why a newer checkpoint is not used."""
        self._note(lambda now: now._replace(problem=problem[:_ERROR_CHARACTERS]))

    def scored(self, rows: int, nulls: int) -> None:
        """Count rows of a task that is not known."""
        self._note(lambda now: now._replace(rows=now.rows + rows, nulls=now.nulls + nulls))

    def serves(self, stream: str) -> None:
        """Record that a streaming query uses the model. `stream` is Spark's id of the query."""
        if self._checkpoint is not None and self._checkpoint.stream != stream:
            self._note(lambda now: now._replace(stream=stream))

    def _note(self, change: Callable[[CheckpointUsed], CheckpointUsed]) -> None:
        with self._news:
            if self._checkpoint is not None:
                self._checkpoint = change(self._checkpoint)
                self._is_new = True
                self._news.notify_all()

    def task(self) -> Task:
        """Return the Task of a new connection."""
        return Task(self, next(self._numbers))

    def changed(self, task: Task, *, opened: int = 0) -> None:
        """Record that a known task has changed. `opened` is 1 if the task has just become known, and -1 if it ended."""
        with self._news:
            self._open += opened
            if self._order is not None:
                self._changed[task.number] = task
                self._is_new = True
            self._news.notify_all()

    def _report(self, order: Mapping[str, Any]) -> None:
        try:
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._is_new)
                with contextlib.closing(dial(order["host"], order["port"], bytes.fromhex(order["secret"]))) as driver:
                    self._tell(driver, order["column"])
        except OSError:  # the driver cannot be reached, or has exited
            with self._news:
                self._order = None
                self._changed.clear()

    def _tell(self, driver: Any, column: str) -> None:
        """Send reports until no task has been connected for a while."""
        meter = gpus.GpuMeter(gpus.visible())
        while True:
            with self._news:
                tasks = tuple(task.report() for task in self._changed.values())
                self._changed.clear()
                self._is_new = False
                load_s, checkpoint = self._load_s, self._checkpoint
            for gpu in meter.changes():
                driver.send(gpu)
            driver.send(ModelUsed(column, socket.gethostname(), os.getpid(), load_s, tasks, checkpoint))
            time.sleep(SHORTEST_S)
            with self._news:
                self._news.wait_for(lambda: not self._open, EVERY_S - SHORTEST_S)
                while not self._is_new:
                    if not self._news.wait(None if self._open else QUIET_S):
                        return


class Task:
    """The rows that have been scored over one connection.

    A request says which Spark task uses the connection. The tasks of a stream only say which query they belong to. Such
    a task is not known, and is not reported.
    """

    def __init__(self, reporter: Reporter, number: int) -> None:
        self.number = number
        self._reporter = reporter
        self._place: tuple[int, str, int, int] | None = None
        self._began = self._ended = 0.0
        self._rows = self._nulls = 0
        self._state: Literal["running", "finished", "failed", "closed"] = "running"
        self._error = ""

    def asks(self, request: pa.Schema) -> None:
        """Find out which Spark task the connection belongs to, from the schema of a request."""
        metadata = request.metadata or {}
        if STREAM in metadata:
            self._reporter.serves(metadata[STREAM].decode())
        about = metadata.get(TASK)
        if self._place is None and about is not None:
            task, query, stage, partition = json.loads(about)
            self._place, self._began = (task, query, stage, partition), time.monotonic()
            self._reporter.changed(self, opened=1)

    def scored(self, batch: pa.RecordBatch) -> None:
        nulls = max(column.null_count for column in batch.columns)
        self._rows += len(batch)
        self._nulls += nulls
        if self._place is not None:
            self._reporter.changed(self)
        else:
            self._reporter.scored(len(batch), nulls)

    def failed(self, error: str) -> None:
        self._state, self._error = "failed", error[:_ERROR_CHARACTERS]

    def finished(self) -> None:
        """Record that the task has sent all its rows."""
        if self._state == "running":
            self._state = "finished"

    def ended(self) -> None:
        """Record that the connection has ended."""
        if self._state == "running":
            self._state = "closed"
        self._ended = time.monotonic()
        if self._place is not None:
            self._reporter.changed(self, opened=-1)

    def report(self) -> TaskScored:
        assert self._place is not None
        state = self._state if self._ended else "running"
        seconds = (self._ended or time.monotonic()) - self._began
        return TaskScored(self.number, *self._place, self._rows, self._nulls, seconds, state, self._error)
