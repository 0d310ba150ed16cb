"""TFRecord files that others have written: rows are read as they are, by their framing and without TensorFlow."""

from __future__ import annotations

import collections
import gzip
import os
import random
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from texts import mentions

from sparkring.data import preview
from sparkring.data.shards import Shards, shards
from sparkring.data.tfrecord import features, framing, open, tfrecords, write_tfrecord
from sparkring.errors import DataError, OptionsError

# ── Records as protobuf and TensorFlow write them ─────────────────────────────────────────────────────────────────────


def varint(number):
    number &= 2**64 - 1
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(values, packed=True):
    """Return a Feature: of floats, integers or bytes, as its first value is. An empty list has no kind."""
    if not len(values):
        return b""
    first = values[0]
    if isinstance(first, bytes):
        return field(1, b"".join(field(1, value) for value in values))
    if isinstance(first, float):
        parts = [struct.pack("<f", value) for value in values]
        return field(2, field(1, b"".join(parts)) if packed else b"".join(b"\x0d" + part for part in parts))
    parts = [varint(value) for value in values]
    return field(3, field(1, b"".join(parts)) if packed else b"".join(b"\x08" + part for part in parts))


def entries(parts):
    return b"".join(field(1, field(1, name.encode()) + field(2, content)) for name, content in parts.items())


def example(packed=True, **named):
    return field(1, entries({name: feature(values, packed) for name, values in named.items()}))


def sequence(context, **lists):
    steps = {name: b"".join(field(1, feature(values)) for values in rows) for name, rows in lists.items()}
    return field(1, entries({name: feature(values) for name, values in context.items()})) + field(2, entries(steps))


def crc(data):
    return struct.pack("<I", int(framing._masked(np.array([framing._slow_crc32c(data)], np.uint32))[0]))


def framed(records):
    heads = [struct.pack("<Q", len(record)) for record in records]
    return b"".join(head + crc(head) + record + crc(record) for head, record in zip(heads, records, strict=True))


def write(path, records, pack=bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack(framed(records)))
    return path


def numbered(begin, end):
    return [example(x=[float(n), n + 0.5], y=[-n], name=[f"n{n}".encode()]) for n in range(begin, end)]


def ys(data):
    return [int(y) for batch in data.as_numpy("y") for y in batch]


# ── What is in them ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_as_tensorflow_writes_and_parses_them(tmp_path, watch):
    """Every kind of feature is read as TensorFlow reads it, in whichever order the features of a record are."""

    def use():
        import tensorflow as tf

        list(tf.data.Dataset.range(1))
        return tf

    tf = watch.except_for(use)
    rng = np.random.default_rng(0)
    path, rows = str(tmp_path / "a.tfrecord"), []
    with tf.io.TFRecordWriter(path) as writer:
        for n in range(100):
            row = {
                "floats": tf.train.Feature(float_list=tf.train.FloatList(value=rng.random(5))),
                "whole": tf.train.Feature(int64_list=tf.train.Int64List(value=rng.integers(-(2**63), 2**63 - 1, 3))),
                "small": tf.train.Feature(int64_list=tf.train.Int64List(value=[n])),
                "bytes": tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes(n * 3)])),
            }
            row = dict(random.Random(n).sample(sorted(row.items(), key=str), 4))
            rows.append(tf.train.Example(features=tf.train.Features(feature=row)).SerializeToString())
            writer.write(rows[-1])
    spec = {
        "floats": tf.io.FixedLenFeature([5], tf.float32),
        "whole": tf.io.FixedLenFeature([3], tf.int64),
        "small": tf.io.FixedLenFeature([], tf.int64),
        "bytes": tf.io.FixedLenFeature([], tf.string),
    }
    theirs = tf.io.parse_example(rows, spec)
    (ours,) = tfrecords(path, batch_size=100, shuffle=False).as_numpy()
    assert ours.keys() == spec.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name].numpy())
    tensors = next(iter(tfrecords(path, batch_size=100, shuffle=False).as_tf("floats", "small")))
    np.testing.assert_array_equal(tensors[0], theirs["floats"])


kinds = st.sampled_from(["float", "int", "bytes"])


@given(st.data())
def test_every_record_is_parsed_as_it_was_written(data):
    """Whatever the order of the features, the lengths of the lists and the encoding of the numbers."""
    names = data.draw(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=4, unique=True))
    kind = {name: data.draw(kinds) for name in names}
    values = {
        "float": st.floats(width=32, allow_nan=False),
        "int": st.integers(-(2**63), 2**63 - 1) | st.integers(0, 300),
        "bytes": st.binary(max_size=200),
    }
    alike = data.draw(st.booleans())
    rows, records = [], []
    for _ in range(data.draw(st.integers(1, 8))):
        order = names if alike else data.draw(st.permutations(names))
        row = {name: data.draw(st.lists(values[kind[name]], min_size=1, max_size=1 if alike else 3)) for name in order}
        rows.append(row)
        records.append(example(data.draw(st.booleans()), **row))
    content = np.frombuffer(b"".join(records), np.uint8)
    lengths = np.array([len(record) for record in records])
    stored = {"float": ("float", "float32"), "int": ("int64", "int64"), "bytes": ("bytes", "bytes")}
    columns = [features.FeatureColumn(name, *stored[kind[name]], (-1,)) for name in names]
    batch = features.columns_of_records(
        content, np.cumsum(lengths) - lengths, lengths, columns, known=frozenset(), batched=False
    )
    assert batch.to_pylist() == [{name: row[name] for name in names} for row in rows]


def test_what_the_first_records_say(tmp_path):
    """Without a schema, names, types and shapes are those of the first records; `schema` gives others."""
    records = [example(v=[1.0, 2.0], n=[7], t=["ä".encode()], raw=[np.arange(6, dtype=np.int16).tobytes()])] * 4
    write(tmp_path / "a", records)
    data = tfrecords(tmp_path, batch_size=2)
    assert isinstance(data, Shards)
    spec = {name: (column.shape, column.dtype.name) for name, column in data.spec.items()}
    assert spec == {"v": ((2,), "float32"), "n": ((), "int64"), "t": ((), "object"), "raw": ((), "object")}
    schema = {"v": ("float64", (2, 1)), "n": "uint8", "t": "string", "raw": ("int16", (2, 3))}
    batch = next(tfrecords(tmp_path, batch_size=2, schema=schema).as_numpy())
    assert (batch["v"].shape, batch["v"].dtype, batch["n"].dtype, batch["t"][0]) == ((2, 2, 1), float, np.uint8, "ä")
    assert batch["raw"].tolist() == [np.arange(6).reshape(2, 3).tolist()] * 2
    grouped = next(tfrecords(tmp_path, batch_size=2, columns={"x": ["v", "n"]}).as_numpy("x"))
    assert grouped.shape == (2, 3)


def test_sequence_examples(tmp_path):
    """The features of the context are rows, and lists of steps are arrays, which are filled up if they differ."""
    records = [sequence({"id": [n]}, s=[[float(k), 0.5] for k in range(n)], t=[[k] for k in range(n)]) for n in (3, 3)]
    write(tmp_path / "even" / "a", records)
    batch = next(tfrecords(tmp_path / "even", batch_size=2).as_numpy())
    assert (batch["id"].shape, batch["s"].shape, batch["t"].tolist()) == ((2,), (2, 3, 2), [[0, 1, 2]] * 2)
    uneven = [sequence({"id": [n]}, s=[[float(k), 0.5] for k in range(n)], t=[[k] for k in range(n)]) for n in (1, 2)]
    write(tmp_path / "uneven" / "a", uneven)
    (table,) = tfrecords(tmp_path / "uneven", batch_size=2, shuffle=False).as_arrow()
    assert table.to_pylist()[0] == {"id": 1, "s": [[0.0, 0.5]], "t": [0]}
    with pytest.raises(DataError, match=r"`[st]` .*lengths"):
        next(tfrecords(tmp_path / "uneven", batch_size=2).as_numpy())
    padded = tfrecords(
        tmp_path / "uneven",
        batch_size=2,
        shuffle=False,
        schema={"s": ("float32", (2, 2)), "t": ("int64", (2,))},
        fill={"s": 0, "t": -1},
    )
    batch = next(padded.as_numpy())
    assert (batch["t"].tolist(), batch["s"][0].tolist()) == ([[0, -1], [0, 1]], [[0, 0.5], [0, 0]])


def test_a_batch_in_each_example(tmp_path):
    """The rows of all Examples follow one another, whatever the size of each batch."""
    blocks = [np.arange(begin, end, dtype=np.float32).repeat(4) for begin, end in ((0, 3), (3, 5), (5, 12))]
    records = [example(x=[block.tobytes()], y=[int(n) for n in block[::4]]) for block in blocks]
    write(tmp_path / "a", records)
    options = {"batched": True, "batch_size": 4, "shuffle": False}
    data = tfrecords(tmp_path, schema={"x": ("float32", (4,)), "y": "int64"}, **options)
    batches = list(data.as_numpy())
    assert [batch["y"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert all((batch["x"][:, 1] == batch["y"]).all() for batch in batches)
    with pytest.raises(DataError, match="`x` holds bytes"):
        tfrecords(tmp_path, **options)
    with pytest.raises(DataError, match=r"byte 0 .*\b3 .*`y`.*\b6 .*`x`"):
        list(tfrecords(tmp_path, schema={"x": ("float32", (2,)), "y": "int64"}, **options).as_numpy())


def test_missing_features_and_other_lengths(tmp_path):
    """They become nulls or are filled; what the first records do not show is an error with file and byte."""
    write(tmp_path / "gaps", [example(x=[1.0], y=[n]) if n % 2 else example(y=[n]) for n in range(4)])
    assert (
        np.isnan(next(tfrecords(tmp_path / "gaps", batch_size=4, shuffle=False).as_numpy("x"))).tolist()
        == [True, False] * 2
    )
    filled = tfrecords(tmp_path / "gaps", batch_size=4, shuffle=False, fill={"x": 9.0})
    assert next(filled.as_numpy("x")).tolist() == [9, 1, 9, 1]
    write(tmp_path / "lists", [example(x=list(range(n))) for n in (1, 3, 2)])
    data = tfrecords(tmp_path / "lists", batch_size=3, shuffle=False, schema={"x": ("int64", (3,))}, fill={"x": -1})
    assert next(data.as_numpy("x")).tolist() == [[0, -1, -1], [0, 1, 2], [0, 1, -1]]


LATER = {
    "lacks": (example(x=[1.0]), ("`y`", "fill=")),
    "type": (example(x=[1], y=[1]), ("integers", "`x`", "floats")),
    "more": (example(x=[1.0], y=[1], z=[b"new"]), ("`z`", "columns=")),
    "longer": (example(x=[1.0, 2.0], y=[1]), ("2 values", "`x`", "schema=", "fill=")),
    "no example": (b"anything", ("tf.train.Example",)),
}


@pytest.mark.parametrize("later", LATER)
def test_records_that_change(tmp_path, later, monkeypatch):
    """A record that does not fit the first ones is not read as something else, or left out."""
    monkeypatch.setattr(open, "PROBED_RECORDS", 10)
    record, words = LATER[later]
    good = [example(x=[1.0], y=[n]) for n in range(20)]
    path = write(tmp_path / "a", [*good, record])
    at = len(framed(good))
    data = tfrecords(tmp_path, batch_size=21)
    with pytest.raises(DataError) as caught:
        list(data.as_numpy())
    assert mentions(str(caught.value), str(path), f"byte {at}", *words)


def test_records_that_change_in_a_compressed_file(tmp_path, monkeypatch):
    """The byte is one of the uncompressed data. The advice helps: shorter lists are padded."""
    monkeypatch.setattr(open, "PROBED_RECORDS", 10)
    records = [*(example(x=[1.0], y=[n]) for n in range(20)), example(x=[1.0, 2.0], y=[20])]
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(framed(records)))
    with pytest.raises(DataError) as caught:
        list(tfrecords(path, batch_size=21).as_numpy())
    assert mentions(str(caught.value), f"byte {len(framed(records[:20]))}", "uncompressed", "`x`")
    schema = {"x": ("float32", (2,)), "y": "int64"}
    data = tfrecords(path, batch_size=21, shuffle=False, schema=schema, fill={"x": 0})
    assert next(data.as_numpy("x")).tolist() == [[1, 0]] * 20 + [[1, 2]]


# ── Files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_names_and_compression(tmp_path):
    """Names without an extension, subfolders, empty files, _SUCCESS, gzip and zlib; the records are all there."""
    write(tmp_path / "part-r-00000", numbered(0, 10))
    write(tmp_path / "below" / "part-r-00001.tfrecord.gz", numbered(10, 20), gzip.compress)
    write(tmp_path / "zlib", numbered(20, 25), zlib.compress)
    two = gzip.compress(framed(numbered(25, 27))) + gzip.compress(framed(numbered(27, 30)))
    (tmp_path / "two.gz").write_bytes(two)
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "part-r-00002").touch()
    data = tfrecords(tmp_path, batch_size=5)
    assert (data.dataset.rows, len(data)) == (30, 6)
    assert sorted(ys(data)) == list(range(-29, 1))
    assert sorted(ys(tfrecords(str(tmp_path / "part-r-*"), batch_size=5))) == list(range(-9, 1))


def test_every_file_system(tmp_path):
    """fsspec opens the files, so that TensorFlow need not know the file system."""
    import fsspec

    fs = fsspec.filesystem("memory")
    try:
        fs.pipe_file("/far/a.tfrecord", framed(numbered(0, 8)))
        assert sorted(ys(tfrecords("memory://far", batch_size=4))) == list(range(-7, 1))
    finally:
        fs.rm("/far", recursive=True)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("group_bytes", [1, 300, 1 << 20])
def test_ranks_have_equal_steps(tmp_path, monkeypatch, pack, group_bytes):
    """No row is read twice, wherever the files are cut, and ranks agree on the number of steps."""
    monkeypatch.setattr(framing, "GROUP_BYTES", group_bytes)
    monkeypatch.setattr(framing, "CHUNK_BYTES", 256)
    for number, (begin, end) in enumerate([(0, 17), (17, 18), (18, 40)]):
        write(tmp_path / str(number), numbered(begin, end), pack)
    shares = [tfrecords(tmp_path, batch_size=4, seed=3, rank=rank, size=3) for rank in range(3)]
    assert {len(share) for share in shares} == {3}
    taken = collections.Counter(y for share in shares for y in ys(share))
    assert len(taken) == 36
    assert set(taken.values()) == {1}


def test_resuming(tmp_path):
    """Reading goes on from a position, on another number of ranks, too."""
    write(tmp_path / "a", numbered(0, 64))
    shares = [tfrecords(tmp_path, batch_size=4, rank=rank, size=2) for rank in range(2)]
    read = [share.as_numpy("y") for share in shares]
    before = [int(y) for batches in read for _ in range(3) for y in next(batches)]
    alone = tfrecords(tmp_path, batch_size=4, rank=0, size=1).resume(shares[0].position(step=3))
    for batches in read:
        batches.close()
    assert sorted(before + ys(alone)) == list(range(-63, 1))


def test_ranks_read_their_shares(shared_local_gang, tmp_path):
    """Ranks read files that the notebook has opened, and the panel learns what is read."""
    write(tmp_path / "data" / "part-r-00000", numbered(0, 24))
    shared_local_gang.notebook["records"] = tfrecords(tmp_path / "data", batch_size=4)
    result = shared_local_gang.cell("[int(y) for batch in records.as_numpy('y') for y in batch]")
    assert sorted(y for rows in result.values for y in rows) == list(range(-23, 1))
    (reading,) = result.record.ranks[1].readings
    assert (reading.opened.kind, reading.opened.rows, reading.ended[0].steps) == ("tfrecord", 24, 2)


def test_shown_before_the_launch(tmp_path):
    """%shards takes a path, a glob and the result of tfrecords(); tf.data's division by files is beside ours."""
    write(tmp_path / "a", numbered(0, 30))
    write(tmp_path / "b", numbered(30, 40))
    for value in (str(tmp_path), f"{tmp_path}/*", tfrecords(tmp_path, batch_size=4)):
        shown = preview.preview(value, "it", 2, batch_size=4)
        assert (shown.dataset.kind, [share.steps for share in shown.ours]) == ("tfrecord", [5, 5])
        assert [share.rows for share in shown.petastorms] == [30, 10]
    with pytest.raises(OptionsError, match="--where"):
        preview.preview(str(tmp_path), "it", 2, where="y > 3")
    write_tfrecord({"x": np.arange(40)}, tmp_path / "own", batch_size=4, files=2)
    for value in (str(tmp_path / "own"), tfrecords(tmp_path / "own")):
        assert [share.steps for share in preview.preview(value, "it", 2, batch_size=4).ours] == [5, 5]


def test_without_tensorflow(tmp_path, monkeypatch):
    """What write_tfrecord() has written is read without TensorFlow, too: every type, and a last batch that is short."""
    rows = {
        "x": np.arange(22, dtype=np.uint64),
        "image": np.arange(22 * 6, dtype=np.uint8).reshape(22, 2, 3),
        "flag": np.arange(22) % 2 == 0,
        "text": [[f"ö{n}", ""] for n in range(22)],
    }
    write_tfrecord(rows, tmp_path / "own", batch_size=4, files=3, compression="GZIP")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    data = tfrecords(tmp_path / "own", shuffle=False, remainder="drop", rank=0, size=1)
    assert isinstance(data, Shards)
    batches = list(data.as_numpy())
    read = {name: np.concatenate([batch[name] for batch in batches]) for name in rows}
    place = read["x"].astype(int)
    assert len(set(place.tolist())) == 20
    for name in ("image", "flag"):
        assert read[name].dtype == rows[name].dtype
        np.testing.assert_array_equal(read[name], rows[name][place])
    assert read["text"].tolist() == [[text.encode() for text in rows["text"][n]] for n in place]
    with pytest.raises(OptionsError, match="batch_size"):
        tfrecords(tmp_path / "own", batch_size=5)


# ── Bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────────

WHOLE = framed(numbered(0, 10))
BEGINS = [0, *np.cumsum([len(record) + 16 for record in numbered(0, 10)]).tolist()]


def flipped(content, at):
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (WHOLE[:-1], ("truncated", f"byte {BEGINS[9]}", f"byte {len(WHOLE) - 1}")),
        (WHOLE[: BEGINS[4] + 5], ("truncated", f"byte {BEGINS[4]}")),
        (WHOLE[:12], ("truncated", "byte 0")),
        (WHOLE[:5], ("not a TFRecord file", "byte 0")),
        (flipped(WHOLE, BEGINS[3]), (f"byte {BEGINS[3]}", "length")),
        (flipped(WHOLE, BEGINS[3] + 6), (f"byte {BEGINS[3]}", "length")),
        (flipped(WHOLE, 20), ("byte 0", "data")),
        (gzip.compress(WHOLE)[:-20], ("truncated", "uncompressed", "GZIP")),
        (gzip.compress(flipped(WHOLE, BEGINS[3])), (f"byte {BEGINS[3]}", "uncompressed", "length")),
        (zlib.compress(WHOLE)[:-3], ("truncated", "uncompressed", "ZLIB")),
        (flipped(gzip.compress(WHOLE), -6), ("byte 0", "GZIP")),
        (b"PAR1" + bytes(100), ("Parquet file", "shards()")),
        (b"id,name\n1,x\n" * 9, ("not a TFRecord file",)),
    ],
    ids=range(13),
)
def test_damaged_files(tmp_path, content, words, monkeypatch):
    """The error names the file and the byte, before any rank is started; nothing is left out without a word."""
    write(tmp_path / "a", numbered(0, 10))
    (tmp_path / "b").write_bytes(content)
    with pytest.raises(DataError) as caught:
        tfrecords(tmp_path)
    assert mentions(str(caught.value), f"{tmp_path}/b", *words)
    monkeypatch.setattr(framing, "CHUNK_BYTES", 100)
    with pytest.raises(DataError, match=f"{tmp_path}/b"):
        tfrecords(tmp_path)


def test_the_data_of_every_record_is_checked_where_it_is_fast(tmp_path, monkeypatch):
    """With google-crc32c, a changed bit in any record is found, not only in the first."""
    (tmp_path / "a").write_bytes(flipped(WHOLE, BEGINS[7] - 5))
    assert len(ys(tfrecords(tmp_path, batch_size=10))) == 10
    monkeypatch.setattr(framing, "_crc32c", lambda: framing._slow_crc32c)
    with pytest.raises(DataError, match=rf"damaged .*byte {BEGINS[6]}: .*data"):
        ys(tfrecords(tmp_path, batch_size=10))


def test_files_that_change(tmp_path):
    """A file that was cut off, rewritten or removed after it was opened is an error."""
    path = write(tmp_path / "a", numbered(0, 10))
    data = tfrecords(tmp_path, batch_size=2)
    os.truncate(path, BEGINS[5])
    with pytest.raises(DataError, match="rewritten"):
        ys(data)
    path.unlink()
    with pytest.raises(DataError, match="removed"):
        ys(data)


def test_what_is_not_there(tmp_path):
    """A path, a folder without files, files without records, a feature and a type."""
    with pytest.raises(DataError, match="does not exist"):
        tfrecords(tmp_path / "no")
    with pytest.raises(DataError, match="Check the path"):
        tfrecords(tmp_path)
    (tmp_path / "part-r-00000").touch()
    with pytest.raises(DataError, match="no record"):
        tfrecords(tmp_path)
    write(tmp_path / "a", [example(label=[1])] * 4)
    for options, words in [
        ({"columns": ["lable"]}, "no feature `lable`.*`label`"),
        ({"schema": {"label": "string"}}, "holds integers"),
        ({"schema": {"label": ("int64", (0,))}}, "expected a dtype"),
        ({"schema": {"label": "int3"}}, "expected a dtype"),
        ({"fill": {"lable": 0}}, "fill names `lable`"),
        ({"remainder": "join"}, "remainder"),
    ]:
        with pytest.raises((DataError, OptionsError), match=words):
            tfrecords(tmp_path, **options)
    write(tmp_path / "a", [example(label=[300])] * 4)
    with pytest.raises(DataError) as caught:
        next(tfrecords(tmp_path, batch_size=2, schema={"label": "uint8"}).as_numpy())
    assert mentions(str(caught.value), "byte 0", "`label`", "uint8", "schema=")
    with pytest.raises(DataError, match=r"tfrecords\(\)"):
        shards(write(tmp_path / "b.tfrecord", numbered(0, 3)))
