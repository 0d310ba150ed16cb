"""`predict_udf(…)`: a UDF that calls a function of arrays as pyspark's predict_batch_udf() does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkring.cluster.session import find_cluster
from sparkring.engine.predictions.column import IDLE_S, returned, scoring_udf
from sparkring.engine.predictions.queries import watch
from sparkring.errors import DataError, OptionsError
from sparkring.runtime.kernel import tell
from sparkring.worker.model.inputs import AsTheyAre, reshaped
from sparkring.worker.model.predictors import judged

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

    Shapes = Sequence[list[int] | None] | Mapping[int, list[int]]


class Made:
    """The function that `make_predict_fn` returns, as a model. It is called with one array per parameter."""

    def __init__(
        self, make_predict_fn: Callable[[], Callable[..., Any]], shapes: Shapes | None, batch_size: int
    ) -> None:
        self._make, self._shapes, self._batch_size = make_predict_fn, shapes, batch_size

    step = None

    @property
    def label(self) -> str:
        return getattr(self._make, "__name__", "a function")

    def load(self) -> Callable[[dict[str, Any]], Any]:
        predict = self._make()
        expected = len(inspect.signature(predict).parameters)
        shapes = self._shapes
        if isinstance(shapes, Mapping):
            shapes = [shapes.get(index) for index in range(expected)]

        def call(columns: dict[str, Any]) -> Any:
            return predict(*_arguments(columns, expected, shapes))

        return judged(call, self._batch_size)


def predict_udf(
    make_predict_fn: Callable[[], Callable[..., Any]],
    *,
    return_type: DataType | str,
    batch_size: int,
    input_tensor_shapes: Shapes | None = None,
    idle_s: float = IDLE_S,
) -> Any:
    """Return a UDF that does what pyspark's predict_batch_udf() does, with one model process per machine or GPU.

        classify = sparkring.predict_udf(make_predict_fn, return_type="float", batch_size=1024)
        df.select(classify("a", "b")); spark.udf.register("classify", classify)

    make_predict_fn: a function that is called once in each model process. It loads the model, and returns a function of
        NumPy arrays.
    return_type: the Spark type of the predictions. A struct has a field for each array that the function returns.
    batch_size: the number of rows in each call to the function.
    input_tensor_shapes: the shape of a row of each input, or None for an input that is a number. These shapes are
        needed if there are columns of arrays.
    idle_s: how many seconds a process keeps the model while no task is using it.

    Raises OptionsError, LaunchError or CaptureError.
    """
    if batch_size < 1:
        raise OptionsError(f"batch_size={batch_size!r}: expected the number of rows in a batch, at least 1.")
    cluster = find_cluster(1, tell, here=False)
    session = cluster.session
    single = returned({"prediction": return_type}, session, struct=False)
    if single.kind.typeName() == "struct":
        fields = {field.name: field.dataType for field in single.kind.fields}
        single = returned(fields, session, struct=True)
    model = Made(make_predict_fn, input_tensor_shapes, batch_size)
    settings = {
        "model": model,
        "inputs": AsTheyAre(),
        "outputs": single.outputs,
        "by_name": False,
        "batch_size": batch_size,
        "on_error": "raise",
    }
    call = f"{model.label}, return_type={single.kind.simpleString()!r}, batch_size={batch_size}"
    report = watch(cluster, f"predict_udf with {model.label}", f"sparkring.predict_udf({call})")
    return scoring_udf(cluster, settings, single.kind, None, idle_s=idle_s, report=report)


def _arguments(columns: dict[str, Any], expected: int, shapes: Sequence[list[int] | None] | None) -> list[Any]:
    """Return the arguments of the function: an array for each column, or one array of all columns.

    The name of a column has a dot if the column is a field of a struct.
    """
    arrays = list(columns.values())
    if not shapes and any(array.ndim > 1 for array in arrays):
        raise DataError(
            "input_tensor_shapes=… is missing, and there are columns of arrays: pass the shape of a row of each input."
        )
    if expected == len(arrays) and expected > 1:
        if shapes and len(shapes) != expected:
            raise DataError(f"input_tensor_shapes has {len(shapes)} shapes, but the function takes {expected} arrays.")
        return [_shaped(array, shapes[at] if shapes else None) for at, array in enumerate(arrays)]
    if expected != 1:
        raise DataError(f"the function takes {expected} arrays, but the UDF was called with {len(arrays)} columns.")
    if shapes and len(shapes) != 1:
        raise DataError(f"input_tensor_shapes has {len(shapes)} shapes, but the function takes one array.")
    if len(arrays) > 1 and (any(array.ndim > 1 for array in arrays) or not all("." in name for name in columns)):
        raise DataError(
            f"the function takes one array, but the UDF was called with {len(arrays)} columns: combine them with "
            "array() or struct()."
        )
    combined = arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1)
    return [_shaped(combined, shapes[0] if shapes else None)]


def _shaped(array: Any, shape: list[int] | None) -> Any:
    return reshaped(array, shape, "input_tensor_shapes: a row") if shape else array
