"""Parts of streams that need no ranks: the magic's line, the order of a fair lock, shares, and cells to run again."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import math
import pickle
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from waiting import until

from sparkring.checkpointing.stream_state import StreamState, _state_of
from sparkring.data import stream_offers
from sparkring.data.keys import shares_by_key
from sparkring.data.micro_batches import (
    ArrayRows,
    ArrowRows,
    Rows,
    StoredPiece,
    StoredRows,
    as_ipc,
    parts_of,
    rows_of,
    share_of,
)
from sparkring.data.spark_streams import waiting_rows
from sparkring.data.watch import FOOTERS, watch
from sparkring.engine.run.past_cells import CELL_BYTES, PastCells
from sparkring.engine.stream.options import StreamOptions
from sparkring.engine.stream.ring import Ring
from sparkring.engine.stream.run import StreamRun
from sparkring.engine.stream.sources import IteratorSource, MicroBatch
from sparkring.errors import DataError, OptionsError
from sparkring.gangs.execution import Execution, Request
from sparkring.history.events import Failure
from sparkring.notebook import stream
from sparkring.runtime import resume_point
from sparkring.runtime.fair_lock import FairLock
from sparkring.runtime.resume_point import Here
from sparkring.runtime.storage import locate
from sparkring.wire.messages import CellCode, Run


def test_the_line_of_the_magic() -> None:
    """Everything before the options is Python, even with a minus sign or a space in it."""
    expression, options = stream.parse(
        " watch('in/*.parquet', every_s=-1 + 2) --trigger 0.5 --state model,w --state n --checkpoint-dir x", -2
    )
    assert expression.written == "watch('in/*.parquet', every_s=-1 + 2)"
    assert (options.np, options.trigger_s, options.state, options.max_restarts) == (-2, 0.5, ("model", "w", "n"), 3)
    assert stream.parse("df -n 4 --by store --dry-run", -2)[1] == StreamOptions(np=4, by=("store",), dry_run=True)
    for line, said in {
        "": "begins with a streaming DataFrame or an iterable",
        "a b": "begins with a streaming DataFrame",
        "df --save-every 0": "save-every",
        "df --fresh": "--fresh needs a --checkpoint-dir",
        "df --checkpoint-dir x --fresh --resume": "choose one",
    }.items():
        with pytest.raises(OptionsError, match=said):
            stream.parse(line, -2)
    assert stream.complete(" df --save") == ["--save-every"]


def test_a_fair_lock_is_given_in_the_order_of_asking() -> None:
    """A thread that asks again at once comes after those that wait. A thread that gives up does not get the lock."""
    lock, order = FairLock(), []
    lock.acquire()

    def ask(name: str) -> None:
        with lock:
            order.append(name)

    threads = []
    for name in "abc":
        threads.append(threading.Thread(target=ask, args=(name,)))
        threads[-1].start()
        until(lambda: len(lock._waiting) == len(threads), "the thread waits")
    assert not lock.acquire(lambda: True)
    lock.release()
    ask("last")
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "c", "last"]


TABLE = pa.table({"x": list(range(10)), "y": [None, *range(9)]})
PIECES = [StoredPiece(as_ipc(TABLE.slice(first, rows)).to_pybytes(), rows) for first, rows in ((0, 1), (1, 5), (6, 4))]


@pytest.mark.parametrize(
    "rows",
    [
        ArrayRows({"x": np.arange(10), "y": np.array([np.nan, *range(9)])}),
        ArrowRows(TABLE),
        StoredRows(TABLE.schema.serialize().to_pybytes(), PIECES, frozenset({"y"})),
    ],
)
def test_shares_are_even_and_complete(rows: Rows) -> None:
    for size in (1, 3, 7, 10):
        shares = [share_of(rows, size, rank).columns(rows.with_nulls()) for rank in range(size)]
        lengths = [len(share["x"]) for share in shares]
        assert max(lengths) - min(lengths) <= 1
        assert np.concatenate([share["x"] for share in shares]).tolist() == list(range(10))
        assert {share["y"].dtype for share in shares} == {np.dtype(float)}
        assert all(array.flags.writeable for share in shares for array in share.values())
    assert [share_of(rows, 12, rank).table()["x"].to_pylist() for rank in (0, 9, 10, 11)] == [[0], [9], [0], [1]]
    assert [part.count for part in parts_of(rows, 4)] == [3, 3, 4]
    assert [part.count for part in parts_of(rows, None)] == [10]


def in_memory(table: pa.Table, nulls: frozenset[str] = frozenset()) -> StoredRows:
    """Return rows as those of a micro-batch that the driver has collected from Spark."""
    pieces = [StoredPiece(as_ipc(table).to_pybytes(), table.num_rows)]
    return StoredRows(table.schema.serialize().to_pybytes(), pieces, nulls)


def test_a_rank_is_sent_only_its_rows() -> None:
    """Rows in memory are cut, also those of the parts of a micro-batch."""
    table = pa.table({"k": np.arange(100_000) % 100, "x": np.arange(100_000)})
    for rows in (in_memory(table), *parts_of(in_memory(table), 50_000)):
        most_bytes = 1.5 * rows.count * 16 / 4
        assert all(len(pickle.dumps(share_of(rows, 4, rank), 5)) < most_bytes for rank in range(4))
        assert all(len(pickle.dumps(share, 5)) < most_bytes for share in shares_by_key(rows, ["k"], 4))


def test_files_are_not_cut(tmp_path: Path) -> None:
    """The rows of a micro-batch can be in files and in memory. Ranks read files, which are not changed."""
    path = tmp_path / "a.arrow"
    path.write_bytes(as_ipc(TABLE.slice(2, 6)).to_pybytes())
    first, last = (as_ipc(TABLE.slice(row, 2)).to_pybytes() for row in (0, 8))
    pieces = [StoredPiece(first, 2), StoredPiece(locate(path), 6), StoredPiece(last, 2)]
    rows = StoredRows(TABLE.schema.serialize().to_pybytes(), pieces, frozenset({"y"}))
    for size in (1, 2, 3, 4, 10):
        shares = [share_of(rows, size, rank) for rank in range(size)]
        assert [value for share in shares for value in share.table()["x"].to_pylist()] == list(range(10))
        for share in shares:
            inner = [share_of(share, share.count, rank).table()["x"].to_pylist() for rank in range(share.count)]
            assert inner == [[value] for value in share.table()["x"].to_pylist()]
    for size in (1, 3):
        keyed = [list(share.of_keys(frozenset({"y"}), arrow=True)) for share in shares_by_key(rows, ["x"], size)]
        assert sorted(each.key for share in keyed for each in share) == list(range(10))


def test_strings_in_a_dict_become_objects() -> None:
    """Otherwise, the type of a column would depend on its longest string."""
    for short, long in (("b", "bb"), (b"b", b"bb")):
        first, second = (rows_of({"k": [short, each]}, "items") for each in (short, long))
        assert first.kinds == second.kinds == {"k": "object"}
        assert second.columns(frozenset())["k"].tolist() == [short, long]
        assert second.table()["k"].to_pylist() == [short, long]


def test_an_arrow_table_of_no_rows_with_several_values() -> None:
    (name,) = ArrayRows({"x": np.zeros((0, 2, 3))}).table().column_names
    assert name == "x"
    table = ArrayRows({"x": np.arange(6).reshape(1, 2, 3)}).table()
    assert table["x"].to_pylist() == [list(range(6))]


def test_nulls_of_a_parquet_file_with_a_struct(tmp_path: Path) -> None:
    """The leaves of a struct are columns of their own in the footer. Without statistics, there may be nulls."""
    table = pa.table({
        "s": [{"a": 1, "b": 2}] * 4,
        "k": pa.array([1, None, 3, 4], pa.int64()),
        "b": pa.array([True, True, None, True]),
        "n": [1, 2, 3, 4],
    })  # fmt: skip
    for statistics, nulls in ((True, {"k", "b"}), (False, {"k", "b", "n"})):
        path = tmp_path / f"{statistics}.parquet"
        pq.write_table(table, path, row_group_size=2, write_statistics=statistics)
        rows = rows_of(path, "items")
        assert rows.with_nulls() == nulls
        found = rows.columns(rows.with_nulls())
        assert found["k"].tolist()[::2] == [1.0, 3.0]
        assert found["b"].tolist() == [True, True, None, True]
        assert found["n"].tolist() == [1, 2, 3, 4]


KEYED = pa.table(
    {"k": ["b", None, "a", "b", "c", None], "n": [1.5, 2, 3, 1.5, float("nan"), float("nan")], "x": range(6)}
)


@pytest.mark.parametrize(
    "rows",
    [
        ArrayRows({name: KEYED[name].to_numpy() for name in KEYED.column_names}),
        ArrowRows(KEYED),
        StoredRows(KEYED.schema.serialize().to_pybytes(), [StoredPiece(as_ipc(KEYED).to_pybytes(), 6)], frozenset()),
    ],
)
@pytest.mark.parametrize("arrow", [False, True])
def test_rows_are_divided_by_key(rows: Rows, arrow: bool) -> None:
    """Each key is on one rank, with its rows in their order. Nulls are a key, and NaNs are equal."""
    for by, wanted in (
        (["k"], {"b": [0, 3], None: [1, 5], "a": [2], "c": [4]}),
        (["n"], {1.5: [0, 3], 2.0: [1], 3.0: [2], math.nan: [4, 5]}),
        (
            ["k", "n"],
            {("b", 1.5): [0, 3], (None, 2.0): [1], ("a", 3.0): [2], ("c", math.nan): [4], (None, math.nan): [5]},
        ),
    ):
        for size in (1, 2, 5):
            shares = [list(share.of_keys(frozenset(), arrow=arrow)) for share in shares_by_key(rows, by, size)]
            found = [(each.key, each.batch["x"]) for share in shares for each in share]
            assert {key: (values.to_pylist() if arrow else values.tolist()) for key, values in found} == wanted
            assert len(found) == len(wanted)
            assert all(each.digest % size == rank for rank, share in enumerate(shares) for each in share)


def test_the_rows_of_a_key_stay_in_their_order() -> None:
    rows = ArrayRows({"k": np.random.default_rng(0).integers(3, size=1_000), "x": np.arange(1_000)})
    for share in shares_by_key(rows, ["k"], 2):
        for each in share.of_keys(frozenset(), arrow=False):
            assert each.batch["x"].tolist() == sorted(each.batch["x"].tolist())


def keyed(rows: Rows, size: int = 1) -> list[Any]:
    """Return (key, digest, rows) for each key in the column `k`."""
    return [
        (each.key, each.digest, each.batch["x"].tolist())
        for share in shares_by_key(rows, ["k"], size)
        for each in share.of_keys(rows.with_nulls(), arrow=False)
    ]


def test_nulls_do_not_change_the_other_keys() -> None:
    """A key is the column's value: an integer stays one if other rows of the micro-batch have nulls."""
    numbers = [2, None, 2**53, 2**53 + 1, None]
    table = pa.table({"k": pa.array(numbers, pa.int64()), "x": range(5)})
    for rows in (ArrowRows(table), in_memory(table, frozenset({"k"}))):
        assert rows.with_nulls() == {"k"}
        for size in (1, 3):
            found = keyed(rows, size)
            assert {repr(key): values for key, _, values in found} == {
                "2": [0],
                "None": [1, 4],
                str(2**53): [2],
                str(2**53 + 1): [3],
            }
            assert all(digest == zlib.crc32(repr(key).encode()) for key, digest, _ in found)
    flags = pa.table({"k": [True, None, False], "x": range(3)})
    assert {repr(key): values for key, _, values in keyed(ArrowRows(flags))} == {"True": [0], "None": [1], "False": [2]}
    halves = pa.table({"k": pa.array([np.float16(0.5), None], pa.float16()), "x": range(2)})
    assert {repr(key): values for key, _, values in keyed(ArrowRows(halves))} == {"0.5": [0], "None": [1]}


@pytest.mark.parametrize("make", [ArrayRows, lambda arrays: ArrowRows(pa.table(arrays))])
def test_equal_keys_are_one_key(make: Any) -> None:
    """Arrow tells 0.0 from -0.0, and one NaN from another. The keys of a state do not."""
    rows = make({"k": np.array([0.0, math.nan, -0.0, -math.nan, 1.5]), "x": np.arange(5)})
    assert {repr(key): values for key, _, values in keyed(rows)} == {"0.0": [0, 2], "nan": [1, 3], "1.5": [4]}


def test_keys_that_arrow_cannot_represent() -> None:
    """Arrow would take the text "a" and the bytes b"a" for the same value."""
    for objects, wanted in (
        ([1, "a", b"a", np.int64(1)], {"1": [0, 3], "'a'": [1], "b'a'": [2]}),
        (["a", b"a", None], {"'a'": [0], "b'a'": [1], "None": [2]}),
        (["\ud800", "a", "\ud800"], {r"'\ud800'": [0, 2], "'a'": [1]}),
        ([2**70, 1, math.nan, math.nan], {str(2**70): [0], "1": [1], "nan": [2, 3]}),
    ):
        rows = ArrayRows({"k": np.array(objects, dtype=object), "x": np.arange(len(objects))})
        assert {repr(key): values for key, _, values in keyed(rows)} == wanted


TIMES = ["2024-01-01"] * 2


@pytest.mark.parametrize(
    "column",
    [
        pa.array(TIMES).cast(pa.date32()),
        pa.array(TIMES).cast(pa.timestamp("ns")),
        pa.array([1, 2], pa.time64("us")),
        pa.array([1, 2], pa.duration("s")),
        pa.array([decimal.Decimal("1.5")] * 2),
        np.array(TIMES, "datetime64[ns]"),
        np.array([1, 2], "timedelta64[s]"),
    ],
)
def test_keys_that_a_checkpoint_cannot_hold_are_refused(column: Any) -> None:
    run = StreamRun.__new__(StreamRun)  # only the options are needed
    run._options = StreamOptions(by=("k",))
    rows: Rows = ArrayRows({"k": column}) if isinstance(column, np.ndarray) else ArrowRows(pa.table({"k": column}))
    with pytest.raises(DataError, match=r"--.*k: .*type .*column .*: convert .*column .*strings"):
        run._check_keys(MicroBatch(0, rows, ""))


def test_a_categorical_column_has_keys() -> None:
    run = StreamRun.__new__(StreamRun)  # only the options are needed
    run._options = StreamOptions(by=("k",))
    rows = ArrowRows(pa.table({"k": pa.array(["a", "b", "a", None]).dictionary_encode(), "v": [1, 2, 3, 4]}))
    run._check_keys(MicroBatch(0, rows, ""))
    found = [each for share in shares_by_key(rows, ("k",), 2) for each in share.of_keys(frozenset(), arrow=False)]
    assert {each.key: each.batch["v"].tolist() for each in found} == {"a": [1, 3], "b": [2], None: [4]}


@pytest.mark.parametrize("value", [datetime.date(2024, 1, 1), decimal.Decimal(1), 1j, ["a"]])
def test_objects_that_a_checkpoint_cannot_hold_are_refused_as_keys(value: Any) -> None:
    objects = np.empty(2, object)
    objects[:] = ["a", value]
    with pytest.raises(DataError, match=rf"--.*k: .*value .*column .* `{type(value).__name__}`, but a key"):
        shares_by_key(ArrayRows({"k": objects}), ["k"], 2)


def test_the_cells_to_run_again() -> None:
    """Cells that define what is needed are found, and what they need; cells with large values are only named."""
    cells = PastCells()

    def ran(source: str, sent: tuple[str, ...] = (), payload: bytes = b"x") -> None:
        cells.add(Execution(Request(Run(CellCode(source), parts=(payload,)), "plain", sent=sent), (0,)))

    ran("import torch")
    ran("other = 1")
    ran("def make():\n    return torch.nn.Linear(1, 1)")
    ran("model = make()", ("lr",))
    ran("print(model)")
    ran("big = data * 2", ("data",), bytes(CELL_BYTES + 1))
    found = cells.that_define({"model", "lr"}, {})
    assert [cell.source for cell in found] == [
        "import torch",
        "def make():\n    return torch.nn.Linear(1, 1)",
        "model = make()",
    ]
    assert [(cell.title, cell.request) for cell in cells.that_define({"big"}, {})] == [("big = data * 2", None)]


@pytest.mark.parametrize(
    ("source", "runs_again"),
    [
        ("dist.init_process_group('gloo')", True),
        ("import horovod.torch as hvd\nhvd.init()\nprint('rank', hvd.rank())", True),
        ("os.environ['OMP_NUM_THREADS'] = '1'\nrank = dist.get_rank()\ntorch.manual_seed(rank)", True),
        ("rank = dist.get_rank()", False),
        ("torch.save(model, 'model.pt')", False),
        ("for _ in range(3):\n    dist.barrier()", False),
        ("shutil.rmtree('live')", False),
        ("dist.barrier()\nshutil.rmtree('live')", False),
        ("print('ready')", False),
    ],
)
def test_cells_that_prepare_the_process_run_again(source: str, runs_again: bool) -> None:
    """They define no name that is needed, but the cells that do may rely on them."""
    cells = PastCells()
    for each in ("import os, shutil, torch", source, "model = 1"):
        cells.add(Execution(Request(Run(CellCode(each), parts=(b"x",)), "plain", sent=()), (0,)))
    found = [cell.source for cell in cells.that_define({"model"}, {"dist": "torch.distributed"})]
    assert (source in found) is runs_again
    assert found[-1] == "model = 1"


def test_the_rows_that_wait_in_the_sources() -> None:
    """They are counted if every source has offsets by partition, as Kafka has. A new partition counts as read."""
    kafka = {"endOffset": {"a": {"0": 5, "1": 7}}, "latestOffset": {"a": {"0": 9, "1": 7, "2": 3}}}
    text = {"endOffset": '{"b": {"0": 1}}', "latestOffset": '{"b": {"0": 3}}'}
    rate = {"endOffset": 12, "latestOffset": None}
    files = {"endOffset": {"logOffset": 3}, "latestOffset": None}
    assert waiting_rows({"sources": [kafka, text]}) == 4 + 2
    for sources in ([kafka, rate], [files], []):
        assert waiting_rows({"sources": sources}) is None
    assert waiting_rows(None) is None


def test_the_rows_that_wait_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some files are opened at a time. The number of rows is then an estimate, and later exact."""
    for number in range(2 * FOOTERS):
        pq.write_table(pa.table({"x": range(3 if number < FOOTERS else 4)}), tmp_path / f"{number:02}.parquet")
    opened, read = [], pq.read_metadata
    monkeypatch.setattr(pq, "read_metadata", lambda file: opened.append(file) or read(file))
    folder = watch(tmp_path / "*.parquet")
    assert [(folder.backlog_rows(), len(opened)) for _ in range(3)] == [
        (6 * FOOTERS, FOOTERS),
        (7 * FOOTERS, 2 * FOOTERS),
        (7 * FOOTERS, 2 * FOOTERS),
    ]
    folder.resume(each.name for each in tmp_path.iterdir())
    assert folder.backlog_rows() == 0


def test_a_file_without_its_footer_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is used when it is complete. Until then, the other files are used, and --available-now ends without it."""
    whole = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": range(3)}), whole)
    content = whole.getvalue().to_pybytes()
    files = {"cut": content[:-9], "empty": b"", "whole": content}
    for name, held in files.items():
        (tmp_path / f"{name}.parquet").write_bytes(held)
    folder = watch(tmp_path / "*.parquet", every_s=0.01, timeout_s=0.1)
    assert [Path(path).stem for path in folder.files(available_now=True)] == ["whole"]
    assert folder.backlog_rows() == 0
    assert capsys.readouterr().err.count("no Parquet footer") == 2
    (tmp_path / "cut.parquet").write_bytes(content)
    assert [Path(path).stem for path in folder] == ["cut"]


class _Model:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_the_choice_of_the_state() -> None:
    """Objects with a state that the cell or its functions use, and variables that it reads and changes."""
    namespace: dict[str, Any] = {"__name__": "__main__", "model": _Model(), "other": _Model(), "seen": 0, "lr": 0.1}
    exec("def step():\n    global count\n    count += 1\n    return model", namespace)
    namespace |= {"counts": {}, "count": 0, "fixed": np.zeros(3)}
    cell = "step()\nseen += 1\ncounts['a'] = fixed.sum() * lr\nloss = 1\nbatch = batch"
    assert list(_state_of(cell, namespace, ("batch",))) == ["count", "counts", "model", "seen"]


class Checkpoints:
    """Lets a single process act as a rank with a directory of checkpoints, from one attempt to the next."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._here = Here()
        monkeypatch.setattr(resume_point, "_current", self._here)

    def begin(
        self, names: tuple[str, ...], namespace: dict[str, Any], by: tuple[str, ...] = (), cell: str = ""
    ) -> StreamState:
        """Begin a stream, and restore the newest checkpoint, if there is one."""
        newest = max(self._folder.glob("*/commit.json"), key=lambda file: file.parent.name[9:], default=None)
        resume = "" if newest is None else newest.parent.name
        self._here = Here(str(self._folder), 10**12 + self._here.stamp % 10**12 + 1, resume, "lineage")
        resume_point.enter(self._here)
        state = StreamState(names, None, sharded=bool(by), saves=True, by=by)
        state.begin(cell, namespace, ())
        return state


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    return Checkpoints(tmp_path, monkeypatch)


def count(state: StreamState, namespace: dict[str, Any], keys: str) -> dict[str, Any]:
    """Add 1 to `w` for each of the keys. Return the value of `w` that each key has then."""
    found = {}
    for key in keys:
        with state.of_key(key):
            namespace["w"] = namespace["w"] + 1
            found[key] = namespace["w"]
    return found


def test_new_keys_begin_with_the_first_values(saved: Checkpoints) -> None:
    """So they do in another stream on the same gang, even after an error, and in one that continues on a new gang."""
    namespace: dict[str, Any] = {"w": 0}
    first = saved.begin(("w",), namespace, ("k",))
    assert count(first, namespace, "aab") == {"a": 2, "b": 1}
    with pytest.raises(ZeroDivisionError), first.of_key("a"):
        namespace["w"] = 1 / 0
    assert namespace["w"] == 0
    first.save(0, "")
    later: dict[str, Any] = {"w": 100}
    assert count(saved.begin(("w",), later, ("k",)), later, "ac") == {"a": 3, "c": 1}
    assert later["w"] == 100


def test_a_changed_state_of_keys(saved: Checkpoints) -> None:
    """Names that are new in the state begin with their own values for each key. Names that it had are forgotten."""
    namespace: dict[str, Any] = {"w": 0, "old": 0}
    state = saved.begin(("w", "old"), namespace, ("k",))
    count(state, namespace, "ab")
    state.save(0, "")
    namespace = {"w": 0, "new": 0}
    state = saved.begin(("w", "new"), namespace, ("k",))
    for key in "ab":
        with state.of_key(key):
            assert namespace == {"w": 1, "new": 0}
            namespace["new"] = 5


def test_a_changed_state(saved: Checkpoints) -> None:
    state = saved.begin(("w", "old"), {"w": 1, "old": 1})
    state.save(0, "")
    namespace: dict[str, Any] = {"w": 0, "new": 0}
    saved.begin(("w", "new"), namespace)
    assert namespace == {"w": 1, "new": 0}


# ── Iterators that the notebook holds ────────────────────────────────────────────────────────────────────────────────


def numbers(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {"n": [number]}


def used(items: Any, *, fails_at: int | None = None, saved_up_to: int | None = None, most: int = 100) -> list[Any]:
    """Use the items as a stream does. Return the numbers of the batches, each with the number in its only row."""
    source = IteratorSource(items, "items", StreamOptions())
    found: list[Any] = []

    def train(batch: MicroBatch) -> None:
        if batch.batch_id == fails_at:
            raise ZeroDivisionError
        found.append((batch.batch_id, int(batch.rows.columns(frozenset())["n"][0])))
        if saved_up_to is None or batch.batch_id <= saved_up_to:
            source.forget(batch.batch_id)

    try:
        source.run(-1, "", train, lambda: len(found) >= most, print)
    except ZeroDivisionError:
        assert fails_at is not None
    return found


def test_what_the_checkpoint_includes_is_passed_over() -> None:
    batches, notices = [], []
    source = IteratorSource(list(numbers(5)), "items", StreamOptions())
    source.run(2, "", lambda batch: batches.append(batch.batch_id), lambda: False, notices.append)
    assert batches == [3, 4]
    [notice] = notices
    assert "0–2" in notice
    source.run(-1, "", lambda batch: None, lambda: False, notices.append)
    assert len(notices) == 1


def test_another_stream_continues_with_an_iterator() -> None:
    """A batch whose training failed, and batches whose effect was not saved, are used again."""
    items = numbers(9)
    assert used(items, most=2) == [(0, 0), (1, 1)]
    assert used(items, fails_at=3) == [(2, 2)]
    assert used(items, saved_up_to=4, most=4) == [(3, 3), (4, 4), (5, 5), (6, 6)]
    assert used(items) == [(5, 5), (6, 6), (7, 7), (8, 8)]
    assert used(items) == []
    assert used(numbers(2)) == [(0, 0), (1, 1)]


def test_a_stop_loses_no_item_of_an_iterator() -> None:
    """The item that the iterator is computing at a Stop is the first one of the next stream."""
    computing, may_go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[dict[str, Any]]:
        yield {"n": [0]}
        computing.set()
        may_go_on.wait()
        yield {"n": [1]}
        raise OSError("the source is gone")

    items = slow()
    source = IteratorSource(items, "items", StreamOptions())
    source.run(-1, "", lambda batch: source.forget(batch.batch_id), computing.is_set, print)
    threading.Timer(0.1, may_go_on.set).start()
    found: list[int] = []
    second = IteratorSource(items, "items", StreamOptions())
    with pytest.raises(DataError, match=r"items raised OSError: .*source .*gone"):
        second.run(-1, "", lambda batch: found.append(batch.batch_id), lambda: False, print)
    assert found == [1]


class Table:
    """An iterable that need not begin with its first item."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        raise AssertionError("the first items are not needed")

    def from_batch(self, number: int) -> Iterator[dict[str, Any]]:
        if number > 5:
            raise LookupError(f"no batch {number}")
        return ({"n": [each]} for each in range(number, 5))


def test_an_iterable_can_begin_with_a_later_batch() -> None:
    found: list[int] = []
    source = IteratorSource(Table(), "table", StreamOptions())
    source.run(2, "", lambda batch: found.append(batch.batch_id), lambda: False, print)
    assert found == [3, 4]
    with pytest.raises(DataError, match=r"table\.from_batch\(6\) .*LookupError: no batch 6"):
        source.run(5, "", lambda batch: None, lambda: False, print)


def test_the_cause_if_several_ranks_die_between_two_batches():
    """A process that was killed comes before one that an exit of another may have ended."""
    told: list[Any] = []
    ring = SimpleNamespace(_recorder=SimpleNamespace(add=told.extend))
    deaths = {0: Failure("exit", "exited with code 1"), 1: Failure("signal", "killed by SIGKILL", signal="SIGKILL")}
    outcome = Ring._deaths(ring, deaths)
    assert (outcome.ending, outcome.rank, outcome.reason) == ("failed", 1, "killed by SIGKILL")
    assert [(each.rank, each.failure) for each in told] == [*deaths.items()]


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_stop_while_the_server_is_asked_about_the_query(is_stopped, monkeypatch):
    """A question that is given up because the user stops the stream says nothing about the server."""
    asked = []

    class Asked:
        def within(self, limit_s, ask, gives_up):
            asked.append(ask)
            raise TimeoutError

    monkeypatch.setattr(stream_offers, "_ASK_EVERY_S", 0.0)
    monkeypatch.setattr(stream_offers.Offers, "_next", lambda self: None)
    offers = object.__new__(stream_offers.Offers)
    offers._cluster, offers._stops = Asked(), lambda: is_stopped and bool(asked)
    with contextlib.nullcontext() if is_stopped else pytest.raises(DataError, match="does not answer"):
        offers.follow(None)
    assert len(asked) == 1
