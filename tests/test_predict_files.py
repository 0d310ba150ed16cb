"""Tests of predict() for files: a pool writes parts to a folder, which appears when all parts are complete."""

from __future__ import annotations

import dataclasses
import datetime
import os
import signal
import tempfile
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from leaks import runs
from texts import mentions
from waiting import until

import sparkring
from sparkring.data.dataset import open_dataset
from sparkring.engine.foreach import run as foreach_run
from sparkring.engine.predictions.api import _output
from sparkring.engine.predictions.destination import STATE, SUCCESS, Destination
from sparkring.errors import DataError, ItemsFailed, OptionsError, PathError
from sparkring.executor.orders import ModelOrder
from sparkring.worker.model import parts
from sparkring.worker.model.outputs import columns_of
from sparkring.worker.model.parts import parts_of

ROWS = 6_000  # in three files of 2000 rows; a fourth file is empty
INPUTS = {"x": ["a", "b"]}


def write(folder: Path) -> Path:
    folder.mkdir()
    for number, rows in enumerate((2000, 2000, 0, 2000)):
        first = 2000 * min(number, 2)
        found = np.arange(first, first + rows)
        columns = {"id": found, "a": np.sin(found), "b": found / 7.0, "text": pa.array(map(str, found), pa.string())}
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=500)
    return folder


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "data")


@pytest.fixture
def small_parts(monkeypatch):
    """Make parts of two row groups each."""
    monkeypatch.setattr(parts, "LEAST_BYTES", 40_000)


@pytest.fixture
def no_folder_left():
    yield
    until(lambda: not list(Path(tempfile.gettempdir()).glob("sparkring-model-*")), "no model process is left")


def test_parts(data, small_parts):
    """Small row groups share a part; an error names the row in its file."""
    found = parts_of(open_dataset(data))
    assert [part.rows for part in found] == [1000] * 6
    assert repr(found[1]) == "part-0.parquet, row groups 2 to 3"
    assert found[1].place(0) == "row 1,000 of part-0.parquet"
    assert found[1].place(999) == "row 1,999 of part-0.parquet"
    assert found[4].place(501) == "row 501 of part-3.parquet"


def test_errors_of_reading_and_writing(data, tmp_path, monkeypatch):
    """An error names what cannot be read, or what cannot be written."""
    dataset = open_dataset(data)
    part = parts_of(dataset)[0]
    model = parts.Model("model", "digest")
    order = ModelOrder("key", "token", [], {}, 1.0)
    job = parts.Job(dataset, ("a",), ("id",), (), 100, str(tmp_path), order, model)

    def fails(*args):
        raise OSError("the storage fails")

    monkeypatch.setattr(parts, "windows", fails)
    with pytest.raises(DataError, match=r"^part-0.parquet.* cannot .*read: .*storage fails"):
        job(part)
    with pytest.raises(DataError, match=r"part-00000-.*written: .*such file"):
        dataclasses.replace(job, folder=str(tmp_path / "nowhere"))(part)


def test_the_first_rows_go_through_the_model_here(data, tmp_path):
    """Errors are raised before a process is started, and before a folder is made."""
    to = tmp_path / "preds"

    def fails(message, error=DataError, *, model=lambda batch: batch["x"].sum(axis=1), **options):
        with pytest.raises(error, match=message):
            sparkring.predict(data, model, **{"inputs": INPUTS, "to": to, "np": -1, **options})

    fails("no column `c`: the columns are", inputs={"x": ["a", "c"]})
    fails(r"failed on the first 16 rows: ValueError: wide.*`x`: float64 of shape \[rows, 2\]", model=wide)
    fails("returned 3 rows of `prediction` for 16 rows", model=lambda batch: batch["x"][:3, 0])
    fails("'floaty' is not a type that .* use one of boolean", OptionsError, returns="floaty")
    for kind in ("struct<a:int,,b>", "map<string>", "array<>", "decimal(40,2)", "int(3)", "struct<a>"):
        fails("is not a type that predict", OptionsError, returns=kind)
    fails("cannot be stored as int", returns="int")
    fails("already has a column `id`", OptionsError, returns={"id": "double"})
    fails("name a folder for them", OptionsError, to=None)
    fails('expected "error" or "overwrite"', OptionsError, mode="append")
    fails("np must not be 0", OptionsError, np=0)
    fails("contains files of the input", OptionsError, to=data)
    fails("the type of the predictions is not known", OptionsError, probe=False)
    fails("the path is empty", PathError, to="")
    to.mkdir()
    (to / "mine.txt").touch()
    fails("exists already")
    fails("has `mine.txt`, which predict", mode="overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "preds"]


NESTED = "struct<day:date,tags:map<string,int>,prices:array<decimal(10,2)>>"


@pytest.mark.parametrize(
    ("returns", "made", "stored"),
    [
        ("decimal(10, 2)", [1.5], [Decimal("1.50")]),
        ("decimal(10, 2)", [2], [Decimal("2.00")]),
        ("array<decimal(10, 2)>", [[1.5, None, 2]], [[Decimal("1.50"), None, Decimal("2.00")]]),
        ("map<string, float>", [{"a": 0.5}], [[("a", 0.5)]]),
        ("map<string, decimal(3, 1)>", [{"a": 0.5}], [[("a", Decimal("0.5"))]]),
        ("struct<a: int, b: decimal(3, 1)>", [(1, 0.5)], [{"a": 1, "b": Decimal("0.5")}]),
        (
            NESTED,
            [{"day": datetime.date(1, 1, 1), "tags": {"a": 1}, "prices": [Decimal("1.25"), None]}],
            [{"day": datetime.date(1, 1, 1), "tags": [("a", 1)], "prices": [Decimal("1.25"), None]}],
        ),
        ("struct<`a b`: int, c: string>", {"a b": np.ones(1), "c": ["x"]}, [{"a b": 1, "c": "x"}]),
    ],
)
def test_types_with_parts(returns, made, stored, tmp_path):
    """Decimals, rows and maps are written to Parquet files. If a value does not fit, the error names the type."""
    output = _output("prediction", returns, several=False)
    (column,) = columns_of(made, [output], 1)
    pq.write_table(pa.table({"prediction": column}), tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet").column(0).to_pylist() == stored
    with pytest.raises(DataError, match=r"cannot .*stored .*|needs one value|keys .*names"):
        columns_of([{"k": [1]}] if "struct" in returns else [[["x"]]], [output], 1)


def wide(batch):
    raise ValueError("wide")


def test_an_interrupt_before_the_run_leaves_no_folder(data, tmp_path, monkeypatch):
    """If the run is interrupted before any part is complete, its unfinished folder is removed."""

    def interrupted(spec):
        assert (tmp_path / "_preds.unfinished").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(foreach_run, "prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sparkring.predict(data, lambda batch: batch["x"].sum(axis=1), inputs=INPUTS, to=tmp_path / "preds", np=-1)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_files_on_this_machine(data, tmp_path, small_parts, no_folder_left):
    """The rows keep their order, and the model stays loaded, even if a rank and the model process are killed."""
    to, held, go, once = (tmp_path / name for name in ("preds", "held", "go", "once"))

    def model(batch):
        import os
        import signal
        import time

        x = batch["x"]
        if (x[:, 1] == 4_321 / 7).any():
            raise ValueError("one row")
        if x[0, 1] == 3_000 / 7 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if x[0, 1] == 1_000 / 7:
            held.touch()
            while not go.exists():
                time.sleep(0.01)
        return {"sum": x.sum(axis=1), "pair": x.astype("float32")}

    run = sparkring.predict(
        data,
        model,
        inputs=INPUTS,
        to=to,
        np=-2,
        columns=["text", "id"],
        batch_size=100,
        on_error="null",
        background=True,
    )
    until(held.exists, "the model has part 1")
    assert not to.exists()
    rank = next(each for each in run.record.ranks if each.rank == run.record.items.running[0].slot)
    os.kill(rank.pid, signal.SIGKILL)
    go.touch()
    found = run.result()
    assert (found.rows, found.parts, found.nulls, found.rows_scored) == (ROWS, 6, 1, ROWS)
    assert once.exists()
    table = pq.read_table(to)
    assert table.schema == pa.schema(
        [("text", "string"), ("id", "int64"), ("sum", "double"), ("pair", pa.list_(pa.float32()))]
    )
    ids = np.arange(ROWS)
    assert table["id"].to_pylist() == ids.tolist()
    expected = np.stack([np.sin(ids), ids / 7.0], axis=1).sum(axis=1).tolist()
    expected[4_321] = None
    assert table["sum"].to_pylist() == expected
    assert sorted(path.name for path in tmp_path.iterdir() if "preds" in path.name) == ["preds"]
    assert "6,000 rows" in repr(found)
    assert "predict" in found.record.title


def test_a_row_that_cannot_be_scored(data, tmp_path, no_folder_left):
    """The error names the row and its file. If no part is complete, no folder is left."""
    to = tmp_path / "preds"

    def model(batch):
        if (batch["b"] == 5_017 / 7).any():
            raise ValueError("one row")
        return batch["b"]

    with pytest.raises(ItemsFailed, match=r"row 1,017 of part-3.parquet: ValueError: .*row"):
        sparkring.predict(data, model, inputs=["b"], to=to, np=-1)
    assert not [path for path in tmp_path.iterdir() if "preds" in path.name], "no part was complete"


KILLED = """
    import sparkring
    from sparkring.errors import DataError
    from sparkring.worker.model import parts
    parts.LEAST_BYTES = 40_000
    def model(batch):
        import os, time
        if batch["b"][0] >= 3_000 / 7:
            with open({held!r}, "w") as file:
                file.write(str(os.getpid()))
            while not os.path.exists({go!r}):
                time.sleep(0.01)
        return batch["b"] * 2
    def predict(model, **options):
        try:
            return sparkring.predict({data!r}, model, inputs=["b"], to={to!r}, np=-1, **options)
        except DataError as error:
            return error
    if os.path.exists({go!r}):
        print("OTHER", predict(lambda batch: batch["b"] * 3))
    found = predict(model)
    print("FOUND", found.rows, found.rows_scored)
    print("AGAIN", predict(model))
    print("INSTEAD", predict(lambda batch: batch["b"] * 3, mode="overwrite").rows_scored)
"""


def test_a_killed_kernel(driver, data, tmp_path, no_folder_left):
    """A killed kernel leaves no process and no folder with results. The next run writes only the missing parts."""
    to, held, go = (tmp_path / name for name in ("preds", "held", "go"))
    script = KILLED.format(data=str(data), to=str(to), held=str(held), go=str(go))
    first = driver(script)
    until(lambda: held.exists() and held.read_text(), "the model has the fourth part")
    pid = int(held.read_text())
    first.process.kill()
    first.process.wait()
    until(lambda: not runs(pid), "the model process ends with the kernel")
    assert not to.exists()
    go.touch()
    said = driver(script).wait()
    assert "with different model" in said, said
    assert mentions(said, "parts", "earlier run", "written")
    assert f"FOUND {ROWS} 3000" in said
    assert "exists already" in said
    assert f"INSTEAD {ROWS}" in said
    assert pq.read_table(to)["prediction"].to_pylist() == [3 * (row / 7.0) for row in range(ROWS)]


def test_files_in_spark_tasks(data, tmp_path, spark, small_parts, no_folder_left):
    to = tmp_path / "preds"
    found = sparkring.predict(data, lambda batch: batch["x"][:, 1], inputs=INPUTS, to=to, np=2)
    assert (found.rows, found.parts) == (ROWS, 6)
    assert pq.read_table(to)["prediction"].to_pylist() == [row / 7.0 for row in range(ROWS)]
    assert spark.read.parquet(str(to)).count() == ROWS


@pytest.mark.extended("repetition", "test_autocast_in_the_model_process")
def test_autocast(data, tmp_path, no_folder_left):
    """The model process uses the same autocast as the trial on the first rows, which sets the column's type."""
    import torch

    net = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.1, 0.7]]))
    to = tmp_path / "preds"
    sparkring.predict(data, net, inputs=INPUTS, to=to, np=-1, columns=["a", "b"], autocast=torch.bfloat16)
    found = pq.read_table(to)
    assert found.schema.field("prediction").type == pa.float32()
    rows = torch.tensor(np.stack([found["a"], found["b"]], axis=1), dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = net(rows)[:, 0].tolist()
    assert found["prediction"].to_pylist() == expected
    assert expected != net(rows)[:, 0].tolist()


@pytest.fixture
def belongs(monkeypatch):
    """Return a function that returns the digests of a call of predict(), which does not start a run."""
    found = []

    def interrupted(destination, digests):
        found.append(digests)
        raise KeyboardInterrupt

    def of(*args, **options):
        with pytest.raises(KeyboardInterrupt):
            sparkring.predict(*args, **options)
        return found.pop()

    monkeypatch.setattr(Destination, "open", interrupted)
    return of


def changed(first, second):
    return {name for name in first if first[name] != second[name]}


def test_parts_of_another_autocast(data, tmp_path, belongs):
    """An unfinished run does not continue with another autocast."""
    import torch

    net, to = torch.nn.Linear(2, 1), tmp_path / "preds"
    first, second, third = (
        belongs(data, net, inputs=INPUTS, to=to, np=-1, autocast=autocast)
        for autocast in (None, "bfloat16", torch.bfloat16)
    )
    assert second == third
    assert changed(first, second) == {"settings"}


def test_parts_of_other_inputs(data, tmp_path, belongs):
    """An unfinished run does not continue if the model gets its inputs in another order, or by their names."""

    def of(inputs):
        return belongs(data, lambda batch: batch["a"], inputs=inputs, to=tmp_path / "preds", np=-1)

    assert changed(of(["a", "b"]), of(["a", "b"])) == set()
    assert changed(of(["a", "b"]), of(["b", "a"])) == {"settings"}
    assert changed(of(["a", "b"]), of({"a": "a", "b": "b"})) == {"settings"}


def test_parts_of_another_value_of_a_checkpoint(data, tmp_path, belongs):
    """An unfinished run does not continue with another value of the same checkpoint as the model."""
    import torch

    nets = {name: torch.nn.Linear(2, 1) for name in ("first", "second")}
    store = sparkring.checkpoints(tmp_path / "saved")
    store.save(1, nets)
    store.wait()
    first, second = (
        belongs(data, store, make_net, inputs=INPUTS, to=tmp_path / "preds", np=-1, key=key) for key in nets
    )
    assert changed(first, second) == {"settings"}


def make_net():
    import torch

    return torch.nn.Linear(2, 1)


def test_storage_that_cannot_rename():
    """If the storage cannot rename, files are copied. If copying fails, a later run copies them again."""
    to = "memory://predictions/run1"
    belongs = {"data": "1", "model": "2"}

    def begun(mode="error", **changed):
        found = Destination(to, mode)
        found.open({**belongs, **changed})
        return found

    destination = begun()
    fs, target = destination.folder.fs, destination.folder.path
    fs.pipe_file(f"{destination.unfinished.path}/parts/a.parquet", b"aa")
    fs.pipe_file(f"{destination.unfinished.path}/parts/b.parquet", b"b")
    fs.pipe_file(f"{destination.unfinished.path}/results/a.json", b"{}")
    destination.release()
    with pytest.raises(DataError, match="with different model"):
        begun(model="3")
    copy, fs.cp_file = fs.cp_file, None  # the storage fails
    try:
        with pytest.raises(DataError, match="cannot be written to"):
            begun().commit({"a.parquet": 2}, {})
    finally:
        fs.cp_file = copy
    begun().commit({"a.parquet": 2}, {})
    assert fs.cat_file(f"{target}/a.parquet") == b"aa"
    assert not fs.exists(f"{target}/b.parquet")
    assert fs.exists(f"{target}/{SUCCESS}")
    assert not fs.exists(destination.unfinished.path)
    with pytest.raises(DataError, match="exists already"):
        begun()
    again = begun("overwrite")
    with pytest.raises(DataError, match=r"a.parquet .*changed .*removed"):
        again.commit({"a.parquet": 2}, {})
    fs.rm("memory://predictions", recursive=True)


def test_another_model_after_a_copy_was_interrupted():
    """The folder has only the files of the new model, and mode "error" does not replace those of the old one."""
    to = "memory://predictions/run2"

    def begun(mode, model, names):
        found = Destination(to, mode)
        found.open({"model": model})
        fs = found.folder.fs
        for name in names:
            fs.pipe_file(f"{found.unfinished.path}/parts/{name}", b"a")
            fs.pipe_file(f"{found.unfinished.path}/results/{name}", b"{}")
        return found

    first = begun("error", "1", ["a.parquet", "b.parquet"])
    fs, target = first.folder.fs, first.folder.path
    copy, copied = fs.cp_file, []

    def copy_one(*paths):
        if copied:
            raise OSError("the storage fails")
        copied.append(copy(*paths))

    fs.cp_file = copy_one
    try:
        with pytest.raises(DataError, match="the storage fails"):
            first.commit({"a.parquet": 1, "b.parquet": 1}, {})
    finally:
        fs.cp_file = copy
    first.release()
    assert fs.exists(f"{target}/a.parquet")
    with pytest.raises(DataError, match="with different model"):
        begun("error", "2", [])
    begun("overwrite", "2", ["c.parquet"]).commit({"c.parquet": 1}, {})
    assert {os.path.basename(path) for path in fs.ls(target, detail=False)} == {"c.parquet", STATE, SUCCESS}
    fs.rm("memory://predictions", recursive=True)


def test_a_folder_that_appears_during_the_run(tmp_path):
    """Mode "error" does not replace the folder, and keeps the parts. Mode "overwrite" does not replace other files."""
    to = tmp_path / "preds"

    def begun(mode):
        found = Destination(to, mode)
        found.open({"model": "1"})
        return found

    first = begun("error")
    for folder, name in (("parts", "a.parquet"), ("results", "a.json")):
        path = tmp_path / "_preds.unfinished" / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("a")
    to.mkdir()
    (to / "other.parquet").touch()
    with pytest.raises(DataError, match="exists already"):
        first.commit({"a.parquet": 1}, {})
    first.release()
    again = begun("overwrite")
    (to / "mine.txt").touch()
    with pytest.raises(DataError, match=r"has `mine.txt`"):
        again.commit({"a.parquet": 1}, {})
    (to / "mine.txt").unlink()
    again.commit({"a.parquet": 1}, {})
    assert {path.name for path in to.iterdir()} == {"a.parquet", STATE, SUCCESS}
