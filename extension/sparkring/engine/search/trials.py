"""One run of a search: asks Optuna for trials, and tells Optuna what the trials have reported and how they ended."""

from __future__ import annotations

import importlib
import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkring.engine.run.spec import seed_of
from sparkring.engine.search.journal import JOURNAL, Journal
from sparkring.engine.search.search import AUTO
from sparkring.errors import OptionsError
from sparkring.history.describe import named
from sparkring.history.events import Failure, ItemEnding, Metrics, SearchBegan, SearchEnded
from sparkring.runtime.parameters import Parameters

if TYPE_CHECKING:
    from sparkring.engine.foreach.steering import ResultDirectory
    from sparkring.engine.search.search import Search

# Attributes of Optuna's trials: the key of the code that a trial ran, and the number of the trial that it repeats.
CODE, AGAIN = "sparkring_code", "sparkring_again"
NAMED = 8  # a message names at most this many metrics
# By default, trials are first compared at the second report, or after a twentieth of the reports if that is later: many
# trainings only raise the learning rate until then. Trials with fewer than three reports have nothing to save.
FIRST_REPORT, FRACTION, LEAST_REPORTS = 2, 1 / 20, 3
LEAST_TRIALS = 30  # with fewer finished trials, the importance of parameters often depends on chance


@dataclass
class _Running:
    """A trial that Optuna counts as running, and what its item has reported so far.

    `at` is the step or epoch of the last value that was passed to Optuna, and `reports` counts the reports of the
    metric. `waiting` contains an epoch and the last value that was reported in it. The value is passed to Optuna when
    the epoch is over.
    """

    trial: Any
    at: int = -1
    reports: int = 0
    last: float = math.nan
    waiting: tuple[int, float] | None = None


class Trials:
    """An iterator over the trials of a search, for the pool of a run. It implements `engine.foreach.steering.Steering`.

    It first returns the trials that an earlier run of the same code began, and then asks Optuna for new ones.
    `study` is the Optuna study.
    """

    def __init__(self, search: Search) -> None:
        self.names = search.space.names
        self.metric = search.metric
        self.study: Any = None
        self._search = search
        self._taken = 0
        self._earlier: deque[Any] = deque()  # trials of an earlier run, as Optuna's FrozenTrial
        self._running: dict[int, _Running] = {}  # by the number of the item
        self._journal: Journal | None = None
        self._attributes: dict[str, Any] = {}
        self._complete = 0  # how many trials of this run and of earlier ones have ended with a value
        self._grid: Iterator[dict[str, Any]] = iter(())
        self._end = math.inf  # from this step or epoch on, trials are not pruned, because they are about to end

    def __iter__(self) -> Trials:
        return self

    def __len__(self) -> int:
        return self._search.trials

    def begin(self, folder: Path, place: ResultDirectory | None) -> SearchBegan:
        search = self._search
        code = "" if place is None else place.key_of_code(search.metric, search.mode, search.space.described)
        self.study = search.study
        if self.study is None:
            from optuna.pruners import NopPruner

            pruner = NopPruner() if search.pruner in (None, AUTO) else search.pruner
            copy = None if place is None else place.location / JOURNAL
            self._journal = Journal(folder / JOURNAL, copy, fresh=place is not None and place.fresh)
            self.study = self._journal.study(code or folder.name, search.mode, pruner)
        if code:
            self._attributes = {CODE: code}
            if not place.fresh:  # type: ignore[union-attr] # without a place, there is no code
                self._take_over(code)
        if self._journal is not None:
            # With the same seed as in an earlier run, the sampler would choose the same values again.
            known = len(self._earlier)
            self.study.sampler = _sampler(search.sampler, seed_of(search.seed, known) if known else search.seed)
        if search.sampler == "grid":
            begun = [trial.params for trial in self._earlier]
            self._grid = (values for values in search.space.grid() if values not in begun)
        return SearchBegan(time.time(), search.metric, search.mode, search.space.described)

    def _take_over(self, code: str) -> None:
        """Find the trials that an earlier run of this code began. Trials that did not end count as failed."""
        from optuna.trial import TrialState

        trials = [trial for trial in self.study.get_trials(deepcopy=False) if trial.user_attrs.get(CODE) == code]
        for trial in trials:
            if trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
        repeated = {trial.user_attrs.get(AGAIN) for trial in trials}
        self._earlier.extend(trial for trial in trials if trial.params and trial.number not in repeated)

    def __next__(self) -> Parameters:
        from optuna.trial import TrialState

        if self.study is None:
            raise OptionsError(
                "only %%foreach and sparkring.foreach() can iterate over a search: pass the search itself, not another "
                "iterable that wraps it, such as enumerate(search)."
            )
        if self._taken >= self._search.trials:
            raise StopIteration
        attributes, enqueued = self._attributes, None
        if self._earlier:
            earlier = self._earlier.popleft()
            if earlier.state in (TrialState.COMPLETE, TrialState.PRUNED):
                self._taken += 1
                if earlier.state == TrialState.COMPLETE:
                    self._completed(earlier)
                return self._search.space.values(earlier.params)  # Optuna already knows how this trial ended
            attributes, enqueued = {**attributes, AGAIN: earlier.number}, earlier.params
        elif self._search.sampler == "grid":
            enqueued = next(self._grid)
        if enqueued is not None:
            self.study.enqueue_trial(enqueued, user_attrs=attributes)
        trial = self.study.ask(self._search.space.distributions)
        for name, value in attributes.items():
            if name not in trial.user_attrs:
                trial.set_user_attr(name, value)
        self._running[self._taken] = _Running(trial)
        self._taken += 1
        self._changed()
        return self._search.space.values(trial.params)

    def reported(self, number: int, report: Metrics) -> bool:
        running, value = self._running.get(number), report.values.get(self.metric)
        if running is None or value is None:
            return False
        running.reports += 1
        running.last = value
        before, running.waiting = running.waiting, None
        if report.epoch is None:
            if report.step is not None:
                return self._prunes(running, report.step, value)
            self._noted(running, running.reports, value)  # the n-th reports of two trials need not be at the same point
            return False
        if report.step is None or report.ends_epoch:
            return self._prunes(running, report.epoch, value)
        running.waiting = report.epoch, value
        return before is not None and before[0] != report.epoch and self._prunes(running, *before)

    def _prunes(self, running: _Running, at: int, value: float) -> bool:
        """Pass a value to Optuna, unless an earlier attempt did so. Return whether Optuna wants to prune the trial."""
        is_new = self._noted(running, at, value)
        return is_new and self._search.pruner is not None and at < self._end and bool(running.trial.should_prune())

    def _noted(self, running: _Running, at: int, value: float) -> bool:
        """Pass a value to Optuna, unless an earlier attempt did so. Return whether this was done."""
        if at <= running.at:
            return False
        running.at = at
        running.trial.report(value, at)
        return True

    def problem(self, number: int, metrics: Mapping[str, float]) -> Failure | None:
        if self.metric in metrics or number not in self._running:
            return None
        verb = "minimizes" if self._search.mode == "min" else "maximizes"
        there = f"which reported {named(sorted(metrics), NAMED)}" if metrics else "which reported no metrics"
        keyword = f"{self.metric}=…" if self.metric.isidentifier() else f"**{{{self.metric!r}: …}}"
        advice = f"Call sparkring.log({keyword}) in the item, {there}."
        return Failure("code", f"did not report {self.metric}, which the search {verb}", advice=advice)

    def ended(self, number: int, ending: ItemEnding, metrics: Mapping[str, float]) -> None:
        from optuna.trial import TrialState

        running = self._running.pop(number, None)
        if running is None:
            return
        value = metrics.get(self.metric, math.nan) if math.isnan(running.last) else running.last
        if ending == "pruned":
            if running.at < 0 and not math.isnan(value):
                # The item was pruned in an earlier run. Optuna takes the value of a pruned trial from its last report.
                running.trial.report(value, 0)
            self.study.tell(running.trial, state=TrialState.PRUNED)
        elif ending in ("finished", "kept") and not math.isnan(value):
            self._completed(self.study.tell(running.trial, value))
        else:
            self.study.tell(running.trial, state=TrialState.FAIL)
        self._changed()

    def _completed(self, trial: Any) -> None:
        """Take note of a trial that has ended with a value, an Optuna FrozenTrial."""
        self._complete += 1
        steps = sorted(trial.intermediate_values)
        if self._search.pruner == AUTO and len(steps) >= LEAST_REPORTS:
            if math.isinf(self._end):
                self.study.pruner = _halving(steps)
                self._end = steps[-1]
            self._end = max(self._end, steps[-1])
        if self._complete == LEAST_TRIALS:
            # optuna.importance imports scikit-learn, which takes seconds, so a thread imports it while trials are
            # running.
            threading.Thread(target=importlib.import_module, args=("optuna.importance",), daemon=True).start()

    def _changed(self) -> None:
        if self._journal is not None:
            self._journal.changed()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def summary(self) -> SearchEnded | None:
        importance = _importance(self.study, self.names) if self._complete >= LEAST_TRIALS else {}
        return SearchEnded(time.time(), importance, self._complete) if importance else None


def _halving(steps: Sequence[int]) -> Any:
    """Return the default pruner, for trials that report at about the same steps (or epochs) as a trial that ended."""
    from optuna.pruners import SuccessiveHalvingPruner

    first = steps[max(FIRST_REPORT, math.ceil(len(steps) * FRACTION)) - 1]
    return SuccessiveHalvingPruner(min_resource=max(1, first))


def _sampler(wanted: Any, seed: int) -> Any:
    """Return the Optuna sampler that `wanted` names. If `wanted` is already a sampler, return it."""
    from optuna import samplers

    if not isinstance(wanted, str):
        return wanted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # before Optuna 5, constant_liar counts as experimental
        if wanted == "tpe":
            # A constant liar takes running trials into account, so that trials that run at the same time differ.
            return samplers.TPESampler(seed=seed, constant_liar=True)
        if wanted == "qmc":
            return samplers.QMCSampler(seed=seed)
        return samplers.RandomSampler(seed=seed)


def _importance(study: Any, names: tuple[str, ...]) -> dict[str, float]:
    """Return how much each parameter matters, as a fraction of 1, or {} if this cannot be estimated."""
    if len(names) < 2:
        return {}
    try:
        from optuna import importance

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # before Optuna 5, this evaluator counts as experimental
            evaluator = importance.PedAnovaImportanceEvaluator()
            fractions = importance.get_param_importances(study, evaluator=evaluator, params=list(names))
    except Exception:  # of any type: the estimate may fail, for example, if all values are equal
        return {}
    return {name: float(value) for name, value in fractions.items() if math.isfinite(value)}
