"""Marks for tests that need certain versions: the two sets of versions differ in Keras, Python and pyarrow."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest
from packaging.version import Version

KERAS = Version(metadata.version("keras"))

keras_2 = pytest.mark.skipif(KERAS.major != 2, reason=f"needs Keras 2; Keras {KERAS} is installed")
keras_3 = pytest.mark.skipif(KERAS.major != 3, reason=f"needs Keras 3; Keras {KERAS} is installed")
has_petastorm = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="Petastorm needs pyarrow below 15, which has no builds for Python 3.13"
)
