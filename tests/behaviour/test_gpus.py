"""Tests with a fake NVML: which GPUs each rank has and sees, and how the use of GPUs, CPU and memory is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from texts import mentions
from waiting import until

from sparkring.errors import LaunchError

PRELUDE = """
import glob, json
from sparkring.history import run_store as runs
from sparkring.errors import SparkringError
from sparkring.launchers import place_of, slots_table
from sparkring.views.html import panel

SEES = '''
import os
from sparkring import world
[list(world().gpus), os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")]
'''
USES = '''
import os
held = b"x" * 200_000_000
while not os.path.exists(SEEN):
    sum(range(10_000))
'''
SEEN = os.path.abspath("seen")

class View(View):  # writes SEEN once all ranks have reported what they hold, so that the ranks of USES go on
    def refresh(self, record):
        super().refresh(record)
        # A report from before the allocation does not count.
        if record.ranks and all(rank.gpus and rank.used and rank.used.memory_bytes > 200e6 for rank in record.ranks):
            open(SEEN, "w").close()

found = {}

def attempt(name, np, **options):
    try:
        found[name] = run(SEES, np, **options).values
    except SparkringError as error:
        found[name] = f"{type(error).__name__}: {error}"

def used(np, **options):
    if os.path.exists(SEEN):
        os.remove(SEEN)  # an earlier run may have written it
    record = run(USES, np, {"SEEN": SEEN}, **options).record
    saved = runs.load(runs.find(""))
    assert [rank.gpus for rank in saved.ranks] == [rank.gpus for rank in record.ranks]
    assert [rank.used for rank in saved.ranks] == [rank.used for rank in record.ranks]
    uses = [rank.used for rank in record.ranks]
    found["usage"] = [[u.cpu_percent, u.memory_bytes, u.cores, u.total_bytes, u.rank] for u in uses]
    found["samples"] = [[s.memory_bytes, s.gpu_bytes] for s in (rank.samples[-1] for rank in record.ranks)]
    found["used"] = [[(g.address, g.name, g.used_bytes, g.total_bytes, g.busy_percent, g.power_w, g.temperature_c)
                      for g in rank.gpus]
                     for rank in record.ranks]
    found["panel"] = panel(saved, now=0.0, final=True)
"""
PREDICTS = """
import pyarrow as pa
import pyarrow.parquet as pq
import sparkring
from sparkring.worker.model import parts

parts.LEAST_BYTES = 1
GO, RETURNS = os.path.abspath("go"), {"pid": "long", "sees": "string", "pynvml": "string"}

def model(batch):  # scores the first row on each GPU only when another process has a row, too, and GO exists
    open(f"{GO}-{os.environ['CUDA_VISIBLE_DEVICES']}", "w").close()
    while not (os.path.exists(GO) and len(glob.glob(f"{GO}-*")) > 1):
        time.sleep(0.02)
    sees = os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]
    found = os.getpid(), " ".join(sees), getattr(sys.modules.get("pynvml"), "__file__", "")
    return {name: [value] * len(batch["x"]) for name, value in zip(RETURNS, found)}

def told(name, rows, record):
    found[name] = {"rows": rows, "panel": panel(record, now=0.0, final=True), "outcome": record.outcome,
                   "of ranks": [[gpu.address for gpu in rank.gpus] for rank in record.ranks],
                   "of processes": [[each.pid, each.gpu.address, each.gpu.used_bytes] for each in record.model_gpus]}

def files(np):
    [os.remove(path) for path in glob.glob(f"{GO}*")]
    pq.write_table(pa.table({"x": range(abs(np))}), "data.parquet", row_group_size=1)
    to = os.path.abspath("preds")
    scoring = sparkring.predict("data.parquet", model, inputs=["x"], to=to, np=np, returns=RETURNS, probe=False,
                                background=True)
    while not all(rank.gpus for rank in scoring.record.ranks):
        time.sleep(0.02)
    open(GO, "w").close()
    scoring.result()
    told("files", pq.read_table(to).to_pylist(), runs.load(runs.find("")))
"""
PRINTED = "\nfound['slots'] = slots_table()\nprint('FOUND ' + json.dumps(found) + '\\n', end='')\n"

LOCAL = r'''
attempt("as they are", -2)
attempt("one each", -2, gpus=1)
attempt("two each", -2, gpus=2)
attempt("none", -2, gpus=0)
attempt("too few", -2, gpus=3)
attempt("the driver's list", -2, gpus=1, env=(("CUDA_VISIBLE_DEVICES", "3,1"),))
attempt("by UUID", -2, gpus=1, env=(("CUDA_VISIBLE_DEVICES", "GPU-2222,GPU-0000-fake"),))
attempt("behind a gap", -2, gpus=1, env=(("CUDA_VISIBLE_DEVICES", "1,7,2"),))
attempt("hidden", -1, gpus=1, env=(("CUDA_VISIBLE_DEVICES", ""),))
attempt("more ranks", -5)
used(-2, gpus=2)

from sparkring.launchers import gpus_in_use
from sparkring.worker.member import gpus as nvml
gpus_in_use.hold("another gang", nvml.find("0"))
attempt("beside another gang", -2)
gpus_in_use.release("another gang")
os.environ["FAKE_MIG"] = "2---"
attempt("an instance", -4)
del os.environ["FAKE_MIG"]

CRASH = r"""
import os, sys
with open(os.environ["FAKE_STATE"], "w") as file:
    file.write(f"xid 0 31\nuses 0 {os.getpid()} 5\nuses 0 {os.getppid()} 6\n")
print("CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True)
os.abort()
"""
try:
    run(CRASH, -1, gpus=1)
except SparkringError as error:
    failure = runs.load(runs.find("")).failure
    fault = failure.gpu
    holders = [[each.kind, each.rank, each.used_bytes] for each in fault.holders]
    found["crash"] = [failure.signal, fault.kind, fault.address, fault.xid, holders, str(error)]
found["in use"] = list(gpus_in_use._in_use.values())

import sparkring

def items(name, np, gpus, **options):
    def item(number):
        from sparkring import world
        return [list(world().gpus), os.environ.get("CUDA_VISIBLE_DEVICES")]
    try:
        result = sparkring.foreach(item, [0] * -np, np=np, gpus=gpus, quiet=True, **options)
        found[name] = [result.gpus, result.result.values] if "plan" in options else result.values
    except SparkringError as error:
        found[name] = f"{type(error).__name__}: {error}"

items("two share one", -4, 0.5, env={"CUDA_VISIBLE_DEVICES": "3,1"})
items("items with two", -2, 2)
items("planned", -1, 0.5, plan=True, env={"CUDA_VISIBLE_DEVICES": "2"})
from sparkring.launchers.local import default_at_once
cores = len(os.sched_getaffinity(0))
found["by default"] = [default_at_once(1, 4, {}), default_at_once(2, 1, {"CUDA_VISIBLE_DEVICES": "1"}),
                       default_at_once(1, 0.5, {"CUDA_VISIBLE_DEVICES": "1"}) == min(2, cores)]
items("items with none", -3, 0.3, env={"CUDA_VISIBLE_DEVICES": ""})

os.environ["CUDA_VISIBLE_DEVICES"] = "3,1"
files(-3)
del os.environ["CUDA_VISIBLE_DEVICES"]
'''
WITHOUT = """
attempt("as they are", -1)
attempt("one each", -1, gpus=1)
attempt("none", -1, gpus=0)
found["pynvml"] = "pynvml" in sys.modules
"""
CLUSTER = """
os.environ["PYSPARK_PYTHON"] = PYTHON
session = spark(URL, **{"spark.executor.memory": "600m", "spark.executor.resource.gpu.amount": "4",
    "spark.task.resource.gpu.amount": "2", "spark.executorEnv.LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"],
    "spark.executorEnv.FAKE_GPUS": "4", "spark.default.parallelism": "7", "spark.sql.leafNodeDefaultParallelism": "5"})
while session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < 2:
    time.sleep(0.05)  # the executor registers a moment after the driver
attempt("as they are", 2)
attempt("one each", 2, gpus=1)
attempt("none", 2, gpus=0)
attempt("more than tasks have", 1, gpus=3)
from sparkring.cluster.slots import room
found["room"] = [room(1, gpus) for gpus in (None, 1, 2, 3)]
spec = Cell("\\n[list(context.resources()['gpu'].addresses), len(list(rows))]", {"data": session.range(0, 8, 1, 8)})
spec = RunSpec(spec, Options(np=1, gpus=4, data="data"), "barrier", "test", "%%barrier")
found["with rows"] = run_spec(spec, View()).values
attempt("too few slots", 2, gpus=3)
attempt("too few", 2, gpus=5)
IN_TASK = "from pyspark import TaskContext\\nfrom sparkring import world\\n" \
    "gpu = TaskContext.get().resources()['gpu']\\n(gpu.name, list(gpu.addresses), list(world().gpus))"
found["in tasks"] = run(IN_TASK, 2).values
used(2)
found["cluster slots"] = slots_table()
found["pynvml"] = run("import pynvml; pynvml.__file__", 1).value
open(GO, "w").close()
data = session.range(0, 4, 1, 4).withColumnRenamed("id", "x")
scored = sparkring.predict(data, model, inputs=["x"], returns=RETURNS, probe=False, idle_s=60)
rows = [row.asDict() for row in scored.collect()]
while not (record := runs.load(runs.find(""))).outcome:
    time.sleep(0.05)
told("query", rows, record)
files(2)
session.stop()
"""


@pytest.fixture
def four_gpus(nvml_folder, monkeypatch, tmp_path):
    """Processes that the test starts find four GPUs. Afterwards, no model process is left."""
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([nvml_folder, os.environ.get("LD_LIBRARY_PATH", "")]))
    monkeypatch.setenv("FAKE_GPUS", "4")
    monkeypatch.setenv("FAKE_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    until(lambda: not list(Path(tempfile.gettempdir()).glob("sparkring-model-*")), "no model process is left")


def found_by(driver, script):
    text = driver(PRELUDE + script + PRINTED).wait()
    assert "FOUND" in text, text
    return json.loads(text.rpartition("FOUND")[2])


def check_usage(found):
    """Each rank held 200 MB and was busy. The numbers are those of one rank, not of the machine or of both ranks."""
    for rank, (percent, memory_bytes, cores, total_bytes, number) in enumerate(found["usage"]):
        assert number == rank
        assert 200e6 < memory_bytes < min(400e6, total_bytes)
        assert 0 < percent < 100 * cores + 50
    assert [sample[0] for sample in found["samples"]] == [usage[1] for usage in found["usage"]]
    assert all(name in found["panel"] for rank in found["used"] for _, name, *_ in rank)
    assert "MB of " not in found["panel"], "ranks that have ended use no memory"


def sees(predicted):
    """Check that the run or query finished, with one model process for each set of GPUs. Return what these see."""
    assert predicted["outcome"] == "finished"
    seen = {(row["pid"], row["sees"]) for row in predicted["rows"]}
    assert len(seen) == len({pid for pid, _ in seen}) == len({visible for _, visible in seen})
    return {visible for _, visible in seen}


def test_local(driver, four_gpus):
    """Each rank has K of the driver's GPUs, and sees the GPUs of all ranks. What ranks use is reported and saved."""
    found = found_by(driver, PREDICTS + LOCAL)
    assert found["as they are"] == [[["0"], None, None], [["1"], None, None]], "the environment is left alone"
    assert found["one each"] == [[["0"], "0,1", "PCI_BUS_ID"], [["1"], "0,1", "PCI_BUS_ID"]]
    assert found["two each"] == [[["0", "1"], "0,1,2,3", "PCI_BUS_ID"], [["2", "3"], "0,1,2,3", "PCI_BUS_ID"]]
    assert [value[:2] for value in found["none"]] == [[[], ""]] * 2
    assert [value[:2] for value in found["the driver's list"]] == [[["3"], "3,1"], [["1"], "3,1"]]
    assert [value[0] for value in found["by UUID"]] == [["GPU-2222"], ["GPU-0000-fake"]]
    assert [value[0] for value in found["more ranks"]] == [[]] * 5

    assert [value[:2] for value in found["beside another gang"]] == [[["1"], "1,2,3,0"], [["2"], "1,2,3,0"]]
    own = [*(f"GPU-{index * 4}-fake" for index in "123"), "MIG-00-fake"]
    assert [value[:2] for value in found["an instance"]] == [[[each], each] for each in own]
    *crash, message = found["crash"]
    holders = [["other", None, 6], ["rank", 0, 5]]
    assert crash == ["SIGABRT", "illegal access", "0", 31, holders], "the last output and NVML say what has happened"
    assert "illegal memory access" in message
    assert found["in use"] == []

    installed = ", ".join(f"{index} (NVIDIA Fake, 80 GB)" for index in range(4))
    assert mentions(found["too few"], "LaunchError", "6 GPUs (2 ranks × 3)", "4", installed, "--gpus 0")
    assert sorted(value[1] for value in found["two share one"]) == ["1", "1", "3", "3"]
    assert sorted(value[1] for value in found["items with two"]) == ["0,1", "2,3"]
    assert found["by default"] == [1, 1, True]
    assert found["planned"] == [1, [[["2"], "2"]]]
    none = ("0", "CUDA_VISIBLE_DEVICES=''", "--gpus 0")
    assert mentions(found["items with none"], "LaunchError", "1 GPU (3 items × 0.3)", *none)
    assert mentions(found["behind a gap"], "1 found", "CUDA_VISIBLE_DEVICES='1,7,2': 1 (")
    assert mentions(found["hidden"], "(1 rank × 1)", *none)

    gb = 10**9
    assert found["used"] == [
        [["0", "NVIDIA Fake", gb, 80 * gb, 10, 100, 40], ["1", "NVIDIA Fake", 2 * gb, 80 * gb, 20, 101, 41]],
        [["2", "NVIDIA Fake", 3 * gb, 80 * gb, 30, 102, 42], ["3", "NVIDIA Fake", 4 * gb, 80 * gb, None, None, 43]],
    ]
    assert "2 GPUs 15 %, 3.00 GB of 160 GB, 201 W, 41 °C" in found["panel"]
    check_usage(found)
    assert {sample[1] for sample in found["samples"]} <= {3 * gb, 7 * gb, None}
    assert next(row for row in found["slots"] if row[0].startswith("GPUs"))[1:3] == ["4", "3"]

    files = found["files"]
    assert sees(files) == {"3 PCI_BUS_ID", "1 PCI_BUS_ID"}
    assert files["of ranks"] == [["3"], ["1"], ["3"]]
    assert "NVIDIA Fake" in files["panel"]


def test_without_gpus(driver, monkeypatch):
    """Without NVML there are no GPUs, and finding that out does not import pynvml."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = found_by(driver, WITHOUT)
    if found["pynvml"]:
        pytest.skip("this machine has an NVML of its own")
    assert found["as they are"] == [[[], None, None]]
    assert found["none"] == [[[], "", "PCI_BUS_ID"]]
    assert mentions(found["one each"], "1 GPU (1 rank × 1)", "0", "no NVIDIA driver")


def test_a_driver_that_does_not_answer(driver, four_gpus, monkeypatch):
    """If NVML cannot be opened, there are no GPUs to use."""
    monkeypatch.delenv("FAKE_GPUS")
    found = found_by(driver, WITHOUT)
    assert found["as they are"] == [[[], None, None]]
    assert mentions(found["one each"], "0", "no NVIDIA driver")


@pytest.mark.slow
def test_spark(driver, four_gpus, gpu_cluster):
    """Ranks have the GPUs that Spark gave to their tasks; the executors need no pynvml of their own."""
    found = found_by(driver, f"URL, PYTHON = {gpu_cluster.url!r}, {gpu_cluster.python!r}\n{PREDICTS}{CLUSTER}")
    for name, each in (("as they are", 2), ("one each", 1)):
        own, seen = [value[0] for value in found[name]], {tuple(value[1:]) for value in found[name]}
        assert [len(gpus) for gpus in own] == [each] * 2, found[name]
        in_order = [address for gpus in own for address in gpus]
        assert len(set(in_order)) == 2 * each, "no GPU is given twice"
        assert seen == {(",".join(in_order), "PCI_BUS_ID")}, "all GPUs of the node, in the order of local ranks"
    assert [value[:2] for value in found["none"]] == [[[], ""]] * 2
    assert [(name, own == given, len(own)) for name, own, given in found["in tasks"]] == [("gpu", True, 2)] * 2
    ((own, *_),) = found["more than tasks have"]
    assert len(own) == 3
    assert found["room"] == [2, 2, 2, 1], "the settings of the parallelism do not matter"
    assert found["with rows"] == [[["0", "1", "2", "3"], 8]]
    assert mentions(found["too few slots"], "SlotsError", "2 task slots", "3 GPUs", "1 in all")
    assert mentions(found["too few"], "LaunchError", "5 GPUs", "2 (spark://")
    for setting in ("spark.task.resource.gpu.amount=5", "spark.executor.resource.gpu.amount", "discoveryScript"):
        assert setting in found["too few"]
    assert sorted(address for rank in found["used"] for address, *_ in rank) == ["0", "1", "2", "3"]
    assert "NVIDIA Fake" in found["panel"]
    check_usage(found)
    assert "sparkring.zip" in found["pynvml"]
    assert "GPUs: 2 per task, 4 per executor" in found["cluster slots"][-1][-1]

    query = found["query"]
    assert sees(query) == {"0,1 PCI_BUS_ID", "2,3 PCI_BUS_ID"}
    pids = {row["sees"].split()[0]: row["pid"] for row in query["rows"]}
    gb = 10**9
    used = [[pids["0,1" if index < 2 else "2,3"], str(index), (index + 1) * gb] for index in range(4)]
    assert sorted(query["of processes"], key=lambda each: each[1]) == used
    assert all("sparkring.zip" in row["pynvml"] for row in query["rows"])
    assert "NVIDIA Fake" in query["panel"]
    assert sees(found["files"]) == {"0,1 PCI_BUS_ID", "2,3 PCI_BUS_ID"}
    assert sorted(found["files"]["of ranks"]) == [["0", "1"], ["2", "3"]]


@pytest.mark.standalone("the resources are asked of the executors")
def test_a_session_without_gpus(tasks):
    """The error names the settings that help, or, in local mode, says that Spark assigns no GPUs."""
    with pytest.raises(LaunchError, match=r"needs 1 GPU .*each task, .*Spark assigns 0") as caught:
        tasks.run("rank", n=2, gpus=1)
    alone = "(local[" in str(caught.value)
    assert ("in this mode: use -n -2" if alone else "spark.task.resource.gpu.amount=1") in str(caught.value)
    assert tasks.run("import os; os.environ['CUDA_VISIBLE_DEVICES']", n=1, gpus=0).value == ""


def test_the_stub_is_what_pynvml_opens(four_gpus):
    """If pynvml did not open the fake NVML, the tests above would test nothing."""
    done = subprocess.run(
        [sys.executable, "-c", "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "4"


EXAMINED = """
from sparkring.engine.doctor import builds, gpus, preflight
from sparkring.launchers.base import LaunchRequest

builds.builds = lambda: [builds.Build("torch", "9.1", "13.0"), builds.Build("tensorflow", "2.99", "12.4")]

def notices(gpus=None, np=-2, framework="torch", **environment):
    return preflight.notices([LaunchRequest(place_of(np), abs(np), environment, "cell", gpus)], framework)

horovod = builds.HorovodBuild("0.28.1", {"torch": "9.1"}, ("Gloo",), "", ("torch",))
found["findings"] = gpus.judge(gpus.read(), builds.builds(), horovod)
began = time.monotonic()
found["before"] = notices()
found["took"] = time.monotonic() - began
found["tensorflow"] = notices(framework="tensorflow")
found["others"] = notices(1, framework="tensorflow", CUDA_VISIBLE_DEVICES="1,2")
found["none"] = notices(0)
found["on spark"] = notices(np=2)
result = run_spec(RunSpec(Cell(chr(10) + "rank", {}), Options(np=-1), "torch", "test", "%%torchrun"), view)
found["noticed"] = [notice.text for notice in result.record.notices]
found["pid"] = os.getpid()
"""


def test_findings_of_each_kind(driver, four_gpus, monkeypatch):
    """%doctor judges what NVML says. Problems of the GPUs that ranks will use are noticed before a launch."""
    monkeypatch.setenv("FAKE_CUDA", "12020")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    found = found_by(driver, EXAMINED)
    levels = {(topic, level) for topic, level, *_ in found["findings"]}
    assert levels == {
        ("driver", "ok"),
        ("torch", "problem"),  # for CUDA 13, which is newer than the driver's
        ("tensorflow", "note"),  # for CUDA 12.4, which is compatible with 12.2
        ("horovod", "note"),  # has no NCCL
        *((f"GPU {index}", "ok") for index in range(4)),
        ("GPU 0", "problem"),  # used by this process
        *((f"GPU {index}", "note") for index in range(4)),  # persistence mode is off
        ("GPU 1", "problem"),  # memory errors
        ("connections", "note"),  # GPUs 0 and 1 are apart
        ("NCCL", "problem"),  # no such interface
    }
    text = "\n".join(" → ".join(finding[2:]) for finding in found["findings"])
    for words in (
        "supports CUDA 12.2 at most",
        "this notebook holds 2.15 GB on GPU 0",
        "CUDA_VISIBLE_DEVICES=1,2,3",
        "program-1 (process 1)",
        "5 uncorrected memory errors",
        "lowered by heat (hardware slowdown)",
        "with 3 instances",
        "GPUs 0 and 1 cannot access each other's memory",
        "2 NVLinks each",
    ):
        assert words in text, text

    too_old, held = found["before"]
    assert mentions(too_old, "torch 9.1", "CUDA 13.0")
    assert "this notebook holds 2.15 GB on GPU-0000-fake" in held  # because of MIG, GPUs have UUIDs
    assert found["noticed"] == found["before"]
    assert found["tensorflow"] == [held], "another framework's build does not matter"
    assert found["others"] == found["none"] == found["on spark"] == []
    print(f"reading took {found['took']:.3f} s")


def test_gpus_that_report_little(driver, four_gpus):
    """Where NVML says nothing about a GPU but its name and memory, nothing is wrong, and launches are silent."""
    found = found_by(driver, EXAMINED)
    assert {finding[1] for finding in found["findings"]} <= {"ok", "note"}
    assert found["before"] == []
