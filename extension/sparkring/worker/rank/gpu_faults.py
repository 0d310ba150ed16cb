"""Recognises failures of GPUs in exceptions and in what a library prints before it aborts the process.

The exception's class and its error code decide, as far as there are any. For many errors of CUDA and NCCL, the text is
the only source. The table in this module is the only place where such texts are matched.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

from sparkring.runtime.world import world
from sparkring.wire.messages import GpuFault, GpuFaultKind
from sparkring.worker.member import gpus
from sparkring.worker.rank import flight_recorder


class _Mark(NamedTuple):
    """How to recognise a kind of fault: by the error codes of CUDA's runtime, or by parts of messages.

    `when_aborted` says whether the text may also be looked for in the last lines of an aborted process. Some texts are
    printed on machines without GPUs, too.
    """

    kind: GpuFaultKind
    codes: tuple[int, ...]
    texts: tuple[str, ...]
    when_aborted: bool = True


_MARKS = (
    _Mark("timeout", (), ("Watchdog caught collective operation timeout",)),
    _Mark("shared", (), ("Duplicate GPU detected",), when_aborted=False),
    _Mark("assert", (710,), ("device-side assert triggered", "CUDA_ERROR_ASSERT")),
    _Mark(
        "illegal access",
        (700, 716, 717, 718),
        ("illegal memory access was encountered", "misaligned address", "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ),
    _Mark("launch failure", (719,), ("unspecified launch failure", "CUDA_ERROR_LAUNCH_FAILED")),
    _Mark("hardware", (214, 714), ("uncorrectable ECC error", "hardware stack error", "CUDA_ERROR_ECC_UNCORRECTABLE")),
    _Mark("lost", (), ("GPU is lost", "fallen off the bus")),
    _Mark("no such device", (100, 101), ("invalid device ordinal", "no CUDA-capable device"), when_aborted=False),
    _Mark("busy", (46,), ("CUDA-capable device(s) is/are busy or unavailable",), when_aborted=False),
    _Mark("out of memory", (2,), ("CUDA out of memory", "CUDA error: out of memory", "CUDA_ERROR_OUT_OF_MEMORY")),
)
# The packages whose exceptions come from CUDA, and the attributes with which some of them give CUDA's error code.
_CODE_OF = {"torch": "error_code", "cupy": "status", "cupy_backends": "status", "numba": "code"}
_PACKAGES = {*_CODE_OF, "tensorflow", "jax", "jaxlib", "horovod"}
_OUT_OF_MEMORY = ("OutOfMemoryError", "ResourceExhaustedError")  # class names of PyTorch, CuPy and TensorFlow
_JAX_ERRORS = ("XlaRuntimeError", "JaxRuntimeError")

# How the messages of PyTorch, JAX and CuPy name the size of the allocation that failed, and those of TensorFlow.
_WANTED = r"(?:[Tt]ried to allocate|trying to allocate|allocating) ([\d.,]+) ?([KMGT]iB|bytes?)"
_WANTED_TENSOR = r"allocating tensor with shape ?\[([\d,]*)\] and type (\w+)"
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TYPE_BYTES = {"double": 8, "int64": 8, "complex64": 8, "half": 2, "bfloat16": 2, "int16": 2, "int8": 1, "bool": 1}
# How the messages of PyTorch and TensorFlow name the device, by its number in the process.
_NUMBER = r"\bGPU (\d+) has a total|\bdevice:GPU:(\d+)"


def find(errors: Sequence[BaseException]) -> GpuFault | None:
    """Return what went wrong with a GPU, according to an exception and its causes; None if nothing did."""
    for error in errors:
        try:
            text = str(error)
        except Exception:  # the user's own __str__
            continue
        kind = _kind(error, text)
        if kind is not None:
            return _described(kind, text)
    return None


def find_in_output(text: str, rank: int, own: Sequence[str]) -> GpuFault | None:
    """Return what went wrong with a GPU, according to the last output of an aborted rank that had the GPUs `own`."""
    for mark in _MARKS:
        if mark.when_aborted and any(part in text for part in mark.texts):
            detail = flight_recorder.summary(rank) if mark.kind == "timeout" else ""
            return _measured(GpuFault(mark.kind, detail=detail), own[0] if len(own) == 1 else "")
    return None


def _kind(error: BaseException, text: str) -> GpuFaultKind | None:
    package = type(error).__module__.partition(".")[0]
    names = {base.__name__ for base in type(error).__mro__}
    if package in _PACKAGES and not names.isdisjoint(_OUT_OF_MEMORY):
        return None if "device:CPU" in text else "out of memory"
    if not names.isdisjoint(_JAX_ERRORS) and text.startswith("RESOURCE_EXHAUSTED"):
        return "out of memory" if world().gpus else None
    code = getattr(error, _CODE_OF.get(package, ""), None)
    by_code = next((mark.kind for mark in _MARKS if code in mark.codes), None)
    if by_code is not None:
        return by_code
    # PyTorch before 2.8 raises a plain RuntimeError for errors of CUDA.
    if package not in _PACKAGES and not (type(error) is RuntimeError and ("CUDA" in text or "NCCL" in text)):
        return None
    return next((mark.kind for mark in _MARKS if any(part in text for part in mark.texts)), None)


def _described(kind: GpuFaultKind, text: str) -> GpuFault:
    fault = GpuFault(kind, wanted_bytes=_wanted_bytes(text) if kind == "out of memory" else None)
    if kind in ("timeout", "shared"):  # about several GPUs
        return fault._replace(detail=flight_recorder.summary(world().rank) if kind == "timeout" else "")
    return fault if kind == "no such device" else _measured(fault, _address(text))


def _wanted_bytes(text: str) -> int | None:
    if named := re.search(_WANTED, text):
        return int(float(named[1].rstrip(".,").replace(",", "")) * _UNITS.get(named[2], 1))
    if tensor := re.search(_WANTED_TENSOR, text):
        size_bytes = _TYPE_BYTES.get(tensor[2], 4)
        for length in filter(None, tensor[1].split(",")):
            size_bytes *= int(length)
        return size_bytes
    return None


def _address(text: str) -> str:
    """Return the address of the GPU that the message is about; '' if that is not known."""
    own, named = world().gpus, re.search(_NUMBER, text)
    number = int(named[1] or named[2]) if named else _current_device()
    if number is None:
        return own[0] if len(own) == 1 else ""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    addresses = gpus.visible() if seen is None else [address.strip() for address in seen.split(",") if address.strip()]
    return addresses[number] if number < len(addresses) else ""


def _current_device() -> int | None:
    """Return the number of the GPU that PyTorch uses in this process; None if it uses none."""
    torch = sys.modules.get("torch")
    try:
        return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else None
    except (RuntimeError, AttributeError):  # CUDA has failed, or torch is only partly imported
        return None


def _measured(fault: GpuFault, address: str) -> GpuFault:
    """Return the fault with the GPU's address, its name, its memory and the processes that hold it."""
    reading = gpus.holders(address) if address else None
    if reading is None:
        return fault._replace(address=address)
    used, holders = reading
    return fault._replace(
        address=address, name=used.name, used_bytes=used.used_bytes, total_bytes=used.total_bytes, holders=holders
    )
