"""The checks that need a GPU: their selection, what each one needs of the machine, and the table of what was checked.

The checks are marked with `gpu`. They are left out of every run, unless `-m` names this marker: `pytest -m gpu`. A
check is skipped only if it is marked with `needs(…)`, and the machine lacks something that the marker names. Any other
skip counts as a failure, so a skip cannot hide one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import gpu_machine
import pytest
from waiting import until

# The names that the marker `needs` can have.
A_GPU = "a GPU"
NVML = "NVML"
TWO_GPUS = "two GPUs"
MIG = "two MIG instances"
FSDP = "fully_shard()"
HOROVOD = "Horovod with NCCL"
TENSORFLOW = "TensorFlow for CUDA"
NEEDS = (A_GPU, NVML, TWO_GPUS, MIG, FSDP, HOROVOD, TENSORFLOW)

TRIAL = "a trial of the checks on CPUs, in which no GPU is used"
# Memory that is in use on a GPU can vary by this much although no process of ours uses any.
_SLACK_BYTES = 64 << 20
_LEFT = pytest.StashKey[str]()  # why a check was left out
_NOTE = pytest.StashKey[str]()  # what a check has measured
_MACHINE = pytest.StashKey["Machine"]()


@dataclass(frozen=True)
class Machine:
    """What the checks run on. `lacks` maps what the machine lacks, of NEEDS, to the reason.

    `device` and `backend` are what cells pass to PyTorch: "cuda" and "nccl", or "cpu" and "gloo" in a trial. `names`
    are the names of the GPUs, and `mig` the UUIDs of their MIG instances.
    """

    device: str
    backend: str
    names: tuple[str, ...] = ()
    mig: tuple[str, ...] = ()
    versions: str = ""
    lacks: dict[str, str] = field(default_factory=dict)

    def cell_names(self) -> dict[str, Any]:
        """Return the variables that every cell of the checks can read."""
        return {"__name__": "__main__", "DEVICE": self.device, "BACKEND": self.backend}


# ── What the machine has ──────────────────────────────────────────────────────

# These scripts run in processes of their own, so that the tests' process uses no GPU. Each prints JSON.
_OF_NVML = """
import json, pynvml as n
def ask(question, *arguments):
    try:
        return question(*arguments)
    except Exception:  # not only NVMLError: a driver that is too old for a function has another error
        return None
n.nvmlInit()
found = []
for index in range(n.nvmlDeviceGetCount()):
    gpu = n.nvmlDeviceGetHandleByIndex(index)
    running = ask(n.nvmlDeviceGetComputeRunningProcesses, gpu)
    mode = ask(n.nvmlDeviceGetMigMode, gpu)
    parts = range(ask(n.nvmlDeviceGetMaxMigDeviceCount, gpu) or 0) if mode and mode[0] else ()
    parts = [ask(n.nvmlDeviceGetMigDeviceHandleByIndex, gpu, part) for part in parts]
    found.append({
        "name": n.nvmlDeviceGetName(gpu),
        "used": n.nvmlDeviceGetMemoryInfo(gpu).used,
        "pids": None if running is None else sorted(each.pid for each in running),
        "mig": [n.nvmlDeviceGetUUID(part) for part in parts if part is not None],
    })
n.nvmlShutdown()
print(json.dumps(found))
"""
_OF_TORCH = """
import importlib.metadata, json, torch, torch.distributed as dist
found = {"version": torch.__version__, "cuda": torch.version.cuda, "count": torch.cuda.device_count(), "why": ""}
if found["cuda"]:
    try:
        torch.zeros(1, device="cuda")
    except Exception as error:
        found["why"] = f"{type(error).__name__}: {error}".splitlines()[0]
found["nccl"] = dist.is_available() and dist.is_nccl_available()
try:
    from torch.distributed.fsdp import fully_shard
    found["fsdp"] = True
except ImportError:
    found["fsdp"] = False
print(json.dumps(found))
"""
_OF_HOROVOD = """
import json
import horovod.torch as hvd
print(json.dumps(int(hvd.nccl_built())))
"""
_OF_TENSORFLOW = """
import importlib.util, json
found = importlib.util.find_spec("tensorflow")
if found:
    import tensorflow as tf
    found = [tf.__version__, bool(tf.test.is_built_with_cuda())]
print(json.dumps(found))
"""


def asked(script: str, env: dict[str, str] | None = None) -> tuple[Any, str]:
    """Run a script in a process of its own. Return what it printed as JSON on its last line, or None, and its error."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", **(env or {})}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={**os.environ, **quiet}
    )
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1]), ""


def look(ask: Callable[[str], tuple[Any, str]] = asked) -> Machine:
    """Return what this machine has. Raise UsageError if the checks cannot run on it."""
    trial = gpu_machine.on_cpu()
    gpus, no_nvml = ask(_OF_NVML)
    if not (gpus or trial):
        raise pytest.UsageError(f"NVML does not respond: {no_nvml}" if gpu_machine.gpu_count() else gpu_machine.NO_GPU)
    torch, no_torch = ask(_OF_TORCH)
    if torch is None:
        raise pytest.UsageError(
            f"PyTorch cannot be imported ({no_torch}): install it with `{sys.executable} -m pip install torch`."
        )
    if not trial:
        _check_torch(torch, len(gpus))
    mig = tuple(uuid for gpu in gpus or () for uuid in gpu["mig"])
    lacks = {
        TWO_GPUS: _one_gpu(len(gpus or ()), torch["count"]),
        MIG: "" if len(mig) > 1 else f"MIG has {len(mig)} instances here" if mig else "MIG is not in use here",
        FSDP: "" if torch["fsdp"] else f"PyTorch {torch['version']} has no public fully_shard(); 2.6 does",
        HOROVOD: _no_horovod(ask, trial=trial),
        TENSORFLOW: _no_tensorflow(ask),
        NVML: "" if gpus else f"NVML reports no GPU here ({no_nvml})",
    }
    if trial:
        lacks |= dict.fromkeys((A_GPU, TWO_GPUS, MIG, TENSORFLOW), f"this is {TRIAL}")
    names = tuple(gpu["name"] for gpu in gpus or ())
    versions = f"Python {sys.version.split()[0]}, PyTorch {torch['version']} for CUDA {torch['cuda']}"
    device, backend = ("cpu", "gloo") if trial else ("cuda", "nccl")
    return Machine(device, backend, names, mig, versions, {need: why for need, why in lacks.items() if why})


def _check_torch(torch: dict[str, Any], gpus: int) -> None:
    """Raise UsageError if PyTorch cannot use a GPU that is there."""
    if not torch["cuda"]:
        raise pytest.UsageError(
            f"PyTorch {torch['version']} is a build without CUDA: install one for CUDA (docs/versions.md says which), "
            "or name a Python that has one, `make test-gpu PYTHON=/path/to/python`."
        )
    if torch["why"] or not torch["count"]:
        why = torch["why"] or "torch.cuda.device_count() is 0"
        raise pytest.UsageError(
            f"NVML finds {gpus} GPUs, but PyTorch {torch['version']} for CUDA {torch['cuda']} can use none ({why}): "
            "install a build for this driver's version of CUDA, which nvidia-smi shows."
        )
    if not torch["nccl"]:
        raise pytest.UsageError(f"PyTorch {torch['version']} was built without NCCL: install NVIDIA's or PyPI's build.")


def _one_gpu(found: int, visible: int) -> str:
    if visible > 1:
        return ""
    return "there is one GPU" if found < 2 else f"PyTorch sees {visible} of {found} GPUs"


def _no_horovod(ask: Callable[[str], tuple[Any, str]], *, trial: bool) -> str:
    """Return why the machine cannot have Horovod with NCCL; '' if it has it, or if its build has failed.

    After a failed build, the checks of Horovod are not left out: they fail.
    """
    outcome, _, why = os.environ.get(gpu_machine.HOROVOD, "").partition(": ")
    if outcome == "left out":
        return why
    if outcome in ("built", "failed"):
        return ""
    nccl, error = ask(_OF_HOROVOD)
    if nccl is None:
        return f"Horovod cannot be imported ({error}); make test-gpu builds it"
    return "" if nccl or trial else "the installed Horovod was built without NCCL; make test-gpu builds another one"


def _no_tensorflow(ask: Callable[[str], tuple[Any, str]]) -> str:
    found, error = ask(_OF_TENSORFLOW)
    if error:
        return f"TensorFlow cannot be imported ({error})"
    if not found:
        return "TensorFlow is not installed"
    return "" if found[1] else f"TensorFlow {found[0]} is a build without CUDA"


# ── Selection ─────────────────────────────────────────────────────────────────


def are_selected(marker_expression: str) -> bool:
    """Return whether an argument of -m asks for the marker `gpu`."""
    return re.search(r"(?<!not )\bgpu\b", marker_expression) is not None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU, and runs only if -m names this marker: make test-gpu")
    config.addinivalue_line("markers", "needs(*what): is left out if the machine lacks one of these: see NEEDS")
    if are_selected(config.option.markexpr) and config.getoption("numprocesses", None):
        raise pytest.UsageError("The checks that need a GPU run in one process: leave out --numprocesses.")
    config.pluginmanager.register(Table(config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the checks out of other runs."""
    if not are_selected(config.option.markexpr):
        gone = [item for item in items if item.get_closest_marker("gpu")]
        if gone:
            config.hook.pytest_deselected(items=gone)
            items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """If checks are about to run, look at the machine. Raise UsageError if they cannot run."""
    config = session.config
    if config.option.collectonly or not any(item.get_closest_marker("gpu") for item in session.items):
        return
    config.stash[_MACHINE] = look()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave a check out if the machine lacks what it needs; fail it if the time is over."""
    if not item.get_closest_marker("gpu"):
        return
    machine = item.config.stash[_MACHINE]
    for marker in item.iter_markers("needs"):
        for need in marker.args:
            assert need in NEEDS, f"{item.name} needs {need!r}, which is not in NEEDS"
            if need in machine.lacks:
                item.stash[_LEFT] = f"{need}: {machine.lacks[need]}"
                pytest.skip(item.stash[_LEFT])
    deadline = os.environ.get(gpu_machine.UNTIL)
    if deadline and time.time() > float(deadline):
        pytest.fail(f"not begun, because the time limit was reached ({gpu_machine.LIMIT} sets another)", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("gpu"):
        if report.skipped and _LEFT not in item.stash:
            report.outcome = "failed"
            report.longrepr = f"{item.name} skipped itself: only the marker `needs` may leave a check out."
        note = item.stash.get(_LEFT if report.skipped else _NOTE, "")
        report.user_properties.append(("note", note))
    return report


# ── The table ─────────────────────────────────────────────────────────────────


@dataclass
class Row:
    """One check. `note` is what it measured, or why it was left out."""

    what: str
    outcome: str = "passed"
    seconds: float = 0.0
    note: str = ""


class Table:
    """Collects the outcomes of the checks, and prints them when the run ends."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.rows: dict[str, Row] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        notes = [value for name, value in report.user_properties if name == "note"]
        if not notes:
            return
        what = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        row = self.rows.setdefault(report.nodeid, Row(what))
        row.seconds += report.duration
        row.note = notes[-1] or row.note
        if report.outcome != "passed" and row.outcome != "failed":
            row.outcome = report.outcome
            if report.failed:
                row.note = f"{report.when}: see above" if report.when != "call" else "see above"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.rows:
            for line in told(self._config.stash[_MACHINE], list(self.rows.values())):
                terminalreporter.write_line(line)


def told(machine: Machine, rows: list[Row]) -> list[str]:
    """Return the lines of the table."""
    on = ", ".join(machine.names) or "no GPU"
    title = f"Checked on: {on}"
    if gpu_machine.on_cpu():
        title = f"This was {TRIAL}. It says nothing about GPUs."
    lines = ["", title, f"  {machine.versions}", "", "What ran:"]
    ran = [row for row in rows if row.outcome != "skipped"]
    left = [row for row in rows if row.outcome == "skipped"]
    width = max((len(row.what) for row in rows), default=0)
    lines += [f"  {row.outcome:7} {row.seconds:5.1f} s  {row.what:{width}}  {row.note}".rstrip() for row in ran]
    if left:
        lines += ["", "What this machine could not show, and why:"]
        lines += [f"  {row.what:{width}}  needs {row.note}" for row in left]
    failed = sum(row.outcome == "failed" for row in ran)
    lines += ["", f"{len(ran) - failed} checks passed, {failed} failed, {len(left)} could not be shown here."]
    return lines


# ── Fixtures ──────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> Machine:
    """What the checks run on."""
    return request.config.stash[_MACHINE]


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`note(text)` adds a text to the check's line in the table."""

    def add(text: str) -> None:
        request.node.stash[_NOTE] = text

    return add


@dataclass(frozen=True)
class Held:
    """What is in use on the GPUs: the memory of each, and the processes; None if NVML does not list processes."""

    used_bytes: tuple[int, ...]
    pids: frozenset[int] | None

    @classmethod
    def now(cls) -> Held:
        gpus, error = asked(_OF_NVML)
        assert gpus is not None, f"NVML does not respond any more: {error}"
        lists = [gpu["pids"] for gpu in gpus]
        pids = None if None in lists else frozenset(pid for each in lists for pid in each)
        return cls(tuple(gpu["used"] for gpu in gpus), pids)

    def more_than(self, before: Held) -> str:
        """Say what is in use now, but was not in use before; '' if nothing is.

        Memory counts only if no process was using the GPUs before, since the memory of others can grow.
        """
        new = (self.pids or frozenset()) - (before.pids or frozenset())
        grown = [now - then for now, then in zip(self.used_bytes, before.used_bytes, strict=True)]
        if new:
            return f"processes {sorted(new)} hold memory on a GPU"
        if not before.pids and max(grown, default=0) > _SLACK_BYTES:
            return f"{max(grown) / 1e6:.0f} MB more of a GPU's memory are in use than before"
        return ""


@pytest.fixture(scope="session")
def at_first(machine: Machine) -> Held | None:
    """What was in use on the GPUs before the checks; None without NVML."""
    if NVML in machine.lacks:
        return None
    # NVML may keep the driver's device files open in the process that has used it. They do not count as left behind.
    from sparkring.worker.member import gpus

    gpus.visible()
    return Held.now()


@pytest.fixture
def released(at_first: Held | None) -> Iterator[None]:
    """Fails a check after which memory of a GPU is still in use. The memory of a killed process is not free at once."""
    yield
    if at_first is not None:
        left = ""

        def is_free() -> bool:
            nonlocal left
            left = Held.now().more_than(at_first)
            return not left

        try:
            until(is_free, "the memory of the GPUs is free again", 15.0)
        except AssertionError:
            pytest.fail(f"15 s after the check, {left}", pytrace=False)
