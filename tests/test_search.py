"""Tests of searches on the driver's side. The ranks are threads of this process."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import optuna
import pytest
from fake_launcher import Exit, FakeRank
from texts import mentions
from waiting import DEADLINE_S

import sparkring
from sparkring.capture.packing import unpack_names
from sparkring.engine.foreach import api as foreach_api
from sparkring.engine.foreach.items import ITEM, Items, Targets
from sparkring.engine.foreach.options import ForeachOptions
from sparkring.engine.foreach.run import ForeachSpec
from sparkring.engine.run import api
from sparkring.engine.run.spec import Cell
from sparkring.engine.search.trials import Trials
from sparkring.errors import CheckpointError, ItemsFailed, OptionsError, RunFailed
from sparkring.history import describe, run_store
from sparkring.history.record import RunRecord
from sparkring.runtime.parameters import Parameters
from sparkring.wire.messages import Metrics
from sparkring.worker.rank.failures import as_failure

STEPS = 4
WORSE = optuna.pruners.ThresholdPruner(upper=3.0)  # prunes a trial that reports a larger value


@pytest.fixture(autouse=True)
def quiet_optuna():
    """Hide Optuna's log."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(level)


def train(rank: FakeRank, trial: Any) -> float:
    """Report the loss of `trial.q` at each step; if it is above 3, the search prunes it."""
    for step in range(1, STEPS + 1):
        rank.tell(Metrics({"loss": trial.q + 1 / step}, step=step))
        if trial.q + 1 / step > 3:
            rank.interrupted.wait(DEADLINE_S)
            raise KeyboardInterrupt
    return trial.q * 10.0


def grid(q: Any, **options: Any) -> Any:
    return sparkring.search(**{"q": q, "sampler": "grid", "minimize": "loss", "prune": WORSE, **options})


def states(study: Any) -> list[str]:
    return [trial.state.name for trial in study.get_trials()]


def test_a_pruned_trial_ends_at_its_next_report(runs):
    """A pruned trial has not failed, and is not tried again. Its value is the last metric. Its process continues."""
    result = runs(train, grid([1, 2, 3, 4]), 1, retries=3)
    table = result.table
    assert list(table.columns) == ["q", "state", "attempts", "seconds", "place", "loss", "value", "error"]
    assert list(table.q) == [1, 2, 3, 4]
    assert list(table.state) == ["finished", "finished", "pruned", "pruned"]
    assert list(table.attempts) == [1] * 4
    assert result.values == [10.0, 20.0, 4.0, 5.0]
    assert len(runs.launched) == 1
    assert states(result.study) == ["COMPLETE", "COMPLETE", "PRUNED", "PRUNED"]
    assert [trial.value for trial in result.study.get_trials()] == [1.25, 2.25, 4.0, 5.0]
    assert (result.best().q, result.best().loss) == (1, 1.25)
    assert result.best("loss", mode="max").q == 2, "the best of the finished trials"
    found = result.record.items
    assert (found.finished, found.pruned, found.done) == (2, 2, 4)
    assert found.search.best == (0, 1.25)
    assert found.known[1].curves["loss"] == ((1.0, 3.0), (2.0, 2.5), (3.0, 2 + 1 / 3), (4.0, 2.25))
    assert mentions(describe.outcome(result.record), "4 trials: 2 finished", "2 pruned", "best loss 1.25", "trial", "0")
    assert run_store.load(run_store.find_saved(result.record.run_id)).items == found
    journal = optuna.storages.journal.JournalFileBackend(f"{result.record.log_folder}/study.journal")
    (summary,) = optuna.get_all_study_summaries(optuna.storages.JournalStorage(journal))
    assert (summary.n_trials, summary.best_trial.params) == (4, {"q": 1}), "other tools can read the study"


@pytest.mark.parametrize(
    ("steps", "compared"),
    [
        (range(1, 3), []),
        (range(1, 5), [2]),
        (range(4), [1]),
        (range(100, 500, 100), [200]),
        (range(1, 9), [2]),
        (range(1, 31), [2, 8]),
        (range(1, 101), [5, 20, 80]),
    ],
)
def test_when_trials_are_compared_by_default(steps, compared, monkeypatch):
    """Not at the first report, and not at the last. A trial is pruned if it is worse than the others at such a step."""
    monkeypatch.setattr("sparkring.engine.search.trials.LEAST_TRIALS", 1_000)  # otherwise, a thread would import Optuna
    trials = Trials(grid(range(len(steps) + 2), prune=True))
    trials.study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    trials._grid = trials._search.space.grid()

    def is_pruned(number: int, worse_at: int | None = None) -> bool:
        next(trials)
        ends = [trials.reported(number, Metrics({"loss": 1.0 + (at == worse_at)}, step=at)) for at in steps]
        assert not any(ends) or steps[ends.index(True)] == worse_at
        trials.ended(number, "pruned" if any(ends) else "finished", {"loss": 1.0})
        return any(ends)

    assert not is_pruned(0)
    assert not is_pruned(1)
    assert [at for number, at in enumerate(steps, 2) if is_pruned(number, at)] == compared


def test_a_trial_that_fails_is_not_pruned(runs):
    """A trial that fails by itself has failed, even if its last value was poor and the search was about to end it."""

    def cell(rank: FakeRank, trial: Any) -> None:
        rank.tell(Metrics({"loss": trial.q}, step=1))
        if trial.q == 4:
            raise ValueError("the loss is too large")
        if trial.q == 5:
            rank.interrupted.wait(DEADLINE_S)
            raise Exit(signal=9)

    with pytest.raises(ItemsFailed):
        runs(cell, grid([1, 4, 5]), 1, retries=0)
    result = api.last_result
    assert list(result.table.state) == ["finished", "failed", "failed"]
    assert [failure.cause for failure in result.errors.values()] == ["exception", "signal"]
    assert states(result.study) == ["COMPLETE", "FAIL", "FAIL"]


def test_trials_have_what_the_sampler_chooses(runs, monkeypatch):
    """The values are those that Optuna's own loop would try. The last trials depend on earlier results."""
    monkeypatch.setattr("sparkring.engine.search.trials.LEAST_TRIALS", 14)
    space = {
        "lr": sparkring.log_uniform(1e-5, 1e-1),
        "width": [64, 128],
        "rate": sparkring.uniform(0, 0.5),
        "layers": range(1, 4),
    }

    def loss(lr: float, width: int, rate: float, layers: int) -> float:
        return abs(math.log10(lr) + 3) + width / 100 + rate + layers

    def cell(rank: FakeRank, trial: Any) -> None:
        rank.tell(Metrics({"loss": loss(**trial)}))

    result = runs(cell, sparkring.search(**space, trials=14, minimize="loss", seed=3, prune=False), 1)

    def objective(trial: optuna.Trial) -> float:
        return loss(
            trial.suggest_float("lr", 1e-5, 1e-1, log=True),
            trial.suggest_categorical("width", [64, 128]),
            trial.suggest_float("rate", 0, 0.5),
            trial.suggest_int("layers", 1, 3),
        )

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=3, constant_liar=True))
    study.optimize(objective, n_trials=14)
    assert [trial.params for trial in result.study.get_trials()] == [trial.params for trial in study.get_trials()]
    assert result.best().loss == study.best_value
    importance, trials = result.record.items.search.importance, result.record.items.search.trials
    assert (sum(importance.values()), trials) == (pytest.approx(1), 14)


def test_a_later_run_goes_on_with_the_study(runs, tmp_path):
    """Trials that have ended, even by pruning, do not run again. The others run again with the same values."""
    options = {"checkpoint_dir": str(tmp_path / "kept")}
    second = threading.Event()

    def slow(rank: FakeRank, trial: Any) -> float:
        if trial.q == 2:
            second.set()
            rank.interrupted.wait(DEADLINE_S)
            raise KeyboardInterrupt
        return train(rank, trial)

    def stop_late(record: RunRecord) -> None:
        if second.is_set() and record.items is not None and record.items.done == 2:
            run.stop(wait=False)

    run = runs.in_background(slow, grid([1, 5, 2, 6]), 1, **options)
    runs.view.on_refresh = stop_late
    with pytest.raises(KeyboardInterrupt):
        run.result(DEADLINE_S)
    assert states(api.last_result.study) == ["COMPLETE", "PRUNED", "FAIL"]
    ran = []

    def noted(rank: FakeRank, trial: Any) -> float:
        ran.append(trial.q)
        return train(rank, trial)

    result = runs(noted, grid([1, 5, 2, 6]), 1, **options)
    assert ran == [2, 6]
    assert list(result.table.state) == ["kept", "pruned", "finished", "pruned"]
    assert list(result.table.loss) == [1.25, 6.0, 2.25, 7.0]
    assert result.values == [10.0, 6.0, 20.0, 7.0]
    assert states(result.study) == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE", "PRUNED"]
    assert (result.record.items.kept, result.record.items.pruned) == (2, 1)
    assert result.best().q == 1
    ran.clear()
    assert list(runs(noted, grid([1, 5, 2, 6]), 1, **options).table.state) == ["kept", "pruned", "kept", "pruned"]
    assert ran == []
    (tmp_path / "kept/study.journal").write_text("{\n{\n")
    (tmp_path / "kept/study.journal.new").unlink()
    with pytest.raises(CheckpointError, match=r"kept/study.journal cannot .*read \(JSONDecodeError"):
        runs(noted, grid([1]), 1, **options)
    assert list(runs(noted, grid([1]), 1, fresh=True, **options).table.state) == ["finished"]


def test_a_run_that_goes_on_tries_other_values(runs, tmp_path):
    """A random sampler does not repeat its first numbers. The study of a killed kernel is completed."""
    options = {"checkpoint_dir": str(tmp_path)}
    space = {"q": sparkring.uniform(0, 1), "sampler": "random", "minimize": "loss", "prune": False}
    first = runs(train, sparkring.search(**space, trials=3), 1, **options)
    study = first.study
    study.ask({"q": optuna.distributions.FloatDistribution(0, 1)}).set_user_attr(
        "sparkring_code", study.trials[0].user_attrs["sparkring_code"]
    )
    lines = Path(first.record.log_folder, "study.journal").read_bytes()
    (tmp_path / "study.journal.new").write_bytes(lines + b'{"op_co')  # as a killed kernel may leave it
    later = runs(train, sparkring.search(**space, trials=6), 1, **options)
    assert list(later.table.state) == ["kept"] * 3 + ["finished"] * 3
    assert list(later.table.q)[:4] == [trial.params["q"] for trial in study.trials]
    assert len({*later.table.q}) == 6
    assert states(later.study) == ["COMPLETE"] * 3 + ["FAIL"] + ["COMPLETE"] * 3


def test_a_metric_that_is_not_reported(runs):
    """One sentence at the end says which call is missing. A metric that is NaN is a failure only for Optuna."""
    with pytest.raises(ItemsFailed) as caught:
        runs(lambda rank, trial: rank.tell(Metrics({"los": 0.5})), grid([1, 2], maximize="val_loss", minimize=""), 1)
    assert mentions(str(caught.value), "2", "not", "val_loss", "trials 0", "1")
    assert mentions(str(caught.value), "sparkring.log(val_loss=…)")
    result = api.last_result
    assert list(result.table.state) == ["failed"] * 2
    assert states(result.study) == ["FAIL"] * 2
    with pytest.raises(OptionsError, match=r"best\('val_loss'\): no finished item .*reported .*metric"):
        result.best()
    result = runs(lambda rank, trial: rank.tell(Metrics({"loss": trial.q})), grid([math.nan, 1.0]), 1)
    assert list(result.table.state) == ["finished"] * 2
    assert states(result.study) == ["FAIL", "COMPLETE"]


def test_a_trial_that_is_tried_again_stays_the_same_trial(runs):
    """If the second attempt of a trial reports steps again, these steps are not judged again."""
    tried = []

    def cell(rank: FakeRank, trial: Any) -> None:
        tried.append(rank.attempt)
        for step in (1, 2, 3):
            rank.tell(Metrics({"loss": 9.0 if step < 3 else 1.0}, step=step))
            if len(tried) == 1 and step == 2:
                raise OSError("the store is busy")

    patient = optuna.pruners.ThresholdPruner(upper=3.0, n_warmup_steps=3)
    result = runs(cell, grid([1], prune=patient), 1, retries=1)
    assert list(result.table.state) == ["finished"]
    assert len(tried) == 2
    (trial,) = result.study.get_trials()
    assert trial.intermediate_values == {1: 9.0, 2: 9.0, 3: 1.0}


def test_a_users_own_study(runs):
    """The study's sampler, pruner and trials are used, and trials in the study's queue come first."""
    study = optuna.create_study(direction="maximize", pruner=WORSE, sampler=optuna.samplers.RandomSampler(seed=1))
    study.enqueue_trial({"q": 2})
    own = {"study": study, "maximize": "loss", "q": sparkring.integer(1, 9), "trials": 3}
    result = runs(train, sparkring.search(**own), 1)
    assert result.study is study
    assert result.table.q[0] == 2
    assert [trial.params["q"] for trial in study.trials] == list(result.table.q)
    assert not Path(result.record.log_folder, "study.journal").exists()
    runs(lambda rank, trial: rank.tell(Metrics({"loss": 9.0}, step=1)), sparkring.search(**own, prune=False), 1)
    assert states(study)[3:] == ["COMPLETE"] * 3


def test_an_error_of_the_users_pruner_ends_the_run(runs):
    """Running items are finished, as after an error of the iterable, and the error shows the user's lines."""

    class Broken(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            raise ZeroDivisionError("no trials")

    with pytest.raises(RunFailed, match=r"ZeroDivisionError: no trials .*\b1 trial\b") as caught:
        runs(train, grid([1, 2], prune=Broken()), 1)
    assert 'raise ZeroDivisionError("no trials")' in str(caught.value)
    assert api.last_result.values == [10.0]


def test_reports_without_steps_are_not_compared():
    trials = Trials(grid([1, 2]))
    trials.study = optuna.create_study(pruner=WORSE)
    trials._grid = trials._search.space.grid()
    next(trials)
    assert not any(trials.reported(0, Metrics({"loss": value})) for value in (1.0, 9.0))
    assert trials.study.trials[0].intermediate_values == {1: 1.0, 2: 9.0}
    assert trials.reported(0, Metrics({"loss": 9.0}, step=3))


def test_what_is_reported_within_epochs():
    """An epoch counts when it is over, with its last value. Reports without steps and epochs are numbered."""
    trials = Trials(sparkring.search(q=[1], minimize="loss", prune=False))

    def told(*reports: Metrics) -> dict[int, float]:
        trials.study = optuna.create_study()
        trials._taken = 0
        next(trials)
        for report in reports:
            trials.reported(0, report)
        return dict(trials.study.trials[0].intermediate_values)

    def keras(epoch: int, step: int | None, loss: float) -> Metrics:
        return Metrics({"loss": loss}, step=step, epoch=epoch, ends_epoch=step is None)

    assert told(keras(1, 1, 9.0), keras(1, 2, 8.0), keras(1, None, 7.0), keras(2, 1, 6.0)) == {1: 7.0}
    assert told(*(Metrics({"loss": n}, step=n % 2, epoch=n // 2) for n in range(5))) == {0: 1.0, 1: 3.0}
    assert told(Metrics({"loss": 3.0}), Metrics({"acc": 1.0}), Metrics({"loss": 2.0})) == {1: 3.0, 2: 2.0}


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({}, r'needs the name of one metric: minimize="val_loss" or maximize="accuracy"'),
        ({"minimize": "a", "maximize": "b", "q": [1]}, "needs the name of one metric"),
        ({"minimize": "a"}, "needs at least one parameter"),
        ({"minimize": "a", "q": 3}, r"search\(q=3\): expected a list of choices"),
        ({"minimize": "a", "q": []}, r"search\(q=\[\]\): expected a list of choices"),
        ({"minimize": "a", "q": [1, 1]}, "two of the choices are equal"),
        ({"minimize": "a", "q": [1], "trials": -1}, r"trials=-1\): expected a whole number"),
        ({"minimize": "a", "q": [1], "seed": [1, 2]}, r"seed=\[1, 2\]\): expected a whole number"),
        ({"minimize": "a", "q": [1], "sampler": "tpr"}, r'sampler=\'tpr\'\): expected "tpe", "random"'),
        ({"minimize": "a", "q": [1], "prune": "yes"}, "expected True, False or one of Optuna's pruners"),
        ({"minimize": "a", "q": sparkring.uniform(0, 1), "sampler": "grid"}, "a grid needs a list of values"),
        ({"maximize": "a", "q": [1], "study": optuna.create_study()}, "the study minimizes: use a study with the same"),
        ({"minimize": "a", "q": [1], "sampler": "tpe", "study": optuna.create_study()}, "set study.sampler"),
    ],
)
def test_what_cannot_be_searched(arguments, what):
    with pytest.raises(OptionsError, match=what):
        sparkring.search(**arguments)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: sparkring.uniform(1, 0), r"uniform\(1, 0\): the first number is the lower bound"),
        (lambda: sparkring.uniform(0, math.inf), "the bounds and the step must be finite"),
        (lambda: sparkring.uniform("a", 1), r"uniform\('a', 1\): the bounds and the step must be finite numbers"),
        (lambda: sparkring.uniform(0, 1, step="x"), "the bounds and the step must be finite"),
        (lambda: sparkring.log_uniform(1, None), r"log_uniform\(1, None\): the bounds"),
        (lambda: sparkring.integer(1, math.inf), r"integer\(1, inf\): the bounds and the step must be finite numbers"),
        (lambda: sparkring.integer(1, math.nan), "the bounds and the step must be finite numbers"),
        (lambda: sparkring.uniform(0, 1, step=0), "the step must be greater than 0"),
        (lambda: sparkring.log_uniform(0, 1), "the lower bound of a logarithmic range must be greater than 0"),
        (lambda: sparkring.integer(1, 2.5), "whole numbers"),
        (lambda: sparkring.integer(1, 9, step=2, log=True), "a logarithmic range cannot have a step"),
    ],
)
def test_ranges_that_do_not_exist(make, what):
    with pytest.raises(OptionsError, match=what):
        make()


def test_the_number_of_trials_of_a_grid():
    assert [len(grid([1, 2, 3], trials=trials)) for trials in (None, 0, 2, 9)] == [3, 0, 2, 3]


def test_targets_that_do_not_fit(runs):
    """Too many names, too few names, and the right names in a different order are refused before anything starts."""
    space = sparkring.search(lr=[0.1], width=[64], minimize="loss", trials=1)
    for targets, what in [("a, b, c", "write `lr, width`, or one name"), ("width, lr", "in another order")]:
        with pytest.raises(OptionsError, match=what):
            foreach_api.foreach_spec(
                ForeachSpec(Cell("\n1", {}), space, ForeachOptions(-1), Targets(targets)), runs.view
            )
    assert not runs.launched
    with pytest.raises(OptionsError, match="only %%foreach and"):
        list(space)


@pytest.mark.parametrize(
    ("targets", "argument", "value"),
    [
        ("q", "", 3),
        ("(q)", "", 3),
        ("q,", "", 3),
        ("trial", "", Parameters(("q",), (3,))),
        (None, "q", 3),
        (None, "trial", Parameters(("q",), (3,))),
    ],
)
def test_the_only_parameter_under_its_own_name(tmp_path, targets, argument, value):
    """The item is the value. The table, the item's name and the study are the same as with any other name."""
    items = Items(grid([3]), None if targets is None else Targets(targets), argument=argument)
    items.steering.begin(tmp_path, None)
    item = items.take()
    namespace: dict[str, Any] = {}
    unpack_names(item.parts[0], namespace, item.parts[1:])
    bound = namespace[ITEM if targets is None else targets.strip("(,)")]
    assert (bound, type(bound)) == (value, type(value))
    assert (item.name, item.parameters, items.shown[0]) == ("q=3", {"q": 3}, {"q": 3})
    assert items.steering.study.trials[0].params == {"q": 3}


@pytest.mark.parametrize(("targets", "argument"), [("q", ""), (None, "q")])
def test_the_name_of_one_of_several_parameters(targets, argument):
    with pytest.raises(OptionsError, match=r"`q` .*name .*parameter .*search, .*get all"):
        Items(grid([3], p=[4]), None if targets is None else Targets(targets), argument=argument)


def test_parameters():
    found = Parameters(("lr", "width"), (0.1, 64))
    lr, width = found
    assert (lr, width) == (found.lr, found["width"]) == (0.1, 64)
    assert dict(**found) == {"lr": 0.1, "width": 64}
    assert repr(found) == "Parameters(lr=0.1, width=64)"
    with pytest.raises(AttributeError, match=r"no parameter 'rate'; .*parameters .*lr, width"):
        found.rate  # noqa: B018


@pytest.mark.parametrize(
    "use", ["trial * 2", "0.5 * trial", "trial - 1", "0 <= trial", "float(trial)", "f'{trial:.2f}'"]
)
def test_a_trial_that_is_taken_for_a_number(use):
    """The error says how to get the value. A tuple would be repeated by `*`."""
    with pytest.raises(TypeError) as caught:
        eval(use, {"trial": Parameters(("lr",), (0.1,))})
    assert mentions(as_failure(caught.value).advice, "`trial.lr`")


def test_choices_of_any_kind(runs):
    """Optuna's file can contain only plain choices, but the items get the values themselves."""
    choices = [(64, 64), (128,), max]
    result = runs(
        lambda rank, trial: [rank.tell(Metrics({"loss": 1.0})), trial.layers][1],
        sparkring.search(layers=choices, minimize="loss", sampler="grid"),
        1,
    )
    assert result.values == choices
    assert result.study.trials[0].params == {"layers": "(64, 64)"}
    assert [each.parameters["layers"] for each in result.record.items.known] == [
        "(64, 64)",
        "(128,)",
        "<built-in function max>",
    ]
