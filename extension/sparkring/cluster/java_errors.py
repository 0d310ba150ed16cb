"""Java's long messages, cut to the line that says what happened."""

from __future__ import annotations

import re

REASONS = ("Error", "Exception")  # a line that contains one of these says why


def line_with(text: str, *words: str) -> str:
    """The line of a long Java message that has one of `words`, else its first line, cut to a readable length."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    for line in lines[1:] if len(lines) > 1 else lines:
        if any(word in line for word in words):
            return line[:400]
    return (lines[0] if lines else "no reason given")[:400]


def root_cause(text: str) -> str:
    """Why a Spark job failed: the exception of a Python traceback in the message, else Java's root cause."""
    _, traceback, stack = text.rpartition("Traceback (most recent call last):\n")
    if traceback:
        return _first_line("\n".join(line for line in stack.splitlines() if not line.startswith((" ", "\t"))))
    causes = [line.strip() for line in text.splitlines() if line.strip().startswith("Caused by: ")]
    if causes:
        return _plain(causes[-1].removeprefix("Caused by: "))
    _, barrier_task, reason = text.partition("finished unsuccessfully.\n")
    return _plain(_first_line(reason) if barrier_task else line_with(text, *REASONS))


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else "no reason given")[:400]


def _plain(line: str) -> str:
    """The line without the name of Java's exception, if Spark's error class follows it: `[DIVIDE_BY_ZERO] …`."""
    return re.sub(r"^[\w.$]+: (?=\[[A-Z0-9_.]+\] )", "", line)[:400]
