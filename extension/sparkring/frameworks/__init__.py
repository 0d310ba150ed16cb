"""The frameworks, each in its own module, and the table that lists them."""

from __future__ import annotations

from sparkring.frameworks.barrier import Barrier
from sparkring.frameworks.base import Framework
from sparkring.frameworks.horovod import Horovod
from sparkring.frameworks.jax import Jax
from sparkring.frameworks.plain import Plain
from sparkring.frameworks.tensorflow import TensorFlow
from sparkring.frameworks.torch import Torch

FRAMEWORKS: dict[str, type[Framework]] = {
    "barrier": Barrier,
    "horovod": Horovod,
    "jax": Jax,
    "plain": Plain,
    "tensorflow": TensorFlow,
    "torch": Torch,
}
