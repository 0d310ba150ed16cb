"""The speed in images per second of the same Keras script as a cell and under horovodrun, for the same time."""

from __future__ import annotations

import functools
import re

from harness import US, Effort, Goal, Measured, Row, Turns, cell, run, script, start_horovodrun

from sparkring.views import Quiet

SPEED = re.compile(r"images/s ([\d.]+)")


def keras(effort: Effort) -> list[Row]:
    seconds = 6 if effort.quick else 60  # three turns take three minutes per contestant
    # Both have the same number of threads. The script sets the number for TensorFlow, and this variable for OpenMP.
    env = {"BENCHMARK_SECONDS": str(seconds), "OMP_NUM_THREADS": "1"}
    turns = Turns(
        1 if effort.quick else min(effort.runs, 3),
        {US: functools.partial(_ours, env), "horovodrun": functools.partial(_horovodrun, env)},
    )
    what = f"Keras on 2 local ranks, {seconds} s of training after the first epoch"
    return [turns.row(what, "images/s", "speed", "horovodrun", goal=Goal(0.98, at_least=True, ratio=True))]


def _ours(env: dict[str, str]) -> Measured:
    return _speed(run(cell("digits"), -2, Quiet(), env=env).logs(0))


def _horovodrun(env: dict[str, str]) -> Measured:
    with start_horovodrun(script("digits"), env=env) as process:
        assert process.stdout is not None
        said = process.stdout.read().decode(errors="replace")
    return _speed(said)


def _speed(said: str) -> Measured:
    found = SPEED.search(said)
    if found is None:
        raise RuntimeError(f"the output has no speed: …{said[-2000:]}")
    return {"speed": float(found[1])}
