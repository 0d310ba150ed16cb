"""Java's long messages, cut to the line that says what happened."""

from __future__ import annotations

REASONS = ("Error", "Exception")  # a line with one of these in it says why


def line_with(text: str, *words: str) -> str:
    """The line of a long Java message that has one of `words`, else its first line, cut to a readable length."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    for line in lines[1:] if len(lines) > 1 else lines:
        if any(word in line for word in words):
            return line[:400]
    return (lines[0] if lines else "no reason given")[:400]


def last_before_java(text: str) -> str:
    """The last line before the first Java stack trace. There, a Python traceback says what happened."""
    before = [line.strip() for line in text.partition("\n\tat ")[0].splitlines() if line.strip()]
    return (before[-1] if before else "no reason given")[:400]


def root_cause(text: str) -> str:
    """Why a Spark job failed: the last line of the Python traceback in the message, or its last `Caused by`."""
    if "Traceback (most recent call last)" in text:
        return last_before_java(text.partition("Traceback (most recent call last)")[2])
    causes = [line.strip() for line in text.splitlines() if line.strip().startswith("Caused by: ")]
    return causes[-1].removeprefix("Caused by: ")[:400] if causes else line_with(text, *REASONS)
