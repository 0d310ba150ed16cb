"""A rank: runs what the driver sends, in this process's main thread and its `__main__`.

A thread listens to the member meanwhile, so that the process can be told things while it computes.
The loop takes one request after another, and what they bind stays; a run of one cell is a gang that gets one.
"""

from __future__ import annotations

import ast
import builtins
import gc
import os
import queue
import select
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from sparkring.capture.notebook_state import NotebookState, RankState
from sparkring.capture.source_lines import keep_lines
from sparkring.data.petastorm import quiet
from sparkring.history import stacks
from sparkring.runtime import report, resume_point, world
from sparkring.runtime.interrupts import held_back
from sparkring.wire.channel import ChannelClosed, Connection, Frame
from sparkring.worker.member import process
from sparkring.worker.member.network import free_port
from sparkring.worker.rank import children, collectives, displays, libraries
from sparkring.worker.rank.failures import as_failure

FLUSH_EVERY_S = 0.1


def main(home: Connection, stack_fd: int, context: str = "", rows: int = -1) -> int:
    """Run requests until told to leave; returns the exit code. `context` and `rows` as in the Ticket."""
    return Rank(home, stack_fd, context, rows).serve()


class Rank:
    """The rank's side of the protocol: `world`, `environment`, `run`, `release`, `leave` come in.

    `done` and `failed` go out, and meanwhile what the cell tells.
    """

    def __init__(self, home: Connection, stack_fd: int, context: str, rows: int) -> None:
        self.home = home
        self.task = (context, rows)
        self.pid = os.getpid()
        # Importing a framework makes objects that stay: with Python's 700, a fifth of it goes on collections.
        gc.set_threshold(5_000, 10, 10)
        self.requests: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.address = ""
        self.environment: dict[str, str] = {}  # the member's, for all requests, unless the notebook has others
        self.notebook = RankState()
        self.cells = 0
        signal.signal(signal.SIGINT, _pass_over)
        _open_streams()
        stacks.install(stack_fd)
        self.namespace = _fresh_main()
        self.names_told: set[str] = set()
        self.loaded = False  # whether the names of this request have all arrived
        report.connect(self.tell)
        displays.connect(self.show)
        quiet.silence_when_imported()
        children.prepare_children(children.main_of_rank)
        libraries.prepare()
        threading.Thread(target=self.listen, name="sparkring-home", daemon=True).start()

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Send something small to the driver, unless this is a process that the user forked.

        An interrupt in the middle of it would leave half a frame, behind which no other can be sent.
        """
        if os.getpid() == self.pid:
            with held_back():
                self.home.send(kind, fields)

    def show(self, fields: dict[str, Any], data: bytes) -> None:
        """Send a display to the notebook, like tell()."""
        if os.getpid() == self.pid:
            with held_back():
                self.home.send("display", fields, [data])

    def listen(self) -> None:
        """In a thread: take frames in, and see to it that a line without its end is shown in time."""
        flushing = threading.Lock()
        # A fork must not happen while this thread is inside a stream's lock: the child would
        # inherit it locked and hang at its first print.
        os.register_at_fork(before=flushing.acquire, after_in_parent=flushing.release, after_in_child=flushing.release)
        while True:
            readable, _, _ = select.select([self.home], [], [], FLUSH_EVERY_S)
            with flushing:
                _flush()
            if not readable:
                continue
            try:
                frame = self.home.receive()
                if frame.kind == "release":  # the main thread is the one that waits
                    collectives.release()
                else:
                    self.requests.put(frame)
            except ChannelClosed:
                # The member is gone. On Linux the kernel has killed us by now; elsewhere we do it.
                os.kill(os.getpid(), signal.SIGKILL)

    def serve(self) -> int:
        while True:
            frame = self.requests.get()
            if frame.kind == "leave":
                # The interpreter would end with a collection over all that a framework has made: most of a
                # second, for memory that the system takes back anyway.
                gc.freeze()
                return 0
            if frame.kind == "world":
                self.enter(frame.fields)
            elif frame.kind == "environment":
                self.environment.update(frame.fields["variables"])
            elif frame.kind == "run":
                self.run(frame)

    def enter(self, fields: dict[str, Any]) -> None:
        seat = world.World(**fields["world"])
        seat = seat._replace(gpus=tuple(seat.gpus))  # in JSON it was a list
        world.enter(seat)
        self.address = fields["address"]
        os.environ.update(fields["environment"])
        # Ranks that each start a thread per core spin against one another, and all come to a crawl.
        fair_share = max(1, process.cores() // seat.local_size)
        os.environ.setdefault("OMP_NUM_THREADS", str(fair_share))
        self.namespace.update(rank=seat.rank, size=seat.size, local_rank=seat.local_rank)
        self.names_told = set(self.namespace)
        from sparkring.compat import sparkdl

        sparkdl.install()

    def run(self, frame: Frame) -> None:
        """Run one request and report how it ended; an interrupt is reported as an error, as is an exit with a code."""
        fields = frame.fields
        self.cells += 1
        self.loaded = False
        try:
            self.prepare(fields)
            try:
                # Anew for each request: the cell before may have set its own.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                try:
                    value = self.compute(fields, frame)
                except SystemExit as end:
                    if exit_code(end) != 0:
                        raise
                    value = None
                finally:
                    self.notebook.leave_run()
                displays.finish()
                _finish_checkpoints()
            finally:
                signal.signal(signal.SIGINT, _pass_over)
            if os.getpid() != self.pid:
                _leave_forked_child(0)
            self.report_value(value, fields["pull"])
        except BaseException as error:  # whatever ends the user's code is the outcome, and is told
            signal.signal(signal.SIGINT, _pass_over)  # it may have come in the middle of the line above
            if os.getpid() != self.pid:
                if isinstance(error, SystemExit):
                    _leave_forked_child(exit_code(error))
                sys.excepthook(type(error), error, error.__traceback__)
                _leave_forked_child(1)
            failure = as_failure(error, stacks.cell_name(self.cells))
            # That another rank has gone is one line's worth: what counts is the other one's traceback.
            _print(f"{failure['summary']}\n" if failure["cause"] == "echo" else failure["traceback"])
            _flush()
            self.tell("failed", {"failure": failure, **self.news()})

    def prepare(self, fields: dict[str, Any]) -> None:
        """Set up what a request asks for: checkpoints, displays, the notebook's state, environment, autolog."""
        resume_point.enter(resume_point.Here(**fields["checkpoints"]))
        displays.begin()
        self.notebook.apply(NotebookState.from_json(fields["notebook"]))
        os.environ.update({**fields["environment"], **self.environment})
        for name, value in fields["defaults"].items():
            os.environ.setdefault(name, value)
        displays.draw_figures()
        if fields["autolog"]:
            from sparkring.worker import keras_hooks

            keras_hooks.install()

    def news(self) -> dict[str, Any]:
        """What the gang needs for the next request: the names that are there now, and a port that is free."""
        bound = [name for name in self.namespace if name not in self.names_told]
        self.names_told.update(bound)
        return {"names_bound": bound, "loaded": self.loaded, "port": free_port(self.address)}

    def compute(self, fields: dict[str, Any], frame: Frame) -> Any:
        from sparkring.capture import packing

        payload, *buffers = frame.parts
        if fields["what"] == "call":
            function, kwargs = packing.unpack_call(payload, buffers)
            return function(**kwargs)
        if fields["scripts"]:
            from sparkring.capture.scripts import Script
            from sparkring.worker.rank import shell

            shell.scripts.update({each["line"]: Script(**each) for each in fields["scripts"]})
        packing.unpack_names(payload, self.namespace, buffers)
        if fields["barrier"]:
            from sparkring.worker.rank import barrier  # it imports pyspark

            self.namespace.update(barrier.names(*self.task))
            self.task = (self.task[0], -1)  # the rows are there once
        self.loaded = True
        return run_cell(fields["source"], self.namespace, stacks.cell_name(self.cells))

    def report_value(self, value: Any, pull: list[str]) -> None:
        """Send the value home, and the names to pull; each by itself, so that one cannot spoil the rest."""
        import cloudpickle

        missing = [name for name in pull if name not in self.namespace]
        wanted = {"": value, **{name: self.namespace[name] for name in pull if name in self.namespace}}
        names: list[dict[str, Any]] = []
        parts: list[Any] = []
        for name, item in wanted.items():
            buffers: list[Any] = []
            told: dict[str, Any] = {"name": name, "type": type_name(item), "parts": 0, "error": ""}
            try:
                packed = cloudpickle.dumps(item, protocol=5, buffer_callback=buffers.append)
                pieces = [packed, *(buffer.raw() for buffer in buffers)]
                told["parts"] = len(pieces)
                parts += pieces
            except Exception as error:  # any object may refuse in its own way
                told["error"] = f"{type(error).__name__}: {error}"
            names.append(told)
        _flush()
        self.home.send("done", {"names": names, "missing": missing, "repr": short_repr(value), **self.news()}, parts)


def run_cell(source: str, namespace: dict[str, Any], filename: str) -> Any:
    """Run a cell's code in `namespace`; returns the value of its last expression, or None.

    Functions keep working after the cell, and tracebacks show its lines. `await` works at the top level.
    """
    keep_lines(filename, source)
    tree = ast.parse(source, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    _execute(compile(tree, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    expression = ast.Expression(last.value)
    return _execute(compile(expression, filename, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)


def _execute(code: types.CodeType, namespace: dict[str, Any]) -> Any:
    value = eval(code, namespace)
    if code.co_flags & 0x80:  # CO_COROUTINE: there was an await outside any function
        import asyncio  # 30 ms, and most cells do without

        async def wait() -> Any:
            return await value

        return asyncio.run(wait())
    return value


def exit_code(end: SystemExit) -> int:
    """The code with which Python ends a process on a SystemExit: 0 if it has none, 1 if it has a message."""
    if end.code is None:
        return 0
    return end.code if isinstance(end.code, int) else 1


def type_name(value: object) -> str:
    """A value's type as people write it: `dict`, `numpy.ndarray`."""
    kind = type(value)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


def short_repr(value: object, most: int = 200) -> str:
    """A value's repr, cut to `most` characters; empty for None. A repr that raises is told as such."""
    if value is None:
        return ""
    try:
        import reprlib

        short = reprlib.Repr()
        short.maxother = short.maxstring = most
        text = " ".join(short.repr(value).split())
    except Exception as error:  # the user's own __repr__
        return f"<{type_name(value)}; its repr raised {type(error).__name__}>"
    return text if len(text) <= most else text[: most - 1] + "…"


def _finish_checkpoints() -> None:
    """Wait for what is still being saved: a cell whose last checkpoint is lost has not ended well."""
    store = sys.modules.get("sparkring.checkpointing.store")
    if store is not None:  # else the cell saves none, and it is not worth the import
        store.finish()


def _fresh_main() -> dict[str, Any]:
    """A new, empty `__main__`: the cell's namespace, where what is pickled by value finds its home."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    # The `exit` that Python's site module defines closes stdin, which the next cell of a warm gang may read.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    from sparkring.worker.rank.shell import get_ipython

    module.__dict__.update(
        __builtins__=__builtins__,
        get_ipython=get_ipython,
        display=displays.display,
        displayHTML=displays.display_html,
    )
    return module.__dict__


def _open_streams() -> None:
    """Line by line, so that nothing is lost in a buffer when the process dies; UTF-8 whatever the locale."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _pass_over(number: int, frame: object) -> None:
    """SIGINT before and after the user's code. Not SIG_IGN: processes that are started would inherit that."""


def _quietly(action: Callable[[], object]) -> None:
    try:
        action()
    except (OSError, ValueError):
        pass  # the user closed the stream


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            _quietly(stream.flush)


def _print(text: str) -> None:
    if sys.stderr is not None:
        _quietly(lambda: sys.stderr.write(text))


def _leave_forked_child(code: int) -> None:
    """End a process that the cell forked and that came out at the cell's end: it is no rank."""
    _flush()
    os._exit(code)
