"""Reports the metrics of Keras' `model.fit` and the checkpoints of its callbacks, without changes to the user's code.

This module patches Keras' modules as soon as the user's code has imported them. It does not import Keras itself.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import os
import time
import types
from collections.abc import Callable
from typing import Any

from sparkring.runtime import report
from sparkring.wire.messages import CheckpointRemoved, CheckpointSaved, Metrics
from sparkring.worker.rank.imports import when_imported

# The modules that define Model: in Keras 2, in tf-keras, and in Keras 3.
_MODULES = (
    "keras.src.engine.training",
    "tf_keras.src.engine.training",
    "keras.src.models.model",
    # The modules that define the callbacks: in Keras 3 and in Keras 2.13 to 2.15, and in tf-keras.
    "keras.src.callbacks",
    "tf_keras.src.callbacks",
)
_BATCH_EVERY_S = 0.2

_wanted = False  # whether the current cell wants reports; the next cell on a warm gang may decide otherwise


def report_fits(wanted: bool) -> None:
    """Report the metrics of every `fit` from now on if `wanted`, otherwise stop reporting them."""
    global _wanted
    _wanted = wanted
    if wanted:
        for name in _MODULES:
            when_imported(name, _patch)


def _patch(module: types.ModuleType) -> None:
    if hasattr(module, "Model"):
        _report_fits(module)
    if hasattr(module, "ModelCheckpoint") and hasattr(module, "BackupAndRestore"):
        _tell_model_checkpoints(module.ModelCheckpoint)
        _tell_backups(module.BackupAndRestore)


def _report_fits(module: types.ModuleType) -> None:
    import inspect

    model = module.Model
    if hasattr(model.fit, "_sparkring"):
        return
    fit, signature = model.fit, inspect.signature(model.fit)

    @functools.wraps(fit)
    def fit_and_report(*args: Any, **kwargs: Any) -> Any:
        if not _wanted:
            return fit(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return fit(*args, **kwargs)  # let Keras say what is wrong with the call
        callbacks: Any = bound.arguments.get("callbacks")
        if callbacks is None or isinstance(callbacks, (list, tuple, set)):
            callbacks = list(callbacks or ())
        elif not hasattr(callbacks, "append"):  # a single callback, not a CallbackList
            callbacks = [callbacks]
        callbacks.append(_callback(module))
        bound.arguments["callbacks"] = callbacks
        report.in_epoch(1 + (bound.arguments.get("initial_epoch") or 0))
        try:
            return fit(*bound.args, **bound.kwargs)
        finally:
            report.in_epoch(None)

    fit_and_report._sparkring = True  # type: ignore[attr-defined]
    model.fit = fit_and_report


def _callback(module: types.ModuleType) -> Any:
    base = importlib.import_module(
        "tf_keras.callbacks" if module.__name__.startswith("tf_keras") else "keras.callbacks"
    ).Callback

    class ReportMetrics(base):  # type: ignore[misc, valid-type]
        """Reports the metrics after each epoch and, during an epoch, at most five times a second.

        If the run stops on NaN, the metrics of each batch are looked at.
        """

        # With this, Keras passes tensors in `logs`, which are converted only when they are reported.
        _supports_tf_logs = True

        def __init__(self) -> None:
            super().__init__()
            self._epoch = 0
            self._last = 0.0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._epoch = epoch + 1
            report.in_epoch(self._epoch)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.monotonic()
            if now - self._last >= _BATCH_EVERY_S or report.stops_at(logs):
                self._last = now
                report.log(
                    step=batch + 1,
                    epoch=self._epoch,
                    steps=self.params.get("steps"),
                    epochs=self.params.get("epochs"),
                    **report.numbers(logs),
                )

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            values, epochs = report.numbers(logs), self.params.get("epochs")
            report.tell(Metrics(values, epoch=epoch + 1, epochs=epochs, ends_epoch=True))
            report.in_epoch(epoch + 2)  # at the beginning of an epoch, the user's callbacks come first

        def on_train_end(self, logs: Any = None) -> None:
            if 0 < self._epoch < (self.params.get("epochs") or 0):  # stopped early: no epochs are left
                report.tell(Metrics({}, epoch=self._epoch, epochs=self._epoch, ends_epoch=True))

    return ReportMetrics()


def _tell_model_checkpoints(kind: Any) -> None:
    """Report what ModelCheckpoint writes.

    Keras 3 has a separate method that decides whether to write. In Keras 2, the method that writes also decides, so the
    decision must be inferred: with save_best_only, the method has written only if the callback's `best` has changed.
    """

    def note(callback: Any, writes: bool, took_s: float, epoch: int, batch: Any, logs: Any, path: Any) -> None:
        if writes:
            callback._sparkring_target = (os.fspath(path), None)

    def note_best(callback: Any, path: Any, took_s: float, *_: Any) -> None:
        callback._sparkring_target = (os.fspath(path), callback.best if callback.save_best_only else None)

    def tell(callback: Any, _: None, took_s: float, epoch: int = 0, batch: Any = None, logs: Any = None) -> None:
        path, best_before = callback.__dict__.pop("_sparkring_target", ("", None))
        is_written = path and (best_before is None or callback.best != best_before)
        if is_written and _writes(callback.model):
            folder, name = os.path.split(path.rstrip("/"))
            numbers, best = report.numbers(logs), bool(callback.save_best_only)
            size_bytes, odd = _size_bytes(path), _not_finite(callback.model)
            report.tell(
                CheckpointSaved(
                    folder or ".", name, int(epoch) + 1, size_bytes, took_s, took_s, numbers, best, "keras", odd
                )
            )

    if hasattr(kind, "_should_save_model"):
        _tell_after(kind, "_should_save_model", note)
    else:
        _tell_after(kind, "_get_file_path", note_best)
    _tell_after(kind, "_save_model", tell)


def _tell_backups(kind: Any) -> None:
    """Report what BackupAndRestore writes and removes. It keeps one checkpoint, and by default none after fit()."""

    def tell(callback: Any, _: None, took_s: float, epoch: int = 0, batch: Any = None) -> None:
        tell_file(callback, took_s, callback._training_state.write_checkpoint_manager.latest_checkpoint, int(epoch) + 1)

    def tell_weights(callback: Any, _: None, took_s: float) -> None:  # Keras 3 writes the weights to one file
        in_epoch = callback._last_batch_seen > 0  # Keras' own counter counts only epochs that have ended
        tell_file(callback, took_s, callback._weights_path, callback._current_epoch + in_epoch)

    def tell_file(callback: Any, took_s: float, path: str, epoch: int) -> None:
        if _writes(callback.model):
            folder = os.fspath(callback.backup_dir)
            remove(callback)
            name = os.path.relpath(path, folder)
            callback._sparkring_wrote = (folder, name)
            size_bytes, odd = _size_bytes(path), _not_finite(callback.model)
            report.tell(
                CheckpointSaved(folder, name, epoch, size_bytes, took_s, took_s, kind="tensorflow", not_finite=odd)
            )

    def remove(callback: Any) -> None:
        folder, name = callback.__dict__.pop("_sparkring_wrote", ("", ""))
        if name:
            report.tell(CheckpointRemoved(folder, name))

    def ended(callback: Any, _: None, took_s: float, logs: Any = None) -> None:
        if callback.delete_checkpoint:
            remove(callback)

    _tell_after(kind, "_backup", tell)
    _tell_after(kind, "_save_model", tell_weights)
    _tell_after(kind, "on_train_end", ended)


def _tell_after(kind: Any, name: str, tell: Callable[..., None]) -> None:
    """After each call of the method `name`, call `tell(callback, result, seconds, …)`, and ignore errors of `tell`."""
    method = kind.__dict__.get(name)
    if method is None or hasattr(method, "_sparkring"):
        return

    @functools.wraps(method)
    def do_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        result = method(self, *args, **kwargs)
        if _wanted:
            with contextlib.suppress(Exception):
                tell(self, result, time.monotonic() - began, *args, **kwargs)
        return result

    do_and_tell._sparkring = True  # type: ignore[attr-defined]
    setattr(kind, name, do_and_tell)


def _writes(model: Any) -> bool:
    """Return whether the files that this rank writes are kept.

    With several workers, all workers except the chief write into a folder that Keras then removes.
    """
    extended = getattr(getattr(model, "distribute_strategy", None), "extended", None)
    return bool(getattr(extended, "should_checkpoint", True))


def _not_finite(model: Any) -> str:
    """Say which weight of a model is NaN or infinite; return '' if none is, or if only all replicas can read them."""
    extended = getattr(getattr(model, "distribute_strategy", None), "extended", None)
    if extended is not None and getattr(extended, "_in_multi_worker_mode", bool)():
        return ""
    import numpy as np  # Keras has imported it

    for weight in model.weights:
        values = np.asarray(weight)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            return f"{'NaN' if np.isnan(values).any() else 'infinity'} in {weight.name}"
    return ""


def _size_bytes(path: str) -> int:
    """Return the size of a file, a folder, or a TensorFlow checkpoint's files; 0 if only TensorFlow can read it."""
    files = [path] if os.path.isfile(path) else glob.glob(f"{glob.escape(path)}.index")
    files += glob.glob(f"{glob.escape(path)}.data-*")
    for folder, _, names in os.walk(path):
        files += [os.path.join(folder, name) for name in names]
    return sum(os.path.getsize(file) for file in files)
