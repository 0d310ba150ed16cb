"""Tests of %doctor: what its checks find on this machine and on Spark, and how they judge what they are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from texts import mentions
from waiting import DEADLINE_S

from sparkring.capture import environment, own_modules
from sparkring.cluster.session import cluster_of
from sparkring.cluster.slots import Slots, Stage
from sparkring.cluster.survey import TaskReport
from sparkring.engine.doctor import builds, checks, examination, gpus, machine, spark, storage, travel
from sparkring.engine.doctor.builds import Build, HorovodBuild
from sparkring.engine.doctor.gpus import GpuProcess, Gpus, GpuState
from sparkring.engine.doctor.machine import Room
from sparkring.errors import PathError
from sparkring.history import run_store
from sparkring.history.findings import Section, note, ok, problem
from sparkring.runtime.storage import dbfs_root, locate, user_folder
from sparkring.views.findings import findings_html, findings_text, summary


def levels(findings):
    """Return pairs of topic and level, in order."""
    return [(finding.topic, finding.level) for finding in findings]


def said(findings):
    return "\n".join(f"{finding.what} → {finding.advice}" for finding in findings)


def quiet(text):
    pass


# ── This machine ──────────────────────────────────────────────────────────────


def test_this_machine(watch, tmp_path):
    """All sections are there, a rank was started, and nothing is left behind."""
    place = tmp_path / "new" / "run1"
    sections = list(examination.examine(lambda: locate(place), [ok("view", "text")], quiet))
    assert [section.title for section in sections] == ["This machine", "GPUs", "Checkpoints", "Spark"]
    local = dict(levels(sections[0].findings))
    assert {name: local[name] for name in ("Python", "packages", "local rank", "view")} == dict.fromkeys(
        ("Python", "packages", "local rank", "view"), "ok"
    )
    assert ("driver", "ok") in levels(sections[2].findings)
    assert "problem" not in {level for _, level in levels(sections[2].findings)}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("build", "installed", "expected"),
    [
        (None, {}, ["note"]),
        (HorovodBuild("0.28.1", {"torch": "2.1"}, ("Gloo",), ""), {"torch": "2.1"}, ["ok"]),
        (HorovodBuild("0.28.1", {"torch": "2.1.0"}, ("Gloo",), ""), {"torch": "2.1.2+cpu"}, ["ok"]),
        (HorovodBuild("0.28.1", {"torch": "2.1"}, ("Gloo",), ""), {"torch": "2.2"}, ["problem"]),
        (HorovodBuild("0.28.1", {"torch": "2.1"}, ("MPI",), ""), {"torch": "2.1"}, ["problem"]),
        (HorovodBuild("0.28.1", {}, (), ""), {}, ["problem"]),
        (HorovodBuild("0.28.1", {"torch": "2"}, ("Gloo",), ""), {"torch": "2", "tensorflow": "3"}, ["ok", "note"]),
    ],
)
def test_horovods_build(build, installed, expected):
    assert [finding.level for finding in machine.horovod(build, installed)] == expected


def test_the_installed_builds_are_read_from_files():
    """Horovod's build is found in its files, as in its own words, without importing it."""
    before = {"horovod.torch", "horovod.tensorflow"} & set(sys.modules)
    found = builds.horovod()
    assert {"horovod.torch", "horovod.tensorflow"} & set(sys.modules) == before
    assert found is not None
    assert found.parts[0] == "Gloo"
    asked = "import horovod.torch as hvd; print(bool(hvd.cuda_built()), bool(hvd.nccl_built()))"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    assert [str(bool(found.cuda)), str("torch" not in found.without_nccl)] == said[-2:]
    # A local version, such as +cpu, is in only one of the two, depending on who built the package.
    installed = {build.package: build.version.partition("+")[0] for build in builds.builds()}
    built_for = {name: version.partition("+")[0] for name, version in found.built_for.items()}
    assert installed.items() >= built_for.items()


def test_cuda_of_builds(tmp_path, monkeypatch):
    """The version of CUDA is read from the packages' own files."""
    for name, text in {
        "torch/version.py": "from typing import Optional\n__version__ = '2.9'\ncuda: Optional[str] = '12.8'\n",
        "torch/__init__.py": "raise ImportError",
        "torch-2.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.9\n",
        "tensorflow/python/platform/build_info.py": "build_info = dict([('cuda_version', '12.5.1')])",
        "tensorflow/__init__.py": "raise ImportError",
        "tensorflow-2.20.dist-info/METADATA": "Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.20\n",
        "jax-0.7.dist-info/METADATA": "Metadata-Version: 2.1\nName: jax\nVersion: 0.7\n",
        "jax_cuda13_plugin-0.7.dist-info/METADATA": "Metadata-Version: 2.1\nName: jax-cuda13-plugin\nVersion: 0.7\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("torch", "tensorflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert builds.builds() == [
        Build("torch", "2.9", "12.8"), Build("tensorflow", "2.20", "12.5.1"), Build("jax", "0.7", "13")
    ]  # fmt: skip


def test_limits():
    """Little space is noted; too little is a problem."""
    gb = 10**9
    assert [machine.disk("TMPDIR", "/tmp", Room(free, gb)).level for free in (5 * gb, gb, gb / 20)] == [
        "ok", "note", "problem"
    ]  # fmt: skip
    assert machine.cores(64, 64, float("inf")) == "64"
    assert mentions(machine.cores(3, 64, 2.5), "3", "machine's 64", "container's", "2.5")
    assert mentions(machine.cores(2, 64, float("inf")), "2", "machine's 64", "kernel's")
    assert [machine.open_files(soft, None).level for soft in (None, 1024, 1000, 100)] == ["ok", "ok", "note", "problem"]
    assert [machine.shared_memory(Room(size, size)).level for size in (gb, 64e6)] == ["ok", "note"]
    assert [machine.memory(Room(size, 64 * gb)).level for size in (5 * gb, gb / 10)] == ["ok", "note"]


def test_the_folder_for_saved_runs(tmp_path):
    """A folder that cannot be written is a problem, because no run can start. The check itself creates nothing."""
    assert machine.folder("runs", lambda: tmp_path / "new" / "runs", "").topic == "runs"
    assert "cannot be written" not in machine.folder("runs", lambda: tmp_path / "new" / "runs", "").what
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "runs", Path(os.devnull, "runs")):
        found = machine.folder("runs", lambda path=path: path, "")
        assert (found.level, "SPARKRING_HOME" in found.advice) == ("problem", True)


def test_a_user_without_a_home_folder(monkeypatch):
    """In a container, HOME may be unset, and the user may have no entry in passwd. A sentence says what to set."""
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "SPARKRING_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    for choose in (run_store.home, lambda: user_folder("cache"), dbfs_root):
        with pytest.raises(PathError, match="set HOME"):
            choose()
    found = machine.folder("runs", run_store.home, "")
    assert (found.level, "SPARKRING_HOME" in found.advice) == ("problem", True)


def test_a_check_that_hangs_or_is_interrupted():
    """A check that takes too long becomes a finding, and an interrupt ends a check at once."""
    ended = []

    def hang(cancelled: threading.Event) -> None:
        ended.append(cancelled.wait(DEADLINE_S))

    told = []
    with pytest.raises(checks.TooSlow, match="no answer within"):
        checks.answer("writing", hang, told.append, 0.0)
    assert told == ["writing: 0 s"]

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        checks.answer("writing", hang, interrupt, 60.0)
    assert ended == [True, True]
    assert time.monotonic() - began < 30
    found = examination.failed("driver", checks.TooSlow("no answer within 30 s"))
    assert (found.topic, found.level) == ("driver", "problem")


@pytest.fixture
def interrupted_starts(monkeypatch):
    """Have an interrupt arrive whenever a thread is being started."""
    start = threading.Thread.start

    def start_and_interrupt(thread):
        start(thread)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pyspark's handler outlives its context
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_the_check_starts(interrupted_starts):
    """An interrupt that arrives while the thread of a check is being started ends the check."""
    ended = []
    with pytest.raises(KeyboardInterrupt):
        checks.answer("writing", lambda cancelled: ended.append(cancelled.wait(DEADLINE_S)), quiet, 60.0)
    assert ended == [True]


# ── GPUs ──────────────────────────────────────────────────────────────────────


def test_without_gpus():
    assert levels(gpus.judge(None, [], None)) == [("GPUs", "ok")]
    assert levels(gpus.judge(Gpus("535", (12, 2), ()), [], None)) == [("GPUs", "problem")]


@pytest.mark.parametrize(
    ("cuda", "expected"), [("", "note"), ("11.8", "ok"), ("12.2", "ok"), ("12.4", "note"), ("13", "problem")]
)
def test_the_driver_and_the_builds(cuda, expected):
    """A newer major version of CUDA needs a newer driver; a newer minor version is compatible."""
    (found,) = gpus.driver(Gpus("535", (12, 2), ()), Build("torch", "2.9", cuda))
    assert found.level == expected
    assert gpus.driver(Gpus("535", None, ()), Build("torch", "2.9", "13")) == []


def test_memory_that_the_notebook_holds():
    def held(used_bytes):
        return gpus.held_by_notebook(
            GpuState("0", "GPU", processes=(GpuProcess(1, "python", used_bytes, "notebook"),)), []
        )

    assert [held(used).level for used in (None, 1 << 20, 2 << 30)] == ["note", "note", "problem"]
    assert "unknown amount" in held(None).what
    assert gpus.held_by_notebook(GpuState("0", "GPU", processes=(GpuProcess(1, "python", 2 << 30),)), []) is None


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, "ok"),
        ("eth0", "ok"),
        ("eth", "ok"),
        ("=eth", "problem"),
        ("=eth0,ib0", "ok"),
        ("ib", "problem"),
        ("^lo", "ok"),
        ("^lo,eth", "problem"),
    ],
)
def test_nccl_interface(setting, expected):
    assert gpus.nccl_interface(setting, ["lo", "eth0"]).level == expected


def test_visible_gpus():
    two = [GpuState("0", "GPU"), GpuState("1", "GPU")]
    found = [gpus.visible(setting, two) for setting in (None, "1", "0,2", "")]
    assert [[each.level for each in some] for some in found] == [[], ["ok"], ["problem"], ["note"]]


# ── A directory for checkpoints ───────────────────────────────────────────────


def test_a_directory_in_memory():
    """Any URL that fsspec knows is checked in the same way."""
    location = locate("memory://doctor/run1")
    trial = storage.begin(location)
    assert trial.works
    assert location.fs.exists(trial.file.path)
    assert storage.end(trial) == []
    assert not location.fs.exists("/doctor/run1")


def test_wrong_directories(tmp_path, watch):
    """A path that cannot be used is a problem, and the other checks go on."""
    (tmp_path / "file").write_text("")
    trial = storage.begin(locate(tmp_path / "file" / "run1"))
    assert levels(trial.findings) == [("driver", "problem")]
    assert not trial.works
    assert storage.end(trial) == []

    def wrong():
        raise PathError("dbfs://x: write dbfs:/x")

    sections = {section.title: section.findings for section in examination.examine(wrong, [], quiet)}
    assert levels(sections["Checkpoints"]) == [("driver", "problem")]
    assert sections["Spark"]


def test_a_directory_that_loses_what_is_written(tmp_path, monkeypatch):
    """Storage that does not list or return what was written is a problem, and the file is removed."""
    location = locate(tmp_path)
    monkeypatch.setattr(type(location), "entries", lambda self: iter(()))
    trial = storage.begin(location)
    assert "is not listed" in said(trial.findings)
    assert storage.end(trial) == []
    assert list(tmp_path.iterdir()) == []

    def refuse(path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(location.fs, "rm_file", refuse)
    trial = storage.begin(location)
    assert levels(storage.end(trial)) == [("driver", "problem")]


# ── Spark ─────────────────────────────────────────────────────────────────────

HERE = spark.DriverFacts("3.11.7", "17.0.9", {"torch": "2.1.0", "numpy": "1.26.4"}, frozenset({"torch"}))
SAME = TaskReport("a", 1, "3.11.7", "/python", {"torch": "2.1.0", "numpy": "1.26.4"}, "17.0.9", 0.01, "", 0.1, "")
SLOTS = Slots(4, 0, "spark://x", ["driver", "a", "a", "b", "b"], [], 0, 0)
FOUR = [SAME, SAME._replace(executor=2), SAME._replace(host="b"), SAME._replace(host="b", executor=2)]


def judged(*reports):
    return spark.judge(reports, HERE, SLOTS, "10.0.0.1:4040")


def test_executors_that_are_alike():
    """The executors are grouped in one line for each topic."""
    found = judged(*FOUR, *FOUR)
    assert {finding.level for finding in found} == {"ok"}
    assert mentions(said(found), "4", "2 hosts", "Python 3.11.7")
    assert len(found) == 6
    assert levels(spark.judge_directory(FOUR, SLOTS)) == [("executors", "ok")]


@pytest.mark.parametrize(
    ("change", "topic", "level", "words"),
    [
        ({"python": "3.11.2"}, "Python", "note", "1 executor on b: Python 3.11.2"),
        ({"python": "3.10.1"}, "Python", "problem", "PYSPARK_PYTHON"),
        ({"packages": {"torch": "2.1.1", "numpy": "1.26.4"}}, "packages", "note", "1 executor on b: torch 2.1.1"),
        ({"packages": {"torch": "2.2.0", "numpy": "1.26.4"}}, "packages", "problem", "this notebook has 2.1.0"),
        ({"packages": {"numpy": "1.26.4"}}, "packages", "problem", "no torch"),
        ({"packages": {"torch": "2.1.0"}}, "packages", "note", "no numpy"),
        ({"java": "11.0.1"}, "Java", "note", "1 executor on b: Java 11.0.1"),
        (
            {"reached_s": None, "unreached": "timed out"},
            "driver's port",
            "note",
            "b cannot connect to the driver at 10.0.0.1:4040: timed out; so messages go through Spark jobs",
        ),
        ({"shared_bytes": 64e6}, "/dev/shm", "note", "1 executor on b: 64"),
        ({"clock_s": -30.0}, "clocks", "note", "30 s ahead of this machine"),
    ],
)
def test_an_executor_that_differs(change, topic, level, words):
    """The executor that differs is named, and nothing else is complained about."""
    found = judged(*FOUR[:3], FOUR[3]._replace(**change))
    assert {each for each in levels(found) if each[1] != "ok"} == {(topic, level)}
    assert words in said(found)


def test_what_goes_along(tmp_path, monkeypatch):
    """Own modules that can be sent are listed with their size, and the others with the reason, as is --env-pack."""
    monkeypatch.setattr(own_modules, "_used", set())
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "doctor_sent.py").write_text("import numpy, json, not_installed")
    (tmp_path / "doctor_kept").mkdir()
    (tmp_path / "doctor_kept/__init__.py").touch()
    (tmp_path / "doctor_kept/fast.so").touch()
    (tmp_path / "site-packages/made-1.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(environment, "_site_folders", lambda: [str(tmp_path / "site-packages")])
    cells = ["import doctor_sent, doctor_kept", "def f():\n    import torch"]
    monkeypatch.setattr(sys.modules["__main__"], "In", cells, raising=False)
    assert {"numpy", "torch"} <= set(travel.imported_packages())
    assert not {"json", "not_installed", "doctor_sent"} & set(travel.imported_packages())
    modules, kept, pack = travel.check()[-3:]
    assert "doctor_sent.py" in modules.what
    assert (kept.level, "fast.so" in kept.what) == ("note", True)
    assert (pack.level, "1 package" in pack.what) == ("ok", True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / "site-packages/other-1.0.dist-info").mkdir()
    assert travel.check()[-1].level == "note"


def test_executors_that_did_not_answer_or_cannot_use_the_directory():
    assert ("executors", "note") in levels(judged(*FOUR[:3]))
    cut = FOUR[3]._replace(directory="does not exist there, so it is not shared with the driver")
    (found,) = spark.judge_directory([*FOUR, cut], SLOTS)
    assert (found.level, found.what[:17]) == ("problem", "1 executor on b: ")
    assert spark.judge_directory([SAME._replace(directory=None)], SLOTS) == []


def test_sessions_and_jobs_that_cannot_be_used():
    assert spark.session(SLOTS, growth="").level == "ok"
    assert spark.session(SLOTS._replace(total=0), growth="spark.cores.max=4").level == "ok"
    assert spark.session(SLOTS._replace(total=0), growth="").level == "problem"
    wrong = spark.job_failed("ModuleNotFoundError: No module named 'numpy'", lambda: "/usr/bin/python3")
    assert mentions(wrong.what, "/usr/bin/python3", "no")
    assert spark.job_failed("java.io.IOException: disk is full", str).level == "problem"
    assert spark.cannot_listen("10.0.0.1", 4040, OSError(98, "in use")).level == "problem"


def test_slots_that_a_gang_holds():
    """The slots of a gang that has just started are busy, even if Spark has not counted them yet."""
    gang = Stage(None, "warm gang of 4", 4, persistent=True)
    assert spark.with_gangs(SLOTS, [gang]).free == 0
    assert spark.with_gangs(SLOTS, [gang]).holders == ["warm gang of 4: 4"]
    assert spark.with_gangs(SLOTS._replace(busy=4), [gang]).holders == []
    assert spark.with_gangs(SLOTS, []) == SLOTS


def test_the_executors_of_a_session(spark, tmp_path, watch):
    """Every executor answers, and can use the directory; the session stays up, and nothing is left behind."""
    from sparkring.engine.doctor import spark as doctor

    trial = storage.begin(locate(tmp_path / "run1"))
    found = doctor.check(trial, quiet)
    Path(trial.file.path).unlink()
    hidden = doctor.check(trial, quiet)
    storage.end(trial)
    assert {finding.level for finding in found.findings} == {"ok"}, said(found.findings)
    assert {finding.topic for finding in found.findings} >= {"session", "executors", "Python", "driver's port"}
    assert levels(found.directory) == [("executors", "ok")], said(found.directory)
    assert "does not show the driver's file" in said(hidden.directory)
    assert list(tmp_path.iterdir()) == []
    assert spark.range(3).count() == 3


def test_a_job_on_the_executors_has_a_time_limit(spark, watch):
    """A job that takes too long is cancelled."""
    from sparkring.cluster.jobs import interruptibly

    context = spark.sparkContext

    def ask():
        return context.parallelize([0], 1).map(lambda _: time.sleep(50)).collect()

    with pytest.raises(TimeoutError, match=r"waiting took longer .* 1 s"):
        interruptibly(cluster_of(spark), "waiting", ask, quiet, 1.0)


def test_an_interrupt_while_a_job_starts(spark, watch, interrupted_starts):
    """An interrupt that arrives while the thread of a Spark job is being started ends the job before it is raised."""
    from sparkring.cluster.jobs import interruptibly

    context, ended = spark.sparkContext, []

    def ask():
        try:
            context.parallelize([0], 1).map(lambda _: time.sleep(50)).collect()
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        interruptibly(cluster_of(spark), "waiting", ask, quiet)
    assert ended == [True]


# ── How it is shown ───────────────────────────────────────────────────────────


def test_how_findings_are_shown():
    """Marks say what needs attention, advice follows, and no text is taken for markup."""
    sections = [
        Section("GPUs <1>", (ok("driver", "535"), problem("torch", "<b>too new</b>", "update & restart"))),
        Section("Spark", (note("session", "none"),)),
    ]
    assert summary(sections) == "1 problem, 1 note"
    assert summary([Section("GPUs", (ok("driver", "535"),))]) == "no problems"
    assert findings_text(sections).splitlines() == [
        "1 problem, 1 note",
        "",
        "GPUs <1>",
        "  ✓ driver  535",
        "  ✗ torch   <b>too new</b>",
        "            → update & restart",
        "",
        "Spark",
        "  ! session  none",
    ]
    html = findings_html(sections)
    assert "&lt;b&gt;too new&lt;/b&gt;" in html
    assert "update &amp; restart" in html
    assert html.count("<table") == 2
