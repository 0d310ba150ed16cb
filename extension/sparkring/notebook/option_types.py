"""The values that options take: each function turns the text on a magic's line into a value, or says what is wrong."""

from __future__ import annotations

from argparse import ArgumentTypeError

MOST_RANKS = 1_024


def number_of_ranks(text: str) -> int:
    """A number of ranks; a negative number means processes on this machine."""
    try:
        number = int(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not a whole number of ranks (-2: two processes here, 2: two Spark tasks)"
        ) from None
    if abs(number) > MOST_RANKS:
        raise ArgumentTypeError(f"{number} is beyond the limit of {MOST_RANKS} ranks")
    return number


def seconds(text: str) -> float:
    """A time in seconds."""
    return _time(text, "seconds")


def minutes(text: str) -> float:
    """A time in minutes."""
    return _time(text, "minutes")


def _time(text: str, unit: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of {unit} greater than 0")
    return number


def variable(text: str) -> str:
    """The name of a variable."""
    if not text.isidentifier():
        raise ArgumentTypeError(f"{text!r} is not a variable's name")
    return text


def variables(text: str) -> tuple[str, ...]:
    """Names of variables, separated by commas."""
    return tuple(variable(name) for name in _separated(text))


def columns(text: str) -> tuple[str, ...]:
    """Names of columns, separated by commas; one at least."""
    names = tuple(dict.fromkeys(_separated(text)))
    if not names:
        raise ArgumentTypeError(f"{text!r} names no column")
    return names


def _separated(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def assignment(text: str) -> tuple[str, str]:
    """KEY=VALUE as a pair."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, value


def count(text: str, least: int = 0) -> int:
    """A whole number, `least` or more."""
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def positive_count(text: str) -> int:
    """A whole number, 1 or more."""
    return count(text, least=1)
