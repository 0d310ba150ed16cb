"""Independent items, at most two at once: how long a trivial item takes, and how well long ones use both places."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from harness import US, Case, Effort, Goal, Measured, Row, Turns, notebook, run_cell, spark_session

AT_ONCE = 2
ITEMS = 1_000
SPARK_TRIALS = 20  # of Hyperopt, which takes about a second for each
SECONDS = (5, 5, 3, 3, 2, 2, 1, 1, 0.5, 0.5)  # the longest first, so that an ideal pool is busy to the end

Run = Callable[[Callable[[Any], Any], Sequence[Any]], Sequence[Any]]  # calls a function with each item; its results


def trivial(effort: Effort) -> list[Row]:
    """The seconds of all items, start of the pool included, divided by their number."""
    items, trials = (ITEMS // 10, SPARK_TRIALS // 4) if effort.quick else (ITEMS, SPARK_TRIALS)
    # joblib sends several items at once if they are short, unless its batches have one item.
    local: dict[str, Case] = {
        US: functools.partial(_each, _foreach_cell, items),
        "joblib, an item at a time": functools.partial(_each, functools.partial(_joblib, batch_size=1), items),
        "joblib": functools.partial(_each, _joblib, items),
        "Ray": functools.partial(_each, _ray, items),
    }
    _warm_up()
    turns = Turns(effort.runs, local)
    rows = [
        turns.row(
            f"{items:,} trivial items, {AT_ONCE} at once: an item",
            "ms",
            "item",
            "joblib, an item at a time",
            goal=Goal(5.0),
        ),
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
    name = f"{items:,} trivial items, {AT_ONCE} Spark tasks at once: an item"
    return [
        *rows,
        turns.row(name, "ms", "item", "joblib-spark", goal=Goal(10.0)),
        turns.row(f"… compared with {trials} items of Hyperopt", "ms", "item", "Hyperopt's SparkTrials"),
    ]


def utilisation(effort: Effort) -> list[Row]:
    """The time that the items sleep, as a share of the time that the two places have until all items have ended."""
    seconds = [each / 10 for each in SECONDS] if effort.quick else SECONDS
    cases: dict[str, Case] = {
        US: functools.partial(_share, _foreach_cell, seconds),
        "joblib": functools.partial(_share, _joblib, seconds),
        "Ray": functools.partial(_share, _ray, seconds),
    }
    _warm_up()
    turns = Turns(1 if effort.quick else min(effort.runs, 3), cases)
    name = f"{len(seconds)} items of {min(seconds):g} to {max(seconds):g} s, {AT_ONCE} at once: time that is used"
    return [
        turns.row(name, "%", "share", "joblib", goal=Goal(95.0, at_least=True)),
        turns.row("… compared with Ray", "%", "share", "Ray"),
    ]


def _warm_up() -> None:
    """Start the peers' processes, which stay for later calls; ours start with each run."""
    for run in (_joblib, _ray):
        run(abs, range(AT_ONCE))


def _each(run: Run, items: int) -> Measured:
    begun = time.perf_counter()
    found = run(abs, range(items))
    seconds = time.perf_counter() - begun
    if list(found) != list(range(items)):
        raise RuntimeError(f"it returned {found[:10]} …")
    return {"item": 1_000 * seconds / items}


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
    """Run as many trials as there are items. Hyperopt makes the items itself, so it returns `items` unchanged."""
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
