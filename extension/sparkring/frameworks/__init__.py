"""The frameworks, each in a file of its own; one line here makes one known."""

from __future__ import annotations

from sparkring.frameworks.barrier import Barrier
from sparkring.frameworks.base import Framework
from sparkring.frameworks.horovod import Horovod
from sparkring.frameworks.plain import Plain
from sparkring.frameworks.tensorflow import TensorFlow
from sparkring.frameworks.torch import Torch

FRAMEWORKS: dict[str, type[Framework]] = {
    "barrier": Barrier,
    "horovod": Horovod,
    "plain": Plain,
    "tensorflow": TensorFlow,
    "torch": Torch,
}
