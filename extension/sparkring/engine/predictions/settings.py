"""The arguments of predict() about the model, its inputs and its predictions, for both DataFrames and files."""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import pyarrow as pa

from sparkring.checkpointing.entries import Entry
from sparkring.checkpointing.store import Store, Which, checkpoints
from sparkring.data.columns import Caller
from sparkring.data.layout import (
    Batch,
    BatchLayout,
    Columns,
    Group,
    Transform,
    dtype_of,
    groups_of,
    making_of,
    members_of,
)
from sparkring.errors import CheckpointError, DataError, OptionsError
from sparkring.history.describe import counted
from sparkring.runtime.kernel import tell
from sparkring.runtime.storage import locate
from sparkring.worker.model import outputs, predictors
from sparkring.worker.model.by_key import key_input
from sparkring.worker.model.inputs import Described
from sparkring.worker.model.outputs import PredictedColumn
from sparkring.worker.model.predictors import Autocast
from sparkring.worker.model.saved import Followed, Saved
from sparkring.worker.model.scorer import ModelSource, OnError, error_text

if TYPE_CHECKING:
    import torch
    from pyspark.sql.types import DataType

PROBED_ROWS = 16


class Probe(NamedTuple):
    """The model's results for the first rows of the data, whether the model is small, and the number of these rows."""

    results: Any
    small: bool
    rows: int


class _ModelFailed(DataError):
    """The model, which is the user's code, failed on the first rows."""


class Live:
    """A model of the notebook: a torch module, a Keras model or a function."""

    step = None

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def label(self) -> str:
        """The name of the model, in messages."""
        name: str = getattr(self._model, "__name__", None) or type(self._model).__name__
        return "a function" if name == "<lambda>" else name

    def load(self) -> Any:
        return self._model


@dataclass(frozen=True)
class Settings:
    """The arguments of predict(), which engine/predictions/api.py describes.

    Raise OptionsError or DataError if an argument is invalid.
    """

    model: Any
    inputs: Columns
    make_model: Callable[[], Any] | None = None
    returns: str | DataType | Mapping[str, str | DataType] | None = None
    which: Which = "latest"
    batch_size: int = 1024
    transform: Transform | None = None
    fill: Mapping[str, Any] | None = None
    raw: Mapping[str, tuple[Any, Sequence[int]]] | None = None
    dtype: Any = None
    on_error: OnError = "raise"
    probe: bool = True
    autocast: Autocast | torch.dtype | None = None
    key: str | Sequence[str] | None = None
    version: str | None = None
    refresh_s: float | None = None
    caller: Caller = "predict"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise OptionsError(f"batch_size={self.batch_size!r}: expected the number of rows in a batch, at least 1.")
        if self.on_error not in get_args(OnError):
            raise OptionsError(f'on_error={self.on_error!r}: expected "raise" or "null".')
        if self.autocast is not None and self.autocast_name is None:
            raise OptionsError(f'autocast={self.autocast!r}: expected "bfloat16" or "float16".')
        _check_name(self.version)
        if self.refresh_s is not None:
            self._check_refresh(self.refresh_s)
        if not self.groups:
            raise OptionsError(
                "inputs names no columns: name the columns that the model uses, as in inputs=['pixels']."
            )

    def _check_refresh(self, refresh_s: Any) -> None:
        if isinstance(refresh_s, bool) or not isinstance(refresh_s, int | float) or not 0 < refresh_s < math.inf:
            raise OptionsError(
                f"refresh_s={refresh_s!r}: expected a number of seconds greater than 0, as in refresh_s=5."
            )
        if self.which not in ("latest", "best"):
            raise OptionsError(
                f"refresh_s={refresh_s!r} looks for newer checkpoints, but which={self.which!r} selects a fixed one: "
                "leave one of the two out."
            )

    @functools.cached_property
    def groups(self) -> dict[str, Group]:
        """The columns of each input, by the input's name."""
        return groups_of(self.inputs, "inputs") or {}

    @functools.cached_property
    def stored(self) -> tuple[Store, Entry] | None:
        """The store and the checkpoint that is used at first, or None if the model itself was passed."""
        model = self.model
        if isinstance(model, str | os.PathLike):
            place = locate(model)
            if place.fs.isfile(place.path):
                raise _other_file(os.fspath(model)) or OptionsError(f"{place.written} is a file: {_PASSED}.")
            model = checkpoints(model)
        if not isinstance(model, Store):
            return None
        try:
            return model, model.find(self.which)
        except CheckpointError as error:
            raise _other_file(model.directory) or error from None

    @functools.cached_property
    def key_columns(self) -> tuple[str, ...]:
        """The columns whose values are the keys, if the checkpoint has a model for each key; otherwise ().

        Raise OptionsError if `key` does not name such columns.
        """
        if self.stored is None:
            return ()
        store, entry = self.stored
        by = store.key_columns(entry)
        given = (self.key,) if isinstance(self.key, str) else tuple(self.key or ())
        what = f"the checkpoint {entry.name} in {store.directory}"
        if not by:
            if not isinstance(self.key, str | None):
                raise OptionsError(f"key={self.key!r}: {what} has a single state, so key is the name of a value.")
            return ()
        if len(given) != len(by):
            columns = repr(by[0]) if len(by) == 1 else repr(list(by))
            raise OptionsError(
                f"{what} has a model for each value of {', '.join(by)}: name the column of the data that has "
                f"these values, as in key={columns}."
            )
        return given

    @property
    def used(self) -> tuple[str, ...]:
        """The columns of all inputs, and those of the keys."""
        inputs = (name for group in self.groups.values() for name in members_of(group))
        return tuple(dict.fromkeys((*inputs, *self.key_columns)))

    @property
    def by_name(self) -> bool:
        """Whether a model with several inputs gets them by their names."""
        return isinstance(self.inputs, Mapping)

    @property
    def autocast_name(self) -> Autocast | None:
        """The name of the type in which torch.autocast() computes, or None. Sending it does not require torch."""
        return next((name for name in get_args(Autocast) if str(self.autocast) in (name, f"torch.{name}")), None)

    def described(self, data: str) -> Described:
        """Return an object that makes arrays of rows. `data` is the name of the data in messages.

        Raise DataError if `fill` or `raw` is invalid, or names a column that is not an input.
        """
        making = making_of(self.fill, self.raw, self.used, "inputs", self.caller)
        keys = {key_input(number): name for number, name in enumerate(self.key_columns)}
        transform = self.transform
        if transform is not None and keys:
            transform = functools.partial(_beside, transform, tuple(keys))
        return Described(BatchLayout(data, {**self.groups, **keys}, making, dtype_of(self.dtype), transform))

    def source(self) -> ModelSource:
        """Return the source of the model. Checkpoints are looked up during this call.

        Raise OptionsError if `model` is neither a model nor a directory of checkpoints, or does not support `autocast`.
        """
        if self.stored is not None:
            model, entry = self.stored
            text = f"predicting with the checkpoint of step {entry.step:,} in {model.directory} ({entry.name})"
            by_key = bool(self.key_columns)
            key = self.key if isinstance(self.key, str) and not by_key else None
            if self.refresh_s is None:
                tell(text)
                return Saved(model, entry, self.make_model, key, by_key=by_key)
            tell(f"{text}, and with {'newer' if self.which == 'latest' else 'better'} ones as soon as they are found")
            which: Literal["latest", "best"] = "latest" if self.which == "latest" else "best"
            return Followed(model, entry, self.make_model, key, which, self.refresh_s, by_key=by_key)
        model = self.model
        for name in ("key", "version", "refresh_s"):
            if getattr(self, name) is not None:
                raise OptionsError(
                    f"{name}=… is only for checkpoints, but the model itself was passed: pass the directory of its "
                    f"checkpoints, as in predict(df, 'dbfs:/ml/run1', make_model, …), or leave {name} out."
                )
        if self.make_model is not None:
            raise OptionsError(
                "make_model is only for checkpoints, but the model itself was passed: leave make_model out."
            )
        if isinstance(model, Mapping):
            raise OptionsError(
                "the model is a dict, perhaps of weights: load them into a model with model.load_state_dict(…), and "
                "pass the model."
            )
        if not callable(model):
            raise OptionsError(f"the model is a `{type(model).__name__}`: {_PASSED}.")
        predictors.check_autocast(model, self.autocast_name)
        if predictors.is_torch(model) and any(parameter.device.type != "cpu" for parameter in model.parameters()):
            return Live(copy.deepcopy(model).cpu())  # the executors may have no GPU, or different ones
        return Live(model)

    def kinds(self) -> dict[str, Any]:
        """Return a dict from the predictions' columns to their types, or {} if the types are not given."""
        if not isinstance(self.returns, Mapping):
            return {} if self.returns is None else {outputs.DEFAULT_NAME: self.returns}
        if not self.returns:
            raise OptionsError("returns={}: name at least one column, as in returns={'score': 'float'}.")
        return {str(name): kind for name, kind in self.returns.items()}

    def with_version(self, kinds: Mapping[str, Any], kind: Any) -> dict[str, Any]:
        """Return the predictions' columns and the column of versions, which has the type `kind`, if there is one.

        Raise OptionsError if the model has an output of the same name.
        """
        if self.version is None:
            return dict(kinds)
        if self.version.lower() in {name.lower() for name in kinds}:
            raise OptionsError(
                f"version={self.version!r} is also the name of a column of predictions: give one of them another name."
            )
        return {**kinds, self.version: kind}

    def of_model(self, columns: Sequence[PredictedColumn]) -> tuple[PredictedColumn, ...]:
        """Return the columns that the model makes."""
        return tuple(output for output in columns if output.name != self.version)

    def probed(self, source: ModelSource, inputs: Described, rows: pa.RecordBatch) -> Probe | None:
        """Score the first rows in this process.

        With on_error="null", if these rows cannot be scored together, score the first row that can be scored alone.
        Return None if none of them can become arrays. Raise DataError if the model cannot score them.
        """
        load, problem = functools.cache(source.load), None
        alone = [rows.slice(at, 1) for at in range(len(rows))] if self.on_error == "null" else []
        for some in (rows, *alone):
            try:
                arrays = self._learned(inputs, some)
            except DataError as error:
                if not alone:
                    raise
                problem = problem or error
                continue
            try:
                return Probe(*self._scored(load(), arrays, len(some)), len(some))
            except _ModelFailed as error:
                problem = error if not isinstance(problem, _ModelFailed) else problem
        if isinstance(problem, _ModelFailed):
            raise problem
        return None

    def _learned(self, inputs: Described, rows: pa.RecordBatch) -> Batch:
        try:
            return inputs.learn(rows)
        except DataError:
            raise
        except Exception as error:  # `transform` is the user's code
            raise DataError(f"transform failed on {_first(len(rows))}: {error_text(error)}") from error

    def _scored(self, model: Any, arrays: Batch, rows: int) -> tuple[Any, bool]:
        """Return the model's results for some rows, and whether the model is small."""
        try:
            with predictors.borrowed(model):
                predict = predictors.predictor_of(model, by_name=self.by_name, autocast=self.autocast_name)
                small = predictors.is_torch(model) and predictors.is_small(predict, arrays, self.batch_size)
                return predict(arrays), small
        except (DataError, OptionsError):
            raise
        except CheckpointError as error:  # a key has no state
            raise _ModelFailed(str(error)) from error
        except Exception as error:  # the model is the user's code
            given = ", ".join(f"`{name}`: {outputs.described(array)}" for name, array in arrays.items())
            raise _ModelFailed(
                f"the model failed on {_first(rows)}: {error_text(error).rstrip('.')}. Its inputs were {given}."
                f"{self._side_by_side(model, arrays)}"
            ) from error

    def _side_by_side(self, model: Any, arrays: Batch) -> str:
        """Return how to pass columns of numbers as one array of shape [rows, columns], if that may be the problem."""
        single = [name for name, array in arrays.items() if array.ndim == 1]
        if not (predictors.is_model(model) and single) or self.transform is not None or self.caller == "estimator":
            return ""
        columns = [self.groups[name] for name in single]
        return f" For one array of shape [rows, {len(single)}], write inputs={{{single[0]!r}: {columns!r}}}."

    def scorer(
        self, source: ModelSource, inputs: Described, columns: Sequence[PredictedColumn], **more: Any
    ) -> dict[str, Any]:
        """Return the arguments of the Scorer that makes the `columns`."""
        return {
            "model": source,
            "inputs": inputs,
            "outputs": columns,
            "by_name": self.by_name,
            "autocast": self.autocast_name,
            "batch_size": self.batch_size,
            "on_error": self.on_error,
            "version": self.version,
            **more,
        }

    def check_new(self, columns: Sequence[PredictedColumn], names: Sequence[str], data: str, more: str = "") -> None:
        """Raise OptionsError if one of the `columns` has one of the `names` of the data's columns."""
        taken = {name.lower() for name in names}
        for output in columns:
            if output.name.lower() in taken:
                again = f"{output.name}_2"
                advice = f"the predictions another name, as in returns={{{again!r}: {output.written!r}}}"
                if self.caller == "estimator":
                    advice = f"the predictions another name, as in setOutputCols([{again!r}])"
                if output.name == self.version:
                    advice = f"the column of versions another name, as in version={again!r}"
                raise OptionsError(f"{data} already has a column `{output.name}`: give {advice}{more}.")


_PASSED = (
    "pass a torch module, a Keras model, a function that takes a dict of arrays (such as `lambda batch: "
    "model.predict(batch['x'])`), or a directory of checkpoints"
)
# How to load the files in which people save models, by the ends of their names.
_LOADED = {
    (
        ".pt",
        ".pth",
        ".bin",
        ".ckpt",
    ): "model.load_state_dict(torch.load({path!r})), or torch.load({path!r}) if the file has the whole model",
    (".safetensors",): "model.load_state_dict(safetensors.torch.load_file({path!r}))",
    (".keras", ".h5", ".hdf5"): "model = keras.models.load_model({path!r})",
    ("saved_model.pb",): "model = keras.models.load_model({folder!r})",
    (".pkl", ".pickle", ".joblib", ".onnx", ".json", ".ubj"): "a function that loads {path!r} and calls the model",
}


def _other_file(path: str) -> OptionsError | None:
    """Return the error for a file, or a directory with files, in which another package has saved a model."""
    place, folder = locate(path), path
    try:
        names = sorted(os.path.basename(str(name).rstrip("/")) for name in place.fs.ls(place.path, detail=False))
    except (OSError, ValueError):  # the directory does not exist
        return None
    for ends, how in _LOADED.items():
        name = next((name for name in names if name.endswith(ends)), None)
        if name is not None:
            if place.fs.isfile(place.path):
                reason, folder = f"{path} is not a directory of checkpoints", os.path.dirname(path)
            else:
                reason = f"{path} has no checkpoints that sparkring has saved, but it has the file `{name}`"
            advice = how.format(path=f"{folder.rstrip('/')}/{name}", folder=folder)
            return OptionsError(f"{reason}: load the model yourself, and pass it. For this file, use {advice}.")
    return None


def _beside(transform: Transform, keys: tuple[str, ...], batch: Batch) -> Mapping[str, Any]:
    """Call the user's transform with a batch without the arrays of keys, and return these beside its results."""
    results: Any = transform({name: array for name, array in batch.items() if name not in keys})
    return {**results, **{name: batch[name] for name in keys}} if isinstance(results, Mapping) else results


def _first(rows: int) -> str:
    return f"the first {counted(rows, 'row')}" if rows > 1 else "a row"


def _check_name(version: Any) -> None:
    if version is not None and not (isinstance(version, str) and version):
        raise OptionsError(f"version={version!r}: expected the name of a new column, as in version='step'.")
