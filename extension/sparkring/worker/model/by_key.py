"""A model for each key: each row is scored by the model of its own key, from a checkpoint of %%stream with --by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparkring.checkpointing.keyed import StatesByKey
from sparkring.data.keys import as_key
from sparkring.worker.model import outputs, predictors
from sparkring.worker.model.predictors import Autocast, Batch, Predict


def key_input(number: int) -> str:
    """Return the name of the model's input that has the values of the key column of this number."""
    return f"__key_{number}"


class ModelsByKey:
    """The models of all keys. `make(tree)` makes the model of a key from the tree of its state, when it is first used.

    The arrays of keys, which key_input() names, are beside the models' own inputs.
    """

    def __init__(self, states: StatesByKey, make: Callable[[dict[str, Any]], Any]) -> None:
        self._states, self._make = states, make

    def predictor(self, *, by_name: bool, autocast: Autocast | None) -> Predict:
        """Return the function that scores each row of a batch with the model of its key.

        It raises CheckpointError if a key has no state.
        """
        of_keys: dict[Any, Predict] = {}

        def of_key(key: Any) -> Predict:
            if key not in of_keys:
                model = predictors.settled(self._make(self._states.tree(key)))
                of_keys[key] = predictors.predictor_of(model, by_name=by_name, autocast=autocast)
            return of_keys[key]

        def predict(batch: Batch) -> Any:
            inputs = dict(batch)
            columns = [inputs.pop(key_input(number)).tolist() for number in range(len(self._states.by))]
            numbers: dict[Any, int] = {}
            keys = map(as_key, columns[0] if len(columns) == 1 else zip(*columns, strict=True))
            codes = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
            if len(numbers) == 1:
                (key,) = numbers
                return of_key(key)(inputs)
            order = np.argsort(codes, kind="stable")
            bounds = np.searchsorted(codes[order], np.arange(len(numbers) + 1))
            results = []
            for key, number in numbers.items():
                rows = order[bounds[number] : bounds[number + 1]]
                results.append(of_key(key)({name: array[rows] for name, array in inputs.items()}))
            return _joined(results, np.argsort(order))

        return predict


def _joined(results: list[Any], order: Any) -> Any:
    """Join the results for the keys, and put the rows in the order in which they were passed."""
    first = results[0]
    if isinstance(first, dict):
        return {name: _joined([result[name] for result in results], order) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined(list(parts), order) for parts in zip(*results, strict=True))
    return np.concatenate([outputs.as_array(result) for result in results])[order]
