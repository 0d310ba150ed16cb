"""Many ranks on one machine."""

from __future__ import annotations

import functools

from harness import US, Effort, Row, Turns, cell, horovodrun, ours, script

MARKER = "hello from rank"
RANKS = 32


def many(effort: Effort) -> list[Row]:
    turns = Turns(
        1 if effort.quick else min(effort.runs, 3),
        {
            US: functools.partial(ours, cell("line"), -RANKS, MARKER),
            "horovodrun": functools.partial(horovodrun, script("line"), marker=MARKER, ranks=RANKS),
        },
    )
    what = f"{RANKS} local ranks that only print: start to"
    return [
        turns.row(f"{what} first line", "s", "first", "horovodrun"),
        turns.row(f"{what} end", "s", "total", "horovodrun"),
    ]
