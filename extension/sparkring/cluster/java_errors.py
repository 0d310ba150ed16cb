"""Cuts Java's long error messages to the line that says what happened."""

from __future__ import annotations

import re

REASONS = ("Error", "Exception")  # a line that contains one of these says why something failed


def line_with(text: str, *words: str) -> str:
    """Return a message's first line, or, if one of `words` is in a later line, the first such line.

    Lines of stack traces are skipped, and the result is cut to 400 characters.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    for line in lines[1:] if len(lines) > 1 else lines:
        if any(word in line for word in words):
            return line[:400]
    return (lines[0] if lines else "no reason given")[:400]


def root_cause(text: str) -> str:
    """Return why a Spark job failed, from the text of its error.

    If the text contains a Python traceback, this is the exception at its end; otherwise, it is Java's root cause.
    """
    _, traceback, stack = text.rpartition("Traceback (most recent call last):\n")
    if traceback:
        return line_with("\n".join(line for line in stack.splitlines() if not line.startswith((" ", "\t"))))
    text, connect, _ = text.partition("JVM stacktrace:\n")  # before it, Spark Connect puts the error itself
    causes = [line.strip() for line in text.splitlines() if line.strip().startswith("Caused by: ")]
    if causes:
        return _plain(causes[-1].removeprefix("Caused by: "))
    _, barrier_task, reason = text.partition("finished unsuccessfully.\n")
    return _plain(line_with(reason) if barrier_task else line_with(text, *(() if connect else REASONS)))


def _plain(line: str) -> str:
    """Return a line without the name of Java's exception, if Spark's error class (`[DIVIDE_BY_ZERO] …`) follows it.

    The colon that py4j writes before the exception is removed, too.
    """
    return re.sub(r"^[\w.$]+: (?=\[[A-Z0-9_.]+\] )", "", line.removeprefix(": "))[:400]
