"""Shows a run as plain text, line by line, in a terminal or in a script's output."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import TextIO

from sparkring.history import describe, progress, reading
from sparkring.history.events import Notice
from sparkring.history.lines import Blocks, Shared, coloured, folded_blocks, is_noise, plain, visible
from sparkring.history.record import Attempt, Checkpoint, RunRecord
from sparkring.runtime.kernel import write
from sparkring.views import attempts, checkpoints, displays, timelines, watching
from sparkring.views.tables import width_of

PROGRESS_EVERY_S = 0.2
TRACEBACK_WITHIN_S = 0.5  # an unfinished traceback is printed if no new line arrives during this time
WARM_PAUSE_S = 0.1  # a warm run shows no progress during this time, because most warm runs end sooner
_RANK_COLOURS = ("36", "32", "33", "35", "34", "96", "92", "95")
_DIM, _RESET, _CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"


class TerminalView:
    """Prints lines as they arrive. On a terminal, the lines are in colour, and the last line shows the run's progress.

    With NO_COLOR (https://no-color.org), there are no colours. A terminal that calls itself dumb, such as the shell of
    Emacs, would show the codes for colours and for the progress line as text, so it gets neither.
    Background runs pass `progress=False`, since their progress line would overwrite the prompt.
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic, progress: bool = True) -> None:
        self._stream = stream
        self._clock = clock
        is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_colours = is_terminal and not os.environ.get("NO_COLOR")
        self._shows_progress = progress and is_terminal
        self._lines = 0
        self._blocks = Blocks()
        self._heard = 0.0
        self._noise = 0
        self._notices: tuple[Notice, ...] = ()
        self._attempts: tuple[Attempt, ...] = ()
        self._checkpoints: tuple[Checkpoint, ...] = ()
        self._progress_due: float | None = None
        self._progress_shown = ""

    def refresh(self, record: RunRecord) -> None:
        """Print what is new since the last call."""
        self._print(self._news(record), record)

    def close(self, record: RunRecord) -> None:
        """Print what is new, and then some closing lines. Unless the run was quick, the last says how the run ended."""
        lines = self._news(record)
        if self._noise:
            hidden = f"{describe.counted(self._noise, 'line')} of TensorFlow's start-up not shown"
            lines.append(f"sparkring: {hidden}{_see(describe.log_path(record))}")
        closing = [*reading.closing_words(record, record.ended), *timelines.closing_words(record)]
        closing += [*displays.closing_words(record), *describe.not_finite_words(record), watching.getting_worse(record)]
        closing.append(describe.verdict_words(record))
        closing.append(describe.importance(record))
        if not describe.quick(record):
            log = f"log: {describe.log_path(record)}" if record.outcome == "finished" and record.log_folder else ""
            closing.append(describe.dotted(describe.closing(record, record.ended), log))
        self._print(lines + [f"sparkring: {line}" for line in closing if line], record)

    def again(self, record: RunRecord) -> None:
        """Print the state of the run on one line."""
        self._print([describe.short(record, time.time())], record)

    def _news(self, record: RunRecord) -> list[str]:
        notices = [notice for notice in record.notices if notice not in self._notices]
        lines = [f"sparkring: {describe.first_line(notice.text, 1000)}" for notice in notices]
        count = record.recent_count - self._lines
        self._lines = record.recent_count
        new = record.recent[-count:] if count else ()
        if count > len(new) and record.logs != "callbacks":
            missed = describe.counted(count - len(new), "more line")
            lines.append(f"… {missed}{_see(describe.log_path(record))}")
        blocks = [block for line in visible(new, record.logs) for block in self._blocks.take(line)]
        if new:
            self._heard = self._clock()
        if self._blocks and (record.outcome is not None or self._clock() > self._heard + TRACEBACK_WITHIN_S):
            blocks += self._blocks.rest()
        for shared in folded_blocks(blocks):
            if is_noise(shared.line):
                self._noise += len(shared.ranks)
            else:
                lines.append(self._line(shared))
        lines += [f"sparkring: {line}" for line in checkpoints.news(self._checkpoints, record)]
        lines += [f"sparkring: {line}" for line in attempts.news(self._attempts, record)]
        self._notices, self._attempts, self._checkpoints = record.notices, record.attempts, record.checkpoints
        return lines

    def _line(self, shared: Shared) -> str:
        line, tag = shared.line, f"[{describe.rank_numbers(shared.ranks)}]"
        if not self._has_colours:
            return f"{tag} {plain(line.text)}"
        shown = "".join(f"\x1b[{code}m{piece}" if code else piece for code, piece in coloured(line.text))
        colour = _RANK_COLOURS[line.rank % len(_RANK_COLOURS)]
        return f"\x1b[{colour}m{tag}{_RESET} {_DIM if line.stream == 'stderr' else ''}{shown}{_RESET}"

    def _print(self, lines: list[str], record: RunRecord) -> None:
        progress = self._progress(record)
        if not lines and progress == self._progress_shown:
            return
        cleared = _CLEAR_LINE if self._progress_shown else ""
        whole = cleared + "".join(f"{line}\n" for line in lines) + progress
        self._progress_shown = progress
        write(whole, self._stream)
        self._stream.flush()

    def _progress(self, record: RunRecord) -> str:
        """Return the progress line without a newline. Until an update is due, return the previous progress line."""
        if not self._shows_progress or record.outcome is not None:
            return ""
        began = self._clock()
        if self._progress_due is None:
            self._progress_due = began + (WARM_PAUSE_S if record.warm else 0.0)
        if began < self._progress_due:
            return self._progress_shown
        now = time.time()
        slowest = progress.slowest(record, now)
        words = [describe.progress_words(slowest) if slowest else describe.outcome(record)]
        if record.items is not None:
            words = [describe.items_progress(record, now), describe.items_left(record, now)]
        if record.stream is not None:
            words = [describe.stream(record), describe.stream_idle(record, now)]
        words += [reading.progress_words(record, now)]
        words += [checkpoints.progress_words(record)] if record.stream is None else []
        words += describe.metric_words(record, 4)
        words += [describe.gpu_words(record.gpus), describe.duration(int(describe.elapsed_s(record, now)))]
        self._progress_due = began + max(PROGRESS_EVERY_S, 10 * (self._clock() - began))
        return _cut(plain(describe.dotted(*words)), shutil.get_terminal_size().columns - 1)


def _cut(line: str, columns: int) -> str:
    """Return the beginning of `line` that fits into so many columns. A longer line could not be cleared."""
    while width_of(line) > columns:
        line = line[:-1]
    return line


def _see(path: str) -> str:
    return f": {path}" if path else ""
