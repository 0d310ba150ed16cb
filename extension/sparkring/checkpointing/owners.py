"""Notices if two runs save to one directory of checkpoints at the same time, from different kernels or machines.

Each run keeps a small file, `.RUN.owner.json`, in the directory, and writes it again every REFRESH_S seconds. This
needs neither locks nor renames, which mounts of object stores lack. The file says which process owns it. On the machine
of this process, the owner is dead if there is no such process; on another machine, if the file has not been written for
DEAD_AFTER_S seconds, by the clock of the storage.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sparkring.checkpointing.entries import changed_at
from sparkring.errors import CheckpointError
from sparkring.runtime.kernel import tell
from sparkring.runtime.storage import Location

REFRESH_S = 15.0
LOOK_EVERY_S = 1.0  # how often to look whether the ranks have made the directory
DEAD_AFTER_S = 60.0
_SUFFIX = ".owner.json"
_TRIES, _PAUSE_S = 3, 0.1


class Owner(NamedTuple):
    """A run that saves to a directory. `machine` also tells containers apart, and `process` is its pid and start."""

    run_id: str
    user: str
    host: str
    machine: str
    process: str
    since: float
    refreshed: float


@contextlib.contextmanager
def owned(directory: Location, run_id: str) -> Iterator[None]:
    """Own `directory` for a run. Raises CheckpointError if a run of another process that is alive owns it.

    Other runs of this process are not looked at. A directory that does not exist yet is owned once the ranks have made
    it, and the user is told if another run then owns it, too.
    """
    now = time.time()
    mine = Owner(run_id, _user(), socket.gethostname(), _machine(), _process(os.getpid()), now, now)
    path = directory / _name(run_id)
    over = threading.Event()
    try:
        is_there = _write(directory, path, mine)
        _refuse_others(directory, mine)
        arguments = directory, path, mine, over, is_there
        refreshing = threading.Thread(target=_refresh, args=arguments, name="sparkring-owner", daemon=True)
        refreshing.start()
        try:
            yield
        finally:
            over.set()
            refreshing.join(REFRESH_S)  # the storage may not respond
    finally:
        _remove(path)


def _name(run_id: str) -> str:
    return f".{run_id}{_SUFFIX}"  # hidden, because the user's code may list the directory


def _refresh(directory: Location, path: Location, mine: Owner, over: threading.Event, is_there: bool) -> None:
    while not over.wait(REFRESH_S if is_there else LOOK_EVERY_S):
        was_there, is_there = is_there, _write(directory, path, mine._replace(refreshed=time.time()))
        if is_there and not was_there:
            try:
                _refuse_others(directory, mine)
            except CheckpointError as error:
                tell(str(error))


def _write(directory: Location, path: Location, owner: Owner) -> bool:
    """Write the owner's file, and return whether it is there."""
    # If this fails, two runs may not notice each other, but this run goes on.
    with contextlib.suppress(Exception):  # each storage has its own errors
        if not directory.local or os.path.isdir(directory.path):
            path.fs.pipe_file(path.path, json.dumps(owner._asdict()).encode())
            return True
    return False


def _refuse_others(directory: Location, mine: Owner) -> None:
    files = _files(directory)
    # The storage's own time, because the clocks of machines may differ.
    now = files.get(_name(mine.run_id), 0.0) or time.time()
    for name, changed in sorted(files.items()):
        owner = _read(directory / name)
        if owner is None or (owner.machine, owner.process) == (mine.machine, mine.process):
            continue
        if owner.machine == mine.machine:
            is_alive = owner.process == _process(int(owner.process.partition(" ")[0]))
        else:
            is_alive = now - (changed or owner.refreshed) < DEAD_AFTER_S
        if not is_alive:
            _remove(directory / name)
        elif owner.machine != mine.machine or (owner.since, owner.run_id) < (mine.since, mine.run_id):
            began = time.strftime("%Y-%m-%d %H:%M", time.localtime(owner.since))
            there = f"{owner.user} on {owner.host}, process {owner.process.partition(' ')[0]}"
            wait = f" If its machine is gone, try again in {DEAD_AFTER_S:.0f} s." * (owner.machine != mine.machine)
            raise CheckpointError(
                f"{directory.written} is in use by run {owner.run_id} of another notebook or program ({there}), since "
                f"{began}. Both would remove and mix up each other's checkpoints: wait for that run, stop it there, or "
                f"use another directory.{wait}"
            )


def _files(directory: Location) -> dict[str, float]:
    """Return when the files of owners were last written, by their names."""
    with contextlib.suppress(Exception):  # the run itself reports what is wrong with the directory
        directory.fs.invalidate_cache()
        return {
            name: changed_at(info)
            for info in directory.entries()
            if (name := str(info["name"]).rpartition("/")[2]).endswith(_SUFFIX)
        }
    return {}


def _read(file: Location) -> Owner | None:
    """Return the owner in a file; None if the file has been removed, or is none of ours."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            with contextlib.suppress(Exception):  # each storage has its own errors
                return Owner(**json.loads(file.fs.cat_file(file.path)))
            time.sleep(_PAUSE_S)  # it may be only half written
    return None


def _remove(file: Location) -> None:
    with contextlib.suppress(Exception):  # it is not there, or cannot be removed: it soon counts as dead
        file.fs.rm_file(file.path)


def _machine() -> str:
    """Return an id of this machine, or of this container: where a pid means the same process."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux has these files
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _process(pid: int) -> str:
    """Return what identifies a process, its pid and, on Linux, its start; '' if there is no such process."""
    try:
        with contextlib.suppress(PermissionError):  # it exists, but belongs to another user
            os.kill(pid, 0)
        # The second field, the name of the program, may contain spaces.
        return f"{pid} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except ProcessLookupError:
        return ""
    except OSError:  # there is no /proc
        return f"{pid}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user has no name
        return str(os.getuid())
