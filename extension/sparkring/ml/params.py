"""The parameters of the estimators and of their models. They have the same names as in horovod.spark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, BooleanType, DataType, NumericType

from sparkring.data.frames import check_names
from sparkring.errors import DataError, OptionsError
from sparkring.runtime.kernel import tell


def _names(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(TypeConverters.toListString(value))


def _shapes(value: Any) -> list[list[int]]:
    return [TypeConverters.toListInt(shape) for shape in value]


def _param(name: str, what: str, convert: Callable[[Any], Any] | None = None) -> Param[Any]:
    or_none = None if convert is None else lambda value: None if value is None else convert(value)
    return Param(Params._dummy(), name, what, typeConverter=or_none)


def camel(name: str) -> str:
    """Return a parameter's name as it is used in the names of methods: `batch_size` becomes `BatchSize`."""
    return "".join(part.capitalize() for part in name.split("_"))


def _setter(name: str) -> Callable[..., Any]:
    def set_it(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    set_it.__doc__ = f"Set the parameter `{name}`, and return this object."
    return set_it


def _getter(name: str) -> Callable[..., Any]:
    def get_it(self: Any) -> Any:
        return self.getOrDefault(name)

    get_it.__doc__ = f"Return the parameter `{name}`."
    return get_it


class Columns(Params):  # type: ignore[misc]
    """The parameters that estimators and their models have in common."""

    feature_cols = _param("feature_cols", "the columns that are the inputs of the model, in this order", _names)
    label_cols = _param("label_cols", "the columns that the outputs of the model are compared with", _names)
    output_cols = _param("output_cols", "the columns for predictions; default: <label>__output", _names)
    input_shapes = _param(
        "input_shapes",
        "the shape of each input of the model, as in [[-1, 8, 8, 1]]; a leading -1 stands for the number of rows",
        _shapes,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(feature_cols=None, label_cols=None, output_cols=None, input_shapes=None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add the methods that users of pyspark expect, such as setBatchSize() and getBatchSize()."""
        super().__init_subclass__(**kwargs)
        for name, value in [pair for base in cls.__mro__ for pair in vars(base).items()]:
            if isinstance(value, Param):
                for method, made in ((f"set{camel(name)}", _setter(name)), (f"get{camel(name)}", _getter(name))):
                    if not hasattr(cls, method):
                        made.__name__ = method
                        made.__qualname__ = f"{cls.__qualname__}.{method}"
                        setattr(cls, method, made)

    def value(self, name: str) -> Any:
        """Return the value of a parameter."""
        return self.getOrDefault(name)

    def outputs(self) -> list[str]:
        """Return the names of the columns for predictions."""
        return list(self.value("output_cols") or [f"{label}__output" for label in self.value("label_cols")])


# Parameters of horovod.spark's estimators that have no meaning here, and what to know about some of them.
NOT_USED = {
    **dict.fromkeys(("compress_sparse_cols", "continuous_cols", "categorical_cols", "data_module")),
    **dict.fromkeys(("inmemory_cache_all", "mp_start_method", "partitions_per_process", "reader_pool_type")),
    **dict.fromkeys(("shuffle_buffer_size", "train_reader_num_workers", "val_reader_num_workers")),
    "backend_env": "Instead of backend_env, set the variables in the notebook's os.environ",
    "checkpoint_callback": "Instead of checkpoint_callback, set checkpoint_dir",
    "custom_objects": "Models and their classes are sent with the fit",
    "run_id": "To continue a fit that was interrupted, set checkpoint_dir",
    "store": "Instead of store, set SPARKRING_CACHE for the cached rows, and checkpoint_dir for checkpoints",
}
# Parameters of horovod.spark's estimators that change the training, and what there is instead.
NOT_THERE = {
    "backward_passes_per_step": "use a larger batch_size",
    "label_shapes": "reshape the labels in the DataFrame or with transformation_fn",
    "loss_constructors": "pass the losses as `loss`",
    "train_minibatch_fn": "write the training loop in a cell, under %%torchrun",
    "transformation_edit_fields": "transformation_fn may change types and shapes without it",
    "transformation_removed_fields": "only feature_cols, label_cols and sample_weight_col are read",
}


def of_horovod(who: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters without those of horovod.spark that are not used here, which a line of output names.

    Raise OptionsError if one of them would change the training, and TypeError for a name that neither package has.
    """
    values = {name: value for name, value in given.items() if value is not None}
    if "backend" in values:
        processes = values.pop("backend").num_processes()
        if "num_proc" not in values and processes:
            values["num_proc"] = processes
    for name in values.keys() & NOT_THERE.keys():
        if (name, values[name]) != ("backward_passes_per_step", 1):
            raise OptionsError(f"{who}: {name} is not supported: {NOT_THERE[name]}.")
        del values[name]
    unused = sorted(values.keys() & NOT_USED.keys())
    if unused:
        tell(". ".join([f"{who} ignores {', '.join(unused)}", *filter(None, map(NOT_USED.get, unused))]))
    values = {name: value for name, value in values.items() if name not in NOT_USED}
    for name in values:
        if not isinstance(getattr(Fitting, name, None), Param):
            raise TypeError(f"{who}() got an unexpected keyword argument {name!r}")
    return values


class Fitting(Columns):
    """The parameters of the estimators."""

    num_proc = _param("num_proc", "the number of ranks: processes on this machine if < 0, Spark tasks if > 0")
    model = _param("model", "the model, or a function that returns it")
    optimizer = _param("optimizer", "the optimizer, or a function that returns it")
    loss = _param("loss", "the loss, or a list with one for each label")
    loss_weights = _param("loss_weights", "the weight of each label's loss", TypeConverters.toListFloat)
    metrics = _param("metrics", "the metrics of each epoch, besides the loss", list)
    sample_weight_col = _param("sample_weight_col", "the column with the weights of the rows", TypeConverters.toString)
    validation = _param("validation", "the fraction of the rows for validation, or a column that is > 0 in these rows")
    callbacks = _param("callbacks", "the callbacks for the training", list)
    batch_size = _param("batch_size", "the number of rows in a batch of each rank", TypeConverters.toInt)
    val_batch_size = _param("val_batch_size", "batch_size for validation; default: batch_size", TypeConverters.toInt)
    epochs = _param("epochs", "the number of epochs", TypeConverters.toInt)
    verbose = _param("verbose", "what rank 0 prints: with 0, nothing; with 1 or 2, each epoch", TypeConverters.toInt)
    shuffle = _param("shuffle", "whether to shuffle the rows in each epoch", TypeConverters.toBoolean)
    random_seed = _param("random_seed", "the seed for the weights, the shuffling and the split", TypeConverters.toInt)
    train_steps_per_epoch = _param(
        "train_steps_per_epoch", "the most steps of an epoch; default: all rows", TypeConverters.toInt
    )
    validation_steps_per_epoch = _param(
        "validation_steps_per_epoch", "the most steps of a validation; default: all rows", TypeConverters.toInt
    )
    transformation_fn = _param("transformation_fn", "a function that changes each row, a dict, before batching")
    gradient_compression = _param("gradient_compression", "Keras: how Horovod compresses gradients")
    use_gpu = _param("use_gpu", "whether ranks use GPUs, if there are any", TypeConverters.toBoolean)
    checkpoint_dir = _param("checkpoint_dir", "the directory from which an interrupted fit continues")
    max_restarts = _param("max_restarts", "how often a fit may restart after losing a rank", TypeConverters.toInt)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            num_proc=-1, model=None, optimizer=None, loss=None, loss_weights=None, metrics=[], sample_weight_col=None,
            validation=None, callbacks=[], batch_size=32, val_batch_size=None, epochs=1, verbose=0, shuffle=True,
            random_seed=None, use_gpu=True, checkpoint_dir=None, max_restarts=None, train_steps_per_epoch=None,
            validation_steps_per_epoch=None, transformation_fn=None, gradient_compression=None,
        )  # fmt: skip

    def check(self) -> None:
        """Raise OptionsError if a parameter is missing or cannot be used."""
        who = type(self).__name__
        if not isinstance(self.value("num_proc"), int) or self.value("num_proc") == 0:
            raise OptionsError(
                f"{who}: num_proc={self.value('num_proc')!r} (np for short): expected a number of ranks, such as -2 "
                "for two processes on this machine, or 2 for two Spark tasks."
            )
        columns = ("feature_cols=['features']", "label_cols=['label']")
        for example in ("model=make_model", "optimizer=make_optimizer", "loss='mse'", *columns):
            name = example.partition("=")[0]
            value = self.value(name)
            if value is None or (isinstance(value, list | tuple | str) and not value):
                raise OptionsError(f"{who}: {name} is missing: set it, as in {example}.")
        for name in ("batch_size", "val_batch_size", "epochs", "train_steps_per_epoch", "validation_steps_per_epoch"):
            number = self.value(name)
            if number is not None and number < 1:
                raise OptionsError(f"{who}: {name}={number}: expected at least 1.")
        if self.value("transformation_fn") is not None and not callable(self.value("transformation_fn")):
            raise OptionsError(f"{who}: transformation_fn: expected a function of a row, which is a dict.")
        features, labels = self.value("feature_cols"), self.value("label_cols")
        for name in ("output_cols", "loss", "loss_weights", "input_shapes"):
            value, wanted = self.value(name), features if name == "input_shapes" else labels
            allowed = {len(wanted), 1} if name == "loss" else {len(wanted)}  # one loss can be for all labels
            if isinstance(value, list | tuple) and len(value) not in allowed:
                raise OptionsError(
                    f"{who}: {name} has {len(value)} entries, but needs {len(wanted)}: one for each of "
                    f"{', '.join(wanted)}."
                )
        share = self.value("validation")
        if isinstance(share, bool) or not (share is None or isinstance(share, str) or 0 <= share < 1):
            raise OptionsError(
                f"{who}: validation={share!r}: expected a fraction of at least 0 and less than 1, or a column's name."
            )

    def check_columns(self, frame: DataFrame) -> None:
        """Raise DataError if a column is missing or does not hold numbers. The error names the column."""
        weight, validation = self.value("sample_weight_col"), self.value("validation")
        columns = {
            "feature_cols": self.value("feature_cols"),
            "label_cols": self.value("label_cols"),
            "sample_weight_col": [weight] if weight else [],
            "validation": [validation] if isinstance(validation, str) else [],
        }
        kinds = {field.name: field.dataType for field in frame.schema.fields}
        for param, names in columns.items():
            check_names(frame, names, f"{param}: ")
            for name in names:
                arrays = param in ("feature_cols", "label_cols")
                if not _is_numeric(kinds[name], arrays=arrays):
                    raise DataError(
                        f"{param}: column `{name}` is {kinds[name].simpleString()}, but the training needs numbers"
                        f"{', arrays of numbers or vectors' * arrays}: convert it, for example with StringIndexer, "
                        "VectorAssembler or cast()."
                    )


def _is_numeric(kind: DataType, *, arrays: bool) -> bool:
    if isinstance(kind, NumericType | BooleanType):
        return True
    if not arrays:
        return False
    return type(kind).__name__ == "VectorUDT" or (
        isinstance(kind, ArrayType) and _is_numeric(kind.elementType, arrays=True)
    )
