"""Starts members as child processes on the driver's machine."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sparkring.errors import LaunchError, MemberLost
from sparkring.executor.boot import HERE, start
from sparkring.executor.orders import Ticket
from sparkring.executor.processes import kill_orphans
from sparkring.history.describe import counted
from sparkring.launchers import gpus_in_use
from sparkring.launchers.base import ItemRoom, Launcher, LaunchRequest, Place
from sparkring.launchers.forks import ForkedMember
from sparkring.launchers.spare import Setting, SpareProcess, setting_of, spares
from sparkring.runtime import limits
from sparkring.runtime.world import gpu_environment, share_gpus
from sparkring.worker.member import gpus as nvml
from sparkring.worker.member import timeline
from sparkring.worker.member.gpus import Gpu


class ThisMachine(Place):
    """Processes on the driver's machine."""

    name, title = "local", "this machine"
    here = shares_gpus = True

    def launcher(self, request: LaunchRequest, say: Callable[[str], None], *, patient: bool = True) -> Launcher:
        return LocalLauncher(request.environment, request.size, request.gpus)

    def room(self, request: LaunchRequest) -> int:
        return request.size

    def item_room(self, request: LaunchRequest, gpus_each: float | None) -> ItemRoom:
        installed = nvml.find(visible_gpus(request.environment)) if gpus_each != 0 else []
        free = tuple((gpu.used.total_bytes or 0) - (gpu.used.used_bytes or 0) for gpu in installed)
        if not gpus_each:
            return ItemRoom(gpu_free=free)
        return ItemRoom(gpus=_room_on_gpus(installed, request.size, gpus_each), gpu_free=free)

    def gpus_of_a_rank(self, size: int, say: Callable[[str], None]) -> float:
        return float(bool(nvml.found(os.environ.get("CUDA_VISIBLE_DEVICES"))))

    def every_slot(self) -> int:
        return limits.cores()

    def table(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("this machine (n < 0)", counted(limits.cores(), "core"), "", f"load {os.getloadavg()[0]:.1f}")
        ]
        gpus = nvml.found(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if gpus:
            busy = sum(bool(gpu.busy_percent) for gpu in gpus)
            used = (str(gpu) + (f", {gpu.used_bytes / 1e9:.0f} GB used" if gpu.used_bytes else "") for gpu in gpus)
            rows.append(("GPUs here (n < 0)", str(len(gpus)), str(busy), "; ".join(used)))
        return rows

    def pool_requests(self, request: LaunchRequest, at_once: int, gpus: float | None) -> list[LaunchRequest]:
        share = max(1, limits.cores() // (at_once * request.size))  # Spark itself sets the variable for its tasks
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}
        request = request._replace(environment={**threads, **request.environment})
        if gpus is None:
            return [request] * at_once
        request = request._replace(gpus=math.ceil(gpus))
        if gpus == 0:
            return [request] * at_once
        shares = pool_shares(at_once, request.size, gpus, visible_gpus(request.environment))
        return [request._replace(environment={**request.environment, "CUDA_VISIBLE_DEVICES": own}) for own in shares]


class LocalLauncher(Launcher):
    """Starts each member as a process in a session of its own, so that Ctrl-C in the terminal does not reach it."""

    def __init__(self, environment: dict[str, str], size: int, gpus: int | None = None) -> None:
        self._size = size
        self._environment = environment
        self._gpus = _shares(size, gpus, visible_gpus(environment))
        self.pins_gpus = self._gpus.pinned
        self._members: list[subprocess.Popen[bytes] | ForkedMember] = []
        self._waiting: list[Ticket] = []  # tickets of the members that have not been started yet
        self._spare: SpareProcess | None = None
        self._begun = False  # whether `spares` knows of the launch
        self._imported: tuple[str, ...] | None = ()

    def start(self, size: int, ticket: Ticket) -> None:
        gpus_in_use.hold(self, (gpu for own in self._gpus.own for gpu in own))
        self._environment = {**os.environ, **self._environment, **self._gpus.environment}
        gpus = [tuple(gpu.address for gpu in own) for own in self._gpus.own]
        self._waiting = [ticket._replace(member=number, gpus=gpus[number]) for number in range(size)]
        if self.code is not None:
            self._spare = spares.begin(self._setting(), self.code)
            self._begun = True
        self._start_members()

    def _start_members(self) -> None:
        """Start the members that have not been started, unless the spare process is still importing what they need."""
        if self._spare is not None and self._spare.is_importing():
            return
        waiting, self._waiting = self._waiting, []
        for own in waiting:
            try:
                forked = None if self._spare is None else self._spare.fork(own)
                self._members.append(forked or _start(self._environment, own))
            except OSError as error:
                raise LaunchError(
                    f"process {own.member + 1} of {self._size} could not be started: {error.strerror or error}. "
                    "Use fewer ranks, or raise the limit on processes (ulimit -u)."
                ) from error

    def note_imports(self, modules: Sequence[str] | None) -> None:
        if modules is None or self._imported is None:
            self._imported = None
        else:
            self._imported = max(self._imported, tuple(modules), key=len)

    def problem(self, wait_s: float = 0.0) -> LaunchError | None:
        self._start_members()
        deadline = time.monotonic() + wait_s
        while (problem := self._lost()) is None and time.monotonic() < deadline:
            time.sleep(0.002)  # a member's connection ends a moment before its exit code is known
        return problem

    def waits_for(self) -> str:
        if not self._waiting or self._spare is None:
            return ""
        packages = dict.fromkeys(module.partition(".")[0] for module in self._spare.wanted.modules)
        return f"one process imports {' and '.join(packages)} for all of them"

    def _setting(self) -> Setting | None:
        set_later = {} if self.code is None else self.code.environment
        return setting_of({**self._environment, **set_later}, self._size)

    def _lost(self) -> MemberLost | None:
        for member, process in enumerate(self._members):
            code = process.poll()
            if code is not None and code != 0:
                which = f"process {member + 1} of {len(self._members)} (pid {process.pid})"
                if code < 0:
                    return MemberLost(
                        f"{which} was killed by signal {-code}. Another process or the operating system sent the "
                        "signal. `dmesg` shows whether the machine ran out of memory."
                    )
                return MemberLost(
                    f"{which} exited with code {code}; what it printed is in the driver's stderr. "
                    f"Does `{sys.executable}` start?"
                )
        return None

    def stop(self, grace_s: float, *, joined: bool) -> None:
        self._waiting = []
        deadline = time.monotonic() + grace_s
        for process in self._members:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # The member may be blocked because its rank reads nothing. On SIGUSR1, the member kills the rank.
                process.send_signal(signal.SIGUSR1)
        for process in self._members:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()  # if the member is still running, it now exits, and so do all its descendants
        for process in self._members:
            try:
                process.wait(3.0)  # longer than a member takes to kill what its rank has started (_KILL_LIMIT_S)
            except subprocess.TimeoutExpired:
                kill_orphans(process.pid)  # while the member still lives: it is the parent by which they are found
                process.kill()
                process.wait()
            if process.returncode:  # it did not end by itself, and may have left processes and files
                kill_orphans(process.pid)
                timeline.remove_left(process.pid)
        self._members = []
        gpus_in_use.release(self)
        # Before end(), which may start the spare process that imports these modules.
        spares.note_imports(self._setting(), self._imported)
        if self._begun:
            self._begun = False
            spares.end()


def _start(environment: Mapping[str, str], ticket: Ticket) -> subprocess.Popen[bytes]:
    """Start a member in a new process, and give it its ticket. The member exits when its stdin is closed."""
    return start("sparkring.worker.member.member", ticket, environment, last=[HERE])


def visible_gpus(environment: Mapping[str, str]) -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES for ranks with this environment; None if it is not set."""
    return {**os.environ, **environment}.get("CUDA_VISIBLE_DEVICES")


def default_at_once(size: int, gpus_each: float | None, environment: Mapping[str, str]) -> int:
    """Return how many items run at once on this machine by default: as many as it has cores and GPUs for.

    Each item has `size` ranks, and each rank needs a core and `gpus_each` GPUs. `environment` holds the ranks'
    variables.
    """
    size = max(1, size)  # not yet checked, and neither is `gpus_each`
    by_cores = limits.cores() // size
    if not gpus_each or not math.isfinite(gpus_each):
        return max(1, by_cores)
    return max(1, min(by_cores, _room_on_gpus(nvml.find(visible_gpus(environment)), size, gpus_each)))


def _room_on_gpus(installed: Sequence[Gpu], size: int, gpus_each: float) -> int:
    if gpus_each < 1:
        return len(installed) * sharers(gpus_each)
    # A process can use only one MIG instance.
    return sum(gpus_each == 1 or not gpu.is_mig for gpu in installed) // (size * int(gpus_each))


def pool_shares(slots: int, size: int, gpus_each: float, visible: str | None) -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each slot of a pool. Raise LaunchError if there are too few GPUs.

    Each of the `size` ranks of a slot gets `gpus_each` GPUs. If this is a fraction, such as 0.5, `size` is 1, and as
    many slots share a GPU as fit on it. The slots are then spread over all GPUs.
    """
    asked = f"{counted(slots, 'item')} × {f'{size} ranks × ' if size > 1 else ''}{gpus_each:g}"
    if 0 < gpus_each < 1:
        gpus = _enough_gpus(math.ceil(slots / sharers(gpus_each)), asked, "items at once", visible, whole=False)[:slots]
        return [gpus[slot % len(gpus)].address for slot in range(slots)]
    gpus = _enough_gpus(slots * size * int(gpus_each), asked, "items at once", visible, whole=gpus_each > 1)
    return [",".join(gpu.address for gpu in share) for share in share_gpus(gpus, slots, size * int(gpus_each))]


def sharers(gpus_each: float) -> int:
    """Return how many items share a GPU if each item gets the fraction `gpus_each` of the GPU."""
    return int(1 / gpus_each + 1e-6)


class _Shares(NamedTuple):
    """The GPUs of each rank.

    If `pinned` is true, the gang tells each rank which GPUs it sees. `environment` has variables for all ranks.
    """

    own: list[tuple[Gpu, ...]]
    pinned: bool
    environment: Mapping[str, str] = {}


def _shares(size: int, gpus_each: int | None, visible: str | None) -> _Shares:
    """Divide the GPUs among `size` ranks. Raise LaunchError if there are too few GPUs.

    `gpus_each` is the number of GPUs for each rank; None means 1 if there are enough GPUs for all ranks, otherwise 0.
    If it is None, ranks see all GPUs, as far as CUDA can show them.
    """
    if gpus_each is not None:
        asked = f"{counted(size, 'rank')} × {gpus_each}"
        devices = _enough_gpus(size * gpus_each, asked, "ranks", visible, whole=gpus_each > 1)
        return _Shares(share_gpus(devices, size, gpus_each), pinned=True)
    devices = nvml.find(visible)
    ordered = gpus_in_use.least_used_first(devices)
    own = share_gpus(ordered, size, 1 if len(devices) >= size else 0)
    if any(gpu.is_mig for gpus in own for gpu in gpus):
        return _Shares(own, pinned=True)
    whole = [gpu for gpu in ordered if not gpu.is_mig]
    if not any(own) or whole == devices:
        return _Shares(own, pinned=False)
    return _Shares(own, pinned=False, environment=gpu_environment(gpu.address for gpu in whole))


def _enough_gpus(needed: int, asked: str, fewer: str, visible: str | None, *, whole: bool) -> list[Gpu]:
    """Return the GPUs, those first that the fewest other ranks of this notebook use. With `whole`, leave out instances.

    If there are fewer than `needed` for what was `asked`, raise LaunchError.
    """
    gpus = nvml.find(visible) if needed else []
    instances = [gpu for gpu in gpus if whole and gpu.is_mig]
    gpus = [gpu for gpu in gpus if gpu not in instances]
    if len(gpus) < needed:
        limit = " (no NVIDIA driver is responding)" if not gpus and not instances else ""
        if visible is not None:
            limit = f" under CUDA_VISIBLE_DEVICES={visible!r}"
        names = ": " + ", ".join(str(gpu.used) for gpu in gpus) if gpus else ""
        if instances:
            counts = f"{counted(len(instances), 'MIG instance')} not counted, because a process can use only one"
            names += f" ({counts})" if gpus else f": {counts}"
        raise LaunchError(
            f"needs {counted(needed, 'GPU')} ({asked}), but {len(gpus)} found on this machine{limit}{names}. "
            f"Use fewer {fewer}, fewer GPUs for each, or --gpus 0 for none."
        )
    return gpus_in_use.least_used_first(gpus)
