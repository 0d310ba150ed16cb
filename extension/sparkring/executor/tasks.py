"""Makes the functions that Spark's tasks call, on executors that need not have sparkring."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from sparkring.executor.orders import sent

Task = Callable[[Iterable[Any]], Iterator[Any]]
_Order = TypeVar("_Order")

# The modules whose functions and classes are sent by value, in addition to the module of the task's function.
_BY_VALUE = ("sparkring.executor", "sparkring.runtime.limits")


def task_for(function: Callable[[_Order, Iterable[Any]], Iterator[Any]], order: _Order) -> Task:
    """Return the function of a task, which calls function(order, rows) with the rows of the task's partition.

    `order` is a NamedTuple; the task gets a namespace with the same attributes. The code is sent by value, even if an
    executor has sparkring, because it may have another version. So a task can use only the standard library, packages
    that all executors have, constants, what is in the module of `function`, and what is in the modules above. The rows
    that a task returns must be of other classes.
    """
    fields = _by_value(function, order)

    def task(rows: Iterable[Any]) -> Iterator[Any]:
        return function(fields, rows)

    task.__name__ = function.__name__  # Spark shows this name
    return task


def batch_function_for(function: Callable[[_Order, Any, int], None], order: _Order) -> Callable[[Any, int], None]:
    """Return a function for foreachBatch() of Spark Connect, which calls function(order, frame, batch_id).

    It runs on the server, which need not have sparkring either: see task_for().
    """
    fields = _by_value(function, order)

    def batch_function(frame: Any, batch_id: int) -> None:
        function(fields, frame, batch_id)

    return batch_function


def _by_value(function: Callable[..., Any], order: Any) -> Any:
    """Let pyspark send a function's code, and return the order as it is sent."""
    from pyspark import cloudpickle

    for name in (*_BY_VALUE, function.__module__):
        cloudpickle.register_pickle_by_value(importlib.import_module(name))
    return sent(order)


def in_arrow(task: Task) -> Task:
    """Return a function for mapInArrow() that calls task(rows), and yields what the task yields, each value pickled."""

    def task_in_arrow(batches: Iterable[Any]) -> Iterator[Any]:
        import pickle

        import pyarrow

        for value in task([row for batch in batches for row in batch.column(0).to_pylist()]):
            values = pyarrow.array([pickle.dumps(value)], pyarrow.binary())
            yield pyarrow.RecordBatch.from_pydict({"value": values})

    return task_in_arrow
