"""Files of arrays: they are written sequentially and read back bit for bit, and damage is recognized."""

from __future__ import annotations

import io
import json
import random
import struct
import tracemalloc
import uuid

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from sparkring.checkpointing import tensors
from sparkring.checkpointing.digests import digest_of
from sparkring.checkpointing.entries import File
from sparkring.checkpointing.tree import Raw
from sparkring.errors import CheckpointDamagedError, CheckpointError
from sparkring.runtime.storage import Location, locate

LEAVES = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "bytes": np.frombuffer(b"abc", np.uint8),
    "half": np.array([1.5, -0.0, np.nan, np.inf], np.float16),
    "flag": np.array(True),
    "none": np.zeros((0, 7), np.int64),
    "turned": np.arange(6.0).reshape(2, 3).T,
    "every other": np.arange(10, dtype=np.int16)[::2],
}
OTHERS = {
    "text": np.array(["a", "äö\0b"]),
    "empty text": np.array(["", ""]).astype("U0"),
    "when": np.array(["2024-02-29", "NaT"], "datetime64[ns]"),
    "complex": np.array([1 + 2j]),
    "big-endian": np.arange(3, dtype=">f4"),
    "longdouble": np.array([np.longdouble(1) / 3]),
    "record": np.array([(1, 2.5, b"x")], [("a", "<i4"), ("b", "<f8", ()), ("c", "S3")]),
    "record without gaps": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "void": np.array([b"ab", b"c"], "V2"),
}
RAW = {
    "bf16": Raw("bfloat16", (3,), np.arange(6, dtype=np.uint8)),
    "f8": Raw("float8_e5m2", (2, 1), b"\1\2"),
    "odd": Raw("float4_of_tomorrow", (3,), b"\1\2"),
}


@pytest.fixture
def place(tmp_path):
    return locate(tmp_path / "rank-0.safetensors")


def written(place, leaves, metadata=None):
    layout = tensors.lay_out(leaves)
    return tensors.write(place, layout, metadata or {}, tensors.in_order(layout, leaves))


def content(place):
    return place.fs.cat_file(place.path)


def equal(one, other):
    if isinstance(other, Raw):
        return (one.dtype_name, one.shape, bytes(one.buffer)) == (other.dtype_name, other.shape, bytes(other.buffer))
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def test_there_and_back(place):
    """Every dtype and shape is read back bit for bit, and each array has its own writable memory."""
    leaves = {**LEAVES, **OTHERS, **RAW}
    metadata = {"tree": [1, {"a": None}], "text": "ä\ud800"}
    file = written(place, leaves, metadata)
    found, arrays = tensors.read(place, file)
    assert found == metadata
    assert arrays.keys() == leaves.keys()
    assert all(equal(arrays[name], leaves[name]) for name in leaves)
    for name, array in arrays.items():
        if not isinstance(array, Raw):
            assert array.flags.writeable
            assert array.flags.aligned
            assert not any(np.shares_memory(array, other) for key, other in arrays.items() if key != name and
                           not isinstance(other, Raw))  # fmt: skip
    assert (file.name, file.size_bytes) == ("rank-0.safetensors", len(content(place)))
    assert file.digest == digest_of(content(place))


def test_from_the_arena(place, tmp_path):
    """If a copy is made first, the file is the same, and later changes to the arrays do not affect it."""
    leaves = {
        name: leaf.copy() if isinstance(leaf, np.ndarray) else leaf for name, leaf in {**LEAVES, **OTHERS}.items()
    }
    leaves["large"] = np.arange(3 * tensors.CHUNK_BYTES, dtype=np.uint16)  # for more than one thread
    leaves["bf16"] = RAW["bf16"]
    direct = written(place, leaves)
    layout = tensors.lay_out(leaves)
    copy = tensors.copy_into(np.empty(layout.size_bytes + 5, np.uint8), layout, leaves)
    for leaf in leaves.values():
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiu":
            leaf[...] = 0
    assert tensors.write(locate(tmp_path / "two"), layout, {}, [copy])._replace(name=direct.name) == direct


def test_nothing_at_all(place):
    """A state without an array can be written, too."""
    file = written(place, {}, {"state": 1})
    assert tensors.read(place, file) == ({"state": 1}, {})


def test_safetensors_reads_it(place):
    """The safetensors library reads equal arrays, each aligned to its dtype."""
    from safetensors import safe_open
    from safetensors.numpy import load_file

    written(place, {**LEAVES, **OTHERS})
    found = load_file(place.path)
    assert all(equal(found[name], LEAVES[name]) for name in LEAVES)
    assert all(found[name].tobytes() == OTHERS[name].tobytes() for name in OTHERS)
    with safe_open(place.path, "np") as file:
        assert set(file.metadata()) == {"sparkring", "dtypes"}
    data = content(place)
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    for name in LEAVES:
        assert header[name]["data_offsets"][0] % LEAVES[name].dtype.itemsize == 0


def test_what_numpy_lacks(place):
    """The safetensors library reads bfloat16 and float8 as such, and an unknown dtype as bytes."""
    from safetensors import safe_open

    written(place, RAW)
    with safe_open(place.path, "np") as file:
        found = {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in RAW}
    assert found == {"bf16": ("BF16", [3]), "f8": ("F8_E5M2", [2, 1]), "odd": ("U8", [2])}


class OnceFile(MemoryFile):
    def seek(self, *where):
        raise OSError("a mount cannot seek")


class Once(MemoryFileSystem):
    """A file system on which files can only be written from beginning to end. Notes which files were opened."""

    protocol = "once"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    asked: list = []  # noqa: RUF012

    def open(self, path, mode="rb", **options):
        assert mode in ("rb", "wb")
        self.asked.append((mode, path))
        if mode == "rb":
            return io.BytesIO(self.store[self._strip_protocol(path)].getvalue())
        file = OnceFile(self, self._strip_protocol(path))
        file.commit()
        return file

    def mv(self, *paths, **options):
        raise OSError("a mount cannot rename")

    move = rename = cp_file = touch = mv


def test_one_sequence():
    """A file is opened once and written to its end: no seek, no append, no rename."""
    fsspec.register_implementation("once", Once, clobber=True)
    place = Location(fsspec.filesystem("once"), f"/{uuid.uuid4().hex}", "once:/x")
    Once.asked.clear()
    file = written(place, LEAVES)
    assert Once.asked == [("wb", place.path)]
    _, arrays = tensors.read(place, file)
    assert equal(arrays["w"], LEAVES["w"])


# ── Damaged files ────────────────────────────────────────────────────────────


def test_cut_anywhere(place, tmp_path):
    """A file that was cut off at any byte raises an error, and none of its arrays are returned."""
    file = written(place, LEAVES)
    data = content(place)
    for length in range(len(data)):
        (tmp_path / "rank-0.safetensors").write_bytes(data[:length])
        with pytest.raises(CheckpointDamagedError, match=f"has {length:,} bytes instead of {len(data):,}"):
            tensors.read(place, file)
        # An error is raised even if the expected size is that of the damaged file.
        with pytest.raises(CheckpointDamagedError):
            tensors.read(place, file._replace(size_bytes=length))
    (tmp_path / "rank-0.safetensors").write_bytes(data + b"\0")
    with pytest.raises(CheckpointDamagedError, match="has"):
        tensors.read(place, file)
    (tmp_path / "rank-0.safetensors").unlink()
    with pytest.raises(CheckpointDamagedError, match=r"rank-0.safetensors is missing"):
        tensors.read(place, file)


def test_one_bit_anywhere(place, tmp_path):
    """One changed bit in the header or the arrays is recognized."""
    file = written(place, {**LEAVES, **OTHERS, **RAW}, {"a": [1.5]})
    data = content(place)
    for position in [*range(100), *random.Random(0).sample(range(len(data)), 300)]:
        bad = bytearray(data)
        bad[position] ^= 1 << position % 8
        (tmp_path / "rank-0.safetensors").write_bytes(bad)
        with pytest.raises(CheckpointDamagedError):
            tensors.read(place, file)


def lying(place, header, data=b"", length=None):
    """Write a file whose digest is right but whose header is wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = struct.pack("<Q", len(text) if length is None else length) + text + data
    place.fs.pipe_file(place.path, whole)
    return File("rank-0.safetensors", len(whole), digest_of(whole))


def array(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


def dtyped(text, shape=(1,)):
    return {**array("U8", (8,)), "__metadata__": {"dtypes": json.dumps({"a": [text, list(shape)]})}}


@pytest.mark.parametrize(
    "header",
    [
        array(shape=(10**15,)),
        array(shape=(10**15,), offsets=(0, 4 * 10**15)),
        array(shape=(-1, -2)),
        array(shape=(2**70, 0), offsets=(0, 0)),
        array(offsets=(8, 0)),
        array(offsets=(-8, 0)),
        array(offsets=(0, 4), shape=(1,)),
        array(offsets=(4, 8), shape=(1,)),
        array(offsets=(0.0, 8.0)),
        array(offsets=()),
        array("F99"),
        array("BF16", (3,)),
        {**array(), "b": array()["a"]},
        {"a": 1},
        {"a": {}},
        {"__metadata__": 1, **array()},
        {**array(), "__metadata__": {"dtypes": "{"}},
        {**array(), "__metadata__": {"dtypes": "[]"}},
        {**array(), "__metadata__": {"sparkring": "{"}},
        dtyped("'|O'"),
        dtyped("[('a', '|O')]"),
        dtyped("'<f4'", [3]),
        dtyped("__import__('os').getpid()"),
        dtyped("'<U99999999999999999999'"),
        dtyped("(" * 500),
        dtyped(3),
        [],
        b"[" * 100_000,
        b"\xff\xfe",
        b"",
    ],
    ids=str,
)
def test_headers_that_lie(place, header):
    """A header with impossible values counts as damage, and no memory is allocated for it."""
    file = lying(place, header, bytes(8))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointDamagedError, match=r"rank-0.safetensors .*not match .*digest"):
            tensors.read(place, file)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [1, 2**31, 2**63, 2**64 - 1])
def test_lengths_that_lie(place, length):
    """A wrong length of the header counts as damage."""
    with pytest.raises(CheckpointDamagedError):
        tensors.read(place, lying(place, array(), bytes(8), length))


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.sampled_from(["F32", "U8", "<f4", "dtypes", "a"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["a", "__metadata__", "dtype", "shape", "data_offsets", "dtypes"]), inner, max_size=4
            )
        ),
        max_leaves=20,
    )
)
def test_any_header(place, header):
    """A header of arbitrary JSON is either read or reported as damage."""
    file = lying(place, header, bytes(8))
    try:
        tensors.read(place, file)
    except CheckpointDamagedError:
        pass


def test_too_many_plain_values(place, monkeypatch):
    """If there are more plain values than the format's readers accept, the error says what to do."""
    monkeypatch.setattr(tensors, "HEADER_BYTES", 1_000)
    with pytest.raises(CheckpointError, match=r"plain values .*names.*NumPy arrays"):
        written(place, {}, {"list": list(range(1_000))})
