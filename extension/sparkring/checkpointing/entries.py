"""The entries of a directory of checkpoints, as plain data.

    DIR/00000120.1795294802123-0/       a checkpoint, named STEP.STAMP-NUMBER
        rank-0.safetensors              the state that rank 0 saved; with sharding, there is such a file for each rank
        commit.json                     written last, with sizes and digests: without it, the folder is not a checkpoint

STAMP identifies the attempt that saved the checkpoint, and NUMBER counts the saves of this attempt from 0. Later
attempts have larger stamps, so the newest checkpoint has the largest (STAMP, NUMBER), whatever its STEP. The STEP of a
stream is the last micro-batch that the checkpoint includes; for the state before the first one, it is -0000001.
"""

from __future__ import annotations

import datetime
import math
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

State = Literal["committed", "partial", "corrupt"]

COMMIT = "commit.json"
INITIAL = -1  # the step of a checkpoint with the initial state of a stream
TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")  # fsspec's names for a file's time
_NAME = re.compile(r"(\d{8,}|-0{6}1)\.(\d{10,})-(\d+)")


class Name(NamedTuple):
    """A checkpoint's name: its step, the stamp of the attempt that saved it, and its number in this attempt."""

    step: int
    stamp: int
    number: int

    def __str__(self) -> str:
        return f"{self.step:08d}.{self.stamp}-{self.number}"

    @classmethod
    def of(cls, text: str) -> Name | None:
        """Return the parsed name; None if `text` is not the name of a sparkring checkpoint."""
        match = _NAME.fullmatch(text)
        return cls(*map(int, match.groups())) if match else None

    @property
    def age(self) -> tuple[int, int]:
        """The sort key that orders checkpoints by the time at which they were saved."""
        return self.stamp, self.number


class File(NamedTuple):
    """One file of a checkpoint."""

    name: str
    size_bytes: int
    digest: str  # algorithm:hexadecimal


class Commit(NamedTuple):
    """The contents of commit.json. `time` is in Unix seconds; `size` is the number of ranks that trained.

    `sharded` says whether each rank wrote a file of its own. `lineage` is an id that all checkpoints of one training
    run share. `data` maps the name of each data set whose position is saved to the version of this data set. `uses`
    maps the names of the values and functions that the code uses to their digests. `not_finite` says which weights or
    which metric are NaN or infinite, '' if none is. Earlier versions did not save `uses` and `not_finite`.
    """

    step: int
    time: float
    files: tuple[File, ...]
    metrics: dict[str, float]
    lineage: str
    run_id: str
    size: int
    sharded: bool
    code: str
    data: dict[str, str]
    uses: Mapping[str, str] = {}
    not_finite: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class Entry(NamedTuple):
    """A checkpoint.

    Its state is "partial" if it has no commit.json, "committed" if all files have the right sizes, and otherwise
    "corrupt": a file is missing or damaged.
    """

    name: str
    state: State
    commit: Commit | None = None
    reason: str = ""  # why it is corrupt
    changed: float = 0.0  # for a partial checkpoint, when it last changed, in Unix seconds; 0.0 for unknown

    def __repr__(self) -> str:
        """Return one line: the name, the state, and the metrics."""
        metrics = {} if self.commit is None else self.commit.metrics
        facts = [repr(self.name), self.state, *(f"{name}={value:g}" for name, value in metrics.items()), self.reason]
        facts.append(self.not_finite)
        return f"Entry({', '.join(filter(None, facts))})"

    @property
    def parsed(self) -> Name:
        name = Name.of(self.name)
        assert name is not None
        return name

    @property
    def step(self) -> int:
        return self.parsed.step

    @property
    def not_finite(self) -> str:
        return "" if self.commit is None else self.commit.not_finite


class Last(NamedTuple):
    """The checkpoint from which a new attempt continues; `name` is '' if there is none.

    `there` holds the names of all checkpoints that the driver knows of. `commit` is None if the driver could not read
    it.
    """

    name: str = ""
    step: int = 0
    there: tuple[str, ...] = ()
    commit: Commit | None = None


def stamp_after(stamps: list[int]) -> int:
    """Return the stamp of an attempt that begins now: the time in ms since 1970, but larger than all `stamps`."""
    return max([int(time.time() * 1000), *(stamp + 1 for stamp in stamps)])


def changed_at(info: dict[str, Any]) -> float:
    """Return when a file or folder last changed, in Unix seconds; 0.0 if its file system does not say."""
    values = [info[name] for name in TIMES if info.get(name) is not None]
    times = [moment.timestamp() if isinstance(moment, datetime.datetime) else moment for moment in values]
    return max((float(moment) for moment in times if isinstance(moment, int | float)), default=0.0)


def newest(entries: Iterable[Entry]) -> Entry | None:
    """Return the committed checkpoint that was saved last. Those with NaN or infinity are passed over."""
    return max(filter(is_good, entries), key=lambda entry: entry.parsed.age, default=None)


def passed_over(steps: Mapping[int, str]) -> str:
    """Say which checkpoints with NaN or infinity are passed over: `steps` has what is not finite, by step."""
    named = [f"{step:,} ({words})" for step, words in sorted(steps.items())]
    named = named[:1] + [f"{len(named) - 2} more"] * (len(named) > 2) + named[1:][-1:]
    return f"passed over the checkpoint{'s' if len(steps) > 1 else ''} of step {' and '.join(named)}"


def is_good(entry: Entry) -> bool:
    """Return whether a run may continue from the checkpoint: it is committed, and its weights are finite."""
    return entry.state == "committed" and not entry.not_finite


def best(entries: Iterable[Entry], metric: str, mode: Literal["min", "max"]) -> Entry | None:
    """Return the newest good checkpoint with the best value of `metric`; None if every value is missing or NaN."""
    sign = 1 if mode == "max" else -1
    scored = [
        (sign * entry.commit.metrics[metric], entry.parsed.age, entry)
        for entry in entries
        if is_good(entry) and entry.commit is not None and not math.isnan(entry.commit.metrics.get(metric, math.nan))
    ]
    return max(scored)[2] if scored else None
