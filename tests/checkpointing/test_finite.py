"""Checkpoints with NaN or infinity: they are marked, and no run continues from them unless it names them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import pytest

from sparkring import checkpoints
from sparkring.checkpointing.directory import open_directory
from sparkring.checkpointing.inventory import inventory
from sparkring.checkpointing.retention import expired
from sparkring.errors import CheckpointError
from sparkring.history import events
from sparkring.history.record import replay
from sparkring.runtime.storage import locate
from sparkring.views.checkpoints import advice, listed, recorded, table_rows
from sparkring.wire import messages

NAN, INF = math.nan, math.inf


def save(store, step, value, metrics=None):
    store.save(step, {"w": np.full(3, value), "step": step}, metrics)
    store.wait()


def marks(store):
    return {entry.step: entry.not_finite for entry in store.list()}


def torch_model(value, dtype="float32"):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2).to(getattr(torch, dtype))
    with torch.no_grad():
        model.bias[1] = value
    return model


def masked(value):
    torch = pytest.importorskip("torch")
    model = torch_model(0.0)
    model.register_buffer("mask", torch.full((2, 2), value))
    return model


def adam(value):
    torch = pytest.importorskip("torch")
    model = torch_model(0.0)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg_sq"][0, 0] = value
    return optimizer


def keras_model(value):
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.Dense(2)])
    model.build((None, 2))
    model.compile("sgd", "mse")
    model.layers[0].bias.assign([0.0, value])
    return model


@dataclass
class Trainer:
    w: np.ndarray


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: {"model": torch_model(NAN)}, "NaN in model/bias"),
        (lambda: {"model": torch_model(-INF)}, "infinity in model/bias"),
        (lambda: {"model": torch_model(NAN, "bfloat16")}, "NaN in model/bias"),
        (lambda: {"model": torch_model(INF, "float16")}, "infinity in model/bias"),
        (lambda: {"model": torch_model(3.0e38, "bfloat16")}, ""),
        (lambda: {"model": masked(-INF)}, ""),
        (lambda: {"model": masked(NAN)}, "NaN in model/mask"),
        (lambda: {"optimizer": adam(INF)}, "infinity in optimizer/state/0/exp_avg_sq"),
        (lambda: {"optimizer": adam(NAN)}, "NaN in optimizer/state/0/exp_avg_sq"),
        (lambda: {"model": keras_model(NAN)}, "NaN in model/"),
        (lambda: {"model": keras_model(INF)}, "infinity in model/"),
        # with a model, other arrays do not count: they may be tables that are not full yet
        (lambda: {"model": torch_model(0.0), "losses": np.full(4, NAN), "best": INF}, ""),
        (lambda: {"params": {"dense": [np.zeros(2), np.array([1.0, NAN])]}}, "NaN in params/dense/1"),
        (lambda: {"trainer": Trainer(np.array([NAN]))}, "NaN in trainer/w"),
        (lambda: {"w": np.ones(3, "f8") * 1e308, "limits": np.array([-INF, INF])}, ""),
        (lambda: {"best": NAN, "worst": np.float64(INF), "count": np.arange(3), "empty": np.zeros(0)}, ""),
    ],
)  # fmt: skip
def test_what_counts(tmp_path, make, words, background):
    """NaN counts in models and optimizers, or else in all arrays; infinity only in weights; numbers never count."""
    store = checkpoints(tmp_path, background=background)
    store.save(1, make())
    store.wait()
    (mark,) = marks(store).values()
    assert mark.startswith(words)
    assert bool(mark) == bool(words)


def test_large_arrays(tmp_path):
    """Every piece of an array is checked, also if arrays share a buffer."""
    store = checkpoints(tmp_path, keep=None)
    for step, at in enumerate((0, 131_072, 299_999)):
        big = np.zeros(300_000, "f4")
        big[at] = NAN
        store.save(step, {"first": np.zeros(100_001, "f4"), "big": big, "last": np.zeros(7, "f2")})
        store.wait()
    assert marks(store) == dict.fromkeys(range(3), "NaN in big")


def test_they_are_passed_over(tmp_path, capsys):
    """By default, restore() takes the last good one, and names the others. A step or a name still selects them."""
    store = checkpoints(tmp_path, keep=None, best="loss")
    for step, value, loss in ((1, 1.0, 0.5), (2, 2.0, 0.7), (3, NAN, 0.1), (4, 4.0, NAN), (5, NAN, INF)):
        save(store, step, value, {"loss": loss})
    assert {step for step, mark in marks(store).items() if mark} == {3, 4, 5}
    state = {"w": np.zeros(3), "step": 0}
    capsys.readouterr()
    assert checkpoints(tmp_path).restore(state) == 2
    stderr = capsys.readouterr().err
    assert "3 (NaN in w)" in stderr
    assert "5 (loss is infinite)" in stderr
    assert checkpoints(tmp_path, best="loss").restore(state, "best") == 1
    assert (store.latest().step, store.best().step, store.find().step) == (2, 1, 2)
    assert checkpoints(tmp_path).restore(state, 4) == 4
    assert checkpoints(tmp_path).restore(state, store.list()[0].name) == 5
    assert math.isnan(store.load(3)["w"][0])


def test_only_bad_ones(tmp_path, capsys):
    """Without a good one, training begins anew, and load() says that there are only others."""
    save(checkpoints(tmp_path), 7, NAN)
    assert checkpoints(tmp_path).restore({"w": np.zeros(3), "step": 0}) == 0
    assert "step 7 (NaN in w)" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="NaN"):
        checkpoints(tmp_path).load()


def test_good_ones_are_kept(tmp_path):
    """A bad checkpoint replaces no good one. Only the newest bad one is kept, until there are newer good ones."""
    store = checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        save(store, step, 0.0)
    for step in (4, 5, 6):
        save(store, step, NAN)
    assert sorted(marks(store)) == [2, 3, 6]
    for step in (7, 8):
        save(store, step, 0.0)
    assert sorted(marks(store)) == [7, 8]
    assert expired(store.list(), store._policy(store._lineage)) == []


def test_any_rank_s_part(tmp_path, run, seat, told):
    """A sharded checkpoint is marked if one rank's part is not finite."""
    run(tmp_path)
    stores = []
    for rank in (0, 1):
        seat(rank, 2)
        store = checkpoints(sharded=True)
        store.save(4, {"w": np.full(2, NAN if rank else 0.0)})
        stores.append(store)
    stores[0].wait()
    (saved,) = told.of(messages.CheckpointSaved)
    assert saved.not_finite == "NaN in w (rank 1)"
    seat(0, 2)
    assert marks(stores[0]) == {4: "NaN in w (rank 1)"}
    assert stores[0].latest() is None


def test_a_stream_does_not_go_back(tmp_path, run, told):
    """The checkpoints of a stream are not marked, since its earlier rows may be gone."""
    from sparkring.checkpointing.store import save_batch

    store = checkpoints(tmp_path)
    save_batch(store, 3, {"w": np.full(2, NAN)})
    store.wait()
    assert marks(store) == {3: ""}


def test_a_run_continues_from_a_good_one(tmp_path, told):
    """The driver chooses a good checkpoint, for the first attempt and for restarts, and says what it passes over."""
    store = checkpoints(tmp_path, keep=None)
    save(store, 10, 0.0)
    save(store, 20, NAN)
    directory = open_directory(str(tmp_path), 1, "", {})
    assert directory.first.step == 10
    words = directory.words(time.time())
    assert "step 20 (NaN in w)" in words
    assert "continues from step 10" in words
    store.restore({"w": np.zeros(3), "step": 0})
    save(store, 30, INF)
    save(store, 40, NAN)
    started = events.RunStarted(0.0, "run", "", "", 1, "local", "plain", "all", (0,), False)
    told = told.of(messages.CheckpointSaved)
    record = replay([started, *(saved._replace(folder=directory.location.written) for saved in told)])
    last = directory.last(record)
    assert last.step == 30, "infinity in an array that is not a model's may be meant"
    assert "step 40 (NaN in w)" in directory.passed_over(record, last)
    (series,) = recorded(record)
    assert [mark.state for mark in series.marks] == ["committed", "not finite", "committed", "not finite"]
    assert [mark.resumes for mark in series.marks] == [False, False, True, False]
    assert table_rows(series, 1.0, 9)[1][0][-1].startswith("not finite")


def test_the_listing_shows_the_mark(tmp_path):
    """%checkpoints shows which checkpoints are not finite, and from which one a run continues."""
    store = checkpoints(tmp_path)
    save(store, 1, 0.0)
    save(store, 2, NAN)
    there = inventory(locate(str(tmp_path)))
    assert (there.newest.step, [mark.state for mark in listed(there).marks]) == (1, ["committed", "not finite"])
    assert any("restore(state, 2)" in line for line in advice(there))
