"""Keeps AutoGraph from converting Horovod's own functions, which saves about two seconds in each rank's first fit().

AutoGraph rewrites Python statements whose conditions are tensors. In the functions of Horovod 0.28, conditions are
plain Python values, and tf.cond() is called for conditions that are tensors, so these functions need no conversion. The
user's own functions are still converted. Tested with TensorFlow 2.13, 2.15 and 2.21.
"""

from __future__ import annotations

import inspect
import types
from typing import Any


def adapt_subgraphs(module: types.ModuleType) -> None:
    """Adapt `horovod.tensorflow.util`, from which Horovod's other modules import _make_subgraph()."""
    tf = module.tf

    def make_subgraph(function: Any) -> Any:
        compression = inspect.getclosurevars(function).nonlocals.get("compression")
        return tf.function(function, autograph=compression is not None and not _is_of_horovod(compression))

    module._make_subgraph = make_subgraph  # type: ignore[attr-defined]


def adapt_tape(module: types.ModuleType) -> None:
    """Adapt `horovod.tensorflow`, for tapes that are made in a tf.function. Such a tape does not use a subgraph."""
    keep = module.tf.autograph.experimental.do_not_convert
    make = module._make_allreduce_grads_fn

    def make_allreduce_grads_fn(
        name: str, device_dense: str, device_sparse: str, compression: Any, *args: Any, **kwargs: Any
    ) -> Any:
        reduce = make(name, device_dense, device_sparse, compression, *args, **kwargs)
        return keep(reduce) if inspect.isfunction(reduce) and _is_of_horovod(compression) else reduce

    module._make_allreduce_grads_fn = make_allreduce_grads_fn  # type: ignore[attr-defined]
    # Only the call that makes a tape is kept from conversion. The tape's methods are still converted, since gradient()
    # may call the user's functions.
    module.DistributedGradientTape = keep(module.DistributedGradientTape)  # type: ignore[attr-defined]


def _is_of_horovod(compression: Any) -> bool:
    """Return whether a compressor is Horovod's own. The methods of a user's compressor may need the conversion."""
    return getattr(compression, "__module__", None) == "horovod.tensorflow.compression"
