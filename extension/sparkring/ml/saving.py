"""Saves estimators and their models as pyspark does, and loads them.

PATH/metadata            pyspark's JSON: the class, the parameters, and what is in the other files
PATH/files/weights/      a checkpoint with the model: JSON and safetensors
PATH/files/code.pickle   only if needed: functions and classes that cannot be imported
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from sparkring.checkpointing.store import checkpoints
from sparkring.data.layout import Spec
from sparkring.errors import CheckpointError
from sparkring.inference import predictors
from sparkring.ml import torch
from sparkring.runtime.kernel import tell

if TYPE_CHECKING:
    from pyspark import SparkContext

_FILES, _WEIGHTS, _CODE = "files", "weights", "code.pickle"


class ModelWriter(MLWriter):  # type: ignore[misc]
    """Writes a KerasModel or a TorchModel."""

    def __init__(self, fitted: Any) -> None:
        super().__init__()
        self._fitted = fitted

    def saveImpl(self, path: str) -> None:
        """Write the model to `path`, which MLWriter.save() has checked."""
        fitted, model = self._fitted, self._fitted.getModel()
        with tempfile.TemporaryDirectory(prefix="sparkring-") as folder:
            store = checkpoints(f"{folder}/{_WEIGHTS}", background=False)
            store.save(0, {"model": model})
            made = None
            if not (predictors.is_keras(model) and predictors.is_keras(store.load()["model"])):
                made = _reference(self._maker(model), Path(folder, _CODE))
            extra = {
                "made": made,
                "history": fitted.history,
                "inputs": {name: [list(spec.shape), spec.dtype.str] for name, spec in fitted._specs.items()},
            }
            DefaultParamsWriter.saveMetadata(fitted, path, self.sc, extra)
            _copy(self.sc, _local(folder), f"{path}/{_FILES}")

    def _maker(self, model: Any) -> Any:
        """Return what the reader needs to make a model for the weights: a function, or a module without weights."""
        given = self._fitted._given
        if given is not None and not predictors.is_model(given):
            return given
        if predictors.is_torch(model):
            return torch.hollow(model)
        raise CheckpointError(
            f"the model is a `{type(model).__name__}`, which Keras cannot make from its configuration: pass the "
            "estimator a function that makes the model, or register the class with "
            "keras.saving.register_keras_serializable()."
        )


class ModelReader(MLReader):  # type: ignore[misc]
    """Reads a KerasModel or a TorchModel."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        """Return the model that was saved at `path`."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sc)
        fitted = self._kind()
        fitted._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(fitted, metadata)
        fitted._history = metadata["history"]
        fitted._specs = {name: Spec(tuple(shape), np.dtype(kind)) for name, (shape, kind) in metadata["inputs"].items()}
        with _files(self.sc, path) as folder:
            store, made = checkpoints(f"{folder}/{_WEIGHTS}"), metadata["made"]
            if made is not None:
                fitted._given = _referred(made, folder / _CODE)
                fitted._model = fitted._rebuilt(fitted._given)
                store.load_model(fitted._model)
                return fitted
            fitted._model = store.load()["model"]
        if not predictors.is_model(fitted._model):
            raise CheckpointError(
                f"{path}: Keras cannot make the model from its configuration: first import the modules that define the "
                "model's classes."
            )
        return fitted


class EstimatorWriter(MLWriter):  # type: ignore[misc]
    """Writes an estimator that has not been fitted."""

    def __init__(self, estimator: Any) -> None:
        super().__init__()
        self._estimator = estimator

    def saveImpl(self, path: str) -> None:
        """Write the estimator to `path`, which MLWriter.save() has checked."""
        values = {param.name: value for param, value in self._estimator._paramMap.items()}
        plain = {name: value for name, value in values.items() if _is_plain(value)}
        named = {name: _importable(value) for name, value in values.items() if name not in plain}
        rest = {name: values[name] for name, found in named.items() if not found}
        with tempfile.TemporaryDirectory(prefix="sparkring-") as folder:
            if rest:
                _pickled(rest, Path(folder, _CODE), ", ".join(f"`{name}`" for name in rest))
            extra = {"imported": {name: found for name, found in named.items() if found}, "pickled": bool(rest)}
            DefaultParamsWriter.saveMetadata(self._estimator, path, self.sc, extra, plain)
            if rest:
                _copy(self.sc, _local(folder), f"{path}/{_FILES}")


class EstimatorReader(MLReader):  # type: ignore[misc]
    """Reads an estimator."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        """Return the estimator that was saved at `path`."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sc)
        estimator = self._kind()
        estimator._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(estimator, metadata)
        estimator._set(**{name: _imported(found) for name, found in metadata["imported"].items()})
        if metadata["pickled"]:
            with _files(self.sc, path) as folder:
                estimator._set(**pickle.loads((folder / _CODE).read_bytes()))
        return estimator


# ── Code ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _reference(value: Any, file: Path) -> str:
    """Return the name under which the function `value` can be imported.

    If there is no such name, or `value` is a module without weights, write `value` to `file` and return ''.
    """
    found = _importable(value)
    if not found:
        _pickled(value, file, "how the model is made")
    return found


def _referred(found: str, file: Path) -> Any:
    return _imported(found) if found else pickle.loads(file.read_bytes())


def _importable(value: Any) -> str:
    """Return the name of a function or class as module:name, or '' if no other process could import it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not module or not name or module == "__main__":
        return ""
    try:
        found = _imported(f"{module}:{name}")
    except (ImportError, AttributeError):
        return ""
    return f"{module}:{name}" if found is value else ""


def _imported(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _pickled(value: Any, file: Path, what: str) -> None:
    try:
        file.write_bytes(cloudpickle.dumps(value))
    except Exception as error:  # whatever an object raises when it is pickled
        raise CheckpointError(f"{what} cannot be saved: {type(error).__name__}: {error}") from error
    tell(f"{what} cannot be imported by name, so it is saved with cloudpickle; loading it runs its code")


def _is_plain(value: Any) -> bool:
    """Return whether JSON can represent the value exactly."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return value is None or type(value) in (bool, int, float, str)


# ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _files(context: SparkContext, path: str) -> Iterator[Path]:
    """Yield a local folder with the files of what was saved at `path`."""
    with tempfile.TemporaryDirectory(prefix="sparkring-") as folder:
        _copy(context, f"{path}/{_FILES}", _local(f"{folder}/{_FILES}"))
        yield Path(folder, _FILES)


def _copy(context: SparkContext, source: str, target: str) -> None:
    """Copy a folder with Hadoop, so that the files are in the same file system as the metadata that pyspark writes."""
    jvm: Any = context._jvm
    hadoop, settings = jvm.org.apache.hadoop.fs, context._jsc.hadoopConfiguration()
    one, other = hadoop.Path(source), hadoop.Path(target)
    hadoop.FileUtil.copy(one.getFileSystem(settings), one, other.getFileSystem(settings), other, False, settings)


def _local(path: str) -> str:
    return f"file://{path}"
