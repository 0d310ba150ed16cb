"""The speed in images per second of the same Keras script as a cell and under horovodrun, for the same time."""

from __future__ import annotations

import functools

from harness import US, Effort, Goal, Measured, Row, Turns, cell, run, said_by_horovodrun, script, speed_in

from sparkring.views import Quiet


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
    return speed_in(run(cell("digits"), -2, Quiet(), env=env).logs(0))


def _horovodrun(env: dict[str, str]) -> Measured:
    return speed_in(said_by_horovodrun(script("digits"), env=env))
