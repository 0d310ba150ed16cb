"""The options that runs have: option() describes one, and the other functions read one from a magic's line.

If the text of an option is not valid, the function that reads it raises an ArgumentTypeError that says why.
"""

from __future__ import annotations

import dataclasses
import functools
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

MOST_RANKS = 1_024


def option(
    default: Any,
    help: str,
    value: str = "",
    read: Callable[..., Any] = str,
    *,
    least: int | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Return a field of a dataclass that users set with an option of a magic, or with a keyword of a function.

    `help` and `value`, the name of the value, are what the magic's help shows. A bool has no value: its option sets the
    other value than the default. `read` makes the value from text; if the default is a tuple, the option may be
    repeated. `least` is the smallest value, apart from the default. If `choices` is set, there are no other values.
    """
    if read is count:
        read = functools.partial(count, least=least or 0)
    settings = {"help": help, "value": value, "read": read, "least": least, "choices": choices}
    return dataclasses.field(default=default, metadata=settings)


def flag_of(name: str) -> str:
    """Return the option that sets the field `name`: `--min-np` for `min_np`, `--timeout` for `timeout_s`."""
    if name == "trace":  # --no-profile sets the field `profile`
        return "--profile"
    return f"--{name.removesuffix('_s').replace('_', '-')}"


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


def minutes(text: str) -> float:
    """Return the number of seconds that a number of minutes stands for."""
    return 60 * _time(text, "minutes")


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
