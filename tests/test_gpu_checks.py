"""How the checks that need a GPU are selected, left out and reported, and how `make test-gpu` begins, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gpu_checks
import gpu_machine
import pytest
from gpu_checks import FSDP, HOROVOD, MIG, TENSORFLOW, TWO_GPUS, Held, Machine, Row
from texts import mentions

GPU = {"name": "NVIDIA H100", "used": 0, "pids": [], "mig": []}
TORCH = {"version": "2.13.0", "cuda": "13.0", "count": 1, "why": "", "nccl": True, "fsdp": True}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests also pass in a trial of the checks on CPUs."""
    for name in (gpu_machine.ON_CPU, gpu_machine.HOROVOD, gpu_machine.UNTIL, gpu_machine.WHEELS):
        monkeypatch.delenv(name, raising=False)


def machine_with(gpus: Any = (GPU,), torch: Any = TORCH, nccl: Any = 22907, tensorflow: Any = None) -> Machine:
    """Return what look() finds if the scripts print these values. A string is the error of a script that fails."""
    answers = {
        gpu_checks._OF_NVML: gpus,
        gpu_checks._OF_TORCH: torch,
        gpu_checks._OF_HOROVOD: nccl,
        gpu_checks._OF_TENSORFLOW: tensorflow,
    }

    def ask(script: str) -> tuple[Any, str]:
        answer = answers[script]
        return (None, answer) if isinstance(answer, str) else (json.loads(json.dumps(answer)), "")

    return gpu_checks.look(ask)


# ── Selection ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("gpu", True),
        ("gpu and not slow", True),
        ("", False),
        ("not gpu", False),
        ("not (browser or gpu_cluster)", False),
    ],
)
def test_other_runs_leave_the_checks_out(expression: str, expected: bool) -> None:
    """They are deselected, not skipped, so the count of skips stays the same."""

    def item(*marks: str) -> Any:
        return SimpleNamespace(get_closest_marker=lambda name: name in marks or None)

    check, other = item("gpu"), item("slow")
    items, gone = [check, other], []
    config: Any = SimpleNamespace(
        option=SimpleNamespace(markexpr=expression),
        hook=SimpleNamespace(pytest_deselected=lambda items: gone.extend(items)),
    )
    gpu_checks.pytest_collection_modifyitems(config, items)
    assert (items, gone) == (([check, other], []) if expected else ([other], [check]))


def test_an_ordinary_skip_of_a_check_is_a_failure() -> None:
    """Only a need that the machine lacks may leave a check out."""

    def reported(*, lacked: str = "") -> pytest.TestReport:
        stash = pytest.Stash()
        if lacked:
            stash[gpu_checks._LEFT] = lacked
        item: Any = SimpleNamespace(stash=stash, name="test_it", get_closest_marker=lambda name: True)
        report = pytest.TestReport("test_it", ("", 0, ""), {}, "skipped", ("", 0, "why"), "setup")
        steps = gpu_checks.pytest_runtest_makereport(item)
        next(steps)
        with pytest.raises(StopIteration) as stopped:
            steps.send(report)
        found: pytest.TestReport = stopped.value.value
        return found

    assert reported().failed
    left_out = reported(lacked="two GPUs: there is one GPU")
    assert left_out.skipped
    assert left_out.user_properties == [("note", "two GPUs: there is one GPU")]


# ── What the machine has ──────────────────────────────────────────────────────


def test_what_a_machine_with_one_gpu_lacks() -> None:
    found = machine_with(nccl="ModuleNotFoundError: horovod")
    assert (found.device, found.backend, found.names) == ("cuda", "nccl", ("NVIDIA H100",))
    assert set(found.lacks) == {TWO_GPUS, MIG, HOROVOD, TENSORFLOW}
    complete = machine_with(
        gpus=[{**GPU, "mig": ["MIG-1", "MIG-2"]}, GPU], torch={**TORCH, "count": 2}, tensorflow=["2.15", True]
    )
    assert (complete.lacks, complete.mig) == ({}, ("MIG-1", "MIG-2"))
    assert set(machine_with(torch={**TORCH, "fsdp": False}, nccl=0).lacks) >= {FSDP, HOROVOD}
    # TensorFlow is installed, but broken.
    assert "ImportError" in machine_with(tensorflow="ImportError: no").lacks[TENSORFLOW]


def test_horovod_whose_build_has_failed_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "ImportError: undefined symbol"
    monkeypatch.setenv(gpu_machine.HOROVOD, "failed: nvcc: error")
    assert HOROVOD not in machine_with(nccl=broken).lacks
    monkeypatch.setenv(gpu_machine.HOROVOD, "built")
    assert HOROVOD not in machine_with(nccl=broken).lacks
    monkeypatch.setenv(gpu_machine.HOROVOD, "left out: there is no toolkit")
    assert machine_with().lacks[HOROVOD] == "there is no toolkit"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"gpus": "NVMLError_LibraryNotFound"}, "No NVIDIA GPU was found"),
        ({"gpus": []}, "No NVIDIA GPU was found"),
        ({"torch": "ModuleNotFoundError: torch"}, "-m pip install torch"),
        ({"torch": {**TORCH, "cuda": None}}, "a build without CUDA"),
        ({"torch": {**TORCH, "why": "RuntimeError: the driver is too old"}}, "the driver is too old"),
        ({"torch": {**TORCH, "count": 0}}, "device_count() is 0"),
        ({"torch": {**TORCH, "nccl": False}}, "without NCCL"),
    ],
)
def test_machines_on_which_the_checks_cannot_run(
    answers: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is an error, not a skip."""
    monkeypatch.setattr(gpu_machine, "gpu_count", lambda: 0)
    with pytest.raises(pytest.UsageError) as caught:
        machine_with(**answers)
    assert said in str(caught.value)


def test_a_trial_on_cpus_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu_machine.ON_CPU, "1")
    found = machine_with(gpus="no NVML", torch={**TORCH, "cuda": None, "count": 0}, nccl=0)
    assert (found.device, found.backend) == ("cpu", "gloo")
    assert {gpu_checks.A_GPU, gpu_checks.NVML, TWO_GPUS, MIG, TENSORFLOW} == set(found.lacks)
    assert mentions("\n".join(gpu_checks.told(found, [Row("training")])), "nothing", "GPUs")


def test_the_table() -> None:
    rows = [
        Row("training", note="fast"),
        Row("memory", "failed", note="see above"),
        Row("rings", "skipped", note="two"),
    ]
    lines = gpu_checks.told(Machine("cuda", "nccl", ("NVIDIA H100",)), rows)
    assert "Checked on: NVIDIA H100" in lines
    at = lines.index("What this machine could not show, and why:")
    assert ["rings" in line for line in lines[at:]].count(True) == 1
    assert not any("rings" in line for line in lines[:at])
    assert mentions(lines[-1], "1", "1 failed", "1", "not")


def test_what_is_left_on_a_gpu() -> None:
    """New processes always count; memory counts only if nobody else was using the GPU before."""
    mb = 10**6
    before = Held((500 * mb, 0), frozenset())
    assert not Held((530 * mb, 0), frozenset()).more_than(before)
    assert "processes [7]" in Held((500 * mb, 0), frozenset({7})).more_than(before)
    assert "800 MB" in Held((500 * mb, 800 * mb), frozenset()).more_than(before)
    assert "800 MB" in Held((500 * mb, 800 * mb), None).more_than(Held((500 * mb, 0), None))
    others = Held((500 * mb, 0), frozenset({3}))
    assert not Held((900 * mb, 0), frozenset({3})).more_than(others)


# ── make test-gpu ─────────────────────────────────────────────────────────────


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script of `make test-gpu`, for a machine with a GPU, with its files in a folder of the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = Path(__file__).parent / "with_gpu" / "run.py"
    spec = importlib.util.spec_from_file_location("run_gpu_checks", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / "venv")
    monkeypatch.setattr(module, "LOG", tmp_path / "log")
    monkeypatch.setattr(gpu_machine, "gpu_count", lambda: 1)
    return module


def python_that(folder: Path, script: str) -> str:
    """Return a command that takes the place of a Python."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def test_without_a_gpu_one_sentence_says_so(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_machine, "gpu_count", lambda: 0)
    assert runner.main() == 1
    assert capsys.readouterr().err == f"make test-gpu: {gpu_machine.NO_GPU}\n"
    assert not runner.VENV.exists()


def test_torch_is_never_downloaded(runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If it is missing, the error has the command to install it, unless it is in the folder of wheels."""
    without = python_that(tmp_path, "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1")
    monkeypatch.setattr(sys, "executable", without)
    with pytest.raises(runner.CannotRun, match=rf"`{without} .*pip install torch`"):
        runner.Setup({}, time.time() + 60).check()
    wheels = {gpu_machine.WHEELS: str(tmp_path)}
    with pytest.raises(runner.CannotRun, match="has no PyTorch"):
        runner.Setup(wheels, time.time() + 60).check()
    (tmp_path / "torch-2.13.0-cp311-none-linux_x86_64.whl").touch()
    setup = runner.Setup(wheels, time.time() + 60)
    setup.check()
    assert (setup.env["PIP_NO_INDEX"], setup.env["PIP_FIND_LINKS"]) == ("1", tmp_path.as_uri())
    with pytest.raises(runner.CannotRun, match=r"not .*folder"):
        runner.Setup({gpu_machine.WHEELS: str(tmp_path / "none")}, time.time() + 60).check()
    monkeypatch.setattr(sys, "executable", python_that(tmp_path, "echo"))
    with pytest.raises(runner.CannotRun, match="build without CUDA"):
        runner.Setup({}, time.time() + 60).check()


def test_how_the_build_of_horovod_ends(runner: ModuleType, tmp_path: Path) -> None:
    """A build that the machine cannot do is told apart from a build that fails, or takes too long."""
    setup = runner.Setup({"PATH": "/usr/bin:/bin"}, time.time() + 600)
    setup.python = python_that(tmp_path, """echo '[false, ["CUDA, since there is no nvcc"]]'""")
    assert mentions(setup.build_horovod(), "left", "CUDA", "no")
    says = 'if [ "$1" = -c ]; then echo "[true, []]"; else {}; fi'
    setup.python = python_that(tmp_path, says.format("echo $HOROVOD_GPU_OPERATIONS; exit 0"))
    assert setup.build_horovod() == "built"
    assert runner.LOG.read_text() == "NCCL\n"
    setup.python = python_that(tmp_path, says.format("echo 'nvcc: error: no'; exit 1"))
    assert setup.build_horovod().startswith("failed: ")
    setup.python = python_that(tmp_path, says.format("exec sleep 600"))
    setup.deadline = time.time()
    assert "end in time" in setup.build_horovod()


def test_checks_that_hang_are_killed(runner: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    assert runner._status(["sleep", "600"], {"PATH": "/usr/bin:/bin"}, 0.1) == 1
    assert mentions(capfd.readouterr().err, "not", "within 0", "killed")
    assert runner._status(["sh", "-c", "exit 5"], {"PATH": "/usr/bin:/bin"}, 60.0) == 5
