"""How long a search takes to reach a given loss: with and without pruning, and compared with Optuna's own loop.

The trials of all contestants run one after another, with the same sampler and the same seeds. sparkring's trials run in
a separate process. The time includes the start of this process and its imports. What the trials compute is in
losses.py, which imports little: like the functions of a notebook, it does not need the modules of the benchmarks.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import US, Effort, Goal, Measured, Row, Turns
from losses import ackley, approached, branin, hartmann, net, rate

import sparkring

if TYPE_CHECKING:
    import optuna

UNPRUNED, LOOP = f"{US}, prune=False", "study.optimize, with the same pruner"
HALF, NO_WORSE = Goal(0.5, ratio=True), Goal(1.1, ratio=True)


class Task(NamedTuple):
    """What to search for: `losses(**values)` yields the loss after each step, and the search ends at the loss `good`.

    The ranges are as for Optuna's FloatDistribution: low, high, and whether the scale is logarithmic.
    """

    losses: Callable[..., Iterator[float]]
    ranges: Mapping[str, tuple[float, float, bool]]
    good: float
    trials: int


def _approached(
    function: Callable[..., float], height: float, good: float, **ranges: tuple[float, float, bool]
) -> Task:
    return Task(functools.partial(approached, function, height), ranges, good, 100)


FUNCTIONS = (
    _approached(branin, 100, 0.6, x=(-5, 10, False), y=(0, 15, False)),
    _approached(hartmann, 2, -3.7, x=(0, 1, False), y=(0, 1, False), z=(0, 1, False)),
    _approached(ackley, 10, 1.5, x=(-5, 5, False), y=(-5, 5, False)),
    _approached(rate, 5, 0.05, lr=(1e-6, 1, True), decay=(1e-7, 0.1, True)),
)
NET = (Task(net, {"lr": (1e-4, 3, True), "width": (8, 128, True), "alpha": (1e-6, 1, True)}, 0.14, 100),)


def time_to_good(effort: Effort) -> list[Row]:
    rows = []
    # More seeds for the functions would take far longer than ten minutes.
    for what, tasks, seeds in (
        ("4 test functions", FUNCTIONS, range(1)),
        ("a small network on the digits", NET, range(3)),
    ):
        turns = Turns(
            min(effort.runs, 3),
            {
                US: functools.partial(_all, _ours, tasks, seeds, prune=True),
                UNPRUNED: functools.partial(_all, _ours, tasks, seeds, prune=False),
                LOOP: functools.partial(_all, _loop, tasks, seeds),
            },
        )
        told = f"search of {what}: total time to a given loss"
        rows += [
            turns.row(told, "s", "reached", UNPRUNED, goal=HALF),
            turns.row("… compared with Optuna's own loop", "s", "reached", LOOP, goal=NO_WORSE),
        ]
    return rows


def _all(search: Callable[..., float], tasks: tuple[Task, ...], seeds: range, **settings: Any) -> Measured:
    return {"reached": sum(search(task, seed, **settings) for task in tasks for seed in seeds)}


def _ours(task: Task, seed: int, *, prune: bool) -> float:
    """Search with sparkring, and return the seconds until a trial has reported a loss that is good enough."""
    ranges = {
        name: sparkring.log_uniform(low, high) if log else sparkring.uniform(low, high)
        for name, (low, high, log) in task.ranges.items()
    }
    search = sparkring.search(**ranges, trials=task.trials, minimize="loss", prune=prune, seed=seed)
    losses, good = task.losses, task.good
    with tempfile.TemporaryDirectory() as folder:
        reached = Path(folder, "reached")

        def train(trial: Any) -> None:
            for step, loss in enumerate(losses(**trial), 1):
                sparkring.log(step=step, loss=loss)
                if loss <= good and not reached.exists():
                    reached.touch()

        begun = time.perf_counter()
        run = sparkring.foreach(train, search, np=-1, quiet=True, background=True)
        while not (reached.exists() or run.done):
            time.sleep(0.001)
        took = time.perf_counter() - begun
        run.stop()
        with contextlib.suppress(KeyboardInterrupt):
            run.result()
    return took


def _loop(task: Task, seed: int) -> float:
    """Search with Optuna's own loop, in this process."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def objective(trial: optuna.Trial) -> float:
        values = {name: trial.suggest_float(name, low, high, log=log) for name, (low, high, log) in task.ranges.items()}
        loss = math.nan
        for step, loss in enumerate(task.losses(**values), 1):
            trial.report(loss, step)
            if loss <= task.good:
                study.stop()
                break
            if trial.should_prune():
                raise optuna.TrialPruned
        return loss

    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        pruner=optuna.pruners.SuccessiveHalvingPruner(),
    )
    begun = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):
        study.optimize(objective, n_trials=task.trials)
    return time.perf_counter() - begun
