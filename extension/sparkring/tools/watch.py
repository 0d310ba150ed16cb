"""Runs a long command with its output in a log, shows its progress, and says why it failed.

This module is also a script, `watch.py LOG TITLE COMMAND…`. The Makefile uses it before anything is installed, so it
imports only the standard library.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO


class StepProgress:
    """Shows progress: on a terminal, in one line that is rewritten; elsewhere, with a new line every ten seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._rewrites = stream.isatty()
        self._text, self._begun, self._shown = "", 0.0, 0.0

    def step(self, text: str) -> None:
        """Begin a step."""
        self._text, self._begun, self._shown = text, self._clock(), self._clock()
        self._show(f"{text} …")

    def tick(self, share: float | None = None) -> None:
        """Show that the step is running; `share` is the part of its time that has passed, if known."""
        now = self._clock()
        if self._rewrites or now - self._shown >= 10:
            self._shown = now
            passed = now - self._begun
            parts = [f"{passed:.0f} s"]
            if share:
                parts = [f"{100 * share:.0f} %", *parts, _left(passed * (1 - share) / share)]
            self._show(f"{self._text} … {', '.join(parts)}")

    def done(self) -> None:
        """End the step, and show how long it took."""
        self._show(f"{self._text}: {self._clock() - self._begun:.0f} s")
        self.close()

    def note(self, *lines: str) -> None:
        """Show lines that stay, between two steps."""
        for line in lines:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def close(self) -> None:
        """End the line that is being rewritten."""
        if self._rewrites:
            self._stream.write("\n")

    def _show(self, text: str) -> None:
        self._stream.write(f"\r\033[K{text}" if self._rewrites else f"{text}\n")
        self._stream.flush()


def _left(seconds: float) -> str:
    """Return the time left as text. It is rounded, since it is an estimate."""
    if seconds < 20:
        return "almost done"
    return f"about {10 * round(seconds / 10)} s left" if seconds < 95 else f"about {seconds / 60:.0f} min left"


def watch(
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    progress: StepProgress,
    *,
    verbose: bool = False,
    share_of: Callable[[str, float], float | None] = lambda fresh, passed_s: None,
) -> int:
    """Run a command with its output in `log`, and show its progress. Return its exit status.

    `share_of(fresh, passed_s)` returns the share of the command's time that has passed, from 0 to 1, or None if that is
    unknown. `fresh` is the output since the last call, and `passed_s` is how many seconds have passed.

    The output is read from the growing log, because reading it from a pipe would block while the command is silent, and
    the elapsed time would not be updated.
    """
    begun = time.monotonic()
    with log.open("ab") as sink, log.open("r", encoding="utf-8", errors="replace") as reader:
        reader.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
        try:
            while True:
                try:
                    status: int | None = process.wait(0.5)
                except subprocess.TimeoutExpired:
                    status = None
                fresh = reader.read()
                if verbose:
                    sys.stderr.write(fresh)
                share = share_of(fresh, time.monotonic() - begun)
                if status is not None:
                    return status
                if not verbose:
                    progress.tick(share)
        finally:
            if process.poll() is None:
                # End the whole process group, which includes the compilers that the command has started.
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()


_TELLING = re.compile(
    r"\berror:|CMake Error|undefined reference|cannot find -l|multiple definition|Killed|No space left|Error: |ERROR: "
)
_ECHO = re.compile(r"subprocess-exited|did not run successfully|Failed (building|to build)|metadata-generation-failed")


def telling_lines(log: str, limit: int = 6) -> list[str]:
    """Return the first errors in `log`, without those that pip only repeats; if there are none, the last lines."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    chosen: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if _TELLING.search(line) and not _ECHO.search(line):
            # cmake prints the location of an error on one line, and the reason on the next.
            chosen += [line, following] if line.startswith("CMake Error") and following else [line]
    return list(dict.fromkeys(chosen))[:limit] or lines[-limit:]


def why_failed(failure: str, log: Path) -> str:
    """Return `failure`, and below it the lines of the log that say why."""
    reasons = telling_lines(log.read_text(encoding="utf-8", errors="replace"))
    return "\n  ".join([failure, *reasons, f"The full log is {log}"])


def main(arguments: Sequence[str]) -> int:
    """Run and watch a command, and return its exit status."""
    log, title, *command = arguments
    file, progress = Path(log), StepProgress(sys.stderr)
    file.write_text("")
    progress.step(title)
    try:
        status = watch(command, os.environ, file, progress)
    except KeyboardInterrupt:
        progress.close()
        return 130
    if status:
        progress.close()
        print(why_failed(f"{title} failed:", file), file=sys.stderr)
    else:
        progress.done()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
