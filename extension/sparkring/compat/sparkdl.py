"""Provides the import paths that notebooks for Databricks use, unless the real packages are installed.

    from sparkdl import HorovodRunner
    from sparkdl.horovod import log_to_driver
    from sparkdl.horovod.tensorflow.keras import LogCallback
    from spark_tensorflow_distributor import MirroredStrategyRunner

The APIs follow the public documentation of sparkdl and of spark-tensorflow-distributor.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import types
from collections.abc import Iterable
from typing import Any

_MODULES = {
    "sparkdl": ("sparkdl", "sparkdl.horovod", "sparkdl.horovod.tensorflow", "sparkdl.horovod.tensorflow.keras"),
    "spark_tensorflow_distributor": (
        "spark_tensorflow_distributor",
        "spark_tensorflow_distributor.mirrored_strategy_runner",
    ),
}
_HOMES = {
    ("spark_tensorflow_distributor", "MirroredStrategyRunner"): "sparkring.engine.run.distributors",
    (
        "spark_tensorflow_distributor.mirrored_strategy_runner",
        "MirroredStrategyRunner",
    ): "sparkring.engine.run.distributors",
    ("sparkdl", "HorovodRunner"): "sparkring.engine.run.api",
    ("sparkdl.horovod", "HorovodRunner"): "sparkring.engine.run.api",
    ("sparkdl.horovod", "log_to_driver"): "sparkring.runtime.report",
}


def install() -> None:
    """Make the import paths work. Leave out packages that are installed, and paths that already work."""
    for package, names in _MODULES.items():
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            _install(names)


def _install(names: Iterable[str]) -> None:
    for name in names:
        module = types.ModuleType(name, __doc__)
        module.__path__ = []
        module.__getattr__ = _finder(name)  # type: ignore[method-assign]
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def _finder(module: str) -> Any:
    """Return a `__getattr__` for the module named `module`. It imports an attribute when the attribute is read."""

    def find(name: str) -> Any:
        if (module, name) == ("sparkdl.horovod.tensorflow.keras", "LogCallback"):
            return _log_callback()
        home = _HOMES.get((module, name))
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)

    return find


def _log_callback() -> type[Any]:
    from tensorflow import keras

    from sparkring.runtime.report import log_to_driver, numbers

    def values(logs: Any) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in numbers(logs).items())

    class LogCallback(keras.callbacks.Callback):  # type: ignore[misc]
        """Sends a line to the notebook at the start and the end of each epoch.

        With `per_batch_log=True`, it also sends a line after every batch.
        """

        def __init__(self, per_batch_log: bool = False) -> None:
            super().__init__()
            self.per_batch_log = per_batch_log
            self._began = 0.0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._began = time.monotonic()
            log_to_driver(f"epoch {epoch + 1} of {self.params.get('epochs', '?')} begins")

        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.per_batch_log:
                log_to_driver(f"batch {batch + 1}: {values(logs)}")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            took = time.monotonic() - self._began
            log_to_driver(f"epoch {epoch + 1} ends after {took:.1f} s: {values(logs)}")

    return LogCallback
