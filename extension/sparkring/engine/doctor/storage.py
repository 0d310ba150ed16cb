"""Checks whether a directory for checkpoints can be written, read, listed and cleaned up."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from typing import NamedTuple

from sparkring.history.describe import duration, first_line
from sparkring.history.findings import Finding, ok, problem
from sparkring.runtime.storage import Location

DRIVER = "driver"


class Trial(NamedTuple):
    """A small file in the directory, written by the driver and read by executors.

    `made` holds the folders that the driver had to create for it, the outermost first.
    """

    location: Location
    file: Location
    content: bytes
    made: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        return all(finding.level != "problem" for finding in self.findings)


def begin(location: Location) -> Trial:
    """Write a small file with a random name into the directory, read it, and find it in a listing."""
    name, content = f".sparkring-doctor-{secrets.token_hex(8)}", secrets.token_hex(32).encode()
    trial = Trial(location, location / name, content, (), ())
    started = time.monotonic()
    try:
        made = tuple(_missing(location))
        if made:
            location.fs.makedirs(location.path, exist_ok=True)
        trial = trial._replace(made=made)
    except Exception as error:  # file systems raise errors of their own, besides OSError
        return _failed(trial, "created", error)
    doing = "written"
    try:
        with location.fs.open(trial.file.path, "wb") as file:
            file.write(content)
        doing = "read"
        with location.fs.open(trial.file.path, "rb") as file:
            if file.read() != content:
                raise OSError("a file that was just written does not contain what was written")
        doing = "listed"
        location.fs.invalidate_cache(location.path)
        if not any(str(entry["name"]).rstrip("/").endswith(name) for entry in location.entries()):
            raise OSError("a file that was just written is not listed")
    except Exception as error:
        return _failed(trial, doing, error)
    new = ", which did not exist," if made else ""
    took = duration(time.monotonic() - started)
    return trial._replace(findings=(ok(DRIVER, f"{location.written}{new} can be written, read and listed ({took})"),))


def end(trial: Trial) -> list[Finding]:
    """Remove the file, and the folders that were created for it. Return a finding if that fails."""
    fs = trial.location.fs
    try:
        if fs.exists(trial.file.path):
            fs.rm_file(trial.file.path)
    except Exception as error:  # as above
        what = f"{trial.file.written} cannot be deleted: {_why(error)}"
        return [problem(DRIVER, what, "Allow deletion there: old checkpoints are removed after each save.")]
    for folder in reversed(trial.made):
        with contextlib.suppress(Exception):  # another program has put something into the folder
            fs.rmdir(folder)
    return []


def _missing(location: Location) -> Iterator[str]:
    """Yield the folders that have to be created for the directory. In object stores, there are no folders to create."""
    if not location.local:
        if not location.fs.exists(location.path):
            yield location.path
        return
    path, missing = location.path, []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    yield from reversed(missing)


def _failed(trial: Trial, done: str, error: Exception) -> Trial:
    what = f"{trial.location.written} cannot be {done}: {_why(error)}"
    advice = "Use a directory that this user can write, or check the credentials of the store."
    return trial._replace(findings=(problem(DRIVER, what, advice),))


def _why(error: Exception) -> str:
    reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
    return first_line(f"{type(error).__name__}: {reason}", 200)
