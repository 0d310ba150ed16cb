"""Tests of what everything shares that runs on executors: functions of tasks, orders, and the start of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

import pytest
from pyspark import cloudpickle

from sparkring.cluster import python
from sparkring.cluster.survey import Directory, Questions, answer
from sparkring.data.stage_task import Staging, stage
from sparkring.executor import boot
from sparkring.executor.orders import ModelOrder, SpareOrder, Ticket, decode, encode
from sparkring.executor.tasks import task_for
from sparkring.worker.model.task import Scoring, score
from sparkring.worker.spark_task import MemberTask, run_member

TICKET = Ticket(3, "host", 1, "secret", gpus=["0"], rows=7)
SPARE = SpareOrder(["torch"], True, 1.0, 2)
MODEL = ModelOrder("key", "token", ["path"], {"A": "1"}, 0.3, report={"port": 1}, gpus=["0"])
ALONE = """
import pickle, sys
sys.modules["sparkring"] = None  # an import would fail
import pyarrow
where, member, staging, survey, scoring = pickle.load(sys.stdin.buffer)
print(*where([]), [task.__name__ for task in (member, staging, survey, scoring)])
print(*(row.to_pylist()[0]["rows"] for row in staging([pyarrow.RecordBatch.from_pydict({"x": [1, None]})])))
print(*(report["directory"] for report in survey([])), *scoring([]))
"""


def test_tasks_need_no_sparkring(tmp_path):
    """Executors without sparkring can unpickle the function of each task, and the orders that it contains."""
    questions = Questions(None, b"", {"numpy": ("numpy",)}, Directory(str(tmp_path), True, "file", b""))
    tasks = [
        task_for(python._executable, None),
        task_for(run_member, MemberTask(b"archive", TICKET, {}, None, 0, None)),
        task_for(stage, Staging(str(tmp_path), True, "0", 1000, ["x"])),
        task_for(answer, questions),
        task_for(score, Scoring(MODEL, None, None, 10, [])),
    ]
    alone = subprocess.run(
        [sys.executable, "-c", ALONE], input=cloudpickle.dumps(tasks), capture_output=True, check=True
    )
    assert alone.stdout.decode().splitlines() == [
        f"{sys.executable} ['run_member', 'stage', 'answer', 'score']",
        "2",
        "does not show the driver's file, so it is not shared with the driver",
    ]


@pytest.mark.parametrize("order", [TICKET, SPARE, MODEL])
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
