"""sparkring.search() and its arguments: what to search for, and how."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparkring.engine.search.space import Space
from sparkring.errors import OptionsError
from sparkring.runtime.packages import require
from sparkring.runtime.report import short_repr

if TYPE_CHECKING:
    from sparkring.engine.search.trials import Trials

TRIALS = 100  # the default
AUTO = "auto"  # the default pruner, which Trials makes when it knows how often trials report
_SAMPLERS = ("tpe", "random", "grid", "qmc")


@dataclass(frozen=True, eq=False)
class Search:
    """A search. %%foreach and sparkring.foreach() iterate over it, and its items are the trials."""

    space: Space
    trials: int
    metric: str
    mode: Literal["min", "max"]
    sampler: Any
    pruner: Any
    seed: int
    study: Any = None

    def __len__(self) -> int:
        return self.trials

    def __iter__(self) -> Trials:
        from sparkring.engine.search.trials import Trials

        return Trials(self)

    def __repr__(self) -> str:
        return f"search({', '.join(self.space.names)}; {self.trials:,} trials; {self.mode}imize {self.metric})"


def search(
    *,
    trials: int | None = None,
    minimize: str = "",
    maximize: str = "",
    sampler: Any = None,
    prune: Any = True,
    seed: int = 0,
    study: Any = None,
    **parameters: Any,
) -> Search:
    """Return a search for the parameter values that minimize or maximize a metric. %%foreach iterates over the search.

        trials = sparkring.search(
            lr=sparkring.log_uniform(1e-5, 1e-1), width=[64, 128, 256], trials=100, minimize="val_loss"
        )

        %%foreach lr, width in trials -n -4

    Each item is a trial: a tuple of the parameters' values, in the order of the keywords. With one name, as in
    `trial in trials`, the values are `trial.lr` and `trial.width`, and `train(**trial)` passes them as keywords. If the
    search has only one parameter, and the name is that of the parameter, as in `lr in sparkring.search(lr=…)`, each
    item is the value itself.

    A parameter is a list of choices, a Python range, or a range such as uniform(0, 0.5), log_uniform(1e-5, 1e-1) or
    integer(1, 4).

    `minimize` or `maximize` names a metric, which each trial reports with sparkring.log() or through Keras. The last
    value of the metric is the trial's result. With `prune`, a trial ends early if its reports are worse than those of
    other trials at the same step or epoch (successive halving; never at the first report). `prune` can also be one of
    Optuna's pruners, or False.

    `sampler` decides which values are tried next: "tpe" (the default, which follows the results so far), "random",
    "qmc" (evenly spread), "grid" (all combinations), or one of Optuna's samplers. `study` is an Optuna study to
    continue, with its sampler and its pruner. By default, there are 100 trials; with sampler="grid", there is one trial
    for each combination.

    Raises OptionsError if an argument is invalid, or if Optuna is not installed.
    """
    optuna = require("optuna", "search()")
    if bool(minimize) == bool(maximize):
        raise OptionsError('search() needs the name of one metric: minimize="val_loss" or maximize="accuracy".')
    mode: Literal["min", "max"] = "min" if minimize else "max"
    for name, value in (("trials", trials), ("seed", seed)):
        if value is not None and not _is_count(value):
            raise OptionsError(f"search({name}={short_repr(value, 60)}): expected a whole number, at least 0.")
    metric = minimize or maximize
    if not isinstance(metric, str):
        raise OptionsError(f"search({mode}imize={short_repr(metric, 60)}): expected the name of a metric.")
    space = Space(parameters)
    if study is not None:
        if sampler is not None or not isinstance(prune, bool):
            raise OptionsError(
                "search(study=…) takes no sampler or pruner, because the study has its own: set study.sampler and "
                "study.pruner instead."
            )
        directions = [direction.name for direction in study.directions]
        if directions != [f"{mode}imize".upper()]:
            there = " and ".join(f"{direction.lower()}s" for direction in directions)
            raise OptionsError(
                f"search({mode}imize=…, study=…): the study {there}: use a study with the same direction."
            )
    if not (sampler is None or sampler in _SAMPLERS or isinstance(sampler, optuna.samplers.BaseSampler)):
        known = ", ".join(f'"{name}"' for name in _SAMPLERS)
        raise OptionsError(f"search(sampler={short_repr(sampler, 60)}): expected {known} or one of Optuna's samplers.")
    if not isinstance(prune, bool | optuna.pruners.BasePruner):
        raise OptionsError(f"search(prune={short_repr(prune, 60)}): expected True, False or one of Optuna's pruners.")
    if sampler == "grid":
        combinations = space.combinations()
        trials = combinations if trials is None else min(trials, combinations)
    trials = TRIALS if trials is None else int(trials)
    pruner: Any = prune or None
    if prune is True:
        pruner = AUTO if study is None else study.pruner
    return Search(space, trials, metric, mode, sampler or "tpe", pruner, int(seed), study)


def _is_count(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= 0
    except TypeError:
        return False
