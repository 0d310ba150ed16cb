"""The time from a print on a rank until the view has the line. Each line contains the time at which it was printed."""

from __future__ import annotations

import time

from harness import US, Effort, Goal, Measured, Row, Series, cell, run, say, spark_session

from sparkring.history.record import RunRecord

GOAL = Goal(0.2)


def lines(effort: Effort) -> list[Row]:
    spark_session()
    found: dict[str, list[Measured]] = {"local": [], "Spark": []}
    for turn in range(1 if effort.quick else min(effort.runs, 3)):
        for (where, turns), np in zip(found.items(), (-2, 2), strict=True):
            say(f"turn {turn + 1}: {US}, {where} …")
            arrivals = Arrivals()
            run(cell("slow_lines"), np, arrivals)
            seconds = Series(tuple(arrivals.seconds))
            turns.append({"median": seconds.median, "slowest": max(seconds.values)})
    return [
        Row(
            f"10 lines a second from each of 2 ranks, {where}: print to view, {key}",
            "s",
            Series(tuple(turn[key] for turn in turns)),
            goal=GOAL,
        )
        for where, turns in found.items()
        for key in ("median", "slowest")
    ]


class Arrivals:
    """A view that notes how old each line is when it arrives."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._seen = 0

    def refresh(self, record: RunRecord) -> None:
        now, new = time.time(), record.recent_count - self._seen
        self._seen = record.recent_count
        for line in record.recent[-new:] if new else ():
            if line.text.startswith("at "):
                self.seconds.append(now - float(line.text[3:]))

    def close(self, record: RunRecord) -> None:
        self.refresh(record)
