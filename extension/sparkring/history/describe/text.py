"""Turns numbers, names and lists into words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sparkring.history.lines import plain

METRICS_NAMED = 6  # how many metrics, or parameters, a sentence names
CODE_CHARACTERS = 100  # a line of code that a sentence quotes is cut to this length


def duration(seconds: float) -> str:
    """Return a span of time in words: 40 ms, 3.2 s (3 s if `seconds` is an int), 3 min 12 s, 2 h 05 min.

    Return `0 s` for a negative span, and '' for one that is not finite.
    """
    if not math.isfinite(seconds):
        return ""
    if 0 < seconds < 9.95 and isinstance(seconds, float):
        if seconds < 0.001:
            return "< 1 ms"
        return f"{round(seconds * 1000)} ms" if seconds < 0.0995 else f"{seconds:.1f} s"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def ago(seconds: float) -> str:
    """Say how long ago something was: `just now`, `12 s ago`, `3 min ago`, `5 h ago`, `12 days ago`."""
    if not math.isfinite(seconds):
        return ""
    if seconds < 1:
        return "just now"
    if seconds < 60:
        return f"{int(seconds)} s ago"
    if seconds < 3600:
        return f"{int(seconds / 60)} min ago"
    if seconds < 48 * 3600:
        return f"{int(seconds / 3600)} h ago"
    return f"{int(seconds / 86400):,} days ago"


def size(size_bytes: float | None) -> str:
    """Return a number of bytes in decimal units, with three digits: 999 B, 1.20 kB, 34.5 MB; '' if it is not known."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return ""
    if size_bytes < 999.5:
        return f"{size_bytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        size_bytes /= 1000
        if size_bytes < 999.5 or unit == "TB":
            break
    digits = 2 if size_bytes < 9.995 else 1 if size_bytes < 99.95 else 0
    return f"{size_bytes:.{digits}f} {unit}"


def number(value: float) -> str:
    """Return a metric's value with at most four significant digits: `0.0312`, `123,457`, `1.23e+06`, `nan`, `-inf`."""
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 999.95 else f"{value:,.0f}"
    return f"{value:.3g}"


def change(value: float, before: float | None) -> str:
    """Compare a value with that of the last run: ` (−12 % against the last run)`; '' if there is nothing to compare."""
    if before is None or not before or not math.isfinite(value) or not math.isfinite(before):
        return ""
    percents = round(100 * (value - before) / abs(before))
    return f" ({percents:+,} %".replace("-", "−").replace("+0", "±0") + " against the last run)"


def percent(fraction: float) -> str:
    """Return a completed fraction: `34 %`; '' if it is not finite.

    It is rounded down, so that 100 % means that nothing is left.
    """
    if not math.isfinite(fraction):
        return ""
    return f"{math.floor(100 * fraction + 1e-6)} %"


def numbers(values: Sequence[float]) -> Callable[[float], str]:
    """Return the function that formats the numbers in a column: number(), or one that writes four decimals.

    Four decimals are used if each number is 0 or between 0.001 and 100 in size, and not all are whole numbers.
    """
    plain_ones = all(value == 0 or 1e-3 <= abs(value) < 100 for value in values)
    if plain_ones and not all(value == int(value) for value in values):
        return lambda value: f"{value + 0.0:.4f}"  # -0.0 + 0.0 is 0.0
    return number


def dotted(*parts: str) -> str:
    """Join the parts that are not empty: `a · b`."""
    return " · ".join(filter(None, parts))


def rank_list(ranks: Iterable[int]) -> str:
    """Return the ranks with a noun: `rank 2` or `ranks 0–3, 7`."""
    unique = sorted(set(ranks))
    return f"{'rank' if len(unique) == 1 else 'ranks'} {rank_numbers(unique)}"


def rank_numbers(ranks: Iterable[int]) -> str:
    """Return the numbers of the ranks: `0–3, 7`. Three or more consecutive numbers are written as a range."""
    parts: list[str] = []
    for _, group in itertools.groupby(enumerate(sorted(set(ranks))), lambda pair: pair[1] - pair[0]):
        span = [rank for _, rank in group]
        parts += [f"{span[0]}–{span[-1]}"] if len(span) > 2 else map(str, span)
    return ", ".join(parts)


def counted(count: int, what: str) -> str:
    """Return a count with its noun: `1 line`, `4,812 lines`, `12 batches`."""
    return f"{count:,} {what if count == 1 else plural(what)}"


def plural(what: str) -> str:
    """Return the plural of a noun: `lines`, `batches`, `processes`."""
    return f"{what}{'es' if what.endswith(('tch', 's')) else 's'}"


def span(values: Sequence[float], write: Callable[[Any], str]) -> str:
    """Return the range of some values: `3–5`, or `3` if both ends have the same text."""
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low}–{high}"


def named(names: Sequence[str], most: int, characters: int = 40) -> str:
    """Return the first `most` of these names, each cut to `characters`: `a, b and 3 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(first_line(name, characters) for name in names[:most]) + more


def first_line(text: str, most: int = 300) -> str:
    """Return the first line of `text` as plain() shows it, cut to `most` characters."""
    line = plain(text.strip().partition("\n")[0])
    return line if len(line) <= most else line[: most - 1] + "…"


def plain_lines(text: str) -> str:
    """Return `text` with each line as plain() shows it."""
    return "\n".join(plain(line) for line in text.split("\n"))
