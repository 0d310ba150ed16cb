"""The arguments and the results of a fit's ranks. Ranks import this module, so it does not need pyspark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparkring.errors import OptionsError
from sparkring.worker.model.inputs import reshaped

History = dict[str, list[float]]


@dataclass(frozen=True)
class Training:
    """The parameters of an estimator that the ranks need."""

    feature_cols: Sequence[str]
    label_cols: Sequence[str]
    sample_weight_col: str | None
    loss: Any
    loss_weights: Sequence[float] | None
    metrics: Sequence[Any]
    callbacks: Sequence[Any]
    epochs: int
    verbose: int
    train_steps_per_epoch: int | None
    validation_steps_per_epoch: int | None
    gradient_compression: Any
    random_seed: int | None


class TrainedModel(NamedTuple):
    """The result of rank 0: the weights in the form that the framework uses, and the metrics of each epoch by name."""

    weights: Any
    history: History


class Reshape:
    """Reshapes the rows of some columns: the `transform` of the data, in training and in prediction."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._shapes = dict(shapes)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        made = {name: reshaped(batch[name], shape, f"input_shapes: a row of `{name}`")
                for name, shape in self._shapes.items() if name in batch}  # fmt: skip
        return {**batch, **made}


def reshaping(names: Sequence[str], shapes: Sequence[Sequence[int]] | None) -> Reshape | None:
    """Return the transform for `input_shapes`. As in horovod.spark, a shape may begin with -1, for the rows."""
    if not shapes:
        return None
    rows = {name: tuple(shape) for name, shape in zip(names, shapes, strict=True)}
    return Reshape({name: shape[1:] if shape[:1] == (-1,) else shape for name, shape in rows.items()})


class TransformRows:
    """Calls the user's `transformation_fn` with each row of a batch: the `transform` of the data in training."""

    def __init__(self, change: Callable[[dict[str, Any]], dict[str, Any]], then: Reshape | None, who: str) -> None:
        self._change, self._then, self._who = change, then, who

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        rows = [self._row(dict(zip(batch, values, strict=True))) for values in zip(*batch.values(), strict=True)]
        changed = {name: np.stack([np.asarray(row[name]) for row in rows]) for name in batch}
        return changed if self._then is None else self._then(changed)

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        names = [*row]
        changed: object = self._change(row)
        missing = [name for name in names if name not in changed] if isinstance(changed, dict) else []
        if not isinstance(changed, dict) or missing:
            kind = f"a dict without {', '.join(missing)}" if missing else f"a `{type(changed).__name__}`"
            raise OptionsError(
                f"{self._who}: transformation_fn returned {kind}: it has to return a dict with {', '.join(names)}."
            )
        return changed


def transforming(
    change: Callable[[dict[str, Any]], dict[str, Any]] | None, then: Reshape | None, who: str
) -> TransformRows | Reshape | None:
    """Return the transform for `transformation_fn` and, after it, for `input_shapes`."""
    return then if change is None else TransformRows(change, then, who)
