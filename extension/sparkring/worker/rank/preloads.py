"""Finds which frameworks a rank has imported, so that a spare process can import them before later ranks start."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from sparkring.worker.rank import imports

# Only these are imported ahead of time. Each has been found to be safe to fork after its import.
FRAMEWORKS = frozenset(
    {
        "horovod.keras",
        "horovod.tensorflow",
        "horovod.tensorflow.keras",
        "horovod.torch",
        "keras",
        "pandas",
        "sklearn",
        "sklearn.cluster",
        "sklearn.compose",
        "sklearn.decomposition",
        "sklearn.ensemble",
        "sklearn.linear_model",
        "sklearn.metrics",
        "sklearn.model_selection",
        "sklearn.neighbors",
        "sklearn.neural_network",
        "sklearn.pipeline",
        "sklearn.preprocessing",
        "sklearn.svm",
        "sklearn.tree",
        "tensorflow",
        "torch",
        "torch._dynamo",  # imported by DistributedDataParallel and by optimizers, which takes as long as torch itself
    }
)
# Environment variables that these packages, or libraries that they use, read when they are imported. The variables that
# are excluded first are read later: TF_CONFIG and TORCH_NCCL_… are set for requests, Lightning sets the third one when
# it is imported, and PyTorch itself sets the last one when DistributedDataParallel or an optimizer is first used.
_READ_AT_IMPORT = re.compile(
    r"(?!TF_CONFIG$|TORCH_NCCL_|PYTORCH_NVML_BASED_CUDA_CHECK$|TORCHINDUCTOR_CACHE_DIR$)"
    r"(ARROW|GOTO|KERAS|MKL|NUMEXPR|OMP|OPENBLAS|PYTORCH|TF|TORCH|TORCHDYNAMO|TORCHINDUCTOR|XLA)_"
).match

ahead: tuple[str, ...] = ()  # the frameworks that a spare process had imported before it forked this process


class Preloads:
    """Watches what a rank imports, and whether its code changes environment variables that imports depend on."""

    def __init__(self) -> None:
        self._at_first: dict[str, str] | None = None
        self._compared: dict[Any, Any] | None = None  # the encoded environment in which changed() last looked
        self._changed: list[str] = []
        imports.note_order(FRAMEWORKS)

    def begin(self) -> None:
        """Remember the environment. Called before each request runs, but only the first call has an effect."""
        if self._at_first is None:
            self._at_first = _settings()

    def changed(self) -> list[str]:
        """Return the environment variables that imports depend on and that have changed since the first request."""
        encoded = getattr(os.environ, "_data", None)  # comparing it is 50 times as fast as reading all variables
        if encoded is None or encoded != self._compared:
            self._compared = None if encoded is None else dict(encoded)
            now, first = _settings(), self._at_first or {}
            self._changed = sorted(name for name in {**now, **first} if now.get(name) != first.get(name))
        return self._changed


def imported() -> tuple[str, ...]:
    """Return the installed frameworks that this process has imported, in the order in which their imports began."""
    return tuple(name for name in imports.order() if imports.is_installed(sys.modules[name]))


def _settings() -> dict[str, str]:
    return {name: os.environ[name] for name in os.environ if _READ_AT_IMPORT(name)}  # items() decodes all values
