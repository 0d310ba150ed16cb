"""The model process: loads a model once, and scores the rows that the tasks of this machine, or of its GPU, send.

    task ──┐ Arrow                ┌─ a thread per connection: makes arrays, calls transform
    task ──┼─────────▶ socket ────┼─      …                      │ one at a time
    task ──┘                      └─      …                      ▼
                                                               model, with all threads

The process exits when no task has been connected for a while, or when the executor exits. Nothing that a task sends is
unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from sparkring.capture.packing import unpack_call
from sparkring.errors import DataError
from sparkring.executor.orders import ModelOrder
from sparkring.wire.messages import ModuleFiles
from sparkring.worker.model.reporter import Reporter, Task
from sparkring.worker.model.scorer import RowsError, error_text
from sparkring.worker.rank.sent_modules import SentModules

_LOOK_EVERY_S = 0.25
_PROBLEM_S = 5.0  # how long a process that could not load its model keeps running, to tell the tasks why
_KEPT = 3  # how many models without a task a machine keeps: the most recently used ones
# Arguments of the C library's mallopt(), as in malloc.h, and the sizes up to which freed memory is kept.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEPT_BYTES, _KEPT_BLOCK_BYTES = 512 << 20, 256 << 20
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # Spark's daemon sends SIGHUP when the executor exits


class _Server:
    """Serves connections until the process must exit. If the model could not be loaded, `problem` says why."""

    def __init__(self, scorer: Any, problem: str, token: bytes, folder: str, reporter: Reporter) -> None:
        self._scorer, self._problem, self._token, self._folder = scorer, problem, token, folder
        self._reporter = reporter
        self._open = 0
        self._changing = threading.Lock()
        self._last_used = time.monotonic()

    @property
    def unused_s(self) -> float:
        """For how many seconds no task has been connected; 0.0 if a task is connected."""
        return 0.0 if self._open else time.monotonic() - self._last_used

    def accept(self, listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        with self._changing:
            self._open += 1
        threading.Thread(target=self._serve, args=(Connection(accepted.detach()),), daemon=True).start()

    def _serve(self, connection: Any) -> None:
        task = self._reporter.task()
        knows_token = False  # another model process that starts only looks whether this one is listening
        try:
            with connection, contextlib.suppress(OSError, EOFError, AuthenticationError):
                deliver_challenge(connection, self._token)
                answer_challenge(connection, self._token)
                knows_token = True
                while request := connection.recv_bytes():
                    self._answer(connection, request, task)
                task.finished()
        finally:
            task.ended()
            with self._changing:
                self._open -= 1
                if knows_token:
                    self._last_used = time.monotonic()
            if knows_token:
                with contextlib.suppress(OSError):
                    os.utime(self._folder)  # _newer() compares these times

    def _answer(self, connection: Any, request: bytes, task: Task) -> None:
        failed: dict[str, Any] = {"error": self._problem, "row": None, "of_rows": False} if self._problem else {}
        try:
            rows = pa.ipc.open_stream(request).read_all().combine_chunks()
            task.asks(rows.schema)
            if not failed:
                predictions = self._scorer.score(rows)
                task.scored(predictions)
        except RowsError as error:
            failed = {"error": str(error), "row": error.row, "of_rows": True}
        except DataError as error:  # a file cannot be read
            failed = {"error": str(error), "row": None, "of_rows": False}
        if failed:
            task.failed(failed["error"])
        connection.send_bytes(json.dumps(failed).encode())
        if failed:
            return
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, predictions.schema) as writer:
            writer.write_batch(predictions)
        connection.send_bytes(sink.getvalue())


def main(order: ModelOrder) -> NoReturn:
    """Load the model, and serve until the process must exit."""
    code = 0
    try:
        _serve(order)
        _ignore_signals()
    except _ServerEnded:
        pass
    except BaseException:
        traceback.print_exc()
        code = 1
    if not code:  # otherwise, the task needs the log in the folder
        shutil.rmtree(order.folder, ignore_errors=True)
    sys.stderr.flush()
    os._exit(code)  # threads of the model's framework must not delay the exit


def _serve(order: ModelOrder) -> None:
    """Load the model, and serve until the process is no longer needed.

    If no task has used the process for a while, this returns with the folder locked, so that no task can start another
    process in it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the notebook is for its kernel
    for number in _SIGNALS:
        signal.signal(number, _end)
    folder, lock = order.folder, order.lock
    _set_malloc(_ARENA_MAX, 1)  # threads then share the memory that is kept
    _remove_dead(folder)
    follows = order.follows
    reporter = Reporter(order.report, of_stream=order.of_stream, follows=follows)
    with open(order.model, "rb") as file:
        modules, payload, *buffers = pickle.load(file)[1:]  # the first item is sparkring's archive
    scorer: Any = None
    problem, settings, began = "", dict[str, Any](), time.monotonic()
    try:
        if modules is not None:
            sent = SentModules(folder)
            sent.take(ModuleFiles(*modules))
            sent.install()
        function, settings = unpack_call(payload, buffers)
        scorer = function(**settings)
    except Exception as error:  # loading a model runs the user's code
        place = ", GPU ".join((socket.gethostname(), *order.gpus))
        problem = f"the model could not be loaded on {place}: {error_text(error)}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, "model"))  # a copy that a task has made for this process
    _keep_freed_memory()
    load_s = time.monotonic() - began
    reporter.loaded(load_s, settings["model"].step if follows and not problem else None)
    Path(folder, "loaded").write_text(f"{load_s:.3f}")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(folder, "socket"))
    listener.listen(128)
    fcntl.flock(lock, fcntl.LOCK_UN)
    server = _Server(scorer, problem, bytes.fromhex(order.token), folder, reporter)
    if follows and not problem:
        settings["model"].follow(scorer.use, reporter)
    idle_s = min(order.idle_s, _PROBLEM_S) if problem else order.idle_s
    while _is_alive(order.watch):
        if select.select([listener], [], [], _LOOK_EVERY_S)[0]:
            server.accept(listener)
            continue
        unused_s = server.unused_s
        if (unused_s > idle_s or (unused_s and _newer(folder) >= _KEPT)) and _locked(lock):
            break


def _keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next batch, instead of returning it to the system.

    Otherwise, each large array of each batch is new memory, which the system must map and fill with zeros page by page.
    In models with convolutions, this would take a quarter of the computing time. Memory that was freed while the model
    was loaded is returned.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    _set_malloc(_MMAP_THRESHOLD, _KEPT_BLOCK_BYTES)
    _set_malloc(_TRIM_THRESHOLD, _KEPT_BYTES)


def _set_malloc(parameter: int, value: int) -> None:
    """Set a parameter of malloc(), if this C library has it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(parameter, value)


def _others(folder: str) -> Iterator[Path]:
    """Yield the folders of this user's other model processes on this machine."""
    for other in Path(folder).parent.glob("sparkring-model-*"):
        with contextlib.suppress(OSError):
            if str(other) != folder and other.lstat().st_uid == os.geteuid():
                yield other


def _newer(folder: str) -> int:
    """Return how many other models were used more recently than this process. A model may have several processes."""
    used, newer = os.stat(folder).st_mtime, set()
    for other in _others(folder):
        with contextlib.suppress(FileNotFoundError):
            if other.stat().st_mtime > used:
                newer.add(_key(other))
    return len(newer - {_key(Path(folder))})


def _key(folder: Path) -> str:
    return folder.name.split("-")[2]  # worker/model/task.py makes the name


def _remove_dead(folder: str) -> None:
    """Remove the folders of model processes that were killed."""
    for other in _others(folder):
        with contextlib.suppress(OSError):
            lock = os.open(other / "lock", os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with socket.socket(socket.AF_UNIX) as dialled:
                    if dialled.connect_ex(str(other / "socket")) in (errno.ECONNREFUSED, errno.ENOENT):
                        shutil.rmtree(other, ignore_errors=True)
            finally:
                os.close(lock)


class _ServerEnded(BaseException):
    """A signal has told the process to exit."""


def _end(*_: object) -> NoReturn:
    _ignore_signals()
    raise _ServerEnded


def _ignore_signals() -> None:
    """Ignore further signals while the process is exiting, because Spark's daemon sends SIGHUP twice."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _locked(lock: int) -> bool:
    """Lock the folder, unless a task has locked it in order to connect."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
