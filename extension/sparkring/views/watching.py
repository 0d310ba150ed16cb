"""Says in one sentence what in a run needs the user's attention most."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from sparkring.history import describe, memory, metrics
from sparkring.history.curves import better
from sparkring.history.describe.progress import not_finite_words
from sparkring.history.describe.run import growth_words
from sparkring.history.describe.text import counted, number
from sparkring.history.lines import plain
from sparkring.history.record import RunRecord
from sparkring.views.attempts import restarted

WORSE_IN_A_ROW = 3  # from this many changes for the worse on, a validation metric is mentioned
_ROWS = 50  # the rows of the table that are looked at


class Attention(NamedTuple):
    """The sentence, and the name of the panel's tab that shows more."""

    text: str
    tab: str


def watching(record: RunRecord) -> Attention | None:
    """Return what needs attention most; None if there is nothing to say. Runs of items have other views.

    It is the first of these: values that are not finite, memory that will soon be full, a validation metric that gets
    worse, a restart, what makes the run slow.
    """
    if record.items is not None:
        return None
    if odd := not_finite_words(record):
        return Attention(odd[0], "metrics")
    if grows := memory.growth(record):
        return Attention(growth_words(grows), "metrics")
    if (other := _other(record)) is not None:
        return other
    judged = describe.verdict(record)
    return Attention(describe.verdict_words(record), "timeline") if judged and judged.kind != "balanced" else None


@metrics.remembered("metrics", "attempts", "checkpoints", "finished_ranks")
def _other(record: RunRecord) -> Attention | None:
    if worse := getting_worse(record):
        return Attention(worse, "metrics")
    if restart := restarted(record):
        return Attention(restart, "restarts")
    return None


def getting_worse(record: RunRecord) -> str:
    """Say which validation metric has got worse in each of its last rows: `val_loss has risen for 5 epochs`."""
    table = metrics.table(record)
    names = [name for name in table.names if name.startswith("val_")]
    rows = table.newest(_ROWS) if names else []
    rows = [(row, spreads) for row, spreads in rows if (row.attempt, row.lap) == (rows[-1][0].attempt, rows[-1][0].lap)]
    for name in names:
        values = [(row.at, spreads[name].mean) for row, spreads in reversed(rows) if name in spreads]
        mode = better(record, name)
        worse = [
            after > before if mode == "min" else after < before
            for (_, after), (_, before) in itertools.pairwise(values)
            if math.isfinite(after) and math.isfinite(before)
        ]
        count = len([*itertools.takewhile(bool, worse)])
        if mode is not None and count >= WORSE_IN_A_ROW:
            (last_at, last), (first_at, first) = values[0], values[count]
            verb = "risen" if mode == "min" else "fallen"
            span = counted(last_at - first_at, metrics.noun(record, table))
            return f"{plain(name)} has {verb} for {span}, from {number(first)} to {number(last)}"
    return ""
