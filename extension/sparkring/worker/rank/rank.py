"""A rank: runs the driver's requests in this process's main thread, in the namespace of `__main__`.

The variables that one request sets are still there in the next request. A cold gang gets only one request. While the
main thread is computing, another thread reads messages from the member.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import os
import pickle
import queue
import select
import signal
import sys
import threading
import time
import types
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.capture.notebook_state import RankState
from sparkring.compat import petastorm_warnings
from sparkring.history import stacks
from sparkring.runtime import going, report, resume_point, world
from sparkring.runtime.interrupts import held_back
from sparkring.wire import messages
from sparkring.wire.channel import ChannelClosed, Connection, ProtocolError
from sparkring.worker import keras_hooks
from sparkring.worker.member import process, streams
from sparkring.worker.member.network import free_port
from sparkring.worker.rank import (
    children,
    collectives,
    current_line,
    displays,
    exchange,
    imports,
    libraries,
    mlflow_autolog,
    preloads,
    sampler,
    shell,
    stdin,
    task_context,
)
from sparkring.worker.rank.cell import compile_cell
from sparkring.worker.rank.failures import as_failure
from sparkring.worker.rank.own_modules import OwnModules

if TYPE_CHECKING:
    from sparkring.worker.rank.batches import BatchWork
    from sparkring.worker.rank.items import ItemWork
    from sparkring.worker.rank.rendezvous import RendezvousStore
    from sparkring.worker.rank.sent_modules import SentModules

QueuedOrder = (
    messages.ModuleFiles
    | messages.LackingPackages
    | messages.Work
    | messages.Run
    | messages.EnterWorld
    | messages.SetEnvironment
    | messages.Leave
)
FLUSH_EVERY_S = 0.1
_FSDP = "torch.distributed.fsdp"


class RankPlace(NamedTuple):
    """What a rank gets to know when it enters the world: its address, and its share of the cores."""

    address: str
    threads: str


class CurrentRequest:
    """The request that a rank is running. The thread that receives messages reads it, too."""

    def __init__(self, order: messages.Run) -> None:
        self.order = order
        self.began = time.monotonic()
        self.code_runs = False  # whether the request's code is running, and not what comes before or after it
        self.called: object = None  # the function that the request calls
        self.loaded = False  # whether all values that were sent with the request have been loaded
        self.interrupt_waits = False  # whether an interrupt is waiting for an import to finish
        self.line = current_line.LineWatch()
        self.sampler = sampler.Sampler() if order.profile else None
        self.item_ends = False  # whether the driver has asked to end the item, for example to prune a trial


class MainModule:
    """A new `__main__` for cells and unpickled values. Its `namespace` keeps what the requests set."""

    def __init__(self) -> None:
        self.namespace = _fresh_main()
        self.cells = 0  # how many cells have run in it
        self._names_told: set[str] = set()

    def bind(self, **values: object) -> None:
        """Bind names that the driver knows of."""
        self.namespace.update(values)
        self._names_told = set(self.namespace)

    def changes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names that are new since the last call, and those that are gone."""
        names = set(map(str, self.namespace))  # a cell can put keys that are not strings into its globals()
        before, self._names_told = self._names_told, names
        return tuple(names - before), tuple(before - names)


class Rank:
    """Runs one request after another, and reports how each has ended.

    `home` is the connection to the member, which reads the rank's stack from `stack_fd`. `context` and `rows` are the
    fields of the Ticket, and `folder` is its `cleanup`.
    """

    def __init__(self, home: Connection, stack_fd: int, context: str, rows: int, folder: str) -> None:
        self.home = home
        self.folder = folder
        self.rows = rows
        self.pid = os.getpid()
        # With the default threshold of 700 new objects, garbage collection would account for a fifth of the time that
        # the import of a framework takes.
        gc.set_threshold(5_000, 10, 10)
        self.orders: queue.SimpleQueue[QueuedOrder] = queue.SimpleQueue()
        self.place: RankPlace | None = None
        self.environment: dict[str, str] = {}  # set by the member for all requests; overrides the notebook's variables
        self.notebook = RankState()
        self.ended: float | None = None  # when the code of the previous request ended, in seconds since the epoch
        self.own_modules = OwnModules()
        self.sent_modules: SentModules | None = None
        self.preloads = preloads.Preloads()
        self.work: ItemWork | None = None  # if the rank belongs to a pool: what it runs for each item
        self.stream: BatchWork | None = None  # if a stream uses the rank: what it runs for each micro-batch
        self.current: CurrentRequest | None = None
        self.stack_fd = stack_fd
        signal.signal(signal.SIGINT, _pass_over)
        streams.open_streams()
        stacks.install(stack_fd)
        shell.find_python_first()
        self.main = MainModule()
        report.connect(self.tell)
        displays.connect(self.tell)
        stdin.connect(self.tell, lambda: stdin.IN_ITEM if self.work is not None else "")
        petastorm_warnings.silence_when_imported()
        children.prepare_children(children.main_of_rank)
        libraries.prepare()
        task_context.provide(context, self.tell)
        threading.Thread(target=self.listen, name="sparkring-home", daemon=True).start()

    def tell(
        self,
        message: messages.Told
        | messages.Failed
        | messages.Importing
        | messages.TrainsAlone
        | messages.ModelWeights
        | messages.HostGoing
        | messages.SavePoint
        | messages.StoredKey
        | messages.Gather,
    ) -> None:
        """Send a small message to the driver, unless this is a process that the user has forked."""
        if os.getpid() == self.pid:
            with held_back():  # after an interrupt in the middle of a message, no other message could be sent
                self.home.send(message)
            if self.current is not None and self.current.item_ends and isinstance(message, messages.Metrics):
                raise KeyboardInterrupt  # again, since some libraries, such as scikit-learn, catch the first one

    def listen(self) -> None:
        """Receive messages, flush unfinished output, and repeat a waiting interrupt. Runs in a thread of its own."""
        flushing = threading.Lock()
        main_thread = threading.main_thread().ident or 0
        # If the process were forked while this thread holds a stream's lock, the child would hang at its first print.
        os.register_at_fork(before=flushing.acquire, after_in_parent=flushing.release, after_in_child=flushing.release)
        while True:
            current, pause_s = self.current, FLUSH_EVERY_S
            if current is not None and current.code_runs and current.sampler is not None:
                pause_s = current.sampler.pause_s(FLUSH_EVERY_S)
            readable, _, _ = select.select([self.home], [], [], pause_s)
            with flushing:
                streams.flush()
            current = self.current
            if current is not None and current.code_runs:
                if self.work is None and world.world().size <= current_line.MOST_RANKS:
                    current.line.look(main_thread, stacks.cell_name(self.main.cells))
                self.tell_if_alone(exchange.early, current)
                if current.sampler is not None:
                    current.sampler.look(main_thread, stacks.cell_name(self.main.cells))
            if current is not None and current.interrupt_waits:
                signal.pthread_kill(main_thread, signal.SIGINT)  # interrupt() checks again whether to wait
            if not readable:
                continue
            try:
                self.receive(main_thread)
                while self.home.pending:
                    self.receive(main_thread)
            except ChannelClosed:
                # The member is gone. On Linux, the kernel has killed this process by now; elsewhere, it kills itself.
                os.kill(os.getpid(), signal.SIGKILL)

    def receive(self, main_thread: int) -> None:
        order = self.home.receive()
        if not isinstance(order, messages.RankOrder):
            raise ProtocolError(f"{type(order).__name__} is not for a rank")
        if isinstance(order, messages.Release):  # not in the main thread, which may be waiting in the collective
            collectives.release(lambda: self.home.send(messages.CollectivesEnded()))
        elif isinstance(order, messages.Answer):
            stdin.take(order)
        elif isinstance(order, messages.StoredKey):
            self.rendezvous().take(order)
        elif isinstance(order, messages.SaveSoon):
            going.hear(order.number)
        elif isinstance(order, messages.GoNow):
            going.go()
        elif isinstance(order, messages.Gathered):
            task_context.take(order)
        elif isinstance(order, messages.EndItem):
            if self.current is not None:
                self.current.item_ends = True
            signal.pthread_kill(main_thread, signal.SIGINT)
        else:
            self.orders.put(order)

    def serve(self) -> int:
        """Run requests until a Leave message arrives, then return the exit code."""
        while True:
            match order := self.orders.get():
                case messages.ModuleFiles() | messages.LackingPackages():
                    self.take_modules(order)
                case messages.Work():
                    self.take_work(order)
                case messages.Run():
                    self.run(order)
                    self.current = None
                    stacks.install(self.stack_fd)  # the request may have replaced the handler
                case messages.EnterWorld():
                    self.enter(order)
                case messages.SetEnvironment():
                    self.environment.update(order.variables)
                case messages.Leave():
                    return 0
                case _:
                    messages.never(order)

    def take_modules(self, order: messages.ModuleFiles | messages.LackingPackages) -> None:
        if self.sent_modules is None:
            from sparkring.worker.rank.sent_modules import SentModules  # only ranks on other machines need it

            self.sent_modules = SentModules(self.folder)
        self.sent_modules.take(order)

    def take_work(self, order: messages.Work) -> None:
        """Prepare for items or micro-batches. Their modules are not imported at the top, since few ranks need them."""
        if isinstance(order.what, messages.StreamCode):
            from sparkring.worker.rank.batches import BatchWork

            self.main.cells += 1
            self.stream = BatchWork(order, order.what, self.main.namespace, self.main.cells)
        else:
            from sparkring.worker.rank.items import ItemWork

            self.work = ItemWork(order, order.what, self.main.namespace, stacks.cell_name(1))

    def enter(self, order: messages.EnterWorld) -> None:
        own = order.world
        world.enter(own)
        task_context.peers = order.peers
        os.environ.update(order.environment)
        # By default, each rank would start a thread for each core, and the ranks would slow each other down.
        self.place = RankPlace(order.address, threads=str(process.fair_share(own.local_size)))
        os.environ.setdefault("OMP_NUM_THREADS", self.place.threads)
        self.main.bind(rank=own.rank, size=own.size, local_rank=own.local_rank)
        from sparkring.compat import sparkdl

        sparkdl.install()

    def tell_if_alone(self, check: exchange.Check, current: CurrentRequest) -> None:
        """Tell the driver if `check` finds that the rank trains without the other ranks."""
        try:
            report = check(current.order, self.main.namespace, current.called)
        except Exception:  # the check reads the user's objects, and must not fail the run
            return
        if report is not None:
            self.tell(report)

    def run(self, request: messages.Run) -> None:
        """Run one request and report how it ended. sys.exit() with a code other than 0 counts as a failure."""
        current = self.current = CurrentRequest(request)
        exchange.begin()
        libraries.begin()
        task_context.begin()
        code: object = request.what
        if isinstance(code, messages.NextItem) and self.work is not None:
            number = self.main.cells = 1  # all items run the same cell
            request = current.order = self.work.order.completed(request)
        elif isinstance(code, messages.NextBatch) and self.stream is not None:
            number = self.stream.cell  # all batches run the same cell, too, but other cells may run between two batches
            request = current.order = self.stream.order.completed(request)
            code = self.stream.code
        else:
            number = self.main.cells = self.main.cells + 1
        try:
            self.prepare(request)
            try:
                # Set the handler for each request, since the previous cell may have set a handler of its own.
                signal.signal(signal.SIGINT, self.interrupt)
                try:
                    current.code_runs = True
                    value = self.compute(current)
                except SystemExit as end:
                    if exit_code(end) != 0:
                        raise
                    value = None
                except Exception as error:  # raised again: the user only looks at it first
                    if request.post_mortem and os.getpid() == self.pid:
                        from sparkring.worker.rank import debugger  # not at the top, since the import takes 10 ms

                        debugger.post_mortem(error)
                    raise
                finally:
                    current.code_runs = False
                    self.ended = time.time()
                    self.notebook.leave_run()
                    if current.sampler is not None and os.getpid() == self.pid:
                        current.sampler.finish()
                    if request.traces:
                        sys.modules["sparkring.worker.rank.torch_trace"].finish()
                    going.end()
                displays.finish()
                _finish_checkpoints()
            finally:
                signal.signal(signal.SIGINT, _pass_over)
                current.interrupt_waits = False
            if os.getpid() != self.pid:
                _leave_forked_child(0)
            self.tell_if_alone(exchange.alone, current)
            if (weights := exchange.weights([value, *self.main.namespace.values()])) is not None:
                self.tell(weights)
            self.report_value(value, current)
        except BaseException as error:  # whatever ends the user's code is the outcome, and is reported
            was_ended = current.item_ends  # read this first, since the driver may end the item at any time
            signal.signal(signal.SIGINT, _pass_over)  # again: an interrupt may have prevented the same call above
            if os.getpid() != self.pid:
                if isinstance(error, SystemExit):
                    _leave_forked_child(exit_code(error))
                sys.excepthook(type(error), error, error.__traceback__)
                _leave_forked_child(1)
            failure = as_failure(error, stacks.cell_name(number))
            if was_ended:  # the error says nothing about the user's code, even if it is not a KeyboardInterrupt
                failure = failure._replace(cause="interrupt")
            else:
                # If another rank's exit has caused the failure, one line is enough: the other rank's traceback matters.
                _print(f"{failure.summary}\n" if failure.cause == "echo" else failure.traceback)
            streams.flush()
            self.tell(messages.Failed(failure, self.news(current)))

    def interrupt(self, number: int, frame: types.FrameType | None) -> None:
        """Handle SIGINT while the user's code is running.

        If an installed package is being imported, the interrupt waits until the import has ended. Otherwise a package
        with native code, such as torch, would stay half imported: it could not be used, and could not be imported
        again. Each interrupt that waits is reported to the driver, which gives up on the rank if the import takes too
        long.
        """
        waits = os.getpid() == self.pid and imports.under_way(frame)
        if self.current is not None:
            self.current.interrupt_waits = waits
        if not waits:
            raise KeyboardInterrupt
        self.tell(messages.Importing())

    def prepare(self, request: messages.Run) -> None:
        """Set up checkpoints, displays, the notebook's state, modules, the environment and autolog for a request."""
        resume_point.enter(request.checkpoints)
        going.begin(self.tell, request.grace_s)
        displays.begin()
        shell.begin(raises=request.notebook.raises)
        self.notebook.apply(request.notebook)
        if self.sent_modules is not None:
            self.sent_modules.install()
        assert self.place is not None
        os.environ.setdefault("OMP_NUM_THREADS", self.place.threads)  # again: the notebook may have set and deleted it
        if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in request.environment:
            os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(self.rendezvous().port)
        os.environ.update({**request.environment, **self.environment})
        for name, value in request.defaults.items():
            os.environ.setdefault(name, value)
        self.preloads.begin()
        displays.draw_figures()
        keras_hooks.report_fits(request.autolog)
        report.stop_on_nan(request.stops_on_nan)
        mlflow_autolog.turn_on(request.notebook.autologging)
        if request.traces:
            from sparkring.worker.rank import torch_trace  # not at the top, since few requests need it

            torch_trace.begin()
        if self.ended is not None and self.work is None:
            for name in self.own_modules.reload_changed(self.ended):
                _print(f"sparkring: the module `{name}` has changed, so this rank has loaded it again.\n")

    def rendezvous(self) -> RendezvousStore:
        from sparkring.worker.rank import rendezvous  # imports an HTTP server, which only Horovod needs

        return rendezvous.store(self.tell)

    def news(self, current: CurrentRequest) -> messages.RankNews:
        memory_bytes = 0 if self.work is None else self.work.end()
        bound, gone = self.main.changes()
        assert self.place is not None
        port, seconds = free_port(self.place.address), time.monotonic() - current.began
        return messages.RankNews(bound, current.loaded, port, memory_bytes, self.imported(), seconds, gone)

    def imported(self) -> tuple[str, ...] | None:
        """Return the frameworks that later ranks may import ahead of time; None if they must not."""
        changed = self.preloads.changed()
        if not changed:
            return preloads.imported()
        if preloads.ahead:
            _print(
                f"sparkring: {', '.join(changed)} changed after {', '.join(preloads.ahead)} had been imported. "
                "This may be too late: set it in the notebook or with --env, or run the cell again.\n"
            )
        return None

    def compute(self, current: CurrentRequest) -> Any:
        from sparkring.capture import packing

        request, namespace = current.order, self.main.namespace
        payload, *buffers = request.parts
        match request.what:
            case messages.NextItem():
                assert self.work is not None
                if not request.what.measure:
                    return self.work.compute(request, request.what)
                from sparkring.worker.rank import usage  # not at the top, since most items are not measured

                return usage.measured(self.work, request, request.what, namespace)
            case messages.NextBatch():
                assert self.stream is not None
                return self.stream.compute(request, request.what)
            case messages.FunctionCall():
                function, kwargs = packing.unpack_call(payload, buffers)
                current.loaded, current.called = True, function
                return function(**kwargs)
        packing.unpack_names(payload, namespace, buffers)
        if request.barrier:
            from sparkring.worker.rank import barrier  # not at the top, since other cells do not need it

            namespace.update(barrier.names(self.rows))
            self.rows = -1  # the rows can be read only once
        current.loaded = True
        shell.begin_cell(request.what.scripts, namespace)
        return compile_cell(request.what.source, stacks.cell_name(self.main.cells)).run(namespace)

    def report_value(self, value: Any, current: CurrentRequest) -> None:
        """Send the request's value, and the values of the names to pull, to the driver.

        Each value is packed separately, so if one value cannot be packed, the others are sent. Of that value, what can
        be packed is sent.
        """
        request, namespace = current.order, self.main.namespace
        missing = tuple(name for name in request.pull if name not in namespace and request.pulled)
        wanted = {"": value, **{name: namespace[name] for name in request.pull if name in namespace}}
        values: list[messages.PackedValue] = []
        parts: list[messages.Buffer] = []
        for name, item in wanted.items():
            if name and not (request.pulled or "torch.distributed.tensor" in sys.modules or _FSDP in sys.modules):
                continue
            packed, pieces = _packed(name, item)
            if name and not request.pulled:
                if not packed.shards:
                    continue
                packed, pieces = packed._replace(parts=1), pieces[-1:]
            values.append(packed)
            parts += pieces
        streams.flush()
        self.home.send(
            messages.Done(tuple(values), missing, report.short_repr(value), self.news(current), tuple(parts))
        )


def _packed(name: str, value: Any) -> tuple[messages.PackedValue, list[messages.Buffer]]:
    """Pack a value, or what can be packed of it. Return its description and its parts."""
    if value is None:  # as most cells return: without the modules that pack values, the rank ends sooner
        return messages.PackedValue(name, "NoneType", 1, ""), [pickle.dumps(None, protocol=5)]
    import cloudpickle

    from sparkring.capture import returning
    from sparkring.capture.picklability import type_name

    packed = messages.PackedValue(name, type_name(value), 0, "")
    try:
        packing = returning.pack_value(value)
    except Exception as error:  # packing calls the objects' own code, which may raise anything
        packed = packed._replace(error=returning.in_words(error))
        rest = returning.salvaged(value)
        if rest is None:
            return packed, []
        packed = packed._replace(parts=len(rest.parts), is_state_dict=rest.is_state_dict, left_out=rest.left_out)
        return packed, list(rest.parts)
    pieces = [*packing.parts, *([cloudpickle.dumps(packing.shards, protocol=5)] if packing.shards else ())]
    return packed._replace(parts=len(pieces), without=packing.without, shards=bool(packing.shards)), pieces


def exit_code(end: SystemExit) -> int:
    """Return the exit code with which Python ends a process: 0 if `end` has no code, and 1 if it has a message."""
    if end.code is None:
        return 0
    return end.code if isinstance(end.code, int) else 1


def _finish_checkpoints() -> None:
    """Wait for the checkpoints that are being saved in the background. Raise an error if saving one of them fails."""
    background = sys.modules.get("sparkring.checkpointing.background")
    if background is not None:  # otherwise nothing was saved
        background.finish()


def _fresh_main() -> dict[str, Any]:
    """Make a new `__main__` for cells and unpickled values, and return its namespace."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    # The `exit` that Python's site module defines closes stdin, but the next cell of a warm gang may read stdin.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    module.__dict__.update(
        __builtins__=__builtins__,
        _exit_code=0,  # of the last shell command
        get_ipython=shell.get_ipython,
        display=displays.display,
        displayHTML=displays.display_html,
    )
    return module.__dict__


def _pass_over(number: int, frame: object) -> None:
    """Ignore SIGINT before and after the user's code. Programs that a cell starts do not inherit this handler."""


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)


def _leave_forked_child(code: int) -> None:
    """Exit this process, which the cell has forked. It is not a rank, and must not report that the cell has ended."""
    streams.flush()
    os._exit(code)
