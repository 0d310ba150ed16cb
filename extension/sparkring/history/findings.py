"""What checks have found: a level, a sentence, and advice, as `%doctor` shows them and a run's notices repeat them."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """What a check has found about a `topic`, such as "Python".

    The level "problem" means that launches will fail, or will not do what the user expects. "note" means that the user
    should know about it. `advice` says what to do; '' if there is nothing to do.
    """

    topic: str
    level: Level
    what: str
    advice: str = ""


class Section(NamedTuple):
    """The findings about one part of the setup, such as "Spark"."""

    title: str
    findings: tuple[Finding, ...]


def ok(topic: str, what: str) -> Finding:
    """Return a finding that needs no attention."""
    return Finding(topic, "ok", what)


def note(topic: str, what: str, advice: str = "") -> Finding:
    """Return a finding that the user should know about."""
    return Finding(topic, "note", what, advice)


def problem(topic: str, what: str, advice: str) -> Finding:
    """Return a finding about something that is wrong."""
    return Finding(topic, "problem", what, advice)
