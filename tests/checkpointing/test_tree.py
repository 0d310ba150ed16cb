"""States are taken apart into JSON and arrays, and put together again."""

from __future__ import annotations

import enum
import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparkring.checkpointing.tree import DEPTH, Raw, flatten, rebuild
from sparkring.errors import CheckpointError


def same(one, other):
    """Return whether two states are identical, down to the last bit, with the same types at every level."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def through(state):
    """Take a state apart, and rebuild it from JSON text."""
    skeleton, leaves = flatten(state)
    return rebuild(json.loads(json.dumps(skeleton, allow_nan=False)), leaves)


dtypes = (
    hnp.scalar_dtypes()
    | hnp.byte_string_dtypes()
    | hnp.unicode_string_dtypes()
    | hnp.array_dtypes(max_size=3, allow_subarrays=False)
)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.characters(categories=["Cs"])
keys = st.recursive(plain, lambda inner: st.tuples(inner, inner), max_leaves=3)
scalars = hnp.scalar_dtypes().flatmap(lambda dtype: hnp.arrays(dtype, ())).map(lambda array: array[()])
states = st.recursive(
    plain | st.binary() | arrays | scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


@given(states)
def test_round_trip(state):
    """Every value that a checkpoint can hold comes back to the last bit, with the same types."""
    assert same(through(state), state)


def test_what_hypothesis_may_not_find():
    """Odd floats, very long integers, lone surrogates, and keys that are equal as text come back unchanged."""
    odd = struct.unpack("<d", struct.pack("<Q", 0x7FF8DEADBEEF0001))[0]
    state = {
        "floats": [math.inf, -math.inf, math.nan, odd, -0.0, 5e-324, 0.1],
        "ints": [2**63, -(2**63), 2**64, 10**5_000, -(10**5_000)],
        "\ud800": "\udfff",
        1: "int",
        True + 1: "two",
        "1": "text",
        (1, (2.5, None)): "tuple",
        10**5_000: np.arange(2),
        "": {"": np.arange(3)},
        "a/b": np.arange(4),
        "a": {"b": np.arange(5)},
        "dict": {"dict": {}},
        "__metadata__": np.arange(6),
    }
    assert same(through(state), state)
    assert len(flatten(state)[1]) == 5


def test_names():
    """Leaves are named by their paths, and no two have the same name."""
    leaves = flatten({"model": [{"weight": np.zeros(1)}], "a/b": np.zeros(2), "a": {"b": np.zeros(3)}})[1]
    assert {name: len(leaf) for name, leaf in leaves.items()} == {"model/0/weight": 1, "a/b": 2, "a/b~2": 3}
    assert list(flatten(np.zeros(1))[1]) == ["value"]


def test_arrays_as_they_are():
    """Taking a state apart copies no array. An array that occurs twice becomes two leaves."""
    array = np.arange(3)
    leaves = flatten([array, array])[1]
    assert all(leaf is array for leaf in leaves.values())
    assert list(leaves) == ["0", "1"]


def test_nothing_of_the_state_in_the_skeleton():
    """Later changes to the state do not affect the skeleton, nor a state that is rebuilt from it."""
    state = {"list": [1], "dict": {"a": [2]}}
    skeleton, leaves = flatten(state)
    before = json.dumps(skeleton)
    state["list"].append(3)
    state["dict"]["a"].append(4)
    assert json.dumps(skeleton) == before
    assert rebuild(skeleton, leaves) == {"list": [1], "dict": {"a": [2]}}
    assert rebuild(skeleton, leaves)["list"] is not rebuild(skeleton, leaves)["list"]


def test_raw():
    """A tensor whose dtype NumPy lacks is kept as it is."""
    raw = Raw("bfloat16", (2,), b"\0\1\2\3")
    skeleton, leaves = flatten({"w": raw})
    assert leaves == {"w": raw}
    assert rebuild(skeleton, leaves)["w"] is raw


def test_subclasses():
    """A value of a subclass of a number or of text comes back as the plain type."""

    class Phase(enum.IntEnum):
        WARM = 3

    class Name(str, enum.Enum):
        A = "the name"

    found = through({"phase": Phase.WARM, "name": Name.A, Name.A: 1, "flag": True})
    assert same(found, {"phase": 3, "name": "the name", "the name": 1, "flag": True})


class Foo:
    pass


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"model": {"x": Foo()}}, r"""state\['model'\]\['x'\] is a `.*Foo`.*state_dict\(\)"""),
        ([1, {2, 3}], r"state\[1\] is a `set`"),
        ({"x": np.array([Foo()])}, r"state\['x'\] is an array of Python objects"),
        ({"x": np.ma.masked_array([1])}, "MaskedArray"),
        ({"x": np.zeros(1, [("a", "O")])}, "array of Python objects"),
        ({b"x": 1}, "state has the key b'x', a `bytes`"),
        ({(1, Foo): 1}, "a `type`"),
        ({np.int64(3): 1}, "numpy.int64"),
        ({np.str_("x"): 1}, "numpy.str_"),
    ],
)
def test_what_cannot_be_held(state, told):
    """The error gives the path of a value that a checkpoint cannot hold."""
    with pytest.raises(CheckpointError, match=told):
        flatten(state)


def test_other_packages_dtypes():
    """A dtype that another package has added to NumPy is refused: it would come back as another dtype."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(CheckpointError, match=r"state\['x'\] .*array .*bfloat16"):
        flatten({"x": np.zeros(2, ml_dtypes.bfloat16)})


def test_cycles_and_depth():
    """A state that contains itself, or is too deep for JSON, raises an error. A shared object is not a cycle."""
    state = {"a": []}
    state["a"].append(state)
    with pytest.raises(CheckpointError, match=r"state\['a'\]\[0\] contains itself"):
        flatten(state)
    shared = [1]
    assert through([shared, shared]) == [[1], [1]]
    deep: list = []
    for _ in range(DEPTH - 1):
        deep = [deep]
    assert same(through(deep), deep)
    with pytest.raises(CheckpointError, match="more than 100 levels"):
        flatten([deep])


@pytest.mark.parametrize("skeleton", [{"set": [1]}, {}, {"a": 1, "b": 2}, {"array": "no"}, {"float": "xy"}])
def test_skeletons_of_others(skeleton):
    """For a skeleton of another version, the error says that this version does not know it."""
    with pytest.raises(CheckpointError, match="does not know"):
        rebuild(skeleton, {})
