"""The user's HOROVOD_… variables that change how Horovod is built, as its installation guide describes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from sparkring.tools.horovod_build.errors import AGAIN, BuildError

# The variables that select GPU operations; the first stands for all others.
ALL_GPU_OPERATIONS = "HOROVOD_GPU_OPERATIONS"
_GPU_OPERATIONS = (
    ALL_GPU_OPERATIONS,
    *(f"HOROVOD_GPU_{name}" for name in ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER")),
)
_PARTS = ("TENSORFLOW", "PYTORCH", "MXNET", "GLOO", "MPI", "NVTX")
# The build's result depends on these variables. Horovod's other variables, such as HOROVOD_LOG_LEVEL, only have an
# effect when Horovod runs.
_CHANGE_THE_WHEEL = (
    *_GPU_OPERATIONS,
    *(f"HOROVOD_{with_}_{part}" for part in _PARTS for with_ in ("WITH", "WITHOUT")),
    *(f"HOROVOD_NCCL_{name}" for name in ("HOME", "INCLUDE", "LIB", "LINK")),
    "HOROVOD_ALLOW_MIXED_GPU_IMPL",
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_CUDA_HOME",
    "HOROVOD_DEBUG",
    "HOROVOD_GPU",
    "HOROVOD_LOCAL_VERSION",
    "HOROVOD_NVTX_INCLUDE",
    "HOROVOD_ROCM_HOME",
)
# These choose what the wheel's key names anyway: the frameworks, and that Gloo is built in and MPI and MXNet are not.
_NAMED_BY_THE_KEY = {
    *(f"HOROVOD_{with_}_{part}" for part in ("TENSORFLOW", "PYTORCH") for with_ in ("WITH", "WITHOUT")),
    *("HOROVOD_WITH_GLOO", "HOROVOD_WITHOUT_MPI", "HOROVOD_WITHOUT_MXNET"),
}
VARIABLE_OF = {"tensorflow": "TENSORFLOW", "torch": "PYTORCH"}


@dataclass(frozen=True)
class BuildOptions:
    """The user's variables, except for empty ones, and whether the user has refused GPU operations."""

    variables: Mapping[str, str]
    refuses_gpu: bool = False

    @property
    def operations(self) -> set[str]:
        """The libraries that the user has chosen for GPU operations, such as "NCCL"."""
        return {self.variables[name] for name in _GPU_OPERATIONS if name in self.variables}

    @property
    def chooses_rocm(self) -> bool:
        """Whether the user builds for AMD's GPUs."""
        return self.variables.get("HOROVOD_GPU") == "ROCM"

    @property
    def uses_mpi(self) -> bool:
        """Whether a variable asks for MPI, which is otherwise left out."""
        cpu = self.variables.get("HOROVOD_CPU_OPERATIONS")
        return self.has("HOROVOD_WITH_MPI") or cpu == "MPI" or bool(self.operations & {"MPI", "DDL"})

    def has(self, name: str) -> bool:
        """Return whether a variable is 1, the only value with which Horovod treats a switch as set."""
        return self.variables.get(name) == "1"

    @property
    def digest(self) -> str:
        """A short digest of the variables that are not named by a wheel's key; '' if there are none."""
        relevant = {name: value for name, value in self.variables.items() if name not in _NAMED_BY_THE_KEY}
        # If all operations use NCCL, the key's NCCL says so.
        if relevant.get(ALL_GPU_OPERATIONS) == "NCCL":
            del relevant[ALL_GPU_OPERATIONS]
        lines = "\n".join(f"{name}={value}" for name, value in sorted(relevant.items()))
        return hashlib.sha256(lines.encode()).hexdigest()[:8] if lines else ""


def read_options(environ: Mapping[str, str]) -> BuildOptions:
    """Return the user's options. Raise BuildError if they contradict each other or cannot work with sparkring."""
    variables = {name: environ[name] for name in _CHANGE_THE_WHEEL if environ.get(name)}
    options = BuildOptions(variables, refuses_gpu=environ.get(ALL_GPU_OPERATIONS) == "")
    for part in _PARTS:
        with_, without = f"HOROVOD_WITH_{part}", f"HOROVOD_WITHOUT_{part}"
        if options.has(with_) and options.has(without):
            raise BuildError(f"{with_} and {without} are both 1: unset one of them, {AGAIN}")
    if options.has("HOROVOD_WITHOUT_GLOO"):
        raise BuildError(
            f"HOROVOD_WITHOUT_GLOO is 1, but sparkring connects Horovod's ranks with Gloo: unset it, {AGAIN}"
        )
    if environ.get("HOROVOD_SKIP_COMPILE") == "1":
        raise BuildError(f"HOROVOD_SKIP_COMPILE is 1, so the wheel would not contain Horovod's core: unset it, {AGAIN}")
    if ALL_GPU_OPERATIONS in variables and variables[ALL_GPU_OPERATIONS] not in ("NCCL", "MPI"):
        raise BuildError(
            f"{ALL_GPU_OPERATIONS} is {variables[ALL_GPU_OPERATIONS]!r}, but Horovod accepts NCCL, MPI or nothing: "
            f"correct it, {AGAIN}"
        )
    others = sorted(set(variables) & set(_GPU_OPERATIONS[1:]))
    if ALL_GPU_OPERATIONS in variables and others:
        raise BuildError(f"{ALL_GPU_OPERATIONS} and {others[0]} are both set: unset one of them, {AGAIN}")
    return options
