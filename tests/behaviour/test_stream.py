"""Streams: what the ranks get, what counts exactly once, and how streams end. Kills, errors and other cells."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rings import WarmRing
from texts import mentions
from waiting import PACE, until

import sparkring
from sparkring.engine.run import warm_gang
from sparkring.engine.run.background import BackgroundRun
from sparkring.engine.run.spec import Cell
from sparkring.engine.stream import ring
from sparkring.engine.stream.options import StreamOptions
from sparkring.engine.stream.run import StreamSpec, start_stream
from sparkring.errors import CheckpointError, DataError, OptionsError, RunFailed

pytestmark = pytest.mark.forked("numpy")

SETUP = """
import numpy as np
w = np.zeros(2)
ids = []
seen = 0
"""
TRAIN = """
w = w + batch["x"].sum(0) * np.random.normal(size=2)
seen += len(batch["x"])
ids.append(batch_id)
ids = ids[:]
"""
STATE = "w.tolist(), ids, seen"


def batches(count: int, rows: int = 11, pause_s: float = 0.0) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(0)
    for _ in range(count):
        yield {"x": random.normal(size=(rows, 2))}
        time.sleep(pause_s)


def stream(gang: WarmRing, items: Any, cell: str = TRAIN, **options: Any) -> BackgroundRun[Any]:
    settings = {"quiet": True, "sharded": "checkpoint_dir" in options, "max_restarts": 5, **options}
    if "checkpoint_dir" not in options:
        del settings["max_restarts"]
    chosen = StreamOptions(np=gang.gang.wanted.np, **settings)
    cell = gang._prepared(cell)
    work = Cell(cell, gang.notebook)
    return start_stream(StreamSpec(work, items, "items", gang.gang, chosen, "test", f"%%stream items\n{cell}"))


def trained(run: BackgroundRun[Any], count: int) -> Callable[[], bool]:
    """Return a condition that holds once the ranks have trained on `count` batches, or the stream has ended."""
    return lambda: run.done or (run.record.stream is not None and run.record.stream.batches >= count)


def kill_after(run: BackgroundRun[Any], gang: WarmRing, counts: Iterable[int]) -> None:
    """Kill a rank each time that the ranks have trained on so many batches."""
    for number, count in enumerate(counts):
        until(trained(run, count), f"{count} batches")
        attempts = len(run.record.attempts)
        os.kill(gang.pids()[number % 2], signal.SIGKILL)
        until(lambda before=attempts: run.done or len(run.record.attempts) > before, "new ranks")


@pytest.fixture
def two(ring: Any, watch: Any) -> Iterator[WarmRing]:
    """Two warm ranks that the test may kill."""
    gang = WarmRing(ring.where, watch.mark).start(2)
    gang.cell(SETUP)
    yield gang
    warm_gang.stop(gang.place)


@pytest.mark.any_launcher
@pytest.mark.parametrize("save_every", [pytest.param(1, marks=pytest.mark.extended("repetition", "save_every=3")), 3])
def test_each_batch_counts_once_although_ranks_are_killed(two: WarmRing, tmp_path: Path, save_every: int) -> None:
    """After three kills, the state is the same as without kills, bit by bit. The state is saved at the end, too."""
    quiet = stream(two, batches(20), checkpoint_dir=str(tmp_path / "quiet"), save_every=save_every).result()
    wanted = two.values(STATE)
    assert (quiet.batches, quiet.rows, quiet.saved) == (20, 220, 19)
    assert wanted[0][1] == list(range(20))
    assert [seen for _, _, seen in wanted] == [100, 120]
    warm_gang.stop()
    two.start(2).cell(SETUP)
    run = stream(two, batches(20, pause_s=0.05), checkpoint_dir=str(tmp_path / "killed"), save_every=save_every)
    kill_after(run, two, (3, 5, 11))
    result = run.result()
    assert two.values(STATE) == wanted
    assert (result.batches, result.saved, len(result.record.attempts)) == (20, 19, 4)
    assert result.record.stream.began.state == ("ids", "seen", "w")


@pytest.mark.any_launcher
def test_a_stream_continues_where_it_was_ended(two: WarmRing, tmp_path: Path) -> None:
    """After Stop, the same cell passes over what a checkpoint has, if it is not damaged. A changed cell is refused."""
    first = stream(two, batches(10, pause_s=0.05), checkpoint_dir=str(tmp_path), save_every=4)
    until(trained(first, 3), "three batches")
    first.stop()
    result = first.result()
    assert result.saved == result.record.stream.last.batch_id
    rows = f"{result.rows} rows"
    assert result.record.message == f"{result.batches} batches · {rows} · saved after batch {result.saved} · stopped"
    two.cell("w = ids = seen = None")  # the checkpoint has the values
    second = stream(two, batches(10), checkpoint_dir=str(tmp_path)).result()
    assert result.batches + second.batches == 10
    assert two.values("ids") == [list(range(10))] * 2
    newest = max((tmp_path / name for name in os.listdir(tmp_path)), key=lambda each: each.name[9:])
    damaged = newest / "rank-1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    third = stream(two, batches(10), checkpoint_dir=str(tmp_path)).result()  # it continues after the one before that
    assert third.batches == 1
    assert [each.checkpoint == newest.name for each in third.record.attempts] == [True, False]
    assert two.values("ids") == [list(range(10))] * 2
    two.cell(SETUP)
    lasting = batches(10, pause_s=0.05)  # a generator that two streams share
    part = stream(two, lasting, checkpoint_dir=str(tmp_path / "shared"))
    until(trained(part, 3), "three batches")
    part.stop()
    rest = stream(two, lasting, checkpoint_dir=str(tmp_path / "shared")).result()
    assert part.result().batches + rest.batches == 10
    assert two.values("ids") == [list(range(10))] * 2
    for each in (tmp_path / "shared").glob("*/rank-0.safetensors"):
        each.write_bytes(each.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"all checkpoints in .*damaged: restore .*files,"):
        stream(two, batches(10), checkpoint_dir=str(tmp_path / "shared")).result()
    with pytest.raises(CheckpointError, match=r"cell .*changed"):
        stream(two, batches(10), TRAIN + "w += 1", checkpoint_dir=str(tmp_path))


@pytest.mark.extended_on("spark", "test_a_streaming_dataframe streams to ranks on Spark")
def test_changed_values_and_helpers_of_a_stream_are_asked_about(two: WarmRing, tmp_path: Path) -> None:
    """What the cell uses counts as well as its text, even if an earlier cell has sent it to the ranks."""

    def define(text: str) -> None:
        exec(text, two.notebook)

    cell, options = "seen = seen + helper(len(batch['x']))", {"checkpoint_dir": str(tmp_path)}
    define("def helper(x): return x * scale\nscale, unused = 2, 1")
    two.cell("helper(scale)")
    stream(two, batches(2), cell, **options).result()
    define("unused = 2")
    for change, name in [("scale = 3", "scale"), ("scale = 2\ndef helper(x): return x + scale", "helper")]:
        define(change)
        with pytest.raises(CheckpointError, match=rf"(?s)^(?!.*`unused`).*`{name}` .*changed since then.*--fresh"):
            stream(two, batches(4), cell, **options)
    define("def helper(x):\n    'The docstring.'\n    return x * scale")
    assert stream(two, batches(3), cell, **options).result().batches == 1


@pytest.mark.any_launcher
def test_a_slow_rank_does_not_hold_up_the_save(two: WarmRing, tmp_path: Path) -> None:
    """Ranks that save a state of their own begin to save when all of them have trained."""
    two.cell("import time; from sparkring.checkpointing import writing; writing.OTHERS_LIMIT_S = 0.8")
    run = stream(two, batches(1), "time.sleep(1.5 * rank); w = w + 1", checkpoint_dir=str(tmp_path))
    assert run.result().saved == 0
    assert run.record.stream.saving_s < 1.0 < run.record.stream.training_s


@pytest.mark.any_launcher
def test_a_corrected_cell_begins_with_the_initial_state(two: WarmRing, tmp_path: Path) -> None:
    """Batches that the cell had trained on before it failed count once, although none of them had been saved."""
    saved = {"checkpoint_dir": str(tmp_path), "save_every": 10, "resume": True}
    with pytest.raises(RunFailed, match=r"(?s)ValueError: bad.*state before .*first batch .*saved .*: run"):
        stream(two, batches(5), TRAIN + "if batch_id == 3: raise ValueError('bad')", **saved).result()
    again = stream(two, batches(5), TRAIN, **saved)
    assert again.result().saved == 4
    assert again.record.stream.began.saved is None
    assert mentions(again.record.notices[0].text, "continues", "initial state", "saved")
    assert two.values("ids, seen") == [(list(range(5)), 25), (list(range(5)), 30)]


@pytest.mark.any_launcher
def test_other_cells_use_the_gang_between_two_batches(two: WarmRing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell waits for the current batch only. There is one stream at a time. Without checkpoints, it is lost."""
    run = stream(two, batches(10**9))
    seen = [two.values("seen")[0] for _ in range(5)]
    assert seen == sorted(seen)
    until(lambda: two.values("seen")[0] > seen[-1], "the stream goes on")
    with pytest.raises(OptionsError, match=r"already training .*stream: stop .*stream .* `%runs --stop"):
        stream(two, batches(1))
    monkeypatch.setattr(ring, "HELD_AFTER_S", 0.1)
    with ThreadPoolExecutor(1) as notebook:
        other = notebook.submit(two.cell, "import time\ntime.sleep(0.5)")
        until(lambda: any("another cell" in notice.text for notice in run.record.notices), "what the stream waits for")
        other.result()
    until(lambda: run.record.stream.others_s > 0.4, "the time of the other cell")
    until(lambda: not any("another cell" in notice.text for notice in run.record.notices), "the stream goes on")
    two.cell("w = w * 0")
    run.stop()
    assert run.result().record.outcome == "finished"
    lost = stream(two, batches(10**9))
    until(trained(lost, 2), "two batches")
    os.kill(two.pids()[1], signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"rank 1 .* failed: killed .*SIGKILL"):
        lost.result()


@pytest.mark.any_launcher
def test_a_rank_that_dies_between_two_batches(two: WarmRing) -> None:
    """The error is the same as if the rank had died during a batch."""

    def items() -> Iterator[dict[str, Any]]:
        yield from batches(2)
        os.kill(two.pids()[1], signal.SIGKILL)
        until(lambda: two.gang.ended, "the gang has ended")
        yield from batches(2)

    with pytest.raises(RunFailed, match=r"rank 1 .* failed: killed .*SIGKILL") as caught:
        stream(two, items()).result()
    assert caught.value.record.failed_rank == 1


@pytest.mark.any_launcher
def test_a_stream_that_prints_nothing_is_not_a_stall(two: WarmRing) -> None:
    """The ranks are asked where they are only if one micro-batch takes long, not if the stream is silent for long."""
    stream(two, batches(1), "pass").result()  # the first batch takes long, because the ranks import what reads it
    done = stream(two, batches(20), f"import time; time.sleep({0.1 * PACE} * rank)", stall_after_s=PACE).result()
    assert "StackTaken" not in (Path(done.record.log_folder) / "events.jsonl").read_text()
    long = stream(two, batches(1), "import time; time.sleep(1.5 * rank)", stall_after_s=0.4).result()
    assert "StackTaken" in (Path(long.record.log_folder) / "events.jsonl").read_text()


@pytest.mark.any_launcher
def test_what_the_ranks_get(two: WarmRing, tmp_path: Path) -> None:
    """Arrays, DataFrames, Arrow tables and Parquet files are divided evenly. Too few rows are repeated."""
    import pandas

    pq.write_table(pa.table({"x": pa.array([1, None, 3, 4, 5], pa.int64())}), tmp_path / "a.parquet", row_group_size=2)
    items = [
        {"x": np.arange(5)},
        pandas.DataFrame({"x": [1, 2, 3]}),
        pa.table({"x": [1.5, 2.5]}),
        str(tmp_path / "a.parquet"),
    ]
    two.cell("got = []")
    for item in items:  # one stream each, because all batches of a stream have columns of the same types
        stream(two, [item], "got.append((batch['x'].dtype.str, batch['x'].tolist()))").result()
    assert two.values("repr(got)") == [
        "[('<i8', [0, 1]), ('<i8', [1]), ('<f8', [1.5]), ('<f8', [1.0, nan])]",
        "[('<i8', [2, 3, 4]), ('<i8', [2, 3]), ('<f8', [2.5]), ('<f8', [3.0, 4.0, 5.0])]",
    ]
    few = [{"x": np.arange(1)}, {"x": np.arange(0)}, {"x": np.arange(10)}]
    result = stream(two, few, "got.append((batch_id, batch['x'].to_pylist()))", arrow=True, max_rows=4).result()
    assert result.record.stream.empty == 1
    assert two.values("got[4:]") == [
        [(0, [0]), (2, [0]), (2, [3]), (2, [6, 7])],
        [(0, [0]), (2, [1, 2]), (2, [4, 5]), (2, [8, 9])],
    ]


@pytest.mark.any_launcher
def test_errors(two: WarmRing, tmp_path: Path) -> None:
    """An error in the cell, in the iterator or in a batch ends the stream and says what is wrong; the gang stays up."""

    def broken() -> Iterator[dict[str, Any]]:
        yield {"x": np.zeros((4, 2))}
        raise OSError("the tap is dry")

    cases: list[tuple[Any, str, type[Exception], str]] = [
        (batches(3), "if rank == 1 and batch_id == 1: raise ValueError('bad')", RunFailed, "rank 1 .*ValueError: bad"),
        (broken(), "batch", DataError, "items raised OSError: the tap is dry"),
        ([{"x": [1], "y": [1, 2]}], "batch", DataError, "`x` has 1, `y` has 2"),
        ([3], "batch", DataError, "batch 0 of items is a `int`: expected a dict of arrays"),
        ([{"x": [1, 2]}, {"x": [1.0, 2.0]}], "batch", DataError, "batch 1 .*`x`, which was int64, is now float64"),
    ]
    for items, cell, kind, said in cases:
        with pytest.raises(kind, match=f"(?s){said}"):
            stream(two, items, cell).result()
    with pytest.raises(DataError, match=r"`items` is a `dict`: use .*streaming DataFrame"):
        stream(two, {"x": [1]})
    with pytest.raises(RunFailed, match=r"no model, optimizer "):
        stream(two, batches(1), "print(len(batch))", checkpoint_dir=str(tmp_path)).result()
    assert two.values("seen") == [0, 0]


KILLED = """
import numpy as np, sparkring
from IPython.testing.globalipapp import start_ipython
shell = start_ipython()
shell.run_line_magic("load_ext", "sparkring")
shell.run_line_magic("gang", "start -n -2 --framework torch")
shell.run_cell_magic("torchrun", "", {setup!r})
shell.user_ns["items"] = [{{"x": np.full((4, 2), float(number))}} for number in range(30)]
run = shell.run_cell_magic("stream", "items --checkpoint-dir here --sharded --trigger 0.05", {train!r})
print("result", run.result().batches, run.record.stream.last.batch_id, flush=True)
print("state", shell.run_cell_magic("ranks", "0", {state!r}).value[1:], flush=True)
shell.run_line_magic("gang", "stop")
"""


def test_a_killed_kernel_loses_nothing(driver: Any, tmp_path: Path) -> None:
    """The same cells in a new kernel go on after the last checkpoint, and no process of the old kernel is left."""
    script = KILLED.format(setup=SETUP, train=TRAIN, state=STATE).replace("here", str(tmp_path / "here"))
    first = driver(script)
    until(lambda: len(list((tmp_path / "here").glob("*/commit.json"))) > 1, "checkpoints")
    first.process.kill()
    first.process.wait()
    text = driver(script).wait()
    batches, last = map(int, text.partition("result ")[2].split()[:2])
    assert last == 29
    assert 0 < batches < 30
    assert f"state ({list(range(30))}, 60)" in text


@pytest.mark.any_launcher
def test_watch_yields_each_file_once(two: WarmRing, tmp_path: Path) -> None:
    """Files are used in the order of their times, when they are complete, and not again after a restart."""
    folder = tmp_path / "in"

    def add(number: int) -> None:
        folder.mkdir(exist_ok=True)
        part = folder / f"_{number}.part"
        pq.write_table(pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array([float(number)] * 8), 2)}), part)
        os.utime(part, (number, number))
        part.rename(folder / f"{9 - number}.parquet")

    def watched() -> Any:
        return sparkring.watch(f"{folder}/*.parquet", every_s=0.02)

    cell = "ids = [*ids, batch['x'][0, 0]]"
    add(1)
    same = watched()
    with pytest.raises(RunFailed, match="ValueError: bad"):  # no checkpoint has the file, so it is used again
        stream(two, same, cell + "; raise ValueError('bad')", checkpoint_dir=str(tmp_path / "saved")).result()
    first = stream(two, same, cell, checkpoint_dir=str(tmp_path / "saved"), resume=True)
    until(trained(first, 1), "a file")
    add(2)
    add(3)
    until(trained(first, 3), "all files")
    first.stop()
    add(4)
    second = stream(two, watched(), cell, checkpoint_dir=str(tmp_path / "saved"), available_now=True)
    assert second.result().batches == 1
    assert two.values("ids") == [[1.0, 2.0, 3.0, 4.0]] * 2
    with pytest.raises(OptionsError, match=r"only .*last part .*path .*pattern"):
        sparkring.watch("in/*/a.parquet")


@pytest.mark.any_launcher
def test_a_state_for_each_key(two: WarmRing, tmp_path: Path) -> None:
    """Each key has its own variables on one rank, which begin with those of the gang, and survive a kill.

    Another number of ranks can continue: the keys are divided among them.
    """
    items = [{"k": [f"{(row * row + number) % 7}" for row in range(20)], "v": np.arange(20.0)} for number in range(6)]
    wanted: dict[str, list[float]] = {}
    for item in items:
        for key, value in zip(item["k"], item["v"], strict=True):
            wanted.setdefault(key, []).append(float(value))
    two.cell("w = np.zeros(1); ids = []; sums = {}")
    cell = "w = w + batch['v'].sum(); ids = ids + [batch_id]; sums[key] = (float(w[0]), ids)"
    options = {"by": ("k",), "state": ("w", "ids"), "checkpoint_dir": str(tmp_path), "save_every": 2}

    def slow() -> Iterator[Any]:
        for item in items:
            yield item
            time.sleep(0.1)

    run = stream(two, slow(), cell, **options)
    kill_after(run, two, (3,))
    run.result()
    warm_gang.stop()
    two.start(3).cell(SETUP)
    two.cell("w = np.ones(1); ids = []; sums = {}")
    last = {"k": [*items[0]["k"], "new"], "v": [*items[0]["v"], 20.0]}  # it has all keys of batch 0, and another one
    stream(two, [*items, last], cell, **options).result()
    by_rank = two.values("sums")
    found = {key: each for sums in by_rank for key, each in sums.items()}
    assert sum(map(len, by_rank)) == len(found)
    assert all(by_rank)
    assert found.pop("new") == (20.0, [6])
    assert found.keys() == set(items[0]["k"])
    for key, (total, ids) in found.items():
        more = sum(v for k, v in zip(items[0]["k"], items[0]["v"], strict=True) if k == key)
        assert total == sum(wanted[key]) + more
        assert ids == [number for number, item in enumerate(items) if key in item["k"]] + [6]
    for by, message in ((("k", "v"), "with --by k,v"), ((), "without --by")):
        with pytest.raises(RunFailed, match=rf"state .*each value .*k, .*stream {message} cannot continue"):
            stream(two, items, cell, **{**options, "by": by}).result()
    with pytest.raises(DataError, match=r"--by z: batch 0 .*\bitems\b.* k, v\b"):
        stream(two, items, cell, by=("z",)).result()
    with pytest.raises(DataError, match=r"--.*x: .*type .*column .*float64\[2\], .*key .*single"):
        stream(two, batches(1), "w = w + 1", by=("x",), state=("w",)).result()


# ── From Spark ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder of six Parquet files, one for each micro-batch, in the order of their times."""
    folder = tmp_path / "files"
    folder.mkdir()
    add_files(folder, range(6))
    return folder


def add_files(folder: Path, numbers: Iterable[int]) -> None:
    for number in numbers:
        table = pa.table({"x": pa.array(list(np.random.default_rng(number).normal(size=(9, 2)))), "n": [number] * 9})
        part = folder / f"_{number}.part"
        pq.write_table(table, part)
        os.utime(part, (number, number))
        part.rename(folder / f"{number}.parquet")


def streaming(spark: Any, files: Path) -> Any:
    reader = spark.readStream.schema("x array<double>, n bigint").option("maxFilesPerTrigger", 1)
    return reader.parquet(str(files))


@pytest.mark.standalone("tasks on executors give their rows to ranks on executors")
@pytest.mark.extended_on("local", "test_errors_with_spark streams to local ranks")
def test_a_streaming_dataframe(two: WarmRing, spark: Any, files: Path, tmp_path: Path) -> None:
    """Each micro-batch counts once although a rank is killed and the stream is ended and begun again."""
    train_on_files(two, spark, files, tmp_path, save_every=4)


@pytest.mark.any_launcher
@pytest.mark.extended("repetition", "save_every=4 in test_a_streaming_dataframe")
def test_a_streaming_dataframe_saved_after_every_batch(two: WarmRing, spark: Any, files: Path, tmp_path: Path) -> None:
    """No rows are kept for a replay: Spark considers a micro-batch done only when the state after it is saved."""
    train_on_files(two, spark, files, tmp_path, save_every=1)


def train_on_files(two: WarmRing, spark: Any, files: Path, tmp_path: Path, *, save_every: int) -> None:
    run = stream(two, streaming(spark, files), checkpoint_dir=str(tmp_path / "saved"), save_every=save_every)
    kill_after(run, two, (2,))
    # If a query is stopped as it finds a new file, Spark later adds this file to the next micro-batch. So wait for all.
    until(trained(run, 6), "six batches")
    run.stop()
    before = run.result()
    add_files(files, range(6, 12))
    assert before.saved == before.record.stream.last.batch_id
    saved = {"checkpoint_dir": str(tmp_path / "saved"), "save_every": save_every}
    again = stream(two, streaming(spark, files), available_now=True, **saved)
    assert before.batches + again.result().batches == 12
    ids, seen = zip(*two.values("ids, seen"), strict=True)
    assert ids == (list(range(12)),) * 2
    assert sorted(seen) == [48, 60]
    wanted = two.values("w.tolist()")
    two.cell(SETUP)
    tables = [pq.read_table(files / f"{number}.parquet") for number in range(12)]
    stream(two, [{"x": np.array(table["x"].to_pylist())} for table in tables]).result()
    assert two.values("w.tolist()") == wanted
    (kept,) = (tmp_path / "saved").glob("_stream-*")
    assert not list(kept.glob("batches/*"))


@pytest.mark.extended_on("spark", "test_a_streaming_dataframe streams to ranks on Spark")
def test_errors_with_spark(two: WarmRing, spark: Any, files: Path, tmp_path: Path) -> None:
    """A batch DataFrame is refused, an error of the query or of the cell is told, and a lost part of a checkpoint."""
    with pytest.raises(DataError, match=r"`items` .*not .*streaming DataFrame: make .*spark.readStream"):
        stream(two, spark.range(3))
    saved = str(tmp_path / "saved")
    with pytest.raises(RunFailed, match="ValueError: bad"):
        stream(two, streaming(spark, files), f"{TRAIN}raise ValueError('bad')", checkpoint_dir=saved).result()
    failing = streaming(spark, files).selectExpr("x", "assert_true(n < 1) as ok")
    with pytest.raises(DataError, match=r"(?s)Spark .*"):
        stream(two, failing).result()
    run = stream(two, streaming(spark, files), checkpoint_dir=saved, resume=True)
    until(trained(run, 1), "a batch")
    run.stop()
    assert run.result().saved == run.record.stream.last.batch_id
    (kept,) = (tmp_path / "saved").glob("_stream-*")
    kept.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"Spark's part .*checkpoint, .* is missing"):
        stream(two, streaming(spark, files), checkpoint_dir=saved)
