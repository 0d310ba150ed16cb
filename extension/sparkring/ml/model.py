"""KerasModel and TorchModel: the models that `fit()` returns. `transform()` adds predictions to a DataFrame."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLWritable

from sparkring.data.layout import Spec
from sparkring.engine.predictions.column import spark_types
from sparkring.engine.predictions.dataframes import predict_frame
from sparkring.engine.predictions.settings import Settings
from sparkring.ml import keras, torch
from sparkring.ml.params import Columns
from sparkring.ml.saving import ModelReader, ModelWriter
from sparkring.ml.training import History, TrainedModel, reshaping
from sparkring.worker.model import outputs, predictors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_PROBED = 2  # rows; with a single row, an output of shape [1, n] could be a row or a column


class Fitted(Model, Columns, MLWritable, MLReadable):  # type: ignore[misc]
    """The base class of both estimators' models."""

    def __init__(self) -> None:
        super().__init__()
        self._given: Any = None
        self._trained: TrainedModel | None = None
        self._specs: dict[str, Spec] = {}
        self._model: Any = None
        self._history: History = {}
        self._making = threading.Lock()

    def _of(self, columns: Columns, given: Any, trained: TrainedModel, specs: Mapping[str, Spec]) -> Fitted:
        """Set the results of fit(). `given` is the estimator's model; `specs` describes the rows of its inputs."""
        self._set(
            feature_cols=columns.value("feature_cols"),
            label_cols=columns.value("label_cols"),
            output_cols=columns.outputs(),
        )
        if columns.value("input_shapes"):
            self._set(input_shapes=columns.value("input_shapes"))
        self._given, self._trained, self._specs, self._history = given, trained, dict(specs), trained.history
        return self

    @property
    def history(self) -> History:
        """The metrics of each epoch, by name. The names of validation metrics begin with `val_`."""
        return self._history

    def getHistory(self) -> History:
        """Return the metrics of each epoch, by name."""
        return self._history

    def getModel(self) -> Any:
        """Return the trained Keras model or torch module."""
        with self._making:
            if self._model is None:
                assert self._trained is not None
                self._model = self._made(self._given, self._trained.weights)
                self._trained = None
            return self._model

    def _made(self, given: Any, weights: Any) -> Any:
        """Return a model like `given`, the estimator's model, with these weights."""
        raise NotImplementedError

    def _rebuilt(self, made: Any) -> Any:
        """Return a model into which saved weights can be loaded. `made` is the object that ModelWriter has saved."""
        raise NotImplementedError

    def _transform(self, dataset: DataFrame) -> DataFrame:
        features = self.value("feature_cols")
        reshape = reshaping(features, self.value("input_shapes"))
        settings = Settings(
            self.getModel(), features, returns=self._returns(), transform=reshape, dtype="float32", caller="estimator"
        )
        return predict_frame(dataset, settings)

    def _returns(self) -> dict[str, DataType]:
        """Return the types of the predictions, found by scoring rows of zeros."""
        model = self.getModel()
        rows = {name: np.zeros((_PROBED, *spec.shape), spec.dtype) for name, spec in self._specs.items()}
        with predictors.borrowed(model):
            results = predictors.predictor_of(model, by_name=False)(rows)
        return spark_types(outputs.types_of(results, self.outputs(), _PROBED))

    def copy(self, extra: Any = None) -> Any:
        """Return a copy of this transformer with the same model. `extra` overrides parameters."""
        transformer = super().copy(extra)
        transformer._making = threading.Lock()
        return transformer

    def write(self) -> ModelWriter:
        """Return the writer. save(path) calls this method."""
        return ModelWriter(self)

    @classmethod
    def read(cls) -> ModelReader:
        """Return the reader. load(path) calls this method."""
        return ModelReader(cls)


class KerasModel(Fitted):
    """The transformer that KerasEstimator.fit() returns.

    transform() adds a column for each output of the model: by default, `<label>__output`. `history` holds the metrics
    of each epoch. save() writes the model's configuration and weights, without pickle.
    """

    def _made(self, given: Any, weights: Any) -> Any:
        model = keras.new_model(given, self._specs)
        model.set_weights(weights)
        return model

    def _rebuilt(self, made: Any) -> Any:
        return keras.new_model(made, self._specs)


class TorchModel(Fitted):
    """The transformer that TorchEstimator.fit() returns.

    transform() adds a column for each output of the module: by default, `<label>__output`. `history` holds the metrics
    of each epoch. save() writes the weights, and the name of the function that makes the module. If there is no such
    function, or if the function cannot be imported, save() writes a pickle instead of the name.
    """

    def _made(self, given: Any, weights: Any) -> Any:
        module = torch.new_model(given)
        module.load_state_dict(weights)
        return module.eval()

    def _rebuilt(self, made: Any) -> Any:
        return (torch.filled(made) if predictors.is_torch(made) else torch.new_model(made)).eval()
