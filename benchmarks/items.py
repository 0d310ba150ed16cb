"""How long trivial items take, how well a pool of two keeps busy with long items, and how accurate a plan is."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from harness import US, Case, Effort, Goal, Measured, Row, Turns, notebook, run_cell, spark_session

AT_ONCE = 2
ITEMS = 1_000
SPARK_TRIALS = 20  # of Hyperopt, which takes about a second for each
SECONDS = (5, 5, 3, 3, 2, 2, 1, 1, 0.5, 0.5)  # the longest first, so that an ideal pool is busy to the end

PLANNED = {
    "NumPy": """
import numpy as np
values = np.random.default_rng(i).random(25_000_000)
""",
    "pandas and scikit-learn": """
import numpy as np, pandas as pd
from sklearn.ensemble import RandomForestRegressor
frame = pd.DataFrame(np.random.default_rng(i).random((500_000, 4)), columns=list("abcd"))
model = RandomForestRegressor(20, max_depth=12).fit(frame[["a", "b"]][:30_000], frame.d[:30_000])
""",
    "PyTorch": """
import torch
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.rand(20_000, 512), torch.rand(20_000, 1)
for begin in range(0, 20_000, 1_000):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x[begin : begin + 1_000]), y[begin : begin + 1_000]).backward()
    optimizer.step()
""",
    "TensorFlow": """
import numpy as np, tensorflow as tf
model = tf.keras.Sequential([tf.keras.layers.Dense(512, activation="relu"), tf.keras.layers.Dense(1)])
model.compile("adam", "mse")
x, y = np.random.rand(20_000, 256).astype("float32"), np.random.rand(20_000, 1)
model.fit(x, y, epochs=2, batch_size=500, verbose=0)
""",
}
# The code that follows the code of each item. The first items must not end before the last ones hold their memory, even
# if the machine is busy. So each item waits until all the items that run at once have come here.
MEETING = """
import pathlib, time
(pathlib.Path(here) / str(i)).touch()
while len(list(pathlib.Path(here).iterdir())) < together:
    time.sleep(0.05)
time.sleep(1)
pathlib.Path(over).touch()
"""
MEETING_S = 300  # an item that waits longer than this fails: another item has not come

Run = Callable[[Callable[[Any], Any], Sequence[Any]], Sequence[Any]]  # calls a function with each item; returns results


def trivial(effort: Effort) -> list[Row]:
    """Measure the time of all items, including the start of the pool, divided by the number of items.

    A further item is an item that runs when the processes are up. To measure its time, the time of AT_ONCE items is
    subtracted.
    """
    items, trials = (ITEMS // 10, SPARK_TRIALS // 4) if effort.quick else (ITEMS, SPARK_TRIALS)
    # joblib sends several items at once if they are short, unless its batches have one item.
    local: dict[str, Case] = {
        US: functools.partial(_each, _foreach_cell, items),
        "joblib, one item at a time": functools.partial(_each, functools.partial(_joblib, batch_size=1), items),
        "joblib": functools.partial(_each, _joblib, items),
        "Ray": functools.partial(_each, _ray, items),
    }
    _warm_up()
    turns = Turns(effort.runs, local)
    rows = [
        turns.row(
            f"{items:,} trivial items, {AT_ONCE} at once: time per item",
            "ms",
            "item",
            "joblib, one item at a time",
            goal=Goal(5.0),
        ),
        turns.row("… without the start: time per further item", "ms", "further", "joblib, one item at a time"),
        turns.row("… compared with joblib's batches", "ms", "item", "joblib"),
        turns.row("… compared with Ray", "ms", "item", "Ray"),
    ]

    spark_session()
    on_spark: dict[str, Case] = {
        US: functools.partial(_each, functools.partial(_foreach_cell, np=AT_ONCE), items),
        "joblib-spark": functools.partial(_each, _joblib_spark, items),
        "Hyperopt's SparkTrials": functools.partial(_each, _hyperopt, trials),
    }
    turns = Turns(effort.runs, on_spark)
    name = f"{items:,} trivial items, {AT_ONCE} Spark tasks at once: time per item"
    return [
        *rows,
        turns.row(name, "ms", "item", "joblib-spark", goal=Goal(10.0)),
        turns.row("… without the start: time per further item", "ms", "further", "joblib-spark"),
        turns.row(f"… compared with {trials} items of Hyperopt", "ms", "item", "Hyperopt's SparkTrials"),
    ]


def utilisation(effort: Effort) -> list[Row]:
    """Measure the total time that the items sleep, as a share of twice the run's time, since two items run at once."""
    seconds = [each / 10 for each in SECONDS] if effort.quick else SECONDS
    cases: dict[str, Case] = {
        US: functools.partial(_share, _foreach_cell, seconds),
        "joblib": functools.partial(_share, _joblib, seconds),
        "Ray": functools.partial(_share, _ray, seconds),
    }
    _warm_up()
    turns = Turns(1 if effort.quick else min(effort.runs, 3), cases)
    what = f"{len(seconds)} items of {min(seconds):g} to {max(seconds):g} s, {AT_ONCE} at once"
    return [
        turns.row(f"{what}: share of the time that is used", "%", "share", "joblib", goal=Goal(95.0, at_least=True)),
        turns.row("… compared with Ray", "%", "share", "Ray"),
    ]


def planned(effort: Effort) -> list[Row]:
    """Measure the difference between the memory that a plan expects and the memory that the items use at once.

    The items wait for one another and then hold their memory for a second, so that their peaks are at the same time.
    """
    rows = []
    for spare, how in (("1", "with"), ("0", "without")):
        cases: dict[str, Case] = {
            name: functools.partial(_plan_error, source, spare) for name, source in PLANNED.items()
        }
        turns = Turns(min(effort.runs, 3), cases)
        for name in PLANNED:
            what = f"%%foreach --plan, 4 items at once, {name}, {how} spare processes: error of the planned memory"
            rows.append(turns.row(what, "%", "error", us=name, goal=Goal(20.0)))
    return rows


def _plan_error(source: str, spare: str) -> Measured:
    """Plan a cell in a first launch and run it, and return the error of the plan in percent.

    The measurement ends when the first item ends, because a process that exits clears its modules and so copies memory
    that it shares.
    """
    from sparkring.launchers.spare import spares

    others = set(psutil.Process().children(recursive=True))  # Spark's and peers' processes
    before = os.environ["SPARKRING_SPARE"]
    os.environ["SPARKRING_SPARE"] = spare
    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
            here, over = Path(folder, "here"), Path(folder, "over")
            here.mkdir()
            notebook().user_ns.update(here=str(here), over=str(over), together=1)
            plan = run_cell(f"%%foreach i in range(4) -n -4 --plan\n{source}{MEETING}")
            notebook().user_ns["together"] = 4
            (here / "0").unlink()
            over.unlink()
            held = threads.submit(_peak_until, over, others)
            try:
                run_cell(f"%%foreach i in range(4) -n -4 --timeout-each {MEETING_S}\n{source}{MEETING}")
            finally:
                over.touch()
            return {"error": 100 * abs(plan.memory_at(4) / held.result() - 1)}
    finally:
        spares.stop()
        os.environ["SPARKRING_SPARE"] = before


def _peak_until(over: Path, others: set[psutil.Process]) -> int:
    found = 0
    while not over.exists():
        found = max(found, _held_below(others))
        time.sleep(0.05)
    return found


def _held_below(others: set[psutil.Process]) -> int:
    """Return how much memory the child processes of this process hold, except those in `others`.

    Shared memory and mapped files are counted once. Files that only the spare process has mapped are not counted,
    since the system can drop them from memory.
    """
    from sparkring.launchers.spare import spares

    own = files = 0
    for process in set(psutil.Process().children(recursive=True)) - others:
        with contextlib.suppress(psutil.Error, OSError):
            shares = _kilobytes(f"/proc/{process.pid}/smaps_rollup")
            own += shares["Pss_Anon"] + shares["Pss_Shmem"]
            if spares.spare is None or process.pid != spares.spare.pid:
                files = max(files, _kilobytes(f"/proc/{process.pid}/status")["RssFile"])
    return 1024 * (own + files)


def _kilobytes(path: str) -> dict[str, int]:
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1] == "kB"}


def _warm_up() -> None:
    """Start the peers' processes, which stay up for later calls. Our processes start with each run."""
    for run in (_joblib, _ray):
        run(abs, range(AT_ONCE))


def _each(run: Run, items: int) -> Measured:
    seconds = []
    for count in (AT_ONCE, items):
        begun = time.perf_counter()
        found = run(abs, range(count))
        seconds.append(time.perf_counter() - begun)
        if list(found) != list(range(count)):
            raise RuntimeError(f"the run returned {found[:10]} …")
    few, all_of_them = seconds
    return {"item": 1_000 * all_of_them / items, "further": 1_000 * (all_of_them - few) / (items - AT_ONCE)}


def _share(run: Run, seconds: Sequence[float]) -> Measured:
    begun = time.perf_counter()
    run(time.sleep, seconds)
    return {"share": 100 * sum(seconds) / AT_ONCE / (time.perf_counter() - begun)}


# ── Us ────────────────────────────────────────────────────────────────────────


def _foreach_cell(function: Callable[[Any], Any], items: Sequence[Any], np: int = -AT_ONCE) -> Sequence[Any]:
    """Run a cell for each item, as the user does."""
    notebook().user_ns.update(function=function, items=items)
    return list(run_cell(f"%%foreach item in items -n {np}\nfunction(item)").values)


# ── Peers ─────────────────────────────────────────────────────────────────────


def _joblib(function: Callable[[Any], Any], items: Sequence[Any], batch_size: int | str = "auto") -> Sequence[Any]:
    from joblib import Parallel, delayed

    return list(Parallel(n_jobs=AT_ONCE, batch_size=batch_size)(map(delayed(function), items)))


def _joblib_spark(function: Callable[[Any], Any], items: Sequence[Any]) -> Sequence[Any]:
    from joblib import Parallel, delayed, parallel_backend

    _register_joblib_spark()
    with parallel_backend("spark", n_jobs=AT_ONCE):
        return list(Parallel()(map(delayed(function), items)))


@functools.cache
def _register_joblib_spark() -> None:
    import joblibspark

    joblibspark.register_spark()


def _ray(function: Callable[[Any], Any], items: Sequence[Any]) -> Sequence[Any]:
    import ray

    remote = _on_ray(function)
    return list(ray.get([remote.remote(item) for item in items]))


@functools.cache
def _on_ray(function: Callable[[Any], Any]) -> Any:
    import ray

    if not ray.is_initialized():
        ray.init(
            num_cpus=AT_ONCE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
        )
    return ray.remote(lambda item: function(item))


def _hyperopt(function: Callable[[Any], Any], items: Sequence[Any]) -> Sequence[Any]:
    """Run as many trials as there are items. Hyperopt makes its own items, so `items` are returned unchanged."""
    import numpy
    from hyperopt import SparkTrials, fmin, hp, rand

    trials = SparkTrials(parallelism=AT_ONCE, spark_session=spark_session())
    fmin(
        lambda item: float(function(item)),
        hp.uniform("item", 0, 1),
        algo=rand.suggest,
        max_evals=len(items),
        trials=trials,
        show_progressbar=False,
        verbose=False,
        rstate=numpy.random.default_rng(0),
    )
    return items[: len(trials.losses())]
