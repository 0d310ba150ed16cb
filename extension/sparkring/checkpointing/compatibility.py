"""Finds what has changed since a checkpoint was saved: the cell, or the data. This module does not access storage."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping, Sequence

from sparkring.capture.syntax import parsed
from sparkring.checkpointing.entries import INITIAL, Entry
from sparkring.history.describe import ago

_LINES = 14
_NAMES = 5


def changes(entry: Entry, code: str, data: Mapping[str, str], uses: Mapping[str, str] = {}) -> str:
    """Say what has changed since the checkpoint was saved; return '' if nothing has.

    `uses` has the digests of the values and functions that the cell uses, by name.
    """
    commit = entry.commit
    assert commit is not None
    changed = sorted(name for name in commit.data.keys() & data.keys() if commit.data[name] != data[name])
    reasons = [f"the data of {name} has changed since then." for name in changed]
    if words := changed_words(commit.uses, uses):
        reasons.insert(0, f"{words} since then.")
    if commit.code and code and meaning(commit.code) != meaning(code):
        reasons.insert(0, f"the cell has changed since then:\n{_difference(_body(commit.code), _body(code))}")
    return "\n".join(reasons)


def changed_words(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Say which of the digests differ, as in "the cell and `lr` have changed"; return '' if none does.

    Only names that both know count. Under the name '' is the version of Python.
    """
    changed = [name for name in sorted(before.keys() & now.keys()) if name and before[name] != now[name]]
    if not changed:
        return ""
    named = list(map(_quoted, changed))
    if len(named) > _NAMES:
        named = [*named[: _NAMES - 1], f"{len(named) - _NAMES + 1} more"]
    names = " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
    have = "have" if len(named) > 1 else "has"
    if before.get("") != now.get(""):
        versions = f"Python {now.get('')} is used here, and Python {before.get('')} was used then"
        return f"{versions}, so it is not known whether {names} {have} changed"
    return f"{names} {have} changed"


def _quoted(name: str) -> str:
    return f"`{name}`" if name.isidentifier() else name


def unnoticed(names: Sequence[str]) -> str:
    """Say that changes of values cannot be noticed."""
    named = ", ".join(map(_quoted, names))
    return f"changes of {named} are not noticed, because not all of the content can be compared: use --fresh after them"


def saved_words(entry: Entry, now: float) -> str:
    """Describe a checkpoint, as in `step 120, saved 3 min ago`."""
    assert entry.commit is not None
    return f"{step_words(entry)}, saved {ago(now - entry.commit.time)}"


def step_words(entry: Entry) -> str:
    """Name the step of a checkpoint, as in `step 120`."""
    return "the initial state" if entry.step == INITIAL else f"step {entry.step:,}"


def _body(code: str) -> list[str]:
    """Return the lines of a cell without its %% line, because changed options do not count as a changed cell."""
    lines = [line.rstrip() for line in code.splitlines()]
    return lines[1:] if code.startswith("%%") else lines


def meaning(code: str) -> str:
    """Return a cell in a form that does not depend on comments, empty lines and docstrings."""
    text = "\n".join(_body(code)).strip()
    try:
        tree = parsed(text)
    except SyntaxError:  # for example, because of a line magic
        return text
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
            del node.body[0]
    return ast.dump(tree)


def _difference(before: list[str], now: list[str]) -> str:
    shown = list(difflib.unified_diff(before, now, n=0, lineterm=""))[2:]  # without the two lines that name files
    lines = [f"    {line}" for line in shown if not line.startswith("@@")]
    return "\n".join(lines[:_LINES] + (["    …"] if len(lines) > _LINES else []))
