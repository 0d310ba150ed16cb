"""Checks this machine: Python, packages, Horovod's build, memory, disks, limits, and the launch of a local rank."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import sparkring
from sparkring.capture import notebook_state
from sparkring.capture.packing import pack_call
from sparkring.capture.versions import minor, version_of, versions
from sparkring.engine.doctor import builds
from sparkring.errors import LaunchError, PathError
from sparkring.gangs.execution import Request
from sparkring.gangs.gang import Gang
from sparkring.history import run_store
from sparkring.history.describe import duration, first_line, size
from sparkring.history.findings import Finding, note, ok, problem
from sparkring.launchers.local import LocalLauncher
from sparkring.runtime import limits
from sparkring.runtime.storage import root_for_ranks, user_folder
from sparkring.wire.messages import FunctionCall, Run
from sparkring.worker.member import process

FRAMEWORKS = ("tensorflow", "torch", "jax")
FULL_BYTES, LOW_BYTES = 200e6, 2e9  # with less free space on a disk, there is a problem or a note
LOW_MEMORY_BYTES = 1e9
_VARIABLES = {"cache": "XDG_CACHE_HOME", "runs": "SPARKRING_HOME"}  # those that name these folders
NEEDS_SHARED = "NCCL and the workers of PyTorch's DataLoader may need more"
MORE_SHARED = (
    "In a container, start it with a larger one, such as `docker run --shm-size=8g`; on Kubernetes, mount an emptyDir "
    "with `medium: Memory` at /dev/shm."
)
LOW_SHARED_BYTES = 512e6  # containers get 64 MB of /dev/shm by default
FEW_FILES, LOW_FILES = 256, 1024
_REBUILD = "Build it again with `sparkring-build-horovod --force --install`."


def packages() -> list[Finding]:
    """Check Python, sparkring, the frameworks, and what Horovod was built for."""
    by_name = dict(versions())
    package = Path(sparkring.__file__).parent
    findings = [
        ok("Python", f"{platform.python_version()}, {sys.executable}"),
        ok("sparkring", f"{sparkring.__version__} in {package}"),
    ]
    others = " · ".join(f"{name} {version}" for name, version in by_name.items() if name not in ("python", "sparkring"))
    if any(name in by_name for name in FRAMEWORKS):
        findings.append(ok("packages", others))
    else:
        advice = "Install one of them, for example with `pip install 'sparkring[torch]'`."
        findings.append(
            note("packages", f"no TensorFlow, PyTorch or JAX is installed{others and f'; {others}'}", advice)
        )
    return [*findings, *horovod(builds.horovod(), {name: version_of(name) for name in FRAMEWORKS})]


def horovod(build: builds.HorovodBuild | None, installed: dict[str, str]) -> Iterator[Finding]:
    """Check that Horovod was built with Gloo, and for the `installed` versions of the frameworks ('' for none)."""
    if build is None:
        advice = "For %%horovod cells, build it with `sparkring-build-horovod --install`."
        yield note("Horovod", "not installed", advice)
        return
    stale = [
        f"{name} {version}, but {name} {installed[name]} is installed"
        for name, version in build.built_for.items()
        if installed.get(name) and minor(installed[name]) != minor(version)
    ]
    missing = [name for name in ("tensorflow", "torch") if installed.get(name) and name not in build.built_for]
    frameworks = " and ".join(f"{name} {version}" for name, version in build.built_for.items()) or "no framework"
    built_with = " and ".join(build.parts) or "no known communication library"
    what = f"{build.version}, built for {frameworks}, with {built_with}"
    if stale:
        yield problem("Horovod", f"{build.version} was built for {'; '.join(stale)}", _REBUILD)
    elif not build.built_for:
        yield problem("Horovod", what, _REBUILD)
    elif "Gloo" not in build.parts:
        yield problem("Horovod", f"{what}: sparkring's ranks connect through Gloo", _REBUILD)
    else:
        yield ok("Horovod", what)
    if missing:
        yield note("Horovod", f"{build.version} was built without {' and '.join(missing)}", _REBUILD)


class Room(NamedTuple):
    """The free and the total size of a disk or of memory, in bytes."""

    free: float
    total: float


def capacity() -> list[Finding]:
    """Check cores, memory, free disk space, shared memory, and the limit on open files."""
    findings = [ok("cores", cores(limits.cores(), os.cpu_count() or 1, limits.quota()))]
    if process.total_bytes():
        findings.append(memory(Room(process.available_bytes(), process.total_bytes())))
    findings += [
        folder("TMPDIR", lambda: Path(tempfile.gettempdir()), "Some cells need temporary files."),
        folder("cache", lambda: user_folder("cache"), "DataFrames cannot be cached until then."),
        folder("runs", run_store.home, "No cell can run on ranks until then."),
    ]
    with contextlib.suppress(OSError):  # macOS has no /dev/shm
        disk_usage = shutil.disk_usage("/dev/shm")
        findings.append(shared_memory(Room(disk_usage.free, disk_usage.total)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings.append(open_files(*(None if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))))
    return findings


def cores(usable: int, machine: int, quota: float) -> str:
    """Say how many cores this process may use, and what limits them. `quota` is that of the control groups."""
    if usable == machine:
        return str(usable)
    limit = f"the container's quota is {quota:g}" if quota <= usable else "the kernel's affinity"
    return f"{usable} of the machine's {machine} ({limit})"


def memory(room: Room) -> Finding:
    """Judge how much memory is available."""
    what = f"{size(room.free)} of {size(room.total)} available"
    if room.free < LOW_MEMORY_BYTES:
        return note("memory", what, "Ranks may be killed for lack of memory: end other processes, or use fewer ranks.")
    return ok("memory", what)


def disk(name: str, path: str, room: Room) -> Finding:
    """Judge the free space of the disk that holds `path`."""
    what = f"{size(room.free)} of {size(room.total)} free in {path}"
    if room.free >= LOW_BYTES:
        return ok(name, what)
    advice = f"Remove files, or set {_VARIABLES.get(name, name)} to another folder before the kernel starts."
    return problem(name, what, advice) if room.free < FULL_BYTES else note(name, what, advice)


def folder(name: str, choose: Callable[[], Path], what_for: str) -> Finding:
    """Check that the folder that `choose` returns can be written, or created, and judge the free space of its disk."""
    where = ""
    try:
        path = choose()
        where = f" {path}"
        there_already = next(folder for folder in (path, *path.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=there_already):
            pass
        disk_usage = shutil.disk_usage(there_already)
    except (OSError, PathError) as error:
        what = f"the folder{where} cannot be written: {getattr(error, 'strerror', None) or error}"
        return problem(name, what, f"Set {_VARIABLES.get(name, name)} to a writable folder. {what_for}")
    return disk(name, str(path), Room(disk_usage.free, disk_usage.total))


def shared_memory(room: Room) -> Finding:
    """Judge the size of /dev/shm, which NCCL and PyTorch's DataLoader use."""
    what = f"{size(room.free)} of {size(room.total)} free"
    if room.free >= LOW_SHARED_BYTES:
        return ok("/dev/shm", what)
    return note("/dev/shm", f"{what}; {NEEDS_SHARED}", MORE_SHARED)


def open_files(soft: int | None, hard: int | None) -> Finding:
    """Judge the limits on open files; None stands for no limit."""
    if soft is None:
        return ok("open files", "no limit")
    most = "without a limit" if hard is None else f"up to {hard:,}"
    what = f"at most {soft:,} in a process"
    if soft >= LOW_FILES:
        return ok("open files", what)
    advice = f"Raise the limit ({most}) with `ulimit -n` before Jupyter starts."
    return problem("open files", what, advice) if soft < FEW_FILES else note("open files", what, advice)


def local_rank(cancelled: threading.Event) -> list[Finding]:
    """Check that a local rank starts, connects to the driver, calls a function and returns its value."""
    topic, started = "local rank", time.monotonic()
    packed = pack_call(os.getpid, {}, None)
    run = Run(
        FunctionCall(),
        autolog=False,
        environment=root_for_ranks(),
        notebook=notebook_state.gather(),
        parts=(packed.payload, *packed.buffers),
    )
    launcher = LocalLauncher({}, 1, 0)
    try:
        with contextlib.closing(Gang(launcher, 1)) as gang:
            execution = gang.submit(Request(run, "plain"))
            gang.start()
            while not (execution.done or execution.failures or cancelled.is_set()):
                gang.poll(0.1)
    except LaunchError as error:
        return [problem(topic, f"no rank could be started: {error}", "Ranks connect to the driver on 127.0.0.1.")]
    took = duration(time.monotonic() - started)
    if execution.failures:
        failure = next(iter(execution.failures.values()))
        advice = failure.advice or "What the process printed is in the kernel's stderr."
        return [problem(topic, f"failed after {took}: {first_line(failure.summary)}", advice)]
    return [ok(topic, f"started, connected on {launcher.host}, and returned a value in {took}")]
