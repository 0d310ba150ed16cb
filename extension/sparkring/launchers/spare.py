"""Keeps one spare process, which has imported what ranks have imported before, and has it fork members.

A spare process is started when all ranks on this machine have ended. It serves only launches whose processes would find
everything that matters to an import as the spare process has found it: see Setting. All other launches start new
processes, and a spare process that does not fit the last launch is replaced after it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import sparkring
from sparkring.wire.ticket import SPARE_BOOT, SPARE_READY, SpareOrder, Ticket
from sparkring.worker.member import gpus, process
from sparkring.worker.rank.preloads import FRAMEWORKS

REST_S = 1.0  # a spare process is started so long after the last rank has ended
IDLE_S = 600.0  # it ends if it has not been used for so long
LEAST_BYTES = 2_000_000_000  # it is not started if less memory is available, and ends if less than half of it is
ANSWER_S = 2.0  # a fork takes milliseconds; a spare process that takes longer is given up
UNKNOWN = 0  # the exit code of a member whose spare process was killed and cannot tell it

# Code with one of these may change the environment before it imports a framework, so it needs new processes.
# Each pattern begins with several letters, which makes the search in large values fast.
_CHANGES_ENVIRONMENT = [re.compile(sign) for sign in (rb"environb?(?!\w)", rb"putenv(?!\w)", b"'env'", b"'set_env'")]


class Setting(NamedTuple):
    """What the imports of a process may depend on.

    `inherited` is what else a process inherits: limits, cores and priority. `installed` has the folders of
    installed packages, and when an entry of a folder was last added or removed, as pip does for every change.
    """

    python: str
    environment: Mapping[str, str]
    inherited: tuple[object, ...]
    installed: tuple[tuple[str, int], ...]


def setting_of(environment: Mapping[str, str], size: int) -> Setting | None:
    """Return the Setting of `size` members that are started now with this environment; None if spares are off."""
    if not _is_on():
        return None
    inherited = (_limits(), os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0))
    folders = [path for path in map(str, sys.path) if path.endswith(("site-packages", "dist-packages"))]
    installed = tuple((path, os.stat(path).st_mtime_ns) for path in folders if os.path.isdir(path))
    # Ranks set this variable before they import anything.
    threads = {"OMP_NUM_THREADS": str(process.fair_share(size)), **environment}
    return Setting(sys.executable, threads, inherited, installed)


def _limits() -> tuple[tuple[int, int], ...]:
    import resource  # not at the top, since Windows has no such module

    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return tuple(resource.getrlimit(getattr(resource, name)) for name in names)


class Wanted(NamedTuple):
    """What a spare process is to import, and in which setting."""

    setting: Setting
    modules: tuple[str, ...]

    def covers(self, other: Wanted) -> bool:
        """Whether a spare process for this is also one for `other`."""
        return self.setting == other.setting and set(self.modules) >= set(other.modules)

    def fits(self, texts: Iterable[bytes]) -> bool:
        """Whether ranks that are to run a Code with these `texts` may have imported the modules already.

        They may not if the code could change the environment before it imports a module, or if it names a framework
        that has not been imported: it would then share a process with frameworks that it may not use.
        """
        known = {module.partition(".")[0] for module in self.modules}
        others = {module.partition(".")[0] for module in FRAMEWORKS} - known
        signs = [*_CHANGES_ENVIRONMENT, *(re.compile(name.encode()) for name in others)]
        return not any(sign.search(text) for text in texts for sign in signs)


class ForkedMember:
    """A member that a spare process has forked, with the part of Popen's interface that a launcher needs.

    `stdin` is the writing end of the member's stdin. `ended` is a descriptor that can be read when the process has
    ended; `status` is a pipe from which the spare process's report of its exit code can be read.
    """

    def __init__(self, pid: int, stdin: int, ended: int, status: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb", 0)
        self.returncode: int | None = None
        self._ended = ended
        self._status = status

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code, or the negative number of a signal. Raise TimeoutExpired after `timeout_s` seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self.returncode is None:
            self._await(self._status, deadline)
            said = os.read(self._status, 16)
            if not said:  # the spare process was killed, and the member may still run
                self._await(self._ended, deadline)
            os.close(self._status)
            os.close(self._ended)
            self.returncode = int(said) if said else UNKNOWN
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._ended, number)

    def _await(self, fd: int, deadline: float | None) -> None:
        events = select.poll()
        events.register(fd, select.POLLIN)
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not events.poll(None if left_s is None else left_s * 1000):
            raise subprocess.TimeoutExpired("a forked member", left_s or 0.0)


class SpareProcess:
    """A spare process, as the driver sees it."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self._ready = False
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [wanted.setting.python, "-c", SPARE_BOOT, str(Path(sparkring.__file__).parent.parent)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=dict(wanted.setting.environment),
                start_new_session=True,
            )
        self._channel.settimeout(ANSWER_S)
        with contextlib.suppress(OSError):  # it has ended already
            self._channel.send(SpareOrder(wanted.modules, IDLE_S, LEAST_BYTES // 2).line())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def is_ready(self) -> bool:
        """Whether it has imported its modules and can fork members."""
        if not self._ready:
            said = select.poll()
            said.register(self._channel, select.POLLIN)
            if said.poll(0):
                with contextlib.suppress(OSError):
                    self._ready = self._channel.recv(64) == SPARE_READY
        return self._ready and not self.ended

    def has_refused(self) -> bool:
        """Whether it has ended because it could not import its modules, or is not safe to fork after that."""
        return not self.is_ready() and not self._ready and self.ended

    def fork(self, ticket: Ticket) -> ForkedMember | None:
        """Have a member forked; return None if that fails."""
        stdin, stdin_w = os.pipe()
        status_r, status = os.pipe()
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with self._lock:
                socket.send_fds(self._channel, [ticket.line()], [stdin, status, folder])
                said, fds, _, _ = socket.recv_fds(self._channel, 64, 1, socket.MSG_CMSG_CLOEXEC)
            if said and fds:
                return ForkedMember(int(said), stdin_w, fds[0], status_r)
        except OSError:
            pass  # it has ended, or does not answer in time
        finally:
            for fd in (stdin, status, folder):
                os.close(fd)
        os.close(stdin_w)  # if a member was forked nevertheless, it ends now
        os.close(status_r)
        self._process.kill()  # so that the next call fails at once
        return None

    def close(self) -> None:
        """Have it end, as soon as its members have ended."""
        with self._lock:
            self._channel.close()
        if not self._ready:
            self._process.kill()

    def forget(self) -> None:
        """In a process that the user has forked from the driver: release what belongs to the driver."""
        self._channel.close()
        self._process.returncode = 0  # it is not a child of this process


class Spares:
    """Decides when there is a spare process, and whether it serves a launch.

    begin() and end() enclose each launch of ranks whose code is known. A spare process is started only if none is under
    way, and one that is still importing when a launch begins is ended, so that it does not slow the ranks down.
    """

    def __init__(self) -> None:
        self.spare: SpareProcess | None = None
        self._lock = threading.Lock()
        self._launches = 0  # how many have begun and not ended
        self._wanted: Wanted | None = None
        self._refused: Wanted | None = None  # what a spare process has refused: it would do so again
        self._unfit = False  # whether one of the launches under way must not be imitated
        self._timer: threading.Timer | None = None
        self._leaving: list[SpareProcess] = []

    def begin(self, setting: Setting | None, texts: Iterable[bytes]) -> SpareProcess | None:
        """Return a spare process that may fork the members of a launch; None if the launch needs new processes.

        `setting` is None if there are to be no spare processes. `texts` are those of the Code that the ranks will run.
        """
        with self._lock:
            self._launches += 1
            self._cancel()
            spare = self.spare
            if spare is None:
                return None
            if spare.has_refused():
                self._refused = spare.wanted
            if not (spare.is_ready() and spare.wanted.setting == setting):
                self._dismiss()
                return None
            return spare if spare.wanted.fits(texts) else None

    def end(self) -> None:
        """Note the end of a launch."""
        with self._lock:
            self._launches -= 1
            self._settle()

    def note_imports(self, setting: Setting | None, modules: tuple[str, ...] | None) -> None:
        """Note what the ranks of a launch have imported; None if they must not be imitated."""
        with self._lock:
            self._unfit |= modules is None or setting is None
            if modules and setting is not None:
                self._wanted = Wanted(setting, modules)
            self._settle()

    def stop(self) -> None:
        """End the spare process, if there is one."""
        with self._lock:
            self._wanted = None
            self._cancel()
            self._dismiss()
            atexit.unregister(self.stop)

    def leaving(self) -> bool:
        """Whether there are spare processes that have been told to end, and have not ended yet."""
        with self._lock:
            self._leaving = [each for each in self._leaving if not each.ended]
            return bool(self._leaving)

    def forget(self) -> None:
        """In a process that the user has forked from the driver: release what belongs to the driver."""
        for each in (self.spare, *self._leaving):
            if each is not None:
                each.forget()
        self.spare, self._leaving, self._timer = None, [], None
        self._launches = 0
        self._lock = threading.Lock()

    def _settle(self) -> None:
        """If no launch is under way, end a spare process that is not wanted, and have one started that is."""
        self._leaving = [each for each in self._leaving if not each.ended]
        if self._launches:
            return
        if self._unfit:
            self._wanted, self._unfit = None, False
        spare, wanted = self.spare, self._wanted
        if spare is not None and not (wanted is not None and spare.is_ready() and spare.wanted.covers(wanted)):
            self._dismiss()
        if wanted is not None and self.spare is None and self._timer is None:
            self._timer = threading.Timer(REST_S, self._start)
            self._timer.name = "sparkring-spare"
            self._timer.daemon = True
            self._timer.start()

    def _start(self) -> None:
        """In the timer's thread: start a spare process, if there is still no launch."""
        with self._lock:
            self._timer = None
            wanted = self._wanted
            if self._launches or self.spare is not None or wanted is None or not _is_possible():
                return
            if self._refused is None or not self._refused.covers(wanted):
                with contextlib.suppress(OSError):  # no process can be started now
                    self.spare = SpareProcess(wanted)
                    atexit.register(self.stop)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _dismiss(self) -> None:
        if self.spare is not None:
            self.spare.close()
            self._leaving.append(self.spare)
            self.spare = None


spares = Spares()
os.register_at_fork(after_in_child=spares.forget)


def _is_on() -> bool:
    return process.LINUX and os.environ.get("SPARKRING_SPARE") != "0"


def _is_possible() -> bool:
    """Whether this machine has enough memory, and no GPU: which GPUs a rank may use is known only after its start."""
    return process.available_bytes() >= LEAST_BYTES and not gpus.found(None)
