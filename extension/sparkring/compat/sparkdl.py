"""Provides the import paths that HorovodRunner notebooks use, unless a real sparkdl is installed.

    from sparkdl import HorovodRunner
    from sparkdl.horovod import log_to_driver
    from sparkdl.horovod.tensorflow.keras import LogCallback

The API follows sparkdl's public documentation.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import types
from typing import Any

_MODULES = ("sparkdl", "sparkdl.horovod", "sparkdl.horovod.tensorflow", "sparkdl.horovod.tensorflow.keras")
_HOMES = {
    ("sparkdl", "HorovodRunner"): "sparkring.engine.api",
    ("sparkdl.horovod", "HorovodRunner"): "sparkring.engine.api",
    ("sparkdl.horovod", "log_to_driver"): "sparkring.runtime.report",
}


def install() -> None:
    """Make the import paths work. Do nothing if a real sparkdl is installed, or if the paths already work."""
    if "sparkdl" in sys.modules or importlib.util.find_spec("sparkdl") is not None:
        return
    for name in _MODULES:
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
