"""Tests of what everything shares that runs on executors: functions of tasks, orders, and the start of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from texts import mentions

from sparkring.cluster import python
from sparkring.cluster.survey import Directory, Questions, answer
from sparkring.data.stage_task import HandingOver, Staging, hand_over, stage
from sparkring.executor import boot
from sparkring.executor.orders import ModelOrder, RelayOrder, SpareOrder, Ticket, decode, encode
from sparkring.executor.tasks import batch_function_for, task_for
from sparkring.worker.model.task import Scoring, score
from sparkring.worker.relay_task import Exchange, RelayStart, exchange, start_relay
from sparkring.worker.spark_task import MemberTask, run_member

TICKET = Ticket(3, "host", 1, "secret", gpus=["0"], rows=7)
SPARE = SpareOrder(["torch"], True, 1.0, 2)
MODEL = ModelOrder("key", "token", ["path"], {"A": "1"}, 0.3, report={"port": 1}, gpus=["0"])
RELAY = RelayOrder("00", 1.0)
ALONE = """
import pickle, sys
sys.modules["sparkring"] = None  # an import would fail
import pyarrow
where, member, staging, survey, scoring, relay, ask = pickle.load(sys.stdin.buffer)
print(*where([]), [task.__name__ for task in (member, staging, survey, scoring, relay, ask)])
print(*(row.to_pylist()[0]["rows"] for row in staging([pyarrow.RecordBatch.from_pydict({"x": [1, None]})])))
print(*(report["directory"] for report in survey([])), *scoring([]))
print(*ask([]))
"""


def test_tasks_need_no_sparkring(tmp_path):
    """Executors without sparkring can unpickle the function of each task, and the orders that it contains."""
    questions = Questions(None, b"", {"numpy": ("numpy",)}, Directory(str(tmp_path), True, "file", b""))
    tasks = [
        task_for(python._executable, None),
        task_for(run_member, MemberTask(b"archive", TICKET, {}, None, 0, False, None)),
        task_for(stage, Staging(str(tmp_path), True, "0", 1000, ["x"])),
        task_for(answer, questions),
        task_for(score, Scoring(MODEL, None, None, 10, [])),
        task_for(start_relay, RelayStart(b"archive", "127.0.0.1", RELAY)),
        task_for(exchange, Exchange("127.0.0.1", 1, b"token", 1, 1, 0.0, {}, b"")),
    ]
    alone = subprocess.run(
        [sys.executable, "-c", ALONE], input=cloudpickle.dumps(tasks), capture_output=True, check=True
    )
    names, result, folder, relay = alone.stdout.decode().splitlines()
    assert names == f"{sys.executable} ['run_member', 'stage', 'answer', 'score', 'start_relay', 'exchange']"
    assert result == "2"
    assert mentions(folder, "not", "driver's file")
    assert relay == """b'{"error": "the relay at 127.0.0.1:1: Connection refused"}'"""


SERVER = """
import pickle, sys
from types import SimpleNamespace
sys.modules["sparkring"] = None  # an import would fail
import pyarrow

class Frame:  # of two partitions, the second without rows
    columns = ["a.b"]
    def toDF(self, *names):
        return self
    def mapInArrow(self, task, columns):
        rows = [pyarrow.RecordBatch.from_pydict({"0": [1, None]})]
        self.rows = [row for part in (rows, []) for batch in task(part) for row in batch.to_pylist()]
        return self
    def collect(self):
        return sorted((SimpleNamespace(**row) for row in self.rows), key=lambda row: row.part)

pickle.load(sys.stdin.buffer)(Frame(), 7)
"""


def test_the_server_hands_over_a_batch(tmp_path):
    """It waits until the ranks have taken the batch. If the notebook is silent, it fails, and removes what it wrote."""
    rows, offers = tmp_path / "rows", tmp_path / "rows" / "offers"
    offers.mkdir(parents=True)
    (offers / "lease.json").write_text(json.dumps({"taken": 7}))
    for taken in (True, False):
        staging = Staging(str(rows), True, "", 0, ["a.b"], ["a.b"])
        function = batch_function_for(hand_over, HandingOver(str(offers), True, staging, 0.2))
        server = subprocess.run(
            [sys.executable, "-c", SERVER], input=cloudpickle.dumps(function), capture_output=True, check=False
        )
        if not taken:
            assert b"batch 7 was not taken: the notebook has been silent for 0.2 s" in server.stderr
            assert not rows.exists()
            return
        assert server.returncode == 0, server.stderr
        offer = json.loads((offers / "7-offer.json").read_text())
        ((name, count),) = offer["pieces"]
        assert (count, offer["nulls"]) == (2, ["a.b"])
        assert pa.ipc.open_stream((rows / name).read_bytes()).read_all().to_pydict() == {"a.b": [1, None]}
        (rows / name).unlink()
        (offers / "lease.json").write_text(json.dumps({"taken": 6}))


@pytest.mark.parametrize("order", [TICKET, SPARE, MODEL, RELAY])
def test_orders_are_one_line(order):
    line = encode(order, first=["a"], detached=True)
    assert line.count(b"\n") == 1
    assert decode(line) == order
    assert json.loads(line)["first"] == ["a"]


CARRIES_OUT = """
import os, sys, time

def main(order):
    print(json.dumps([order.member, sys.path[0], sys.path[-1], sys.argv, os.getpgid(0)]), flush=True)
    time.sleep(order.port)
"""


def test_processes(tmp_path, monkeypatch):
    """A process gets its order, whatever is in the working folder. A detached one leaves the family of this process."""
    (tmp_path / "json.py").write_text("raise SystemError")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "carries_out.py").write_text("import json" + CARRIES_OUT)
    monkeypatch.chdir(tmp_path)
    first, last = str(tmp_path / "first"), "/nowhere"
    ticket = TICKET._replace(port=0)
    member = boot.start("no_such_module", ticket, os.environ, last=[boot.HERE])
    assert member.wait() == 1
    assert member.stdin is not None
    member.stdin.close()
    with open(tmp_path / "log", "wb") as log:
        pid = boot.start_detached("carries_out", ticket, os.environ, log, first=[first], last=[boot.HERE, last])
    assert pid
    until = time.monotonic() + 10
    while not (said := (tmp_path / "log").read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert json.loads(said) == [3, first, last, ["-c"], os.getpgid(0)]


def test_a_folder_for_temporary_files(tmp_path, monkeypatch):
    """If Python finds no folder that can be written, one of Spark's is used, also by the processes that are started."""

    def no_folder() -> str:
        raise FileNotFoundError

    monkeypatch.setattr("tempfile.tempdir", "")
    monkeypatch.setenv("TMPDIR", "before")
    root = tmp_path / "root"
    (root / "spark/blockmgr").mkdir(parents=True)
    monkeypatch.setattr(boot, "SHORT", len(str(root)))
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path}/none,{root}/spark/blockmgr")
    boot.use_temporary_folder()
    assert os.environ["TMPDIR"] == "before"
    with monkeypatch.context() as during:
        during.setattr("tempfile.gettempdir", no_folder)
        boot.use_temporary_folder()
    assert (os.environ["TMPDIR"], tempfile.tempdir) == (str(root), str(root))
