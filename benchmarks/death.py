"""How long it takes until the driver has the error after a rank is killed. The rank notes the time of its death."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import US, Effort, Goal, Measured, Row, Turns, cell, run, script, spark_session, start_horovodrun
from peers import torch_distributor_death

from sparkring.errors import RunFailed
from sparkring.views import Quiet

LOCAL, ON_SPARK = Goal(0.5), Goal(1.5)


def killed(effort: Effort) -> list[Row]:
    spark_session()
    states = {"death": "the other asleep", "death_in_allreduce": "the other in an allreduce"}
    local, on_spark, peer = {}, {}, {}
    for name in states:
        torch = functools.partial(torch_distributor_death, in_allreduce=name != "death", local=True)
        local[name] = Turns(
            effort.runs,
            {
                US: functools.partial(_seconds, functools.partial(_ours, name, -2)),
                "horovodrun": functools.partial(_seconds, functools.partial(_horovodrun, name)),
                "TorchDistributor, local": functools.partial(_seconds, torch),
            },
        )
        on_spark[name] = Turns(effort.runs, {US: functools.partial(_seconds, functools.partial(_ours, name, 2))})
    # TorchDistributor on Spark is measured last, not in turn: with pyspark 4.3, it ends a local session's Java process.
    for name in states:
        torch = functools.partial(torch_distributor_death, in_allreduce=name != "death", local=False)
        peer[name] = Turns(effort.runs, {"TorchDistributor": functools.partial(_seconds, torch)})
    rows = []
    for name, state in states.items():
        what = f"SIGKILL of 1 of 2 {{}}, {state}: time to the error"
        rows += [
            local[name].row(what.format("local ranks"), "s", "told", "horovodrun", goal=LOCAL),
            local[name].row("… compared with PyTorch", "s", "told", "TorchDistributor, local"),
            on_spark[name].row(
                what.format("Spark tasks"), "s", "told", "TorchDistributor", of=peer[name], goal=ON_SPARK
            ),
        ]
    return rows


def _seconds(until_told: Callable[[str], None]) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "died-at")
        until_told(str(note))
        told = time.time()
        return {"told": told - float(note.read_text())}


def _ours(name: str, np: int, note: str) -> None:
    try:
        run(cell(name), np, Quiet(), env={"BENCHMARK_NOTE": note})
    except RunFailed as error:
        if "rank 1" not in str(error):
            raise
        return
    raise AssertionError("no error was raised")


def _horovodrun(name: str, note: str) -> None:
    with start_horovodrun(script(name), env={"BENCHMARK_NOTE": note}) as process:
        process.communicate()
    if not process.returncode:
        raise RuntimeError("no error was raised")
