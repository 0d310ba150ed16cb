"""The arguments of predict() about the model, its inputs and its predictions, for both DataFrames and files."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa

from sparkring.checkpointing.store import Store, Which, checkpoints
from sparkring.data.layout import Columns, Layout, Transform, groups_of, making_of
from sparkring.errors import DataError, OptionsError
from sparkring.inference import outputs, predictors
from sparkring.inference.inputs import Described
from sparkring.inference.outputs import Output
from sparkring.inference.predictors import Autocast
from sparkring.inference.scorer import OnError, Source, told
from sparkring.runtime.kernel import tell

if TYPE_CHECKING:
    import torch
    from pyspark.sql.types import DataType

PROBED_ROWS = 16


class Live:
    """A model of the notebook: a torch module, a Keras model or a function."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def told(self) -> str:
        """The name of the model, in messages."""
        found: str = getattr(self._model, "__name__", None) or type(self._model).__name__
        return "a function" if found == "<lambda>" else found

    def load(self) -> Any:
        return self._model


class Saved:
    """A model whose weights are in a checkpoint."""

    def __init__(self, directory: str, name: str, make_model: Callable[[], Any] | None) -> None:
        self._directory, self._name, self._make_model = directory, name, make_model

    @property
    def told(self) -> str:
        """The name of the model in messages: the checkpoint and its directory."""
        return f"{self._name} of {self._directory}"

    def load(self) -> Any:
        store = checkpoints(self._directory)
        if self._make_model is not None:
            model = self._make_model()
            if not predictors.is_model(model):
                raise OptionsError(
                    f"make_model returned a `{type(model).__name__}`: it must return a torch module or a Keras model."
                )
            store.load_model(model, self._name)
            return model
        state = store.load(self._name)
        found = [value for value in state.values() if predictors.is_model(value)]
        if len(found) != 1:
            raise OptionsError(
                f"the checkpoint {self._name} in {self._directory} has weights, but no configuration from which to "
                "make the model: pass a function that makes it, as in predict(df, directory, make_model, …)."
            )
        return found[0]


@dataclass(frozen=True)
class Settings:
    """The arguments of predict(), which engine/predict.py describes.

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

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise OptionsError(f"batch_size={self.batch_size!r}: expected the number of rows in a batch, at least 1.")
        if self.on_error not in get_args(OnError):
            raise OptionsError(f'on_error={self.on_error!r}: expected "raise" or "null".')
        if self.autocast is not None and self.autocast_name is None:
            raise OptionsError(f'autocast={self.autocast!r}: expected "bfloat16" or "float16".')
        if not self.groups:
            raise OptionsError(
                "inputs names no columns: name the columns that the model uses, as in inputs=['pixels']."
            )

    @functools.cached_property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The columns of each input, by the input's name."""
        return groups_of(self.inputs, "inputs") or {}

    @property
    def used(self) -> tuple[str, ...]:
        """The columns of all inputs."""
        return tuple(dict.fromkeys(name for members in self.groups.values() for name in members))

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
        making = making_of(self.fill, self.raw, self.used, "inputs")
        dtype = None if self.dtype is None else np.dtype(self.dtype)
        return Described(Layout(data, self.groups, making, dtype, self.transform))

    def source(self) -> Source:
        """Return the source of the model. Checkpoints are looked up during this call.

        Raise OptionsError if `model` is neither a model nor a directory of checkpoints, or does not support `autocast`.
        """
        model = checkpoints(self.model) if isinstance(self.model, str | os.PathLike) else self.model
        if isinstance(model, Store):
            entry = model.find(self.which)
            tell(f"predicting with the checkpoint of step {entry.step:,} in {model.directory} ({entry.name})")
            return Saved(model.directory, entry.name, self.make_model)
        if self.make_model is not None:
            raise OptionsError(
                "make_model is only for checkpoints, but the model itself was passed: leave make_model out."
            )
        if not callable(model):
            raise OptionsError(
                f"the model is a `{type(model).__name__}`: pass a torch module, a Keras model, a function that takes a "
                "dict of arrays (such as `lambda batch: model.predict(batch['x'])`), or a directory of checkpoints."
            )
        predictors.check_autocast(model, self.autocast_name)
        if predictors.is_torch(model) and any(each.device.type != "cpu" for each in model.parameters()):
            return Live(copy.deepcopy(model).cpu())  # the executors may have no GPU, or different ones
        return Live(model)

    def kinds(self) -> dict[str, Any]:
        """Return a dict from the predictions' columns to their types, or {} if the types are not given."""
        if not isinstance(self.returns, Mapping):
            return {} if self.returns is None else {outputs.DEFAULT_NAME: self.returns}
        if not self.returns:
            raise OptionsError("returns={}: name at least one column, as in returns={'score': 'float'}.")
        return {str(name): kind for name, kind in self.returns.items()}

    def probed(self, source: Source, inputs: Described, rows: pa.RecordBatch) -> tuple[Any, bool]:
        """Score the first rows in this process. Return the model's results, and whether the model is small."""
        try:
            arrays = inputs.learn(rows)
        except DataError:
            raise
        except Exception as error:  # `transform` is the user's code
            raise DataError(f"transform failed on the first {len(rows)} rows: {told(error)}") from error
        model = source.load()
        try:
            with predictors.borrowed(model):
                predict = predictors.predictor_of(model, by_name=self.by_name, autocast=self.autocast_name)
                small = predictors.is_torch(model) and predictors.is_small(predict, arrays, self.batch_size)
                return predict(arrays), small
        except (DataError, OptionsError):
            raise
        except Exception as error:  # the model is the user's code
            given = ", ".join(f"`{name}`: {outputs.described(array)}" for name, array in arrays.items())
            raise DataError(
                f"the model failed on the first {len(rows)} rows: {told(error)}. Its inputs were {given}."
            ) from error

    def scorer(self, source: Source, inputs: Described, found: Sequence[Output], **more: Any) -> dict[str, Any]:
        """Return the arguments of the Scorer that makes the columns in `found`."""
        return {
            "model": source,
            "inputs": inputs,
            "outputs": found,
            "by_name": self.by_name,
            "autocast": self.autocast_name,
            "batch_size": self.batch_size,
            "on_error": self.on_error,
            **more,
        }


def check_new(found: Sequence[Output], names: Sequence[str], data: str, more: str = "") -> None:
    """Raise OptionsError if a column in `found` has one of the `names` of the data's columns."""
    taken = {name.lower() for name in names}
    for output in found:
        if output.name.lower() in taken:
            raise OptionsError(
                f"{data} already has a column `{output.name}`: give the predictions another name, as in "
                f"returns={{'{output.name}_2': {output.written!r}}}{more}."
            )
