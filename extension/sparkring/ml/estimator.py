"""KerasEstimator and TorchEstimator: `fit()` trains a model on a ring of ranks, and returns a model for pipelines."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLWritable

from sparkring.capture.calls import name_of
from sparkring.capture.content import Contents, digest
from sparkring.cluster.session import cluster_of
from sparkring.cluster.slots import slots
from sparkring.engine.run import warm_gang
from sparkring.engine.run.api import run_spec
from sparkring.engine.run.options import Options, restarts
from sparkring.engine.run.spec import Call, RunSpec
from sparkring.engine.run.warm_gang import WarmGang
from sparkring.errors import OptionsError
from sparkring.launchers import place_of
from sparkring.ml import keras, torch
from sparkring.ml.frames import FitRows, rows_of
from sparkring.ml.model import Fitted, KerasModel, TorchModel
from sparkring.ml.params import Fitting, of_horovod
from sparkring.ml.saving import EstimatorReader, EstimatorWriter
from sparkring.ml.training import TrainedModel, Training, reshaping, transforming
from sparkring.runtime.kernel import tell
from sparkring.runtime.storage import Location, locate
from sparkring.worker.model.predictors import is_keras

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkring.cluster.base import Cluster


class _RingEstimator(Estimator[Fitted], Fitting, MLWritable, MLReadable):  # type: ignore[misc]
    """The base class of both estimators. Each defines what its ranks import and call, and the class of its models."""

    framework: str
    imports: tuple[str, ...]
    train: Callable[..., TrainedModel | None]
    result: type[Fitted]

    def __init__(
        self,
        *,
        np: int | None = None,
        num_proc: int | None = None,
        model: Any = None,
        optimizer: Any = None,
        loss: Any = None,
        loss_weights: Sequence[float] | None = None,
        metrics: Sequence[Any] | None = None,
        feature_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] | None = None,
        sample_weight_col: str | None = None,
        validation: float | str | None = None,
        callbacks: Sequence[Any] | None = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int | None = None,
        shuffle: bool | None = None,
        random_seed: int | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        output_cols: Sequence[str] | None = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        transformation_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        gradient_compression: Any = None,
        use_gpu: bool | None = None,
        checkpoint_dir: str | None = None,
        max_restarts: int | None = None,
        **of_horovod: Any,
    ) -> None:
        given = locals().copy()
        super().__init__()
        apart = ("self", "__class__", "of_horovod")
        self.setParams(**{name: value for name, value in given.items() if name not in apart}, **of_horovod)

    def setParams(self, **given: Any) -> Any:
        """Set the parameters that are given and not None, and return this object. `np` is an alias for `num_proc`.

        Of horovod.spark's other parameters, those that only say how to read or where to store are not used, and a line
        of output says so. Raises OptionsError for one that would change the training.
        """
        if given.get("np") is not None:
            given["num_proc"] = given["np"]
        given.pop("np", None)
        return self._set(**of_horovod(type(self).__name__, given))

    def _fit(self, dataset: DataFrame) -> Fitted:
        self.check()
        self.check_columns(dataset)
        shapes, each_row = self.value("input_shapes"), self.value("transformation_fn")
        transform = transforming(each_row, reshaping(self.value("feature_cols"), shapes), type(self).__name__)
        rows = rows_of(dataset, self, transform)
        specs = {name: rows.train.spec[name] for name in self.value("feature_cols")}
        trained = self._trained(rows, cluster_of(dataset.sparkSession))
        return self.result()._of(self, self.value("model"), trained, specs)

    def _trained(self, rows: FitRows, cluster: Cluster) -> TrainedModel:
        np, checkpoint_dir = self.value("num_proc"), self.value("checkpoint_dir")
        parameters = _described({param.name: self.getOrDefault(param) for param in self.params})
        code = f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in parameters.items())}).fit(df)"
        with contextlib.ExitStack() as stack:
            directory = ""
            if checkpoint_dir:
                key = digest(parameters, _meaning(self), rows.version)[:16]
                directory = stack.enter_context(_unfinished(locate(checkpoint_dir), key))
                tell(f"checkpoints of this fit: {directory}")
            gang = None if directory else stack.enter_context(_warm_gang(np))
            if gang is None and not place_of(np).here:
                stack.enter_context(_room(np, cluster))
            options = Options(
                np=np,
                gpus=None if self.value("use_gpu") else 0,
                checkpoint_dir=directory,
                max_restarts=restarts(self.value("max_restarts"), directory),
                resume=bool(directory),  # the directory is only for this code and this data
            )
            values = {
                "training": Training(**{field.name: self.value(field.name) for field in fields(Training)}),
                "model": self.value("model"),
                "optimizer": self.value("optimizer"),
                "data": rows.train,
                "validation": rows.validation,
            }
            call = Call(type(self).train, (), values, self.imports)
            title = f"{type(self).__name__}.fit"
            trained: TrainedModel = run_spec(RunSpec(call, options, self.framework, title, code, gang)).value
        return trained

    def write(self) -> EstimatorWriter:
        """Return the writer. save(path) calls this method."""
        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> EstimatorReader:
        """Return the reader. load(path) calls this method."""
        return EstimatorReader(cls)


class KerasEstimator(_RingEstimator):
    """Trains a Keras model on a ring of Horovod ranks, as a stage of a Spark pipeline.

        est = KerasEstimator(np=2, model=make_model, optimizer="adam", loss="mse", feature_cols=["features"],
                             label_cols=["y"], batch_size=64, epochs=5, validation=0.1)
        fitted = Pipeline(stages=[assembler, est]).fit(train_df)

    The parameters have the same names as in horovod.spark.keras, and are pyspark Params: for each of them, there are
    methods such as setBatchSize() and getBatchSize(). fit() returns a KerasModel.

    np, num_proc: the number of ranks. With np=-2, they are two processes on this machine; with np=2, two Spark tasks.
    model: a Keras model, or a function that returns one.
    optimizer: a name, an optimizer, or a function that returns one.
    loss, loss_weights, metrics: as for compile().
    feature_cols: the columns that are the inputs of the model: numbers, vectors, or arrays of numbers.
    label_cols: the columns that are compared with the outputs of the model.
    sample_weight_col: the column with the weights of the rows.
    validation: the fraction of the rows to use for validation, or the name of a column that is true or > 0 in these
        rows.
    callbacks: Keras callbacks, which are called on every rank. They get metrics that are averages over the ranks.
    batch_size, val_batch_size: the number of rows in a batch of each rank.
    epochs, shuffle: as for fit().
    train_steps_per_epoch, validation_steps_per_epoch: the most steps of an epoch and of a validation.
    transformation_fn: a function that is called on the ranks with each row, a dict, and returns the row to train with.
    gradient_compression: how Horovod compresses gradients, as in hvd.Compression.fp16.
    random_seed: the seed for the weights, the shuffling and the split.
    verbose: as for fit(), but only rank 0 prints. The default is 0, because the panel shows the metrics.
    input_shapes: for each feature column, the shape of a row, as in [[8, 8, 1]]. A shape may begin with -1, which
        stands for the number of rows.
    output_cols: the columns for predictions; by default, <label>__output.
    use_gpu: whether ranks use GPUs, if there are any.
    checkpoint_dir: where to save a checkpoint after each epoch.
    max_restarts: how many times the run may restart after losing a rank.

    fit() raises OptionsError, DataError, CaptureError or CheckpointError before the launch. After that, it raises the
    same errors as run().
    """

    framework = "horovod"
    imports = ("tensorflow", "horovod.tensorflow.keras")
    train = staticmethod(keras.train)
    result = KerasModel


class TorchEstimator(_RingEstimator):
    """Trains a torch module with DistributedDataParallel, as a stage of a Spark pipeline.

        est = TorchEstimator(np=-2, model=make_model, optimizer=lambda params: torch.optim.Adam(params, 0.01),
                             loss=torch.nn.MSELoss(), feature_cols=["features"], label_cols=["y"], epochs=5)

    Parameters that are not listed here are as in KerasEstimator. fit() returns a TorchModel.

    model: a torch module, or a function that returns one. The module is called with a tensor for each feature column.
    optimizer: an optimizer, or a function that takes the parameters and returns one, such as torch.optim.Adam.
    loss: a function of an output and its label, the name of a function in torch.nn.functional, or a list with one of
        these for each label. A label with as many numbers as its output is converted to the output's shape and type;
        class numbers are converted to int64.
    metrics: functions of an output and its label.
    callbacks: functions that are called on every rank with the number of the epoch (from 1) and a dict of the epoch's
        metrics. If one of them returns True, the training ends.
    """

    framework = "torch"
    imports = ("torch",)
    train = staticmethod(torch.train)
    result = TorchModel

    def check(self) -> None:
        super().check()
        torch.check(self.value("loss"), self.value("optimizer"))
        if self.value("gradient_compression") is not None:
            raise OptionsError("TorchEstimator: gradient_compression is Horovod's; the ranks use torch.distributed.")


# ── Identifying a fit ────────────────────────────────────────────────────────────────────────────────────────────────

# These parameters do not affect the training.
_APART = {"checkpoint_dir", "max_restarts", "num_proc", "output_cols", "use_gpu", "verbose"}


def _described(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that determine a fit, as text that is the same in every kernel."""
    return {name: _text(value) for name, value in values.items() if name not in _APART and value not in (None, [])}


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) + "}"
    if is_keras(value):
        return f"{type(value).__name__}({[tuple(weight.shape) for weight in value.weights]})"
    if hasattr(value, "get_config") and not isinstance(value, type):
        return f"{type(value).__name__}({value.get_config()})"
    if isinstance(value, type) or type(value).__name__ in ("function", "partial", "builtin_function_or_method"):
        return name_of(value)
    text = " ".join(repr(value).split())
    return type(value).__name__ if " at 0x" in text else text


def _meaning(estimator: Fitting) -> str:
    """Return a digest of the functions and classes of the notebook that a fit uses, and of weights and settings."""
    namespace = getattr(sys.modules.get("__main__"), "__dict__", {})
    names = ("model", "optimizer", "loss", "metrics", "callbacks", "transformation_fn", "gradient_compression")
    used = {name: estimator.value(name) for name in names}
    return digest(Contents(namespace).parts(used)[0])


# ── Fits in threads ──────────────────────────────────────────────────────────────────────────────────────────────────

_changed = threading.Condition()
_in_use: set[str] = set()
_slots_in_use = 0


@contextlib.contextmanager
def _only_one(what: str) -> Iterator[None]:
    """Wait until no other fit of this process is using a directory or gang."""
    with _changed:
        _changed.wait_for(lambda: what not in _in_use)
        _in_use.add(what)
    try:
        yield
    finally:
        with _changed:
            _in_use.remove(what)
            _changed.notify_all()


@contextlib.contextmanager
def _unfinished(home: Location, key: str) -> Iterator[str]:
    """Yield the first directory for this key that is not marked as finished, and mark it after the block."""
    with _only_one((home / key).url):
        for number in itertools.count(1):
            mark = home / f"{key}-{number}.finished"
            if not mark.fs.exists(mark.path):
                break
        yield (home / f"{key}-{number}").written
        mark.fs.pipe_file(mark.path, b"")


@contextlib.contextmanager
def _warm_gang(np: int) -> Iterator[WarmGang | None]:
    """Yield the warm gang with this `np`, or None if there is none or a cell is using it. Wait for other fits first."""
    if not any(gang.wanted.np == np for gang in warm_gang.every()):
        yield None
        return
    with _only_one(f"the warm gang of {np}"):
        yield warm_gang.find(np, tell)


@contextlib.contextmanager
def _room(np: int, cluster: Cluster) -> Iterator[None]:
    """Wait until Spark has slots for `np` ranks besides those of other fits. A barrier stage would not wait for long.

    If Spark has fewer than `np` slots in all, wait only until no other fit is using slots. The launch then raises an
    error.
    """
    global _slots_in_use
    total = slots(cluster).total
    with _changed:
        _changed.wait_for(lambda: not _slots_in_use or _slots_in_use + np <= total)
        _slots_in_use += np
    try:
        yield
    finally:
        with _changed:
            _slots_in_use -= np
            _changed.notify_all()
