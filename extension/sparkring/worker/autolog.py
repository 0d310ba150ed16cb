"""Metrics of `model.fit` without a change to the user's code: every fit gets one more callback.

Keras is not imported for this. A finder on sys.meta_path waits for the module that defines Model.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from sparkring import report

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    # The import system asks for their methods only, and importlib.abc takes a sixth of a rank's start-up.
    Loader = MetaPathFinder = object

# Where Model is defined: Keras 2.13 to 2.15, tf-keras, Keras 2.6 to 2.12, Keras 3.
_MODULES = (
    "keras.src.engine.training",
    "tf_keras.src.engine.training",
    "keras.engine.training",
    "keras.src.models.model",
)
_BATCH_EVERY_S = 0.2


def install() -> None:
    """Report the metrics of every `fit` from now on; calling it again changes nothing."""
    for name in _MODULES:
        if name in sys.modules:
            _patch(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Lets the others find the module, and patches it when its code has run."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._busy or fullname not in _MODULES:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, real: Loader) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._real.exec_module(module)
        _patch(module)


def _patch(module: types.ModuleType) -> None:
    import inspect

    model = getattr(module, "Model", None)
    if model is None or hasattr(model.fit, "_sparkring"):
        return
    fit, signature = model.fit, inspect.signature(model.fit)

    @functools.wraps(fit)
    def fit_and_report(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return fit(*args, **kwargs)  # let Keras say what is wrong with the call
        callbacks: Any = bound.arguments.get("callbacks")
        if hasattr(callbacks, "append"):
            callbacks = callbacks if not isinstance(callbacks, list) else list(callbacks)
        elif callbacks is None or isinstance(callbacks, (tuple, set)):
            callbacks = list(callbacks or ())
        else:
            callbacks = [callbacks]
        callbacks.append(_callback(module))
        bound.arguments["callbacks"] = callbacks
        return fit(*bound.args, **bound.kwargs)

    fit_and_report._sparkring = True  # type: ignore[attr-defined]
    model.fit = fit_and_report


def _callback(module: types.ModuleType) -> Any:
    """A reporting callback for the Keras that `module` belongs to."""
    base = importlib.import_module(
        "tf_keras.callbacks" if module.__name__.startswith("tf_keras") else "keras.callbacks"
    ).Callback

    class ReportMetrics(base):  # type: ignore[misc, valid-type]
        """Reports each epoch, and the running values at most five times a second."""

        # Keras then hands over tensors as they are; they are read only when they are sent.
        _supports_tf_logs = True

        def __init__(self) -> None:
            super().__init__()
            self._epoch = 0
            self._last = 0.0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._epoch = epoch + 1

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.monotonic()
            if now - self._last >= _BATCH_EVERY_S:
                self._last = now
                report.log(
                    step=batch + 1,
                    epoch=self._epoch,
                    steps=self.params.get("steps"),
                    epochs=self.params.get("epochs"),
                    **_numbers(logs),
                )

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            report.log_epoch(epoch + 1, self.params.get("epochs"), _numbers(logs))

    return ReportMetrics()


def _numbers(logs: Any) -> dict[str, float]:
    found = {}
    for name, value in (logs or {}).items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            continue  # a metric that is not one number has no place in a table
    return found
