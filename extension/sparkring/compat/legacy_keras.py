"""When ranks have to use tf-keras as tf.keras. tf-keras is Keras 2 for TensorFlow versions that come with Keras 3.

horovod.tensorflow.keras takes its callbacks and optimizers from tf.keras. In these versions, tf.keras is Keras 3 unless
TensorFlow is told otherwise. Ranks get the Keras that the cell uses: a notebook with models of Keras 3 keeps Keras 3.
"""

from __future__ import annotations

import re
from collections.abc import Collection

VARIABLE = "TF_USE_LEGACY_KERAS"
NOTICE = f"the cell uses tf_keras, so the ranks get {VARIABLE}=1: tf.keras and Horovod's Keras are then Keras 2"
_IMPORTS = re.compile(r"^\s*(from|import)\s+tf_keras\b", re.MULTILINE)


def is_used(code: str, modules: Collection[str]) -> bool:
    """Whether the code imports tf-keras or uses its values, and no values of keras; `modules`: the values' packages."""
    return "keras" not in modules and ("tf_keras" in modules or _IMPORTS.search(code) is not None)
