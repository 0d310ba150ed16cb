"""Arrow columns as arrays: the types that Spark, pandas and pyarrow write, nulls, and columns that cannot be arrays."""

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.data.columns import Making, to_numpy
from sparkring.errors import DataError

VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)

MAP = pa.map_(pa.string(), pa.int64())


def converted(values, kind=None, *, fill=None, dtype=None, raw=None, nulls=False, exact=True):
    """Return the column as an array. The column does not begin at the start of its memory buffer."""
    array = values if isinstance(values, pa.Array) else pa.array(values, kind)
    array = pa.concat_arrays([array, array]).slice(len(array))
    making = Making(fill or {}, {"c": raw} if raw else {}, frozenset({"c"} if nulls else ()))
    return to_numpy(array, "c", making, dtype, exact=exact)


@pytest.mark.parametrize(
    ("values", "kind", "wanted"),
    [
        ([1, 2, 3], pa.int8(), np.array([1, 2, 3], np.int8)),
        ([1, 2, 3], pa.uint64(), np.array([1, 2, 3], np.uint64)),
        ([0.5, 1.5], pa.float32(), np.array([0.5, 1.5], np.float32)),
        (np.array([0.5, 1.5], np.float16), pa.float16(), np.array([0.5, 1.5], np.float16)),
        ([True, False, True], pa.bool_(), np.array([True, False, True])),
        ([decimal.Decimal("1.25"), None], pa.decimal128(10, 2), np.array([decimal.Decimal("1.25"), None], object)),
        (
            [[decimal.Decimal("1.5")]] * 2,
            pa.list_(pa.decimal128(5, 1)),
            np.array([[decimal.Decimal("1.5")]] * 2, object),
        ),
        ([0.5, None], pa.float32(), np.array([0.5, np.nan], np.float32)),
        (["a", None], pa.dictionary(pa.int32(), pa.string()), np.array(["a", None], object)),
        ([None, None], pa.null(), np.array([None, None], object)),
        ([datetime.date(2026, 1, 2), None], pa.date32(), np.array(["2026-01-02", "NaT"], "M8[D]")),
        ([{"a": [("k", 1)]}, None], pa.struct([("a", MAP)]), np.array([{"a": {"k": 1}}, None], object)),
        ([[("k", 1)], None, []], MAP, np.array([{"k": 1}, None, {}], object)),
        (["a", "ü"], pa.string(), np.array(["a", "ü"], object)),
        (["a", "ü"], pa.dictionary(pa.int32(), pa.string()), np.array(["a", "ü"], object)),
        ([b"\xff", b""], pa.binary(), np.array([b"\xff", b""], object)),
        ([datetime.date(2026, 1, 2)] * 2, pa.date32(), np.array(["2026-01-02"] * 2, "M8[D]")),
        ([datetime.datetime(2026, 1, 2)] * 2, pa.timestamp("us"), np.array(["2026-01-02"] * 2, "M8[us]")),
        ([datetime.datetime(2026, 1, 2)] * 2, pa.timestamp("ns", "UTC"), np.array(["2026-01-02"] * 2, "M8[ns]")),
        ([datetime.time(0, 0, 1)] * 2, pa.time64("us"), np.array([1_000_000] * 2)),
        ([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32()), np.array([[1, 2], [3, 4], [5, 6]], np.int32)),
        ([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2), np.array([[1, 2], [3, 4], [5, 6]], np.int32)),
        ([[[1.0], [2.0]]] * 3, pa.list_(pa.list_(pa.float32())), np.array([[[1.0], [2.0]]] * 3, np.float32)),
        ([["a"], ["b"]], pa.large_list(pa.string()), np.array([["a"], ["b"]], object)),
    ],
)
def test_each_type_becomes_the_array_that_people_expect(values, kind, wanted):
    """Each column becomes an array of the expected dtype, shape and values."""
    found = converted(values, kind)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.skipif(not hasattr(pa, "FixedShapeTensorArray"), reason="needs pyarrow 12 or newer")
def test_tensors_have_their_shape():
    """Tensors of Arrow's own extension type keep their shape."""
    wanted = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    np.testing.assert_array_equal(converted(pa.FixedShapeTensorArray.from_numpy_ndarray(wanted)), wanted)


def test_spark_mls_vectors_become_rows_dense_and_sparse():
    """Sparse vectors are filled with zeros, and a mixture of dense and sparse vectors becomes one array."""
    dense = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]}
    sparse = {"type": 0, "size": 3, "indices": [0, 2], "values": [4.0, 5.0]}
    empty = {"type": 0, "size": 3, "indices": [], "values": []}
    wanted = {"d": [1, 2, 3], "s": [4, 0, 5], "e": [0, 0, 0]}
    for kinds in ("ddd", "sds", "eds", "ee", "dsedse"):
        rows = [{"d": dense, "s": sparse, "e": empty}[kind] for kind in kinds]
        np.testing.assert_array_equal(converted(rows, VECTOR), [wanted[kind] for kind in kinds])
    with pytest.raises(DataError, match=r"rows .*different lengths"):
        converted([dense, {**sparse, "size": 5}], VECTOR)


@given(
    st.lists(st.lists(st.one_of(st.just(0.0), st.floats(-9, 9)), min_size=4, max_size=4), min_size=1, max_size=12),
    st.data(),
)
def test_vectors_are_the_same_however_they_are_stored(rows, data):
    """Rows stored as dense or sparse vectors, in any mixture, give the same array."""

    def stored(row):
        if data.draw(st.booleans()):
            return {"type": 1, "size": None, "indices": None, "values": row}
        kept = [at for at, value in enumerate(row) if value]
        return {"type": 0, "size": 4, "indices": kept, "values": [row[at] for at in kept]}

    np.testing.assert_array_equal(converted([stored(row) for row in rows], VECTOR), rows)


def test_floating_point_columns_become_what_is_asked_for():
    """`dtype` applies only to floating-point columns."""
    assert converted([1.0, 2.0], dtype=np.float32).dtype == np.float32
    assert converted([[1.0], [2.0]], dtype=np.float32).dtype == np.float32
    assert converted([1, 2], dtype=np.float32).dtype == np.int64


def test_nulls_change_a_dtype_where_it_was_decided_before():
    """A batch has the same dtype with and without nulls. Filled columns keep their own dtype."""
    for values in ([1, None], [1, 2], [None, None]):
        found = converted(values, pa.int16(), nulls=True)
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, np.array(values, np.float64))
        found = converted([value and True for value in values], pa.bool_(), nulls=True)
        assert (found.dtype, found.tolist()) == (object, [value and True for value in values])
    assert converted([1, None], pa.int16(), nulls=True, dtype=np.float32).dtype == np.float32
    assert converted([1, None], pa.dictionary(pa.int8(), pa.int64()), nulls=True)[0] == 1.0
    with pytest.raises(DataError, match=r"`c` has nulls \(1 in 4 rows\).*not count .*fill=\{'c': 0\}"):
        converted([1, None, 3, 4])
    np.testing.assert_array_equal(converted([1, None, 3, 4], fill={"c": -1}), [1, -1, 3, 4])
    np.testing.assert_array_equal(converted(["a", None], fill={"c": ""}), np.array(["a", ""], object))
    np.testing.assert_array_equal(converted([[1.0, 2.0], None], fill={"c": [0.0, 0.0]}), [[1, 2], [0, 0]])
    assert np.isnan(converted([1.0, float("nan")])[1])
    for value in ("x", 2.5, 2**64, None):
        with pytest.raises(DataError, match=r"column `c` is int64, .*cannot hold .*value"):
            converted([1, None], fill={"c": value})
    with pytest.raises(DataError, match="column `c` is uint64"):
        converted([1, None], pa.uint64(), fill={"c": -1})
    np.testing.assert_array_equal(converted([1, None], fill={"c": 2.0}), [1, 2])
    day = np.datetime64("2026-01-31")
    assert converted([None], pa.timestamp("us"), fill={"c": day}) == [day]


def test_decimals_become_floats_where_these_are_asked_for():
    """Decimals become floats if a floating-point dtype is requested, or if other numbers are in the same array."""
    price = [decimal.Decimal("1.25"), None]
    for more, dtype in (({"dtype": np.float32}, "f4"), ({"exact": False}, "f8")):
        found = converted(price, pa.decimal128(10, 2), **more)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, [1.25, np.nan])
        found = converted([[price[0]]] * 2, pa.list_(pa.decimal128(10, 2)), **more)
        np.testing.assert_array_equal(found, np.array([[1.25]] * 2, dtype))


def test_lists_of_rows_are_lists():
    """Lists of structs may have any length; a null is None."""
    found = converted([[{"a": 1}], [], None, [{"a": 2}, None]])
    assert (found.shape, found.tolist()) == ((4,), [[{"a": 1}], [], None, [{"a": 2}, None]])


def test_what_is_no_array_is_told():
    """Ragged lists raise errors, and so do nulls that the array cannot hold."""
    with pytest.raises(DataError, match=r"rows .*different lengths \(1 and 2\)"):
        converted([[1], [1, 2]])
    with pytest.raises(DataError, match="different lengths"):
        converted([[1], [2], [1, 2], [3, 4]])
    with pytest.raises(DataError, match=r"lists .*contain nulls"):
        converted([[1, None], [1, 2]])
    with pytest.raises(DataError, match=r"`c` has nulls \(1 in 2 rows\), .*array cannot hold"):
        converted([[1], None])
    with pytest.raises(DataError, match="array cannot hold"):
        converted([b"ab", None], raw=(np.dtype("u1"), (2,)))


def test_no_rows_are_an_array_of_none():
    """An empty array has the row shape of the column's type."""
    assert converted([], pa.float32()).shape == (0,)
    assert converted([], pa.list_(pa.float32(), 3)).shape == (0, 3)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(24)])
def test_raw_bytes_become_arrays_of_what_they_are(kind):
    """Raw bytes become arrays, even if the column does not begin at the start of its memory."""
    wanted = np.arange(30, dtype="<f4").reshape(5, 3, 2)
    rows = [row.tobytes() for row in wanted]
    np.testing.assert_array_equal(converted(rows, kind, raw=(np.dtype("<f4"), (3, 2))), wanted)
    cut = pa.array([*rows, *rows], kind).slice(3, 4)
    np.testing.assert_array_equal(converted(cut, raw=(np.dtype("<f4"), (3, 2))), [*wanted[3:], *wanted[:2]])
    assert converted([], kind, raw=(np.dtype("<f4"), (3, 2))).shape == (0, 3, 2)
    with pytest.raises(DataError, match=r"int64 with shape \[2\] is 16 bytes, but column `c` .*row .* 24"):
        converted(rows, kind, raw=(np.dtype("<i8"), (2,)))


def test_raw_is_for_bytes():
    """`raw` needs binary rows of equal length. Nulls must be filled."""
    with pytest.raises(DataError, match=r"column `c` is int64, .*raw .*binary"):
        converted([1, 2], raw=(np.dtype("u1"), (8,)))
    with pytest.raises(DataError, match="has a row of 1"):
        converted([b"ab", b"a", b"ab"], raw=(np.dtype("u1"), (2,)))
    np.testing.assert_array_equal(
        converted([b"ab", None], fill={"c": b"xx"}, raw=(np.dtype("u1"), (2,))), [[97, 98], [120] * 2]
    )
