"""Two ranks print a million lines each. Are any lost? How fast do they arrive? How much memory does the driver use?

Each turn runs this file as a script in a fresh driver process, so that memory of earlier turns is not counted.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from harness import US, Effort, Goal, Measured, Row, Turns, cell, run, script, start_horovodrun

from sparkring.history import run_store
from sparkring.history.record import RunRecord
from sparkring.views import Quiet, View
from sparkring.views.html import HtmlView
from sparkring.views.terminal import TerminalView

RANKS = 2
SAMPLE_EVERY_S = 0.02
FAST, LEAN = Goal(250_000, at_least=True), Goal(50)
VIEWS = {US: "none", f"{US}, terminal": "terminal", f"{US}, HTML": "html"}


def million(effort: Effort) -> list[Row]:
    lines = 100_000 if effort.quick else 1_000_000
    cases = {name: functools.partial(_in_fresh_driver, view, lines) for name, view in VIEWS.items()}
    turns = Turns(effort.runs, cases | {"horovodrun": functools.partial(_horovodrun, lines)})
    what = f"{RANKS} × {lines:,} printed lines"
    rows = []
    for name, view in VIEWS.items():
        told = f"{what}, " + ("no view" if view == "none" else f"{view} view")
        rows += [
            turns.row(f"{told}: lost", "lines", "lost", us=name, goal=Goal(0)),
            turns.row(f"{told}: start to end", "lines/s", "speed", "horovodrun", us=name, goal=FAST),
            turns.row(f"{told}: driver's memory grows by", "MB", "growth", us=name, goal=LEAN),
        ]
    return rows


def _in_fresh_driver(view: str, lines: int) -> Measured:
    env = {**os.environ, "BENCHMARK_LINES": str(lines)}
    done = subprocess.run([sys.executable, __file__, view], env=env, stdout=subprocess.PIPE, check=True)
    found: Measured = json.loads(done.stdout)
    return found


def _horovodrun(lines: int) -> Measured:
    begun = time.perf_counter()
    with start_horovodrun(script("burst"), env={"BENCHMARK_LINES": str(lines)}) as process:
        assert process.stdout is not None
        came = sum(b"line " in line for line in process.stdout)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}")
    return {"speed": came / (time.perf_counter() - begun), "lost": RANKS * lines - came}


# ── In the fresh driver ───────────────────────────────────────────────────────


def _drive(view: View, lines: int) -> Measured:
    run("print(rank)", -RANKS, Quiet())  # so that the imports of a first run are not measured
    me = psutil.Process()
    before = peak = me.memory_info().rss
    over = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not over.wait(SAMPLE_EVERY_S):
            peak = max(peak, me.memory_info().rss)

    sampler = threading.Thread(target=sample)
    sampler.start()
    begun = time.perf_counter()
    record = run(cell("burst"), -RANKS, view).record
    seconds = time.perf_counter() - begun
    over.set()
    sampler.join()
    return {
        "speed": RANKS * lines / seconds,
        "growth": (peak - before) / 1e6,
        "lost": max(RANKS * lines - count for count in (_in_logs(record), _in_record(record))),
    }


def _in_record(record: RunRecord) -> int:
    return sum(rank.line_count for rank in record.ranks)


def _in_logs(record: RunRecord) -> int:
    return sum(run_store.log(Path(record.log_folder), rank).count("line ") for rank in range(RANKS))


def _view(name: str) -> View:
    nowhere = open(os.devnull, "w")
    if name == "terminal":
        return TerminalView(nowhere)
    if name == "html":
        return HtmlView(show=lambda *shown: nowhere.write(json.dumps(shown)) and None)
    return Quiet()


if __name__ == "__main__":
    print(json.dumps(_drive(_view(sys.argv[1]), int(os.environ["BENCHMARK_LINES"]))))
