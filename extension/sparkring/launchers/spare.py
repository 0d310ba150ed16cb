"""Keeps one spare process, which has imported the modules that earlier ranks imported, and has it fork members.

A spare process is started when all ranks on this machine have exited. Before the first launch, it is started when the
notebook has imported frameworks that ranks may need, or for the launch if it is known what its ranks will import. It
serves a launch only if everything that an import may depend on (see Setting) is still the same. All other launches
start new processes, and a spare process that does not fit the last launch is replaced after that launch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sparkring.executor.boot import HERE, command
from sparkring.executor.orders import SPARE_READY, SpareOrder, Ticket, encode
from sparkring.launchers.base import Code
from sparkring.launchers.forks import ForkedMember, fork
from sparkring.worker.member import gpus, process
from sparkring.worker.rank.preloads import FRAMEWORKS

REST_S = 1.0  # a spare process is started this long after the last rank has exited
IMPORT_S = 60.0  # a launch waits at most this long for the imports of a spare process
IDLE_S = 600.0  # a spare process exits when it has not been used for this long
LEAST_BYTES = 2_000_000_000  # a spare process needs this much available memory to start, and half of that to stay
ANSWER_S = 2.0  # a fork takes milliseconds; a spare process that has not answered after this time is given up

# Code that contains one of these may change the environment before it imports a framework, so it needs new processes.
# Each pattern begins with several letters, which makes the search in large values fast.
_CHANGES_ENVIRONMENT = [re.compile(sign) for sign in (rb"environb?(?!\w)", rb"putenv(?!\w)", b"'env'", b"'set_env'")]


class Setting(NamedTuple):
    """What the imports of a process may depend on.

    `inherited` contains the limits, cores and priority that a process inherits. `installed` lists the folders of
    installed packages with their modification times, which change whenever pip changes a package.
    """

    python: str
    environment: Mapping[str, str]
    inherited: tuple[object, ...]
    installed: tuple[tuple[str, int], ...]


def setting_of(environment: Mapping[str, str], size: int) -> Setting | None:
    """Return the Setting of `size` members that are started now with this environment; None if no spares are used."""
    if not process.LINUX or os.environ.get("SPARKRING_SPARE") == "0":
        return None
    limits = tuple(resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_"))
    inherited = (limits, os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0))
    folders = [path for path in map(str, sys.path) if path.endswith(("site-packages", "dist-packages"))]
    installed = tuple((path, os.stat(path).st_mtime_ns) for path in folders if os.path.isdir(path))
    # Ranks set this variable before they import anything.
    threads = {"OMP_NUM_THREADS": str(process.fair_share(size)), **environment}
    return Setting(sys.executable, threads, inherited, installed)


class Wanted(NamedTuple):
    """What a spare process should import, and in which setting."""

    setting: Setting
    modules: tuple[str, ...]

    def covers(self, other: Wanted) -> bool:
        """Return whether a spare process for this object also has everything that `other` wants."""
        return self.setting == other.setting and set(self.modules) >= set(other.modules)

    def fits(self, code: Code) -> bool:
        """Return whether ranks may import the modules before they run the code."""
        return _may_import_first(self.modules, code)


def wanted_by(code: Code) -> tuple[str, ...]:
    """Return the frameworks that ranks will import first, if they may import them before they run the code."""
    modules = tuple(dict.fromkeys(name for name in code.imports if name in FRAMEWORKS))
    return modules if _may_import_first(modules, code) else ()


def _may_import_first(modules: Sequence[str], code: Code) -> bool:
    """Return whether ranks may import the modules before they run the code.

    The answer is no if the code could change the environment before it imports a module. It is also no if the code
    names a framework that is not among the modules, because this framework would then share a process with frameworks
    that the code might never use. But code that imports all of the modules itself may name others, too.
    """
    known, uses = _packages(modules), _packages(code.imports)
    others = set() if known <= uses else _packages(FRAMEWORKS) - known
    signs = [*_CHANGES_ENVIRONMENT, *(re.compile(name.encode()) for name in others)]
    return not any(sign.search(text) for text in code.texts for sign in signs)


def _packages(modules: Iterable[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


class SpareProcess:
    """A spare process, as the driver sees it. `is_awaited` says whether a launch is waiting for it.

    When it is ready, `imported` are the frameworks that it has: also those that others have imported.
    """

    def __init__(self, wanted: Wanted, *, is_awaited: bool = False) -> None:
        self.wanted = wanted
        self.imported: tuple[str, ...] = ()
        self._awaited_until = time.monotonic() + IMPORT_S if is_awaited else 0.0
        self._ready = False
        self._lock = threading.Lock()  # a request and its answer belong together
        # Packets keep their boundaries, so each ticket arrives together with its own descriptors. A pair has no address
        # to which another process could connect.
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                command(wanted.setting.python, "sparkring.worker.member.spare"),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=dict(wanted.setting.environment),
                start_new_session=True,  # Ctrl-C in the terminal of the notebook must not reach it
            )
        self._channel.settimeout(ANSWER_S)
        with contextlib.suppress(OSError):  # it has already exited
            order = SpareOrder(wanted.modules, is_awaited, IDLE_S, LEAST_BYTES // 2)
            self._channel.send(encode(order, last=[HERE]))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def is_ready(self) -> bool:
        """Return whether the process has imported its modules and can fork members."""
        with self._lock:
            if not self._ready:
                poll = select.poll()
                poll.register(self._channel, select.POLLIN)
                if poll.poll(0):
                    with contextlib.suppress(OSError):
                        answer = self._channel.recv(1 << 16)
                        self._ready = answer.startswith(SPARE_READY)
                        self.imported = tuple(answer.removeprefix(SPARE_READY).decode().split())
        return self._ready and not self.ended

    def serves(self, wanted: Wanted) -> bool:
        """Return whether the process is ready, and has imported everything that `wanted` asks for."""
        return self.is_ready() and self.wanted._replace(modules=(*self.wanted.modules, *self.imported)).covers(wanted)

    def is_importing(self) -> bool:
        """Return whether a launch should wait until the process has imported its modules."""
        return time.monotonic() < self._awaited_until and not (self.is_ready() or self.ended)

    def await_imports(self) -> None:
        """Have a launch wait for the imports that the process does in the background, at the launch's own priority."""
        self._awaited_until = time.monotonic() + IMPORT_S
        with contextlib.suppress(OSError):  # it has exited, or its priority may not be raised
            os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0))

    def has_refused(self) -> bool:
        """Return whether the process has exited because an import failed, or because it would not be safe to fork."""
        return not self.is_ready() and not self._ready and self.ended

    def fork(self, ticket: Ticket) -> ForkedMember | None:
        """Have the process fork a member; return None if that fails."""
        with self._lock, contextlib.suppress(OSError):  # it has exited, or does not answer in time
            return fork(self._channel, encode(ticket))
        self._process.kill()  # so that the next call fails at once
        return None

    def close(self) -> None:
        """Have the process exit once its members have exited. A launch that waits for it then starts new processes."""
        self._awaited_until = 0.0
        with self._lock:
            self._channel.close()
        if not self._ready:  # it reads the socket only after its imports, and has forked no members yet
            self._process.kill()

    def forget(self) -> None:
        """Release what belongs to the driver. Called in a process that the user has forked from the driver."""
        self._channel.close()
        self._process.returncode = 0  # it is not a child of this process


class Spares:
    """Decides when there is a spare process, and whether it serves a launch.

    begin() and end() enclose each launch of ranks whose code is known. A spare process for the next launch is started
    only while no launch is under way. If the process is still importing when a launch begins, the launch waits for it
    if its ranks would import the same; otherwise, the process is ended, because it would slow the ranks down. If a
    launch finds no spare process, and it is known what its ranks will import first, a spare process is started for the
    launch, and the launch waits for it. So the ranks of a first launch, and all processes of a pool, need only one
    import.
    """

    def __init__(self) -> None:
        self.spare: SpareProcess | None = None
        self._lock = threading.Lock()
        self._launches = 0  # how many launches have begun and not ended
        self._wanted: Wanted | None = None
        self._refused: Wanted | None = None  # what a spare process has refused, and would refuse again
        self._unfit = False  # whether the imports of a launch under way must not be done ahead of time
        self._changes = False  # whether _unfit was true for the last launch; if so, it probably will be for the next
        self._timer: threading.Timer | None = None
        self._leaving: list[SpareProcess] = []

    def begin(self, setting: Setting | None, code: Code) -> SpareProcess | None:
        """Return the spare process that will fork the members of a launch; None if the launch needs new processes.

        `setting` is None if no spare processes are used. `code` is what the ranks will run.
        """
        with self._lock:
            self._launches += 1
            self._cancel()
            spare, modules = self.spare, wanted_by(code)
            if spare is not None:
                if modules and not spare.is_ready() and set(spare.wanted.modules) >= set(modules):
                    spare.await_imports()
                if spare.wanted.setting != setting or not (spare.is_ready() or spare.is_importing()):
                    self._dismiss()
            if self.spare is not None and self.spare.wanted.fits(code):
                return self.spare
            if setting is None or not modules or self._changes or self._launches > 1:
                return None
            self._dismiss()
            self._open(Wanted(setting, modules), is_awaited=True)
            return self.spare

    def end(self) -> None:
        """Record that a launch has ended."""
        with self._lock:
            self._launches -= 1
            self._settle()

    def note_imports(self, setting: Setting | None, modules: tuple[str, ...] | None) -> None:
        """Record the modules that the ranks of a launch imported; None if later ranks must not get any in advance."""
        with self._lock:
            self._unfit |= modules is None or setting is None
            if modules and setting is not None:
                self._wanted = Wanted(setting, modules)
            self._settle()

    def expect(self, setting: Setting | None, modules: tuple[str, ...]) -> None:
        """Have a spare process started that imports these modules, because ranks of the next launch may need them."""
        with self._lock:
            expected = None if setting is None else Wanted(setting, modules)
            if expected is not None and not (self._wanted is not None and self._wanted.covers(expected)):
                self._wanted = expected
                self._settle()

    def stop(self) -> None:
        """End the spare process, if there is one."""
        with self._lock:
            self._wanted = None
            self._cancel()
            self._dismiss()
            atexit.unregister(self.stop)

    def leaving(self) -> bool:
        """Return whether there are spare processes that were told to exit, but have not exited yet."""
        with self._lock:
            self._leaving = [source for source in self._leaving if not source.ended]
            return bool(self._leaving)

    def forget(self) -> None:
        """Release what belongs to the driver. Called in a process that the user has forked from the driver."""
        for source in (self.spare, *self._leaving):
            if source is not None:
                source.forget()
        self.spare, self._leaving, self._timer = None, [], None
        self._launches = 0
        self._lock = threading.Lock()

    def _settle(self) -> None:
        """If no launch is under way, end a spare process that is not wanted, and have a wanted one started."""
        self._leaving = [source for source in self._leaving if not source.ended]
        if self._launches:
            return
        if self._unfit:
            self._wanted, self._unfit, self._changes = None, False, True
        elif self._wanted is not None:
            self._changes = False
        spare, wanted = self.spare, self._wanted
        if spare is not None and not (wanted is not None and spare.serves(wanted)):
            self._dismiss()
        if wanted is not None and self.spare is None and self._timer is None:
            self._timer = threading.Timer(REST_S, self._start)
            self._timer.name = "sparkring-spare"
            self._timer.daemon = True
            self._timer.start()

    def _start(self) -> None:
        """Start a spare process, if there is still no launch. Runs in the timer's thread."""
        with self._lock:
            self._timer = None
            wanted = self._wanted
            if not self._launches and self.spare is None and wanted is not None:
                self._open(wanted)

    def _open(self, wanted: Wanted, *, is_awaited: bool = False) -> None:
        """Start a spare process, unless this is impossible or an earlier one has refused to import these modules."""
        if _is_possible() and (self._refused is None or not self._refused.covers(wanted)):
            with contextlib.suppress(OSError):  # no process can be started now
                self.spare = SpareProcess(wanted, is_awaited=is_awaited)
                atexit.register(self.stop)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _dismiss(self) -> None:
        if self.spare is not None:
            if self.spare.has_refused():
                self._refused = self.spare.wanted
            self.spare.close()
            self._leaving.append(self.spare)
            self.spare = None


spares = Spares()
# A process that the user forks from the driver must not end, or use, the driver's spare process.
os.register_at_fork(after_in_child=spares.forget)


def _is_possible() -> bool:
    """Return whether there is enough memory for a spare process, and no GPU.

    With GPUs, a spare process could not know in advance which of them a rank will use.
    """
    return process.available_bytes() >= LEAST_BYTES and not gpus.found(None)
