"""Calls a training function on a rank in the scope of TensorFlow's MultiWorkerMirroredStrategy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sparkring.runtime.packages import require
from sparkring.runtime.world import world


def call_mirrored(train_fn: Callable[..., Any], use_custom_strategy: bool, /, **kwargs: Any) -> Any:
    """Call `train_fn(**kwargs)` in the scope of a MultiWorkerMirroredStrategy, and return its result.

    With `use_custom_strategy`, `train_fn` makes a strategy itself, and is called outside this scope.
    """
    tf = require("tensorflow", "MirroredStrategyRunner")
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and world().gpus:
        # The rank sees the GPUs of all ranks on its node, and a strategy would use all GPUs that TensorFlow sees.
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        tf.config.set_visible_devices([gpus[seen.index(gpu)] for gpu in world().gpus], "GPU")
    if use_custom_strategy:
        return train_fn(**kwargs)
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        return train_fn(**kwargs)
