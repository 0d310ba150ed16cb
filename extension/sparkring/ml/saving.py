"""Saves estimators and their models as pyspark does, and loads them.

PATH/metadata            pyspark's JSON: the class, the parameters, and a description of the other files
PATH/files/weights/      a checkpoint with the model: JSON and safetensors
PATH/files/code.pickle   only if needed: functions and classes that cannot be imported
"""

from __future__ import annotations

import contextlib
import pickle
import pkgutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter

from sparkring.checkpointing.store import checkpoints
from sparkring.cluster.connect import is_connect
from sparkring.cluster.session import cluster_of
from sparkring.data.layout import Spec
from sparkring.errors import CheckpointError
from sparkring.ml import torch
from sparkring.runtime.kernel import tell
from sparkring.worker.model import predictors

if TYPE_CHECKING:
    from sparkring.cluster.base import Cluster

_FILES, _WEIGHTS, _CODE = "files", "weights", "code.pickle"


class ModelWriter(DefaultParamsWriter):  # type: ignore[misc]
    """Writes a KerasModel or a TorchModel."""

    def saveImpl(self, path: str) -> None:
        """Write the model to `path`, which save() has checked."""
        fitted, model = self.instance, self.instance.getModel()
        with tempfile.TemporaryDirectory(prefix="sparkring-") as folder:
            store = checkpoints(f"{folder}/{_WEIGHTS}", background=False)
            store.save(0, {"model": model})
            made = None
            if not (predictors.is_keras(model) and predictors.is_keras(store.load()["model"])):
                maker = self._maker(model)
                made = _importable(maker)
                if not made:
                    _pickle(maker, Path(folder, _CODE), "the code that makes the model")
            extra = {
                "made": made,
                "history": fitted.history,
                "inputs": {name: [list(spec.shape), spec.dtype.str] for name, spec in fitted._specs.items()},
            }
            DefaultParamsWriter.saveMetadata(fitted, path, _spark(self), extra)
            cluster_of(self.sparkSession).copy_folder(_local(folder), f"{path}/{_FILES}")

    def _maker(self, model: Any) -> Any:
        """Return what the reader needs to make a model for the weights: a function, or a module without weights."""
        given = self.instance._given
        if given is not None and not predictors.is_model(given):
            return given
        if predictors.is_torch(model):
            return torch.hollow(model)
        raise CheckpointError(
            f"the model is a `{type(model).__name__}`, which Keras cannot make from its configuration: pass the "
            "estimator a function that makes the model, or register the class with "
            "keras.saving.register_keras_serializable()."
        )


class ModelReader(DefaultParamsReader):  # type: ignore[misc]
    """Reads a KerasModel or a TorchModel."""

    def load(self, path: str) -> Any:
        """Return the model that was saved at `path`."""
        fitted, metadata = _with_params(self, path)
        fitted._history = metadata["history"]
        fitted._specs = {name: Spec(tuple(shape), np.dtype(kind)) for name, (shape, kind) in metadata["inputs"].items()}
        with _files(cluster_of(self.sparkSession), path) as folder:
            store, made = checkpoints(f"{folder}/{_WEIGHTS}"), metadata["made"]
            if made is not None:
                fitted._given = pkgutil.resolve_name(made) if made else pickle.loads((folder / _CODE).read_bytes())
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


class EstimatorWriter(DefaultParamsWriter):  # type: ignore[misc]
    """Writes an estimator that has not been fitted."""

    def saveImpl(self, path: str) -> None:
        """Write the estimator to `path`, which save() has checked."""
        values = {param.name: value for param, value in self.instance._paramMap.items()}
        plain = {name: value for name, value in values.items() if _is_plain(value)}
        named = {name: _importable(value) for name, value in values.items() if name not in plain}
        rest = {name: values[name] for name, import_path in named.items() if not import_path}
        with tempfile.TemporaryDirectory(prefix="sparkring-") as folder:
            if rest:
                _pickle(rest, Path(folder, _CODE), ", ".join(f"`{name}`" for name in rest))
            extra = {
                "imported": {name: import_path for name, import_path in named.items() if import_path},
                "pickled": bool(rest),
            }
            DefaultParamsWriter.saveMetadata(self.instance, path, _spark(self), extra, plain)
            if rest:
                cluster_of(self.sparkSession).copy_folder(_local(folder), f"{path}/{_FILES}")


class EstimatorReader(DefaultParamsReader):  # type: ignore[misc]
    """Reads an estimator."""

    def load(self, path: str) -> Any:
        """Return the estimator that was saved at `path`."""
        estimator, metadata = _with_params(self, path)
        estimator._set(
            **{name: pkgutil.resolve_name(import_path) for name, import_path in metadata["imported"].items()}
        )
        if metadata["pickled"]:
            with _files(cluster_of(self.sparkSession), path) as folder:
                estimator._set(**pickle.loads((folder / _CODE).read_bytes()))
        return estimator


def _with_params(reader: Any, path: str) -> tuple[Any, dict[str, Any]]:
    """Return a new object of the reader's class with the parameters that were saved at `path`, and the metadata."""
    metadata = DefaultParamsReader.loadMetadata(path, _spark(reader))
    made = reader.cls()
    made._resetUid(metadata["uid"])
    DefaultParamsReader.getAndSetParams(made, metadata)
    return made, metadata


def _spark(access: Any) -> Any:
    """Return what pyspark uses for metadata: a SparkContext or, with Spark Connect, a session."""
    return access.sparkSession if is_connect(access.sparkSession) else access.sc


# ── Code ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _importable(value: Any) -> str:
    """Return the name of a function or class as module:name, or '' if no other process could import it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not module or not name or module == "__main__":
        return ""
    try:
        resolved = pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError):
        return ""
    return f"{module}:{name}" if resolved is value else ""


def _pickle(value: Any, file: Path, what: str) -> None:
    try:
        file.write_bytes(cloudpickle.dumps(value))
    except Exception as error:  # pickling an object can raise any exception
        raise CheckpointError(f"{what} cannot be saved: {type(error).__name__}: {error}") from error
    tell(f"{what} cannot be imported by name, so it is saved with cloudpickle; loading it runs its code")


def _is_plain(value: Any) -> bool:
    """Return whether JSON can represent the value exactly."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


# ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _files(cluster: Cluster, path: str) -> Iterator[Path]:
    """Yield a local folder with the files that were saved at `path`, without pyspark's metadata."""
    with tempfile.TemporaryDirectory(prefix="sparkring-") as folder:
        cluster.copy_folder(f"{path}/{_FILES}", _local(f"{folder}/{_FILES}"))
        yield Path(folder, _FILES)


def _local(path: str) -> str:
    return f"file://{path}"
