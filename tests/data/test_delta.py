"""Delta tables without Spark: the files of a version, and one-sentence errors about tables that cannot be read so."""

import datetime
import json
import os
import shutil
import struct
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparkring
from sparkring.data.dataset import open_dataset
from sparkring.data.micro_batches import rows_of
from sparkring.data.preview import preview
from sparkring.errors import CheckpointError, DataError, OptionsError
from sparkring.views.shards import data_words

deltalake = pytest.importorskip("deltalake")
pytestmark = pytest.mark.usefixtures("delta")
Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def rows(path, columns=None, **given):
    """Return the sorted rows of a data set."""
    data = sparkring.shards(path, 2, columns=columns, shuffle=False, remainder="join", rank=0, size=1, **given)
    return sorted(tuple(row) for table in data.as_arrow() for row in zip(*table.to_pydict().values(), strict=True))


@pytest.fixture
def sales(tmp_path):
    """Version 0 has x = 0 to 9 in stores 1 and 2; version 1 lacks x < 3; version 2 has x = 20 and a new column."""
    path = str(tmp_path / "sales")
    first = pa.table({"store": [1, 2] * 5, "x": range(10)})
    deltalake.write_deltalake(path, first, partition_by=["store"])
    deltalake.DeltaTable(path).delete("x < 3")
    more = pa.table({"store": [3], "x": [20], "note": ["new"]})
    deltalake.write_deltalake(path, more, mode="append", schema_mode="merge")
    return path


def test_a_table_has_the_rows_of_its_newest_version(sales):
    """Files that were replaced are still in the folder, but are not read. Older files lack the new column."""
    assert len(pq.ParquetFile(next(iter(deltalake.DeltaTable(sales).file_uris()))).schema_arrow.names) < 3
    old = [(1 + x % 2, x, None) for x in range(3, 10)]
    assert rows(sales, ["store", "x", "note"]) == sorted([*old, (3, 20, "new")], key=lambda row: row[:2])
    dataset = open_dataset(sales)
    assert (dataset.table_version, dataset.rows, dataset.nulls["note"]) == (2, 8, 7)
    nulls_of_a_store = open_dataset(sales, where="note is null and store = 2")
    assert nulls_of_a_store.rows == 4


def test_a_version_and_a_time(sales):
    assert rows(sales, ["x"], version=0) == [(x,) for x in range(10)]
    log = os.path.join(sales, "_delta_log")
    with open(os.path.join(log, f"{2:020}.json")) as file:
        newest = next(entry["commitInfo"]["timestamp"] for entry in map(json.loads, file) if "commitInfo" in entry)
    after = datetime.datetime.fromtimestamp(newest / 1000 + 1, datetime.timezone.utc)
    assert open_dataset(sales, timestamp=after).table_version == 2
    assert open_dataset(sales, timestamp=after.isoformat()).table_version == 2
    assert open_dataset(sales, timestamp="2999-01-01").table_version == 2
    with pytest.raises(DataError, match=r"timestamp=.*\. Pass a later"):
        open_dataset(sales, timestamp="1999-12-31T12:00:00Z")


def test_partitions_of_all_kinds(tmp_path):
    """Values of partitions have their types, and their folders can have any characters."""
    day = datetime.date(2026, 1, 31)
    table = pa.table({
        "day": [day, None, day], "k": ["a b/c", "ä%20x", None], "e": pa.array([1, 2, None], pa.int16()), "x": [1, 2, 3]
    })  # fmt: skip
    path = str(tmp_path / "t")
    deltalake.write_deltalake(path, table, partition_by=["day", "k", "e"])
    assert rows(path, ["x", "day", "k", "e"]) == [(1, day, "a b/c", 1), (2, None, "ä%20x", 2), (3, day, None, None)]
    assert open_dataset(path).schema.field("e").type == pa.int16()
    assert open_dataset(path, where="day >= '2026-01-01'").rows == 2


def test_a_compacted_table_and_one_with_a_checkpointed_log(sales):
    before = rows(sales, ["x"])
    table = deltalake.DeltaTable(sales)
    table.optimize.z_order(["x"])
    table.create_checkpoint()
    assert rows(sales, ["x"]) == before
    assert rows(sales, ["x"], version=2) == before
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    assert rows(sales, ["x"]) == before
    with pytest.raises(DataError, match=r"version 0 of .* VACUUM"):
        open_dataset(sales, version=0)
    os.remove(os.path.join(sales, "_delta_log", f"{0:020}.json"))
    with pytest.raises(DataError, match=r"version 0 of .*newest version is 5"):
        open_dataset(sales, version=0)
    with pytest.raises(DataError, match=r"version 99\b.*newest"):
        open_dataset(sales, version=99)


def test_a_table_that_changes_while_it_is_read(sales):
    """The version is chosen once: what is written later is not read, and what is vacuumed is named."""
    data = sparkring.shards(sales, 1, columns=["x"], shuffle=False, rank=0, size=1)
    deltalake.write_deltalake(sales, pa.table({"store": [9], "x": [99], "note": [""]}), mode="overwrite")
    assert sorted(int(x) for (x,) in data.as_numpy("x")) == [3, 4, 5, 6, 7, 8, 9, 20]
    deltalake.DeltaTable(sales).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(DataError, match=r"removed .*version 2\b"):
        list(data.as_numpy("x"))


def test_a_resumed_run_reads_the_version_of_its_checkpoint(sales, capsys):
    """The rest of the epoch has the rows of that version, on another number of ranks, too."""
    before = sparkring.shards(sales, 2, columns=["x"], rank=0, size=2)
    first = [next(iter(sparkring.shards(sales, 2, columns=["x"], rank=rank, size=2).as_numpy("x"))) for rank in (0, 1)]
    state = json.loads(json.dumps(before.state_dict(before.position(1))))
    deltalake.write_deltalake(sales, pa.table({"store": [9], "x": [99], "note": [""]}), mode="overwrite")
    rest = []
    for rank in range(4):
        data = sparkring.shards(sales, 1, columns=["x"], rank=rank, size=4)
        assert data.dataset.table_version == 3
        data.load_state_dict(state)
        assert (data.dataset.table_version, len(data)) == (2, 1)
        rest += data.as_numpy("x")
    assert sorted(np.concatenate([*first, *rest]).tolist()) == [3, 4, 5, 6, 7, 8, 9, 20]
    assert "version 2" in capsys.readouterr().err
    other = sparkring.shards(sales, 1, columns=["store"], rank=0, size=1)
    with pytest.raises(CheckpointError, match="different columns"):
        other.load_state_dict(state)
    deltalake.DeltaTable(sales).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(CheckpointError, match=r"version 2 .* VACUUM"):
        sparkring.shards(sales, 1, columns=["x"], rank=0, size=1).load_state_dict(state)


def test_the_preview_shows_the_version(sales):
    outlook = preview(sales, sales, 2, version=1)
    assert (outlook.dataset.table_version, outlook.dataset.rows) == (1, 7)
    assert "version 1 (" in data_words(outlook)
    with pytest.raises(OptionsError, match="--version"):
        preview(outlook.dataset, "data", 2, version=1)


# ── What the log says about files ─────────────────────────────────────────────────────────────────────────────────────


def vector(deleted):
    """Return the deletion vector of some rows, as a Delta log stores a small one."""
    body = struct.pack("<IQIII", 1681511377, 1, 0, 12346, 1) + struct.pack("<HHI", 0, len(deleted) - 1, 16)
    body += struct.pack(f"<{len(deleted)}H", *deleted)
    padded, text = body + bytes(-len(body) % 4), ""
    for (number,) in struct.iter_unpack(">I", padded):
        text += "".join(Z85[number // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(body), "cardinality": len(deleted)}


def by_hand(path, file, kinds, *, stored=None, deleted=(), mode="name", features=(), encoded=None):
    """Write the log of a table with one file. `kinds` has its columns, and `stored` their names in the file."""
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in kinds.items()
    ]  # fmt: skip
    for number, field in enumerate(fields if stored else (), 1):
        field["metadata"] = {
            "delta.columnMapping.id": number, "delta.columnMapping.physicalName": stored[field["name"]]
        }  # fmt: skip
    used = [*features, *(["columnMapping"] if stored else []), *(["deletionVectors"] if deleted else [])]
    metadata = {
        "id": "t", "format": {"provider": "parquet", "options": {}}, "partitionColumns": [], "createdTime": 0,
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "configuration": {"delta.columnMapping.mode": mode} if stored else {},
    }  # fmt: skip
    add = {
        "path": encoded or file.name, "partitionValues": {}, "size": file.stat().st_size, "modificationTime": 0,
        "dataChange": True, "stats": json.dumps({"numRecords": pq.read_metadata(file).num_rows}),
        **({"deletionVector": vector(deleted)} if deleted else {}),
    }  # fmt: skip
    versions = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": used, "writerFeatures": used}
    (path / "_delta_log").mkdir()
    entries = [{"protocol": versions}, {"metaData": metadata}, {"add": add}]
    (path / "_delta_log" / f"{0:020}.json").write_text("\n".join(map(json.dumps, entries)))
    return str(path)


@pytest.fixture
def renamed(tmp_path):
    """A table with renamed columns, in row groups of 4 rows, of which three rows are deleted, one with a null."""
    file = tmp_path / "a b.parquet"
    table = pa.table({"col-1": range(10), "col-2": [None if x == 5 else x for x in range(10)]})
    pq.write_table(table, file, row_group_size=4)
    stored = {"the x": "col-1", "y": "col-2"}
    kinds = {"the x": "long", "y": "long"}
    return by_hand(tmp_path, file, kinds, stored=stored, deleted=(1, 5, 6), encoded="a%20b.parquet")


def test_deletion_vectors_and_column_mapping(renamed):
    kept = [0, 2, 3, 4, 7, 8, 9]
    assert rows(renamed) == [(x, x) for x in kept]
    dataset = open_dataset(renamed)
    assert (dataset.counts(), dataset.row_groups) == ([[3, 2, 2]], 3)
    assert open_dataset(renamed, where="`the x` > 4 and y < 9").counts() == [[0, 1, 1]]
    data = sparkring.shards(renamed, 7, columns={"a": ["the x", "y"], "y": "y"}, shuffle=False, rank=0, size=1)
    (batch,) = data.as_numpy()
    assert batch["a"].tolist() == [[x, x] for x in kept]
    assert batch["y"].dtype == np.int64  # the only null is in a row that was deleted


def test_types_that_the_table_has_and_its_file_has_not(tmp_path):
    """Spark writes times as INT96, and a column can become wider without being rewritten."""
    times = [datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.timezone.utc)] * 3
    file = tmp_path / "a.parquet"
    table = pa.table({"t": pa.array(times, pa.timestamp("us", "UTC")), "x": pa.array([1, 2, 3], pa.int32())})
    pq.write_table(table, file, use_deprecated_int96_timestamps=True)
    path = by_hand(tmp_path, file, {"t": "timestamp", "x": "long"}, features=["typeWidening"])
    assert open_dataset(path).schema == pa.schema({"t": pa.timestamp("us", "UTC"), "x": pa.int64()})
    assert rows(path) == [(times[0], x) for x in (1, 2, 3)]
    assert open_dataset(path, where="x >= 2 and t >= '2026-01-01'").rows == 2


@pytest.mark.parametrize(
    ("kinds", "given", "expected"),
    [
        ({"x": "long"}, {"stored": {"x": "x"}, "mode": "id"}, "mode `id`"),
        ({"x": "long"}, {"features": ["catalogManaged"]}, "catalog"),
        ({"x": "long"}, {"features": ["variantType"]}, "variantType"),
        ({"x": "long"}, {"encoded": "file:///elsewhere/a.parquet"}, "shallow clone"),
        ({"x": {"type": "array", "elementType": "long", "containsNull": True}}, {}, "column `x` is"),
    ],
)
def test_what_only_spark_can_read(tmp_path, kinds, given, expected):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1, 2]}), file)
    with pytest.raises(DataError, match=expected):
        open_dataset(by_hand(tmp_path, file, kinds, **given))


def struct_of(stored_name, within=""):
    """Return the type of a struct with a field `a`, which has another name in the files, or of a list of such rows."""
    inner = {"name": "a", "type": "long", "nullable": True, "metadata": {}}
    inner["metadata"] = {"delta.columnMapping.id": 9, "delta.columnMapping.physicalName": stored_name}
    kind = {"type": "struct", "fields": [inner]}
    return {"type": "array", "elementType": kind, "containsNull": True} if within else kind


@pytest.mark.parametrize("within", ["", "list"])
def test_fields_of_structs_with_other_names(tmp_path, within):
    """A struct that keeps its own name can have a renamed field, which must not be read as nulls or as another one."""
    file = tmp_path / "a.parquet"
    row = [{"old": 1}] if within else {"old": 1}
    pq.write_table(pa.table({"s": [row]}), file)
    with pytest.raises(DataError, match=r"`s`.*Spark"):
        open_dataset(by_hand(tmp_path, file, {"s": struct_of("old", within)}, stored={"s": "s"}))


@pytest.mark.parametrize("stored_name", ["s", "col-1"])
def test_structs_whose_fields_keep_their_names(tmp_path, stored_name):
    """In a table that got column mapping later, and in one in which the column was renamed, such columns are read."""
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({stored_name: [{"a": 1}, {"a": 2}]}), file)
    path = by_hand(tmp_path, file, {"s": struct_of("a")}, stored={"s": stored_name})
    (batch,) = sparkring.shards(path, 2, shuffle=False, rank=0, size=1).as_arrow()
    assert batch.column("s").to_pylist() == [{"a": 1}, {"a": 2}]


# ── Where a path of Parquet files is accepted ─────────────────────────────────────────────────────────────────────────


def test_parts_of_a_table_are_refused(sales, tmp_path):
    """Their files may have been removed from the table."""
    removed = next(name for name in os.listdir(f"{sales}/store=2"))
    parts = [f"{sales}/store=2", f"{sales}/*/*.parquet", f"{sales}/store=2/{removed}", str(tmp_path), [sales, sales]]
    for part in parts:
        with pytest.raises(DataError, match="Delta table"):
            open_dataset(part)
    with pytest.raises(DataError, match="Delta table"):
        rows_of(f"{sales}/store=2/{removed}", "the item")


def test_petastorm_refuses_a_table(sales):
    pytest.importorskip("petastorm")
    from sparkring.data.petastorm import make_batch_reader

    with pytest.raises(DataError, match="Delta table"):
        make_batch_reader(f"file://{sales}")


def test_iceberg_and_plain_folders(tmp_path):
    """A folder of Iceberg is never read as Parquet, and only tables have versions."""
    (tmp_path / "ice/data/day=1").mkdir(parents=True)
    (tmp_path / "ice/metadata").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "ice/data/day=1/a.parquet")
    assert open_dataset(tmp_path / "ice").rows == 1
    (tmp_path / "ice/metadata/00000-1.metadata.json").write_text("{}")
    for path in ("ice", "ice/data", "ice/data/day=1/a.parquet", "ice/data/*"):
        with pytest.raises(DataError, match="Iceberg table"):
            open_dataset(tmp_path / path)
    shutil.rmtree(tmp_path / "ice/metadata")
    for choice in ({"version": 1}, {"timestamp": "2026-01-31"}):
        with pytest.raises(DataError, match=rf"Delta table.* {next(iter(choice))}="):
            open_dataset(tmp_path / "ice", **choice)


@pytest.mark.parametrize(
    "choice", [{"version": -1}, {"version": "1"}, {"timestamp": "soon"}, {"version": 0, "timestamp": "2026-01-31"}]
)
def test_a_wrong_choice_of_the_version(sales, choice):
    with pytest.raises(DataError, match=r"version=|timestamp="):
        sparkring.shards(sales, 1, **choice)


def test_without_the_package(sales, monkeypatch):
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(DataError, match=r"pip install 'sparkring\[delta\]'"):
        open_dataset(sales)
