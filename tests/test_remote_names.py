"""Tests of which value of a name counts: the notebook's, or that of a warm gang's ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkring.capture.remote_names import RemoteNames

ALL = range(4)


class Thing:
    """An object of a class that the notebook has defined, once its module is called `__main__`."""

    def __init__(self) -> None:
        self.rate = 0.1
        self.layers: list[Any] = []


Thing.__module__ = "__main__"


def sent(value: Any) -> tuple[RemoteNames, dict[str, Any]]:
    """Return what the ranks hold after `x = value` was sent to them, and the notebook's namespace."""
    held, notebook = RemoteNames(), {"x": value}
    held.beside(notebook, ALL)
    held.update(dict.fromkeys(ALL, ("x",)), {})
    return held, notebook


VALUES: dict[str, Any] = {
    "a number": 0.5,
    "a text": "abc",
    "a list": [1, [2]],
    "a dict": {"a": [1]},
    "an array": np.zeros(4),
    "a view of an array": np.zeros((4, 4))[:, 1],
    "an object": Thing(),
    "a class": Thing,
    "a function": lambda: 1,
    "none": None,
    "what cannot be pickled": [lambda: 1],
}


@pytest.mark.parametrize("what", VALUES)
def test_what_has_not_changed_is_held(what):
    """The ranks' value counts as long as the notebook's stays the same."""
    held, notebook = sent(VALUES[what])
    assert "x" in held.beside(notebook, ALL)
    assert "x" in held.beside(notebook, [1, 2])


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda x: x.append(2)),
        ([[1]], lambda x: x[0].append(2)),
        ({"a": {"b": 1}}, lambda x: x["a"].update(b=2)),
        ({1}, lambda x: x.add(2)),
        (bytearray(b"ab"), lambda x: x.extend(b"c")),
        (np.zeros(4), lambda x: x.__setitem__(2, 1.0)),
        (np.zeros((4, 4))[:, 1], lambda x: x.__setitem__(2, 1.0)),
        (Thing(), lambda x: setattr(x, "rate", 0.2)),
        (Thing(), lambda x: x.layers.append(1)),
    ],
)
def test_a_change_in_place_makes_the_notebooks_the_newer(value, change):
    """Data and the plain attributes of the notebook's own objects are compared by content."""
    held, notebook = sent(value)
    change(value)
    assert "x" not in held.beside(notebook, ALL) or "x" in held.changes()
    held.update(dict.fromkeys(ALL, ("x",)), {})
    assert "x" in held.beside(notebook, ALL)


def test_what_a_library_does_is_not_a_change():
    """Using a model changes caches in it; setting its rate, its weights or its optimizer's rate changes the model."""
    keras = pytest.importorskip("keras")
    layers = [keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    held, notebook = sent(model)
    model.predict(np.ones((1, 2)), verbose=0)
    assert "x" in held.beside(notebook, ALL)
    assert not held.changes()
    assert not held.notices
    for change in (
        lambda: setattr(model.layers[0], "rate", 0.1),
        lambda: setattr(model.optimizer, "learning_rate", 0.5),
        lambda: model.set_weights([weights + 1 for weights in model.get_weights()]),
    ):
        change()
        assert "x" not in held.beside(notebook, ALL)
        assert "`x`" in held.notices[0]
        held.kept(["x"], ALL, sent=True)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1000, 1001),
        ([1], [1]),
        (np.zeros(2), np.zeros(2)),
        (Thing(), Thing()),
        (lambda: 1, lambda: 1),
        (1, True),
        (1, 1.0),
        (None, 0),
    ],
)
def test_a_name_that_is_bound_anew_is_the_newer(value, other):
    """The notebook's value is newer even if it is equal: the user bound the name on purpose."""
    held, notebook = sent(value)
    notebook["x"] = other
    assert "x" not in held.beside(notebook, ALL)


def test_an_object_that_is_gone_is_not_taken_for_another():
    """A new object with the id() of a deleted one is not taken for the deleted one."""
    held, notebook = sent(Thing())
    for _ in range(100):
        notebook["x"] = Thing()
        assert "x" not in held.beside(notebook, ALL)


def test_what_only_some_ranks_have():
    """The ranks' value of a name counts only if all ranks in question have it."""
    held, notebook = sent(1)
    notebook["y"] = 1
    held.update({0: ["y"]}, {})
    assert "y" in held.beside(notebook, [0])
    assert "y" not in held.beside(notebook, [0, 1])
    held.update({1: ["y"]}, {})
    assert "y" in held.beside(notebook, [0, 1])


def test_what_a_cell_may_bind_counts_only_where_it_is():
    """A cell that binds a name on rank 0 alone, or deletes it, leaves no value on the other ranks."""
    held, notebook = sent(1)
    notebook["y"] = [1]
    held.beside(notebook, ALL)
    held.update({0: ["y"]}, {})
    held.kept(["y"], ALL, sent=False)
    assert "y" in held.beside(notebook, [0])
    assert "y" not in held.beside(notebook, ALL)
    held.update({}, {2: ["x"]})
    held.kept(["x"], ALL, sent=False)
    assert "x" in held.beside(notebook, [0, 1, 3])
    assert "x" not in held.beside(notebook, ALL)


def test_a_newer_value_that_some_ranks_got_leaves_the_others_with_an_old_one():
    """A value that was sent to rank 0 alone must be sent again to all."""
    held, notebook = sent(1000)
    notebook["x"] = 2000
    held.update({0: ["x"]}, {})
    assert "x" in held.beside(notebook, [0])
    assert "x" not in held.beside(notebook, ALL)


def test_a_name_of_the_ranks_alone():
    """The ranks' variable counts until the notebook has a variable of the same name."""
    held, notebook = sent(1)
    held.update(dict.fromkeys(ALL, ("trained",)), {})
    assert "trained" in held.beside(notebook, ALL)
    notebook["trained"] = None
    assert "trained" not in held.beside(notebook, ALL)
    assert held.names == {"x", "trained"}


def test_a_name_that_the_notebook_has_deleted():
    """If the notebook deletes a name, the ranks still have their variable of that name."""
    held, notebook = sent([1])
    del notebook["x"]
    assert "x" in held.beside(notebook, ALL)
