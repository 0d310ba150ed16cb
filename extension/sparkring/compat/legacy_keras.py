"""Decides whether ranks use tf-keras as tf.keras.

Newer versions of TensorFlow come with Keras 3, and the package tf-keras provides Keras 2 for them. In these versions,
tf.keras is Keras 3 unless TF_USE_LEGACY_KERAS=1 is set, and horovod.tensorflow.keras takes its callbacks and optimizers
from tf.keras. So the ranks get this variable if the cell uses tf-keras. A notebook with Keras 3 models keeps Keras 3.
"""

from __future__ import annotations

import re
from collections.abc import Collection

VARIABLE = "TF_USE_LEGACY_KERAS"
NOTICE = f"the cell uses tf_keras, so the ranks get {VARIABLE}=1: tf.keras and Horovod's Keras are then Keras 2"
_IMPORTS = re.compile(r"^\s*(from|import)\s+tf_keras\b", re.MULTILINE)


def is_used(code: str, modules: Collection[str]) -> bool:
    """Return whether the code imports tf-keras or uses values from it, and uses no values from the package keras.

    `modules` are the packages of the values that the code uses.
    """
    return "keras" not in modules and ("tf_keras" in modules or _IMPORTS.search(code) is not None)
