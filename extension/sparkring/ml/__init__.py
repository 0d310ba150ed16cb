"""Estimators for Spark pipelines: they train Keras and PyTorch models on a ring of ranks.

    from sparkring.ml import KerasEstimator

Each name is imported when it is first used, because the package also contains the ranks' code, which must work without
pyspark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkring.ml.estimator import KerasEstimator as KerasEstimator
    from sparkring.ml.estimator import TorchEstimator as TorchEstimator
    from sparkring.ml.model import KerasModel as KerasModel
    from sparkring.ml.model import TorchModel as TorchModel

_HOMES = {"KerasEstimator": "estimator", "KerasModel": "model", "TorchEstimator": "estimator", "TorchModel": "model"}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    from sparkring.runtime.packages import require

    require("pyspark", f"sparkring.ml.{name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
