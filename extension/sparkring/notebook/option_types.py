"""The types of options. Each function turns the text of an option on a magic's line into a value.

If the text is not valid, the function raises an ArgumentTypeError that says why.
"""

from __future__ import annotations

import functools
from argparse import ArgumentTypeError

MOST_RANKS = 1_024


def number_of_ranks(text: str) -> int:
    """Return a number of ranks; a negative number means processes on this machine."""
    try:
        number = int(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not a whole number of ranks (-2: two processes here, 2: two Spark tasks)"
        ) from None
    if abs(number) > MOST_RANKS:
        raise ArgumentTypeError(f"{number} is beyond the limit of {MOST_RANKS} ranks")
    return number


def number_of_gpus(text: str) -> float:
    """Return a number of GPUs, which may be a fraction."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number of GPUs (2, or 0.5 if two items share one)") from None


def _time(text: str, unit: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of {unit} greater than 0")
    return number


seconds = functools.partial(_time, unit="seconds")
minutes = functools.partial(_time, unit="minutes")


def age(text: str) -> float:
    """Return the number of seconds that a `text` such as 30d stands for."""
    units = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
    try:
        return _time(text[:-1], "hours, days or weeks") * units[text[-1:]]
    except (KeyError, ArgumentTypeError):
        raise ArgumentTypeError(f"{text!r} is not an age, such as 12h, 30d or 4w (hours, days, weeks)") from None


def variable(text: str) -> str:
    """Return the name of a variable."""
    if not text.isidentifier():
        raise ArgumentTypeError(f"{text!r} is not a variable's name")
    return text


def variables(text: str) -> tuple[str, ...]:
    """Return the names of variables, which are separated by commas in `text`."""
    return tuple(variable(name) for name in _separated(text))


def columns(text: str) -> tuple[str, ...]:
    """Return the names of columns, which are separated by commas in `text`. At least one column has to be named."""
    names = tuple(dict.fromkeys(_separated(text)))
    if not names:
        raise ArgumentTypeError(f"{text!r} names no column")
    return names


def _separated(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def assignment(text: str) -> tuple[str, str]:
    """Split a `text` of the form KEY=VALUE into the key and the value."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, value


def count(text: str, least: int = 0) -> int:
    """Return a whole number that is at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


positive_count = functools.partial(count, least=1)
