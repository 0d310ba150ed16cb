"""sparkring runs a notebook cell as a ring of ranks.

    %load_ext sparkring

    %%horovod -n -2
    import horovod.tensorflow.keras as hvd
    hvd.init()

Each public name is imported from its module when it is first used. This keeps `import sparkring` fast on the driver and
on the ranks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("sparkring runs on Linux and macOS: on Windows, install it in WSL2 and run the notebook there.")

if TYPE_CHECKING:
    from sparkring.capture.versions import show_versions as show_versions
    from sparkring.checkpointing.store import checkpoints as checkpoints
    from sparkring.data.parts import partitions as partitions
    from sparkring.data.shards import shards as shards
    from sparkring.data.watch import watch as watch
    from sparkring.engine.foreach.plan import Plan as Plan
    from sparkring.engine.foreach.result import ForeachResult as ForeachResult
    from sparkring.engine.predictions.api import Predictions as Predictions
    from sparkring.engine.predictions.api import predict as predict
    from sparkring.engine.predictions.udf import predict_udf as predict_udf
    from sparkring.engine.run.api import HorovodRunner as HorovodRunner
    from sparkring.engine.run.api import foreach as foreach
    from sparkring.engine.run.api import last_result as last_result
    from sparkring.engine.run.api import run as run
    from sparkring.engine.run.api import spark as spark
    from sparkring.engine.run.background import BackgroundRun as BackgroundRun
    from sparkring.engine.run.distributors import MirroredStrategyRunner as MirroredStrategyRunner
    from sparkring.engine.run.distributors import TorchDistributor as TorchDistributor
    from sparkring.engine.run.program_gang import gang as gang
    from sparkring.engine.run.result import RunResult as RunResult
    from sparkring.engine.search.search import search as search
    from sparkring.engine.search.space import integer as integer
    from sparkring.engine.search.space import log_uniform as log_uniform
    from sparkring.engine.search.space import uniform as uniform
    from sparkring.engine.stream.run import StreamResult as StreamResult
    from sparkring.runtime.report import log as log
    from sparkring.runtime.report import log_to_driver as log_to_driver
    from sparkring.runtime.storage import local_path as local_path
    from sparkring.runtime.world import World as World
    from sparkring.runtime.world import world as world

__version__ = "0.2.0"
_NAMES = {
    "capture.versions": "show_versions",
    "checkpointing.store": "checkpoints",
    "data.parts": "partitions",
    "data.shards": "shards",
    "data.watch": "watch",
    "engine.run.api": "HorovodRunner foreach last_result run spark",
    "engine.run.background": "BackgroundRun",
    "engine.run.distributors": "MirroredStrategyRunner TorchDistributor",
    "engine.foreach.plan": "Plan",
    "engine.foreach.result": "ForeachResult",
    "engine.predictions.api": "Predictions predict",
    "engine.run.program_gang": "gang",
    "engine.run.result": "RunResult",
    "engine.search.search": "search",
    "engine.stream.run": "StreamResult",
    "engine.search.space": "integer log_uniform uniform",
    "engine.predictions.udf": "predict_udf",
    "runtime.report": "log log_to_driver",
    "runtime.storage": "local_path",
    "runtime.world": "World world",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted([*_HOMES.keys() - {"last_result"}, "load_ipython_extension"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sparkring.runtime.packages import require

    return getattr(require(f"{__name__}.{_HOMES[name]}", f"{__name__}.{name}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics and their completion, and make `import sparkdl` work. `%load_ext sparkring` calls this."""
    from sparkring.notebook import extension

    extension.load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Remove the magics, and end the runs and gangs that they have started. `%unload_ext sparkring` calls this."""
    from sparkring.notebook import extension

    extension.unload(ipython)
