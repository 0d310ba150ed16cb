"""`predict_udf(…)`: a UDF with the arguments of pyspark's predict_batch_udf()."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkring.engine.queries import watch
from sparkring.inference import udf
from sparkring.inference.predict import IDLE_S

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

    from sparkring.inference.udf import Shapes


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
    return udf.predict_udf(make_predict_fn, return_type, batch_size, input_tensor_shapes, idle_s=idle_s, watch=watch)
