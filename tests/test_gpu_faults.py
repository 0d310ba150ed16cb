"""Tests of how failures of GPUs are recognised and explained. NVML is a stub: there is no GPU."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import types
from typing import Any

import pytest
from fake_launcher import CELL, Exit, FakeRank, events_until, received, running
from texts import mentions

from sparkring.history import describe, events
from sparkring.wire.messages import Exited, Failed, GpuFault, GpuHolder, GpuTrouble
from sparkring.worker.member import gpus
from sparkring.worker.rank import collectives, flight_recorder, gpu_faults
from sparkring.worker.rank.failures import as_failure

GB = 10**9
GIB = 1 << 30
H100 = events.GpuUsed("1", "NVIDIA H100", 78 * GB, 80 * GB, 90)
TORCH_TEXT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.25 GiB is free."
)


def raised(package: str, name: str, text: str = "", **attributes: Any) -> BaseException:
    """Return an error whose class has this name and is in this package, as if the package were installed."""
    kind = type(name, (RuntimeError,), {"__module__": package, **attributes})
    return kind(text)


@pytest.fixture
def holders(monkeypatch):
    """NVML reports H100 for each GPU, and this process and process 7 hold its memory."""
    held = (GpuHolder(os.getpid(), "python", 70 * GB), GpuHolder(7, "blender", 8 * GB))
    monkeypatch.setattr(gpus, "holders", lambda address: (H100._replace(address=address), held))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (raised("torch", "AcceleratorError", "any text", error_code=710), "assert"),
        (raised("torch", "AcceleratorError", "any text", error_code=719), "launch failure"),
        (raised("cupy_backends.cuda.api.runtime", "CUDARuntimeError", "any text", status=700), "illegal access"),
        (raised("numba.cuda.cudadrv.driver", "CudaAPIError", "any text", code=214), "hardware"),
        (RuntimeError("CUDA error: device-side assert triggered"), "assert"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "illegal access"),
        (RuntimeError("CUDA error: unspecified launch failure"), "launch failure"),
        (RuntimeError("CUDA error: invalid device ordinal"), "no such device"),
        (RuntimeError("CUDA error: all CUDA-capable device(s) is/are busy or unavailable"), "busy"),
        (raised("tensorflow.python", "InternalError", "CUDA_ERROR_ILLEGAL_ADDRESS: …"), "illegal access"),
        (raised("torch.distributed", "DistBackendError", "Duplicate GPU detected : rank 1 and rank 0"), "shared"),
        (raised("torch.distributed", "DistBackendError", "Watchdog caught collective operation timeout: …"), "timeout"),
        (raised("pynvml", "NVMLError_GpuIsLost", "GPU is lost"), None),
        (RuntimeError("invalid device ordinal"), None),
        (ValueError("CUDA error: unspecified launch failure"), None),
        (raised("torch.distributed", "DistBackendError", "ncclRemoteError"), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kinds(error, kind, holders):
    """The code of an error decides or, if there is none, the text of an error that comes from a GPU's library."""
    failure = as_failure(error)
    assert (failure.gpu.kind if failure.gpu else None) == kind
    assert failure.cause == ("echo" if "ncclRemote" in str(error) else "exception")


def test_the_cause_of_an_error_counts(holders):
    """An error that is raised because of a fault of a GPU is a failure of this GPU."""
    try:
        try:
            raise RuntimeError("CUDA error: device-side assert triggered")
        except RuntimeError as error:
            raise ValueError("bad batch") from error
    except ValueError as error:
        failure = as_failure(error)
    assert failure.gpu is not None
    assert failure.gpu.kind == "assert"


def test_memory_of_pytorch(holders):
    """PyTorch's own exception says how much was wanted, and which GPU it was; NVML says who holds the memory."""
    torch = pytest.importorskip("torch")
    failure = as_failure(torch.cuda.OutOfMemoryError(TORCH_TEXT))
    assert failure.cause == "out of memory"
    fault = failure.gpu
    assert fault[:6] == ("out of memory", "1", "NVIDIA H100", int(2.5 * GIB), 78 * GB, 80 * GB)
    assert [each.pid for each in fault.holders] == [os.getpid(), 7]
    assert received(Failed(failure, FakeRank.news.fget(FakeRank))).failure == failure, "it reaches the notebook"


def test_memory_of_tensorflow(holders):
    """Of TensorFlow's errors, those about a GPU's memory count, not those about the memory of the machine."""
    errors = pytest.importorskip("tensorflow").errors
    text = "OOM when allocating tensor with shape[1024,256] and type double on /job:localhost/device:{}:0 by allocator"
    failure = as_failure(errors.ResourceExhaustedError(None, None, text.format("GPU")))
    assert (failure.cause, failure.gpu.address, failure.gpu.wanted_bytes) == ("out of memory", "0", 1024 * 256 * 8)
    assert as_failure(errors.ResourceExhaustedError(None, None, text.format("CPU"))).gpu is None


def test_memory_of_jax(holders, monkeypatch):
    """JAX does not name the GPU, so it is the rank's own. Without a GPU, the machine's memory has run out."""
    error = raised("jaxlib._jax", "XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory allocating 1,000 bytes.")
    assert as_failure(error).gpu is None
    monkeypatch.setattr(gpu_faults, "world", lambda: types.SimpleNamespace(gpus=("1",), rank=0))
    monkeypatch.setattr(gpu_faults, "_current_device", lambda: None)
    fault = as_failure(error).gpu
    assert (fault.kind, fault.address, fault.wanted_bytes) == ("out of memory", "1", 1000)


def test_an_aborted_process(holders):
    """What a library prints before it aborts is the only source. Texts that are printed without GPUs do not count."""
    text = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: {}\n"
    found = gpu_faults.find_in_output(text.format("unspecified launch failure"), 0, ["1"])
    assert (found.kind, found.address, found.name) == ("launch failure", "1", "NVIDIA H100")
    assert gpu_faults.find_in_output("failed call to cuInit: no CUDA-capable device is detected", 0, ["1"]) is None


def failing(cell) -> events.Failure:
    """Run a cell on two ranks, of which one fails, and return the failure as the record gets it."""
    with running(cell) as gang:
        execution = gang.submit(CELL)
        told = events_until(lambda: execution.failed_rank is not None, gang)
        failure = next(event.failure for event in told if isinstance(event, events.RankFailed))
        notices = [event.text for event in told if isinstance(event, events.Notice)]
    return failure._replace(traceback="\n".join(notices))


def test_who_holds_the_memory(watch, monkeypatch, holders):
    """The notebook knows which processes are ranks, and which one is its own kernel."""
    monkeypatch.setattr("sparkring.gangs.gang.socket.gethostname", lambda: "host")

    def cell(rank: FakeRank) -> None:
        if rank.world.rank == 1:
            raise raised("torch", "OutOfMemoryError", TORCH_TEXT)
        rank.interrupted.wait()

    failure = failing(cell)
    # All ranks of the fake gang, and the notebook, are one process: the last rank's number is kept.
    assert [(each.kind, each.rank) for each in failure.gpu.holders] == [("rank", 1), ("other", None)]
    assert mentions(
        failure.summary,
        "OutOfMemoryError",
        "GPU 1",
        "NVIDIA",
        "H100",
        "80.0 GB",
        "2.68 GB more",
        "78.0 GB",
        "rank 70.0 GB",
        "process",
        "7",
        "8.00 GB",
    )
    assert mentions(failure.advice, "GPU", "process", "7", "GPU")


def test_troubles_explain_a_failure(watch):
    """A notice tells of an Xid error at once. If the rank then fails, its failure mentions the error."""

    def cell(rank: FakeRank) -> None:
        if rank.world.rank == 1:
            rank.tell(GpuTrouble("3", "NVIDIA H100", xid=79))
            rank.tell(GpuTrouble("3", "NVIDIA H100", lost=True))
            raise Exit(signal=6)
        rank.interrupted.wait()

    failure = failing(cell)
    assert (failure.signal, failure.gpu.kind, failure.gpu.xid, failure.gpu.address) == ("SIGABRT", "lost", 79, "3")
    assert failure.summary == "killed by SIGABRT"
    assert mentions(failure.traceback, "GPU 3", "rank", "1", "Xid 79", "GPU")
    assert mentions(failure.traceback, "GPU 3", "rank", "1", "lost")


def test_the_reason_for_an_abort(watch):
    """The member recognises the reason in the last output, and the notebook explains it."""
    fault = GpuFault("timeout", detail="According to PyTorch's flight recorder, all_reduce did not end.")

    def cell(rank: FakeRank) -> None:
        if rank.world.rank == 0:
            end = Exit()
            end.exited = Exited(None, 6, False, 0, fault)
            raise end
        rank.interrupted.wait()

    failure = failing(cell)
    assert failure.gpu == fault
    assert mentions(failure.summary, "killed", "SIGABRT", "NCCL", "not")
    assert failure.advice.startswith(fault.detail)


def test_every_kind_has_words():
    """Each kind is described in one sentence, and has advice."""
    kinds = events.GpuFault.__annotations__["kind"].__args__
    for kind in kinds:
        fault = GpuFault(kind, "0", xid=13)
        assert describe.gpu_fault(fault, 0)
        assert describe.gpu_advice(fault, 0).endswith(".")
    everyone = tuple(GpuHolder(pid, "x", GB, kind, 1) for pid, kind in enumerate(("rank", "notebook", "other gang")))
    advice = describe.gpu_advice(GpuFault("out of memory", "0", holders=everyone), 0)
    assert "%gang stop" in advice
    assert "torch.cuda.empty_cache()" in advice
    assert "local_rank % torch.cuda.device_count()" in advice


def test_what_the_flight_recorder_has_written(tmp_path, monkeypatch):
    """The first collective that has not ended is named. Files that are not plain values are not unpickled."""
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{tmp_path}/trace_")
    assert flight_recorder.summary(0) == ""
    frames = [{"filename": "/x/torch/distributed/c10d.py", "line": 9}, {"filename": "/home/me/train.py", "line": 12}]
    entry = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 7, "input_sizes": [[3, 4]], "frames": frames}
    entries = [entry | {"collective_seq_id": 6, "state": "completed"}, entry | {"state": "started"}]
    path = tmp_path / "trace_0"
    path.write_bytes(pickle.dumps({"version": "2.4", "entries": entries}))
    assert mentions(flight_recorder.summary(0), "PyTorch's", "all_reduce", "3×4", "7", "train.py:12", "not")
    path.write_bytes(pickle.dumps({"entries": [entry | {"state": "completed"}]}))
    assert flight_recorder.summary(0) == ""
    path.write_bytes(pickle.dumps({"entries": os.getcwd}))
    assert flight_recorder.summary(0) == ""
    path.write_bytes(pickle.dumps(entries))  # as PyTorch 2.1 writes it
    assert "all_reduce" in flight_recorder.summary(0)
    os.utime(path, (1, 1))
    assert flight_recorder.summary(0) == "", "from an earlier run"


def test_all_groups_are_aborted_together(monkeypatch):
    """Collectives of subgroups are ended, too. NCCL's groups are aborted together, the newest first."""
    calls: list[str] = []

    def group(name: str) -> Any:
        backend = types.SimpleNamespace(
            _group_start=lambda: calls.append("start"), _group_end=lambda: calls.append("end")
        )
        return type(name, (), {"abort": lambda _: calls.append(name), "_get_backend": lambda *_: backend})()

    whole, part = group("whole"), group("part")
    fake = types.SimpleNamespace(
        is_initialized=lambda: True,
        group=types.SimpleNamespace(WORLD=whole),
        distributed_c10d=types.SimpleNamespace(_world=types.SimpleNamespace(pg_names={whole: "0", part: "1"})),
        destroy_process_group=lambda: calls.append("destroy"),
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(device=str))
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)
    for name in ("horovod.tensorflow.mpi_ops", "horovod.torch.mpi_ops"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(collectives, "_cut_accepted", lambda: calls.append("cut"))
    collectives.release(lambda: calls.append("told"))
    assert calls == ["told", "start", "part", "whole", "end", "cut", "destroy"]


METER = """
import json, os, sys
from sparkring.worker.member import gpus
meter = gpus.GpuMeter(["1", "2"])
def told():
    return [trouble[:1] + trouble[2:] for trouble in meter.troubles()]
def becomes(text):
    with open(os.environ["FAKE_STATE"], "a") as file:
        file.write(text)
found = [told()]
becomes("xid 2 31\\nxid 2 31\\nxid 0 13\\n")
found += [told(), told()]
becomes("lost 1\\n")
found += [told(), told(), [used.address for used in meter.changes()]]
becomes(f"uses 3 {os.getpid()} 5000\\nuses 3 1 7000\\n")
used, holders = gpus.holders("3")
found.append([used.address, [[each.pid == os.getpid(), each.used_bytes, bool(each.name)] for each in holders]])
found.append([gpus.holders("9"), gpus.holders("1")[0].used_bytes])
print(json.dumps(found))
"""


def test_what_nvml_reports(nvml_folder, tmp_path):
    """Xid errors and lost GPUs are reported once, and only those of the rank's own GPUs."""
    environment = {"LD_LIBRARY_PATH": nvml_folder, "FAKE_GPUS": "4", "FAKE_STATE": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, "-c", METER],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    quiet, xid, again, lost, after, read, held, unknown = json.loads(done.stdout)
    assert quiet == again == after == []
    assert xid == [["2", 31, False]]
    assert lost == [["1", None, True]]
    assert read == ["1", "2"]
    assert held == ["3", [[False, 7000, True], [True, 5000, True]]]
    assert unknown == [None, None]
