"""The states of the keys of a stream are read by key, whatever ranks have saved them."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest

from sparkring.checkpointing.inventory import inventory
from sparkring.checkpointing.store import checkpoints
from sparkring.checkpointing.stream_state import StreamState
from sparkring.data.keys import owner_of
from sparkring.errors import CheckpointDamagedError, CheckpointError
from sparkring.runtime import resume_point
from sparkring.runtime.storage import locate
from sparkring.views.checkpoints import folder_words

KEYS = ["a", "b", "c", "d", "e"]


@pytest.fixture
def train(tmp_path, run, seat, monkeypatch):
    """Train some keys on a number of ranks: each adds 1 to `w`, which the state of a key counts; return the folder."""
    folder = tmp_path / "keyed"
    folder.mkdir()

    def train(size, keys, by=("model_id",), step=0):
        newest = max((path for path in os.listdir(folder)), key=lambda name: name[9:], default="")
        run(folder, stamp=2_000_000_000_000 + step, resume=newest)
        states = []
        for rank in range(size):
            seat(rank, size)
            namespace = {"w": np.zeros(2), "seen": 0}
            state = StreamState(("w", "seen"), None, sharded=True, saves=True, by=by)
            state.begin("", namespace, ())
            for key in keys:
                if owner_of(key, size) == rank:
                    with state.of_key(key):
                        namespace["w"] = namespace["w"] + [1, len(str(key))]
                        namespace["seen"] += 1
            states.append(state)
        for rank in reversed(range(size)):  # rank 0 waits for the files of the others
            seat(rank, size)
            states[rank].save(step, "")
        monkeypatch.setattr(resume_point, "_current", resume_point.Here())
        seat(0, 1)
        return folder

    return train


def test_keys_of_all_ranks(train):
    """The notebook reads the states of all keys, although two ranks have saved them."""
    store = checkpoints(train(2, [*KEYS, "a"]))
    assert len({owner_of(key, 2) for key in KEYS}) == 2
    assert store.keys() == store.keys(0) == KEYS
    assert {key: state["seen"] for key, state in store.load().items()} == {**dict.fromkeys(KEYS, 1), "a": 2}
    assert store.load(key="a")["w"].tolist() == [2, 2]
    with pytest.raises(CheckpointError, match=r"model_id = 'z': .*'a', 'b', 'c', 'd', 'e'"):
        store.load(key="z")
    with pytest.raises(CheckpointError, match=r"model_id = None\b"):
        store.load(key=None)


def test_keys_move_among_ranks(train):
    """A run on another number of ranks goes on with the state of each key, and none is lost or counted twice."""
    for step, size in enumerate((2, 3, 1, 4)):
        store = checkpoints(train(size, KEYS if size != 1 else [*KEYS, "new"], step=step))
    assert {key: state["seen"] for key, state in store.load().items()} == {**dict.fromkeys(KEYS, 4), "new": 1}
    assert store.load(2, key="a")["seen"] == 3


def test_keys_of_every_type(train):
    """Nulls, NaN, bytes and several columns; 1 and "1" are two keys."""
    store = checkpoints(train(3, [1, "1", None, "x", b"x", 1.5, math.nan]))
    assert len(store.keys()) == 7
    assert [store.load(key=key)["seen"] for key in (1, "1", None, b"x", math.nan)] == [1] * 5
    with pytest.raises(CheckpointError, match="model_id = 2"):
        store.load(key=2)


def test_several_columns(train):
    store = checkpoints(train(2, [("a", 1), ("b", 2)], by=("store", "item")))
    assert store.keys() == [("a", 1), ("b", 2)]
    assert store.load(key=("b", 2))["seen"] == store.load(key=["b", 2])["seen"] == 1


def test_a_state_that_is_not_by_key(tmp_path, seat):
    """It has no keys, and the error says so."""
    store = checkpoints(tmp_path, background=False)
    store.save(0, {"w": np.zeros(2)})
    assert store.key_columns(store.find()) == ()
    for call in (store.keys, lambda: store.load(key="a")):
        with pytest.raises(CheckpointError, match="a single state"):
            call()


def test_counted_in_the_listing(train):
    """%checkpoints says how many keys the newest checkpoint has."""
    listed = inventory(locate(train(2, KEYS)))
    assert listed.keys == (("model_id",), 5)
    assert any("5 keys (model_id)" in sentence for sentence in folder_words(listed))


def test_a_file_that_is_missing(train):
    """A key is not taken for one without a state because the file of its rank is lost."""
    folder = train(2, KEYS)
    (name,) = os.listdir(folder)
    os.remove(folder / name / "rank-1.safetensors")
    with pytest.raises((CheckpointError, CheckpointDamagedError), match=r"rank-1\.safetensors|damaged"):
        checkpoints(folder).load(name, key="a")
