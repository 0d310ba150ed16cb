"""Start-up, warm cells, a rank's death and reading, measured in turn with the pinned and the newest versions."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from harness import HERE, Effort, Row, Series, columns, say

PINNED, NEWEST = "pinned", "newest"
# The environments that `make env` and `make env-current` make.
ENVIRONMENTS = {PINNED: ".venv", NEWEST: ".venv-current"}
BENCHMARKS = ("frameworks", "trivial", "warm", "kernel", "death", "reading")
TITLE = "## Both sets of versions"
HEADERS = ("what", PINNED, NEWEST, "ratio", "peer", f"ratio to peer, {PINNED}", f"ratio to peer, {NEWEST}")


def compare(effort: Effort) -> str:
    """Return the section of RESULTS.md. A turn measures both sets, one after the other, in separate processes."""
    found: dict[str, list[dict[str, Row]]] = {name: [] for name in ENVIRONMENTS}
    versions = {}
    for turn in range(effort.runs):
        for name, environment in ENVIRONMENTS.items():
            say(f"turn {turn + 1} of {effort.runs}: {name} …", keep=True)
            rows, versions[name] = _measured(HERE.parent / environment / "bin" / "python", effort.quick)
            found[name].append(rows)
    pinned, newest = (_joined(turns) for turns in found.values())
    lines = [
        TITLE,
        "",
        f"Written by `make bench-sets`. Number of turns: {effort.runs}. Each turn measures both sets. Each figure is "
        "the median, with the minimum and maximum if there are several turns. The first ratio is the newest set's "
        "figure divided by the pinned set's; a ratio to the peer is sparkring's figure divided by the peer's.",
        "",
        columns([HEADERS, *(_cells(what, pinned.get(what), row) for what, row in newest.items())]),
        *(f"- {name}: {told}" for name, told in versions.items()),
        "",
    ]
    return "\n".join(lines)


def _measured(python: Path, quick: bool) -> tuple[dict[str, Row], str]:
    """Run one turn of the benchmarks with this Python. Return the rows by what they measure, and the versions."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        command = [str(python), str(HERE / "run.py"), "--runs", "1", "--save", str(file), "--only", *BENCHMARKS]
        done = subprocess.run([*command, *(["--quick"] if quick else [])], stdout=sys.stderr, check=False)
        if done.returncode:
            raise RuntimeError(f"{python}: the benchmarks ended with exit code {done.returncode}")
        saved = json.loads(file.read_text(encoding="utf-8"))
    rows: dict[str, Row] = {}
    for each in saved["rows"]:
        peer = Series(tuple(each["peer"])) if each["peer"] else None
        row = Row(each["what"], each["unit"], Series(tuple(each["ours"])), each["peer_name"], peer)
        if not row.what.startswith("…"):  # such a row compares the figure of the row before with another peer
            rows[row.what] = row
    return rows, saved["versions"]


def save(rows: Iterable[Row], versions: str, file: Path) -> None:
    """Write the rows of a run, for the process that compares them."""
    saved = [
        {
            "what": row.what,
            "unit": row.unit,
            "ours": row.ours.values,
            "peer_name": row.peer_name,
            "peer": row.peer.values if row.peer else None,
        }
        for row in rows
    ]
    file.write_text(json.dumps({"versions": versions, "rows": saved}), encoding="utf-8")


def _joined(turns: list[dict[str, Row]]) -> dict[str, Row]:
    """Join the rows of several turns: return one row for everything that was measured."""
    joined = {}
    for what, first in turns[0].items():
        rows = [turn[what] for turn in turns]
        ours = Series(tuple(value for row in rows for value in row.ours.values))
        peers = tuple(value for row in rows if row.peer for value in row.peer.values)
        joined[what] = Row(what, first.unit, ours, first.peer_name, Series(peers) if peers else None)
    return joined


def _cells(what: str, pinned: Row | None, newest: Row) -> tuple[str, ...]:
    return (
        what,
        pinned.ours.shown(pinned.unit) if pinned else "",
        newest.ours.shown(newest.unit),
        f"{newest.ours.median / pinned.ours.median:.2f}×" if pinned and pinned.ours.median else "",
        newest.peer_name,
        pinned.ratio_shown() if pinned else "",
        newest.ratio_shown(),
    )
