"""Tests of predict() and predict_udf(): one model process per machine adds predictions to a DataFrame as columns."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
import zipfile
from decimal import Decimal
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Pipe, answer_challenge, deliver_challenge
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from leaks import runs
from pyspark.resource import ResourceInformation
from versions import TORCH
from waiting import until

import sparkring
from sparkring import checkpoints
from sparkring.capture import own_modules
from sparkring.capture.packing import pack_call
from sparkring.data.columns import Making
from sparkring.data.layout import BatchLayout
from sparkring.engine.predictions.settings import Live, Settings
from sparkring.errors import CheckpointError, DataError, OptionsError
from sparkring.executor.archive import archive
from sparkring.executor.orders import ModelOrder
from sparkring.worker.model import predictors, server
from sparkring.worker.model.files import FileRows, Files
from sparkring.worker.model.inputs import Described
from sparkring.worker.model.outputs import PredictedColumn, columns_of, types_of
from sparkring.worker.model.reporter import Reporter
from sparkring.worker.model.scorer import RowsError, Scorer
from sparkring.worker.model.task import Scoring, _forget_zip_files, _requests, score

ROWS = """
    SELECT id, array(id / 2D, id / 4D) AS pair, cast(id AS float) AS `a.b`, id % 5 AS rest, map('k', id) AS map,
           IF(id % 7 = 0, NULL, cast(id AS int)) AS whole
    FROM range(0, 3000, 1, 6)
"""


@pytest.fixture
def frame(spark):
    return spark.sql(ROWS)


@pytest.fixture
def no_folder_left():
    """Wait until the model processes of the test have ended, and check that they leave nothing behind."""
    yield
    until(lambda: not folders(), "the model processes have removed their folders")


def folders():
    return list(Path(tempfile.gettempdir()).glob("sparkring-model-*"))


class Unpickled:
    """A model that cannot be loaded, because a module is missing."""

    def __reduce__(self):
        return importlib.import_module, ("nowhere",)


def scorer(model, *, on_error="raise", batch_size=4, fill=None):
    kind = pa.float64()
    layout = BatchLayout("the DataFrame", {"x": "x"}, Making(fill or {}, {}), None, None)
    outputs = [PredictedColumn("prediction", kind, str(kind))]
    inputs = Described(layout)
    return Scorer(Live(model), inputs, outputs, by_name=False, batch_size=batch_size, on_error=on_error)


@pytest.mark.parametrize(
    ("result", "kind", "expected"),
    [
        (np.array([1.5, 2.5]), pa.float32(), [1.5, 2.5]),
        (np.array([[1.5], [2.5]]), pa.float64(), [1.5, 2.5]),
        (np.array([[1, 2], [3, 4]], np.uint8), pa.list_(pa.int64()), [[1, 2], [3, 4]]),
        (np.zeros((2, 2, 0), np.float32), pa.list_(pa.list_(pa.float32())), [[[], []], [[], []]]),
        (np.arange(8).reshape(2, 2, 2), pa.list_(pa.list_(pa.int32())), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (["a", "b"], pa.string(), ["a", "b"]),
        ([{"p": 1.0}, {"p": 2.0}], pa.float64(), [1.0, 2.0]),
    ],
)
def test_results_become_columns(result, kind, expected):
    (column,) = columns_of(result, [PredictedColumn("p", kind, str(kind))], 2)
    assert column.type == kind
    assert column.to_pylist() == expected


def test_results_become_columns_without_pandas():
    """Predictions for files need no pandas."""
    code = """if True:
        import sys

        class Hidden:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "pandas":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Hidden())
        import numpy as np
        import pyarrow as pa
        from sparkring.worker.model.outputs import PredictedColumn, columns_of
        for kind in (pa.float16(), pa.float32(), pa.float64(), pa.list_(pa.float32()), pa.int64()):
            array = np.ones((2, 3) if pa.types.is_list(kind) else 2, "int64")
            (column,) = columns_of(array, [PredictedColumn("p", kind, str(kind))], 2)
            assert column.type == kind
            assert len(column) == 2
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("result", "kind", "message"),
    [
        (np.zeros(3), pa.float64(), r"returned 3 rows of `p` for 2 rows.*shape is \[3\]"),
        (np.float64(1), pa.float64(), "a single value"),
        (np.zeros((2, 3)), pa.float64(), r"float64 of shape \[rows, 3\] for `p`.*is double.*one value for each row"),
        (np.array([0.5, 1]), pa.int32(), "cannot be stored as int32"),
        ({"q": np.zeros(2), "r": np.zeros(2)}, pa.float64(), "returned `q`, `r`, but returns=… lists `p`"),
    ],
)
def test_results_that_do_not_fit(result, kind, message):
    with pytest.raises(DataError, match=message):
        columns_of(result, [PredictedColumn("p", kind, str(kind))], 2)


def test_rows_that_cannot_be_scored():
    """The error names the first such row. With on_error="null", only these rows have no prediction."""

    def model(batch):
        if (batch["x"] == 9).any():
            raise ValueError("nine")
        return batch["x"] * 2

    rows = pa.table({"x": pa.array([*range(9), 9, *range(10, 14)], pa.float64())})
    with pytest.raises(RowsError, match="ValueError: nine") as caught:
        scorer(model).score(rows)
    assert caught.value.row == 9
    found = scorer(model, on_error="null").score(rows)
    assert found.column(0).to_pylist() == [None if x == 9 else 2 * x for x in range(14)]
    # A NaN is an ordinary value, but nulls of whole numbers and rows of a different length cannot be scored.
    nan = scorer(lambda batch: batch["x"]).score(pa.table({"x": pa.array([1.0, None, np.nan])}))
    assert np.isnan(nan.column(0).to_numpy()).tolist() == [False, True, True]
    whole = pa.table({"x": pa.array([1, None, 3])})
    with pytest.raises(RowsError, match=r"column `x` has nulls \(1 in 3 rows\), .*fill=\{'x': …\}") as caught:
        scorer(lambda batch: batch["x"]).score(whole)
    assert caught.value.row == 1
    assert scorer(lambda batch: batch["x"], fill={"x": 2}).score(whole).column(0).to_pylist() == [1, 2, 3]
    ragged = pa.table({"x": pa.array([[1.0, 2.0], [3.0], None, [4.0, 5.0]])})
    lost = scorer(lambda batch: batch["x"].sum(axis=1), on_error="null").score(ragged)
    assert lost.column(0).to_pylist() == [3, None, None, 9]
    with pytest.raises(RowsError, match="returned 1 rows") as caught:  # this happens only in a batch of several rows
        scorer(lambda batch: batch["x"][:1]).score(rows)
    assert caught.value.row is None


def test_batches_are_converted_together():
    """The rows of several batches become arrays at once. If this fails, only the batch that is at fault fails."""
    seen = []

    def model(batch):
        seen.append(batch["x"].tolist())
        return batch["x"] * 2

    def table(numbers):
        return pa.table({"x": pa.array(numbers, pa.int64())})

    scoring = scorer(model, on_error="null")
    for _ in range(2):  # the first request's first batch shows how large rows are
        assert scoring.score(table(range(10))).column(0).to_pylist() == [2.0 * i for i in range(10)]
    assert seen == 2 * [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    found = scoring.score(table([0, 1, 2, 3, 4, None, 6, 7, 8, 9])).column(0).to_pylist()
    assert found == [0, 2, 4, 6, 8, None, 12, 14, 16, 18]
    assert seen[6:] == [[0, 1, 2, 3], [4], [6, 7], [8, 9]]
    with pytest.raises(RowsError, match="has nulls") as caught:
        scorer(model).score(table([*range(9), None]))
    assert caught.value.row == 9


@pytest.mark.versions("pandas UDFs of pyspark, and pandas")
def test_numbers_are_exact(spark, no_folder_left):
    """Large integers and NaNs stay as they are beside nulls, in columns for the model and in predictions."""
    large = 2**53 + 1
    frame = spark.createDataFrame([(large, 0.5), (None, 1.5), (-large, float("nan"))], "whole long, half double")
    frame = frame.coalesce(1)

    def model(batch):
        if (batch["half"] == 1.5).any():
            raise ValueError("one row")
        return {"same": batch["whole"], "half": batch["half"]}

    def predict(**options):
        returns = {"same": "long", "half": "double"}
        data, options = frame.withColumnRenamed("half", "x"), {"on_error": "null", "idle_s": 0.3, **options}
        inputs = {"whole": "whole", "half": "x"}
        return sparkring.predict(data, model, inputs=inputs, returns=returns, probe=False, **options)

    found = predict(fill={"whole": 7}).select("same", "half").collect()
    assert [row.same for row in found] == [large, None, -large]
    assert [repr(row.half) for row in found] == ["0.5", "None", "nan"]
    scored = sparkring.predict(frame, lambda batch: batch["whole"], inputs=["whole"], fill={"whole": large}, idle_s=0.3)
    assert [row.prediction for row in scored.collect()] == [large, large, -large]
    with pytest.raises(Exception, match=r"column `whole` .*nulls, .*integers beyond .*fill={'whole': 0}"):
        predict().select("same").collect()


def test_batches_whose_types_differ():
    """predict_udf() infers the types of each batch. Rows that wait for the next batch get the types of both."""
    numbers = pd.Series([1, 2, 3]), pd.Series([4.0, np.nan]), pd.Series([6, 7, 8])
    texts = pd.Series([None, None, None], dtype=object), pd.Series(["a", None]), pd.Series(["b", "c", "d"])
    lists = (
        pd.Series([np.array([1, 2])] * 3), pd.Series([None, np.array([0.5, 1])]), pd.Series([np.array([3, 4])] * 3),
    )  # fmt: skip
    batches = zip(numbers, texts, lists, strict=True)
    found = list(_requests(batches, None, 4))
    assert [len(each) for each in found] == [4, 4]
    columns = [pa.concat_tables(found).column(at).to_pylist() for at in range(3)]
    assert repr(columns[0]) == "[1.0, 2.0, 3.0, 4.0, nan, 6.0, 7.0, 8.0]"
    assert columns[1] == [None, None, None, "a", None, "b", "c", "d"]
    assert columns[2] == [[1, 2]] * 3 + [None, [0.5, 1]] + [[3, 4]] * 3


def test_zip_files_are_forgotten(tmp_path, monkeypatch):
    """After a task, no zip file is known, because Spark would read its list of contents again for the next task."""
    path = tmp_path / "forgotten.zip"
    with zipfile.ZipFile(path, "w") as archived:
        archived.writestr("forgotten_one.py", "")
        archived.writestr("forgotten_two.py", "")
    monkeypatch.syspath_prepend(str(path))
    importlib.import_module("forgotten_one")
    assert str(path) in sys.path_importer_cache
    _forget_zip_files()
    assert str(path) not in sys.path_importer_cache
    importlib.import_module("forgotten_two")  # the file is read again when it is needed


def test_rows_of_files(tmp_path):
    """Rows of files with several row groups are read in any order, with the types that Spark would give them."""
    first, second = tmp_path / "1", tmp_path / "2"
    some = {
        "n": pa.array(range(250), pa.int32()),
        "v": pa.array([[i, None] for i in range(250)], pa.list_(pa.float32())),
    }
    pq.write_table(pa.table(some), first, row_group_size=100)
    pq.write_table(pa.table({"N": pa.array(range(1000, 1010))}), second)
    kinds = pa.schema({"n": pa.int64(), "v": pa.list_(pa.float64())})
    rows = FileRows(Files({5: str(first), 6: str(second), 7: str(tmp_path / "none")}, kinds, False, False))

    def read(*wanted):
        numbers = pa.array([file << 31 | row for file, row in wanted], pa.int64())
        found = rows.read(pa.RecordBatch.from_arrays([numbers], ["row"]))
        assert found.schema == kinds
        return found

    order = [(5, 3), (5, 4), (5, 99), (5, 100), (5, 249), (6, 9), (6, 0), (5, 120), (5, 120), (5, 2)]
    found = read(*order)
    assert found.column(0).to_pylist() == [row + 1000 * (file == 6) for file, row in order]
    assert found.column(1)[5].as_py() is None
    assert found.column(1)[0].as_py() == [3.0, None]  # in arrays, such nulls become NaN
    assert read(*((5, row) for row in range(90, 210))).column(0).to_pylist() == list(range(90, 210))
    for wanted, message in (((7, 0), "none cannot be read"), ((8, 0), "did not have"), ((6, 10), "fewer rows")):
        with pytest.raises(DataError, match=message):
            read(wanted)


class Broadcast:
    """A broadcast variable whose value is not in a file."""

    def __init__(self, *parts):
        self.value = parts


def task(key, model, batches, *, idle_s=0.1, spread_over=(), modules=None):
    """Score pandas batches of one column of numbers, as a Spark task does."""
    inputs = Described(BatchLayout("the DataFrame", {"x": "x"}, Making({}, {}), None, None))
    outputs = [PredictedColumn("prediction", pa.float64(), "double")]
    settings = {"model": Live(model), "inputs": inputs, "outputs": outputs}
    packed = pack_call(Scorer, {**settings, "by_name": False, "batch_size": 100, "on_error": "raise"}, None)
    process = ModelOrder(key, b"token".hex(), [], {}, idle_s)
    sent = Broadcast(archive(with_nvml=False), modules, packed.payload, *map(bytearray, packed.buffers))
    types = pa.schema({"x": pa.float64()}).serialize().to_pybytes()
    order = Scoring(process, sent, types, 100, spread_over)
    return pd.concat(score(order, iter(batches)), ignore_index=True)


def test_the_model_process_has_the_users_modules(tmp_path, no_folder_left):
    """The model is a function of a module that only the notebook finds, and that imports another one."""
    (tmp_path / "own_helper.py").write_text("FACTOR = 3\n")
    code = "def triple(batch):\n    import own_helper\n    return own_helper.FACTOR * batch['x']\n"
    (tmp_path / "own_model.py").write_text(code)
    modules = [own_modules.OwnModule(name, str(tmp_path), ((f"{name}.py", 1),)) for name in ("own_helper", "own_model")]
    model = types.ModuleType("own_model")
    exec(code, vars(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "own_model", model)
        scored = task("own", model.triple, [pd.Series([1.0, 2.0])], modules=tuple(own_modules.packed(modules)))
    assert list(scored) == [3.0, 6.0]


@pytest.mark.standalone("the executors do not see the notebook's folder")
def test_the_users_modules_on_a_cluster(spark, tmp_path, monkeypatch, no_folder_left):
    """A DataFrame, and files whose parts Spark tasks score, work with a model class of the user's own module."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/own_net.py").write_text(
        "class Net:\n    def __init__(self, factor):\n        self.factor = factor\n"
        "    def __call__(self, batch):\n        return self.factor * batch['x']\n"
    )
    descriptor = os.open(tmp_path / "own", os.O_RDONLY)
    monkeypatch.syspath_prepend(f"/proc/self/fd/{descriptor}")  # only this process finds the folder by this path
    net = importlib.import_module("own_net").Net(2.0)
    rows = spark.sql("SELECT double(id) AS x FROM range(0, 8, 1, 2)")
    scored = sparkring.predict(rows, net, inputs=["x"], idle_s=0.1)
    assert sorted(row.prediction for row in scored.collect()) == [2.0 * number for number in range(8)]
    pq.write_table(pa.table({"x": [1.0, 2.0]}), tmp_path / "rows.parquet")
    sparkring.predict(tmp_path / "rows.parquet", net, inputs=["x"], to=tmp_path / "scored", np=1)
    assert pq.read_table(tmp_path / "scored").column("prediction").to_pylist() == [2.0, 4.0]
    os.close(descriptor)


def test_the_model_process(tmp_path, monkeypatch, no_folder_left):
    """Batches are cut at the same rows, however Spark sends them. A killed process is started again a few times."""
    folder = Path(tempfile.gettempdir())
    dead = folder / "sparkring-model-dead"
    dead.mkdir()
    (dead / "lock").touch()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead / "socket"))
    once, always = tmp_path / "once", tmp_path / "always"

    def model(batch):
        import os
        import signal

        if always.exists() or (batch["x"][0] == 200 and not once.exists()):
            with once.open("a") as file:
                file.write(f"{os.getpid()}\n")
            print("the last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return batch["x"] * 1000 + len(batch["x"])

    def batches():
        yield from (pd.Series(np.arange(begin, end, dtype=float)) for begin, end in ((0, 70), (70, 130), (130, 330)))

    found = task("once", model, batches())
    assert found.tolist() == [x * 1000 + (100 if x < 300 else 30) for x in range(330)]
    assert len(once.read_text().split()) == 1
    assert not dead.exists()
    always.touch()
    monkeypatch.setattr(pyspark, "TaskContext", OnGpus(0, ["1", "0"]))
    with pytest.raises(
        RuntimeError, match=r"model on GPU 0, 1 exited 3 times .*rows 0 to 99 of partition 0.*the last words"
    ):
        task("always", model, batches())
    assert len(set(once.read_text().split())) == 1 + 3
    monkeypatch.undo()
    assert not [*folder.glob("sparkring-model-always*")]
    with pytest.raises(RuntimeError, match=r"not .*loaded .*No module named 'nowhere'"):
        task("lost", Unpickled(), batches())
    open_to_all = folder / "sparkring-model-open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    with pytest.raises(RuntimeError, match=rf"{open_to_all} .*others"):
        task("open", model, batches())
    open_to_all.rmdir()


class OnGpus:
    """Stand in for the TaskContext of the task of `partition`, to which Spark has given GPUs with these addresses."""

    def __init__(self, partition, addresses=None):
        self.partition, self.addresses = partition, addresses

    def get(self):
        return self

    def resources(self):
        return {} if self.addresses is None else {"gpu": ResourceInformation("gpu", self.addresses)}

    def partitionId(self):
        return self.partition

    taskAttemptId = stageId = partitionId

    def getLocalProperty(self, name):
        return None


def test_a_model_process_for_each_gpu(monkeypatch, no_folder_left):
    """Tasks with the same GPU share a process, which sees only this GPU. Without GPUs from Spark, tasks are spread."""

    def model(batch):
        import os

        visible = [os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]]
        return np.full(len(batch["x"]), os.getpid() + 0.5 * (visible != ["MIG-GPU-1f/1/0", "PCI_BUS_ID"]))

    def scored(partition, addresses=None):
        monkeypatch.setattr(pyspark, "TaskContext", OnGpus(partition, addresses))
        return task("gpus", model, [pd.Series([1.0])], idle_s=60, spread_over=["MIG-GPU-1f/1/0", "1"])[0]

    first, second = scored(0, ["MIG-GPU-1f/1/0"]), scored(1, ["1"])
    assert first.is_integer()
    assert not second.is_integer()
    assert len(folders()) == 2
    assert scored(5, ["MIG-GPU-1f/1/0"]) == first
    assert [scored(partition) for partition in range(4)] == [first, second] * 2
    for pid in (first, second):
        os.kill(int(pid), signal.SIGTERM)
    monkeypatch.setattr(pyspark, "TaskContext", OnGpus(0, ["1"]))
    with pytest.raises(RuntimeError, match=r"not .*loaded .*, GPU 1: .*No module named 'nowhere'"):
        task("lost", Unpickled(), [pd.Series([1.0])])


def test_how_many_models_a_machine_keeps(tmp_path):
    """The processes of a model count as one. A process does not count those of its own model."""
    found = [tmp_path / f"sparkring-model-{name}" for name in ("a-0", "a-1", "b-0", "b-1", "c")]
    for used, folder in enumerate(found):
        folder.mkdir()
        os.utime(folder, (used, used))
    assert [server._newer(str(folder)) for folder in found] == [2, 2, 1, 1, 0]


def test_only_tasks_count_as_use(tmp_path):
    """A connection that does not prove that it knows the token is no use of the model."""
    os.utime(tmp_path, (1, 1))
    serving = server._Server(None, "", b"token", str(tmp_path), Reporter(None))
    serving._last_used = used = serving._last_used - 100
    for token in (None, b"other", b"token"):
        assert (os.stat(tmp_path).st_mtime, serving._last_used) == (1, used)
        near, far = Pipe()
        serving._open = 1
        thread = threading.Thread(target=serving._serve, args=(far,))
        thread.start()
        if token is not None:
            with contextlib.suppress(AuthenticationError, EOFError):
                answer_challenge(near, token)
                deliver_challenge(near, token)
        near.close()
        thread.join()
    assert os.stat(tmp_path).st_mtime > 1
    assert serving.unused_s < 100


@pytest.mark.versions("pandas UDFs of pyspark")
def test_columns_of_predictions(frame, no_folder_left):
    """One process scores the rows of all tasks, each row once, and then ends.

    It answers only tasks that have its token. If it is killed, another one is started.
    """
    killed = Path(tempfile.mkdtemp()) / "killed"

    def model(batch):
        import os
        import signal

        if (batch["x"][:, 2] == 2900).any() and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"sum": batch["x"].sum(axis=1), "two": batch["x"][:, :2], "pid": np.full(len(batch["x"]), os.getpid())}

    killed.touch()
    returns = {"sum": "double", "two": "array<double>", "pid": "long"}
    scored = sparkring.predict(
        frame, model, inputs={"x": ["pair", "a.b", "id"]}, returns=returns, batch_size=100, idle_s=3
    )
    assert scored.columns == [*frame.columns, *returns]
    assert not folders()  # the DataFrame is lazy
    found = {row["id"]: row for row in scored.drop("whole").collect()}
    assert list(found) == list(range(3000))
    assert all(row["sum"] == 2.75 * i and row["two"] == [i / 2, i / 4] for i, row in found.items())
    assert found[7]["map"] == {"k": 7}
    pids = {row["pid"] for row in found.values()}
    (folder,) = folders()
    assert len(pids) == 1
    assert folder.stat().st_mode & 0o077 == 0
    with pytest.raises((AuthenticationError, EOFError)):
        Client(str(folder / "socket"), "AF_UNIX", authkey=b"guess")
    killed.unlink()
    again = scored.where("rest < 2").select("id", "sum", "pid").collect()
    assert [row["sum"] for row in again] == [2.75 * i for i in range(3000) if i % 5 < 2]
    assert killed.exists()
    assert not {row["pid"] for row in again} <= pids
    assert "sum" not in scored.select("id")._jdf.queryExecution().executedPlan().toString()


@pytest.mark.versions("pandas UDFs of pyspark, and pandas")
def test_columns_of_all_kinds(spark, no_folder_left):
    """The model gets the same arrays in the model process as on the driver, where it scores the first rows."""
    from pyspark.ml.functions import array_to_vector

    frame = spark.sql("""
        SELECT 'a' || id AS text, timestamp'2026-01-31 23:30:00.000600' AS at, date'2026-01-01' AS day,
               id % 2 = 0 AS yes, cast(id AS decimal(9, 2)) / 4 AS price, cast('abcd' AS binary) AS bytes,
               array(array(id, 1), array(2, 3)) AS nested, array(id, 2D) AS pair,
               IF(id % 2 = 0, NULL, cast(id AS float)) AS gaps, cast(id AS byte) AS small
        FROM range(0, 12, 1, 2)
    """).withColumn("vector", array_to_vector("pair"))
    seen = []

    def model(batch):
        told = [f"{name} {array.dtype} {array.tolist()[0]!r}" for name, array in batch.items()]
        seen.append(told)
        return {"told": ["; ".join(told)] * len(batch["text"])}

    inputs = {**{name: name for name in frame.columns}, "both": ["small", "pair"]}
    scored = sparkring.predict(frame, model, inputs=inputs, raw={"bytes": ("uint8", (4,))}, batch_size=20, idle_s=0.3)
    found = scored.select("told").collect()
    assert found[0].told.split("; ") == seen[0]
    told = dict(each.split(" ", 1) for each in seen[0])
    assert told["bytes"] == "uint8 [97, 98, 99, 100]"
    assert told["nested"] == "int64 [[0, 1], [2, 3]]"
    assert told["vector"] == "float64 [0.0, 2.0]"
    assert told["both"] == "float64 [0.0, 0.0, 2.0]"
    assert told["gaps"] == "float32 nan"
    assert told["at"].startswith("datetime64")
    assert "23, 30, 0, 600" in told["at"]
    assert told["price"] == "object Decimal('0.000000')"


# Each form in which columns can be named, with the first row's array.
FORMS = {
    "a number": ("real", np.float32(1)),
    "a list of one": (["real"], np.array([1], np.float32)),
    "a tuple of one": (("whole",), np.array([1], np.int64)),
    "a list of several": (["real", "whole"], np.array([1, 1], np.float64)),
    "a list of one decimal": (["price"], np.array([0.25])),
    "a list of one text": (["text"], np.array(["a1"], object)),
    "text": ("text", "a1"),
    "an array": ("pair", np.array([1, 2.0])),
    "a list of one array": (["pair"], np.array([1, 2.0])),
    "nested arrays": (["nested"], np.array([[1, 1], [2, 3]])),
    "a vector": ("vector", np.array([1, 2.0])),
    "a list of one vector": (["vector"], np.array([1, 2.0])),
    "vectors, arrays and numbers": (["vector", "real", "pair", "flag"], np.array([1, 2, 1, 1, 2, 1.0])),
}


def test_predict_and_shards_read_the_same_arrays(spark, tmp_path, monkeypatch, no_folder_left):
    """A name is an array [rows, …] of a column's values, and a list is an array [rows, columns], even if it has one."""
    from pyspark.ml.functions import array_to_vector

    monkeypatch.setenv("SPARKRING_CACHE", str(tmp_path / "cache"))
    frame = spark.sql("""
        SELECT cast(id AS float) AS real, id AS whole, cast(id / 4 AS decimal(9, 2)) AS price, 'a' || id AS text,
               array(id, 2D) AS pair, array(array(id, 1), array(2, 3)) AS nested, id = 1 AS flag
        FROM range(1, 5, 1, 1)
    """)
    frame.write.parquet(str(tmp_path / "files"))
    groups = {form: group for form, (group, _) in FORMS.items()}
    stored = {form: group for form, group in groups.items() if "vector" not in group and group != ["price"]}

    def shown(array):
        return [f"{array.dtype} {array.shape[1:]} {row!r}" for row in array.tolist()]

    def model(batch):
        rows = zip(*map(shown, batch.values()), strict=True)
        return {"shown": ["; ".join(row) for row in rows]}

    computed = frame.withColumn("vector", array_to_vector("pair"))
    files = spark.read.parquet(str(tmp_path / "files"))
    for source, inputs in ((computed, groups), (files, stored)):
        (batch,) = sparkring.shards(source, 4, columns=inputs, shuffle=False).as_numpy()
        for form, array in batch.items():
            expected = np.asarray(FORMS[form][1])
            assert array.shape[1:] == expected.shape, form
            assert array.dtype == (object if expected.dtype.kind == "U" else expected.dtype), form
            assert np.array_equal(array[0], expected), form
        scored = sparkring.predict(source, model, inputs=inputs, idle_s=0.3)
        assert [row.shown for row in scored.select("shown").collect()] == model(batch)["shown"]


def test_a_shape_that_does_not_fit_is_told_with_the_way_out(frame):
    """If a model cannot use arrays of shape [rows], the error shows how to combine them in one array."""
    import torch

    hint = r"For one array of shape \[rows, 2\], write inputs={'id': \['id', 'rest'\]}"
    with pytest.raises(DataError, match=hint):
        sparkring.predict(frame, torch.nn.Linear(2, 1), inputs=["id", "rest"])
    assert "prediction" in sparkring.predict(frame, torch.nn.Linear(1, 1), inputs={"x": ["a.b"]}).columns


ROWS_OF_RESULTS = [
    ([[1, 2], [3], None], pa.list_(pa.int64()), [[1, 2], [3], None]),
    ([[1.0, None], [2.0, 3.0], [4.0, 5.0]], pa.list_(pa.float64()), [[1, None], [2, 3], [4, 5]]),
    ([np.zeros(2)] * 3, pa.list_(pa.float64()), [[0, 0]] * 3),
    ([np.zeros(1), np.zeros(2), np.zeros(0)], pa.list_(pa.float64()), [[0], [0, 0], []]),
    ([np.float32(1), np.float32(2), np.float32(3)], pa.float32(), [1, 2, 3]),
    (np.ma.array([1, 2, 3], mask=[0, 1, 0]), pa.int64(), [1, None, 3]),
    ([Decimal("1.5")] * 3, pa.decimal128(2, 1), [Decimal("1.5")] * 3),
    (pd.Series([1, None, 3], dtype="Int64"), pa.int64(), [1, None, 3]),
    (pa.array([True, None, False]), pa.bool_(), [True, None, False]),
]


def test_results_of_any_form():
    """A list can have an array or list for each row, of any length, and None. Other values have one clear error."""
    import torch

    for results, kind, expected in ROWS_OF_RESULTS:
        assert types_of(results, (), 3) == {"prediction": kind}
        (column,) = columns_of(results, [PredictedColumn("prediction", kind, str(kind))], 3)
        assert column.to_pylist() == expected
    scores = pd.DataFrame({"score": [0.5, 1.0], "label": ["a", "b"]})
    kinds = types_of(scores, (), 2)
    found = columns_of(scores, [PredictedColumn(name, kind, str(kind)) for name, kind in kinds.items()], 2)
    assert [column.to_pylist() for column in found] == [[0.5, 1], ["a", "b"]]
    outputs = [PredictedColumn("score", pa.float32(), "float"), PredictedColumn("label", pa.string(), "string")]
    found = columns_of([(0.5, "a"), (None, "b"), (1, None)], outputs, 3)
    assert [column.to_pylist() for column in found] == [[0.5, None, 1], ["a", "b", None]]
    square = [np.arange(3.0)] * 3
    (column,) = columns_of(square, [PredictedColumn("prediction", pa.list_(pa.float32()), "array<float>")], 3)
    assert column.to_pylist() == [[0, 1, 2]] * 3
    (column,) = columns_of(
        [np.ones((1, 3))], [PredictedColumn("prediction", pa.list_(pa.float32()), "array<float>")], 1
    )
    assert column.to_pylist() == [[1, 1, 1]]
    for message, results in {
        "3 arrays without names.*return np.stack": square,
        "2 arrays without names": (np.zeros(3), np.zeros(3)),
        "returned None for `prediction`: it must return an array or a list": None,
        "returned a `generator`": (each for each in ()),
        "returned a single value of `a`": {"a": 1},
        "returned 2 rows": [[1, 2], [3, 4]],
        "list of dicts, but not all of them have the keys of the first one, `a`": [{"a": 1}, {"b": 1}, {"a": 2}],
        "complex128": np.zeros(3, complex),
        "returned object of shape": [1, "a", 2.5],
        "object of shape": [("cat", 0.5), ("dog", 0.25), ("cow", 0.25)],
        r"object of shape \[rows\]": [pd.Timestamp(0), pd.NaT, None],
        "a `Tensor`, which cannot become an array: .*sparse|Sparse": torch.ones(3).to_sparse(),
        "returned no columns": [{}] * 3,
    }.items():
        with pytest.raises(DataError, match=message):
            types_of(results, (), 3)


def test_a_folder_with_files_of_other_packages(tmp_path):
    """The error says which file is there and how to load it, because only sparkring's checkpoints have a format."""
    for name, how in {
        "net.pt": r"it has the file `net.pt`: load the model yourself.*load_state_dict\(torch.load\('.*/net.pt'\)\)",
        "net.keras": r"keras.models.load_model\('.*/net.keras'\)",
        "model.joblib": "a function that loads '.*/model.joblib'",
    }.items():
        folder = tmp_path / name.partition(".")[2]
        folder.mkdir()
        (folder / name).touch()
        for model, told in ((folder, how), (folder / name, f"{name} is not a directory of checkpoints")):
            with pytest.raises(OptionsError, match=told):
                Settings(model, ["x"]).source()
    with pytest.raises(CheckpointError, match=r"no checkpoint\b"):
        Settings(tmp_path / "nothing", ["x"]).source()
    with pytest.raises(OptionsError, match=r"dict, perhaps .*weights"):
        Settings({"weight": 1}, ["x"]).source()


@pytest.mark.versions("metadata columns of Spark")
def test_files_are_read_by_the_model_process(spark, tmp_path, no_folder_left):
    """If the model's columns are stored in Parquet files, Spark sends only the numbers of the rows.

    Otherwise, it sends the columns. The values and nulls are the same. The first rows are read without a Spark job.
    """
    path, folders_path = str(tmp_path / "a b%"), str(tmp_path / "folders")
    source = spark.sql(
        "SELECT id, id % 3 AS part, IF(id % 4 = 0, NULL, cast(id AS float)) AS gap, array(id, 2D) AS pair "
        "FROM range(0, 400, 1, 2)"
    )
    source.write.parquet(path)
    source.write.partitionBy("part").parquet(folders_path)
    scheduler = spark.sparkContext._jsc.sc().dagScheduler()

    def model(batch):
        return batch["x"].sum(axis=1)

    def scored(frame, *names):
        return sparkring.predict(frame, model, inputs={"x": [*names]}, fill={"gap": -1.0}, batch_size=50, idle_s=0.3)

    def reads_files(found):
        plan = found._jdf.queryExecution().executedPlan().toString()
        # Spark computes the numbers once, before the rows wait for Python's answer.
        assert ("row_index" in plan) == bool(re.search(r"score\((sparkring_\w+#\d+L), \1\)", plan)), plan
        return "row_index" in plan

    plain = spark.read.parquet(path)
    jobs = scheduler.numTotalJobs()
    assert reads_files(scored(plain, "id", "gap", "pair"))
    assert scheduler.numTotalJobs() == jobs
    filtered = scored(plain.where("id >= 100 AND part = 1").select("pair", "gap", "id"), "id", "gap", "pair")
    in_folders = scored(spark.read.parquet(folders_path), "id", "gap", "pair")
    computed = scored(plain.withColumn("gap", plain["gap"] * 1), "id", "gap", "pair")
    for each, expected, wanted in (
        (filtered, True, [i for i in range(100, 400) if i % 3 == 1]),
        (in_folders, True, range(400)),
        (computed, False, range(400)),
    ):
        assert reads_files(each) == expected
        sums = {row["id"]: row["prediction"] for row in each.select("id", "prediction").collect()}
        assert sums == {i: 2 * i + 2 + (i if i % 4 else -1) for i in wanted}
    assert not reads_files(scored(spark.read.parquet(folders_path), "gap", "part"))
    assert not reads_files(scored(plain.cache(), "id", "gap"))
    plain.unpersist()


def test_the_first_rows_go_through_the_model_here(frame):
    """Invalid arguments raise an error before a job or a model process is started."""
    import torch

    net = torch.nn.Linear(2, 3).train()
    assert sparkring.predict(frame, net, inputs=["pair"]).schema["prediction"].dataType.simpleString() == "array<float>"
    assert net.training
    one = sparkring.predict(frame, torch.nn.Linear(2, 1), inputs=["pair"])
    assert one.schema["prediction"].dataType.simpleString() == "float"
    for message, options in {
        r"no column `pear`: did you mean `pair`\?": {"inputs": ["pear"]},
        r"column `map` is map<.*no array can hold": {"inputs": ["map"]},
        r"failed on the first 16 rows: RuntimeError.*Its inputs were `id`: int64 of shape \[rows\]": {"inputs": ["id"]},
        r"float32 of shape \[rows, 3\] for `prediction`.*is float": {"inputs": ["pair"], "returns": "float"},
        "'flaot' is not a Spark type": {"inputs": ["pair"], "returns": "flaot"},
        'expected "bfloat16" or "float16"': {"inputs": ["pair"], "autocast": torch.float32},
        "already has a column `rest`": {"inputs": ["pair"], "returns": {"rest": "array<float>"}},
        r"fill names `rest`": {"inputs": ["pair"], "fill": {"rest": 0}},
        r"column `whole` has nulls": {"inputs": ["whole"]},
        "inputs names no columns": {"inputs": []},
        "with probe=False.*set the type": {"inputs": ["pair"], "probe": False},
        "to=… is only for Parquet files": {"inputs": ["pair"], "to": "preds"},
        "mode=… is only for Parquet files": {"inputs": ["pair"], "mode": "overwrite"},
        "background=… is only for Parquet files": {"inputs": ["pair"], "background": True},
    }.items():
        with pytest.raises((DataError, OptionsError), match=message):
            sparkring.predict(frame, net, **options)
    with pytest.raises(OptionsError, match=r"DataFrame .*empty"):
        sparkring.predict(frame.limit(0), net, inputs=["pair"])
    with pytest.raises(OptionsError, match=r"model .*`int`"):
        sparkring.predict(frame, 7, inputs=["pair"])
    with pytest.raises(OptionsError, match=r"autocast='float16' .*only .*torch modules"):
        sparkring.predict(frame, len, inputs=["id"], returns="long", probe=False, autocast="float16")
    with pytest.raises(DataError, match=r"is a `list`, not .*Spark DataFrame"):
        sparkring.predict([1], net, inputs=["pair"])
    assert not folders()


def test_a_function_may_change_its_arrays():
    """An array in Arrow's memory, which is read-only, is copied; other arrays are not."""

    def predict(batch):
        batch["x"] += 1
        return batch["x"]

    read_only = pa.array([1.0, 2.0]).to_numpy()
    assert predictors.predictor_of(predict, by_name=False)({"x": read_only}).tolist() == [2, 3]
    assert read_only.tolist() == [1, 2]
    own = np.zeros(2)
    assert predictors.predictor_of(predict, by_name=False)({"x": own}) is own


def test_which_modules_one_thread_computes():
    """One thread computes small modules. Operations are counted, not timed; those of an LSTM cannot be counted."""
    import torch

    def is_small(net, width, batch_size):
        batch = {"x": np.zeros((16, *width), np.float32)}
        return predictors.is_small(predictors.predictor_of(net, by_name=False), batch, batch_size)

    if TORCH.release >= (2, 2):  # 2.1 counts nothing in inference mode
        assert is_small(torch.nn.Linear(10, 32), (10,), 1024)
    assert not is_small(torch.nn.Linear(10, 32), (10,), 102_400)
    assert not is_small(torch.nn.LSTM(4, 4), (3, 4), 16)


@pytest.mark.parametrize(("batch_size", "expected"), [(1024, 1), (102_400, 3)])
def test_functions_that_one_thread_computes(batch_size, expected):
    """The first batch shows whether one thread is enough for a function that uses PyTorch."""
    import torch

    if TORCH.release < (2, 2):  # 2.1 counts nothing in inference mode
        expected = 3
    net, before = torch.nn.Linear(10, 32), torch.get_num_threads()

    def predict(batch):
        batch["x"] *= 2
        with torch.inference_mode():
            return net(torch.from_numpy(batch["x"])).numpy()

    def batch():
        return {"x": np.ones((16, 10), np.float32)}

    torch.set_num_threads(3)
    try:
        judged = predictors.judged(predict, batch_size)
        for _ in range(2):
            assert np.array_equal(judged(batch()), predict(batch()))
        assert torch.get_num_threads() == expected
        with pytest.raises(KeyError):
            predictors.judged(predict, batch_size)({})
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
def test_autocast(autocast):
    """A torch module computes under torch.autocast(). The columns are float32: NumPy and Spark lack the other types."""
    import torch

    net = torch.nn.Linear(2, 3)
    if autocast == "float16" and TORCH.release < (2, 2):
        with pytest.raises(OptionsError, match=r"not support autocast='float16' .*device type `cpu`"):
            predictors.predictor_of(net, by_name=False, autocast=autocast)
        return
    rows = np.linspace(0, 1, 32).reshape(16, 2)
    found = predictors.predictor_of(net, by_name=False, autocast=autocast)({"x": rows})
    exact = predictors.predictor_of(net, by_name=False)({"x": rows})
    with torch.no_grad(), torch.autocast("cpu", getattr(torch, autocast)):
        expected = net(torch.tensor(rows, dtype=torch.float32))
    assert found.dtype == getattr(torch, autocast)
    assert torch.equal(found, expected)
    assert not torch.equal(found.float(), exact)
    assert not torch.is_autocast_enabled()
    (kind,) = types_of(found, (), len(rows)).values()
    assert kind == pa.list_(pa.float32())
    (column,) = columns_of(found, [PredictedColumn("prediction", kind, str(kind))], len(rows))
    assert column.to_pylist() == expected.tolist()


def test_autocast_that_pytorch_does_not_support(monkeypatch):
    import torch

    with pytest.raises(OptionsError, match=r"not support autocast='float16' .*device type `meta`"):
        predictors.predictor_of(torch.nn.Linear(2, 3, device="meta"), by_name=False, autocast="float16")
    # For some types and devices, PyTorch only warns, and autocast() has no effect.
    monkeypatch.setattr(torch, "autocast", lambda *_: warnings.warn("Disabling autocast.", stacklevel=2))
    with pytest.raises(OptionsError, match="device type `cpu`: try autocast='bfloat16'"):
        predictors.predictor_of(torch.nn.Linear(2, 3), by_name=False, autocast="float16")


def test_autocast_in_the_model_process(frame, no_folder_left):
    import torch

    net = torch.nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.1, 0.2], [0.3, 0.7], [1.1, 1.3]]))
    scored = sparkring.predict(frame.limit(50), net, inputs=["pair"], autocast="bfloat16", idle_s=0.3)
    assert scored.schema["prediction"].dataType.simpleString() == "array<float>"
    rows = torch.tensor([[i / 2, i / 4] for i in range(50)])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = net(rows).tolist()
    assert expected != net(rows).tolist()
    assert [row[0] for row in scored.select("prediction").collect()] == expected


def test_errors_of_tasks(frame, spark, no_folder_left):
    """If a row fails, the error names its partition; if a model cannot be loaded, its host. Both end the query."""

    def fails_late(batch):
        if (batch["id"] == 2600).any():
            raise ValueError("so late")
        return batch["id"]

    scored = sparkring.predict(frame, fails_late, inputs=["id"], idle_s=0.3)
    with pytest.raises(Exception, match=r"row 100 of partition 5: ValueError: so late"):
        scored.select("prediction").collect()
    null = sparkring.predict(frame, fails_late, inputs=["id"], on_error="null", idle_s=0.3)
    assert [row.id for row in null.where("prediction IS NULL").select("id").collect()] == [2600]

    def make():
        raise RuntimeError("no weights")

    bad = sparkring.predict_udf(make, return_type="float", batch_size=10, idle_s=0.3)
    with pytest.raises(Exception, match=r"model .*not .*loaded .*RuntimeError: no weights"):
        frame.select(bad("id")).collect()


def test_a_stream(spark, tmp_path, no_folder_left):
    spark.range(0, 20, 1, 1).selectExpr("cast(id AS double) AS x").write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema("x double").parquet(str(tmp_path / "in"))
    with pytest.raises(OptionsError, match=r"DataFrame .*stream"):
        sparkring.predict(stream, lambda batch: batch["x"], inputs=["x"])
    scored = sparkring.predict(stream, lambda batch: batch["x"] + 1, inputs=["x"], returns="double", idle_s=0.3)
    query = scored.writeStream.format("memory").queryName("scored").trigger(availableNow=True).start()
    query.awaitTermination()
    assert sorted(row[0] for row in spark.table("scored").select("prediction").collect()) == list(range(1, 21))


@pytest.mark.versions("pandas UDFs of pyspark")
@pytest.mark.extended("library", "test_a_udf of test_queries.py")
def test_the_same_as_predict_batch_udf(frame, spark, no_folder_left):
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType

    def one():
        return lambda x: x.sum(axis=1) if x.ndim > 1 else x * 2.0

    def two():
        return lambda x, y: {"s": x[:, 0] + y, "t": x * 2}

    struct = StructType([StructField("s", DoubleType()), StructField("t", ArrayType(DoubleType()))])
    makers = {
        "tensor": (one, {"return_type": DoubleType(), "input_tensor_shapes": [[2]]}),
        "plain": (one, {"return_type": DoubleType()}),
        "several": (two, {"return_type": struct, "input_tensor_shapes": {0: [2]}}),
    }
    columns = {
        "tensor": ("tensor", ["pair"]),
        "number": ("plain", ["id"]),
        "fields": ("plain", [functions.struct("id", "rest")]),
        "several": ("several", ["pair", "id"]),
    }
    udfs = {
        name: [
            sparkring.predict_udf(make, batch_size=64, idle_s=0.3, **options),
            predict_batch_udf(make, batch_size=64, **options),
        ]
        for name, (make, options) in makers.items()
    }
    ours = theirs = frame.limit(200)  # with one partition, because each column starts a Python worker for each task
    for name, (which, arguments) in columns.items():
        our_udf, their_udf = udfs[which]
        ours, theirs = ours.withColumn(name, our_udf(*arguments)), theirs.withColumn(name, their_udf(*arguments))
    assert ours.select(*columns).collect() == theirs.select(*columns).collect()
    spark.udf.register("twice", udfs["plain"][0])
    assert spark.sql("SELECT twice(id) FROM range(3)").collect() == [(0.0,), (2.0,), (4.0,)]


@pytest.mark.versions("PyTorch")
def test_models_from_checkpoints(frame, tmp_path, no_folder_left):
    """The checkpoint is chosen when the query is made, and its weights are loaded in the model process."""
    import torch

    def make_model():
        return torch.nn.Linear(2, 1)

    net = make_model()
    store = checkpoints(tmp_path / "torch", keep=None, best="loss")
    expected = []
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
        with torch.no_grad():
            net.weight.fill_(step)
            net.bias.fill_(-step)
        store.save(step, {"model": net, "step": step}, {"loss": loss})
    store.wait()
    some = frame.limit(50)
    by_which = {
        which: sparkring.predict(some, store, make_model, inputs=["pair"], which=which, idle_s=0.5)
        for which in ("latest", "best")
    }
    store.save(4, {"model": net, "step": 4}, {"loss": 0.0})
    store.wait()
    for which, step in (("latest", 3), ("best", 2)):
        expected = [step * (i * 0.75) - step for i in range(50)]
        assert [row[0] for row in by_which[which].select("prediction").collect()] == pytest.approx(expected)
    with pytest.raises(CheckpointError, match=r"no checkpoint .*step 9"):
        sparkring.predict(some, str(tmp_path / "torch"), make_model, inputs=["pair"], which=9)
    with pytest.raises(OptionsError, match=r"weights, .*no configuration"):
        sparkring.predict(some, str(tmp_path / "torch"), inputs=["pair"])


@pytest.mark.versions("Keras")
@pytest.mark.extended("library", "test_models_from_checkpoints with PyTorch; test_pipelines with Keras")
def test_keras_models_from_checkpoints(frame, tmp_path, no_folder_left):
    """The model's configuration is in the checkpoint, so nobody has to make the model."""
    import keras

    some = frame.limit(50)
    inputs = {name: keras.Input((1,), name=name) for name in ("left", "right")}
    layer = keras.layers.Dense(2)
    model = keras.Model(inputs, layer(keras.layers.Concatenate()(list(inputs.values()))))
    layer.set_weights([np.array([[1, 2], [10, 20]], np.float32), np.zeros(2, np.float32)])
    saved = checkpoints(tmp_path / "keras", keep=None)
    saved.save(1, {"model": model})
    layer.set_weights([np.zeros((2, 2), np.float32), np.zeros(2, np.float32)])
    saved.save(2, {"model": model})
    saved.wait()
    columns = {"right": "rest", "left": "a.b"}
    with pytest.raises(OptionsError, match=r"autocast='bfloat16' .*only .*torch modules"):
        sparkring.predict(some, str(tmp_path / "keras"), inputs=columns, autocast="bfloat16")
    scored = sparkring.predict(some, str(tmp_path / "keras"), inputs=columns, which=1, idle_s=0.5)
    sums = [i + 10 * (i % 5) for i in range(50)]
    assert [row[0] for row in scored.select("prediction").collect()] == [[each, 2 * each] for each in sums]


KILLED = """
    os.environ["PYSPARK_PYTHON"] = {python!r}
    session = spark({url!r}, **{{"spark.executor.memory": "600m"}})
    while session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < 3:
        time.sleep(0.05)
    import numpy as np
    import sparkring
    weights = np.random.default_rng(0).normal(size=3)
    def model(batch):
        import os, time
        x = batch["x"]
        if x[:, 0].max() >= 20_000:
            with open({ran!r}, "a") as file:
                print(os.getpid(), file=file)
            while not os.path.exists({go!r}):
                time.sleep(0.02)
        return x @ weights
    frame = session.range(0, 40_000, 1, 8).selectExpr("id", "id / 7D AS a", "sin(id) AS b")
    scored = sparkring.predict(frame, model, inputs={{"x": ["id", "a", "b"]}}, batch_size=512, idle_s=2)
    rows = frame.collect()
    x = np.array(rows)
    expected = [value for part in range(0, 40_000, 5_000) for begin in range(part, part + 5_000, 512)
                for value in x[begin : min(begin + 512, part + 5_000)] @ weights]
    found = scored.select("id", "prediction").collect()
    print("SAME", [row[0] for row in found] == list(range(40_000)), [row[1] for row in found] == expected, flush=True)
    session.stop()
"""


@pytest.mark.slow
@pytest.mark.extended("repetition", "test_a_worker_is_killed_and_another_one_comes; test_the_model_process")
def test_a_worker_is_killed(driver, brittle_cluster, tmp_path, no_folder_left):
    """If a worker is killed, its model process ends, too, and tasks of the other worker start a new model process.

    The result contains each row once, with the same bits as without a failure. Executors need not have sparkring.
    """
    ran, go = tmp_path / "ran", tmp_path / "go"
    script = driver(KILLED.format(python=brittle_cluster.python, url=brittle_cluster.url, ran=str(ran), go=str(go)))
    until(lambda: ran.exists() and ran.read_text(), "the model process scores the second half")
    pid = int(ran.read_text().split()[0])
    above = {process.pid for process in psutil.Process(os.getpgid(pid)).parents()}  # its daemon's group
    (worker,) = [worker for worker in brittle_cluster.workers if worker.pid in above]
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: not runs(pid), "the model process ends with its executor")
    go.touch()
    assert "SAME True True" in script.wait(), script.text
    assert len(set(ran.read_text().split())) == 2
