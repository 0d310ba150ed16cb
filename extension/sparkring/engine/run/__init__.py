"""Carries out a run of a cell, from its options to its outcome: on new ranks or a warm gang, waiting for it or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkring.products import offer

if TYPE_CHECKING:
    from sparkring.capture.versions import show_versions as show_versions
    from sparkring.checkpointing.store import checkpoints as checkpoints
    from sparkring.data.parts import partitions as partitions
    from sparkring.data.shards import shards as shards
    from sparkring.data.tables import table as table
    from sparkring.data.watch import watch as watch
    from sparkring.engine.run.api import HorovodRunner as HorovodRunner
    from sparkring.engine.run.api import last_result as last_result
    from sparkring.engine.run.api import run as run
    from sparkring.engine.run.api import spark as spark
    from sparkring.engine.run.background import BackgroundRun as BackgroundRun
    from sparkring.engine.run.distributors import MirroredStrategyRunner as MirroredStrategyRunner
    from sparkring.engine.run.distributors import TorchDistributor as TorchDistributor
    from sparkring.engine.run.program_gang import gang as gang
    from sparkring.engine.run.result import RunResult as RunResult
    from sparkring.runtime.phase import phase as phase
    from sparkring.runtime.report import log as log
    from sparkring.runtime.report import log_to_driver as log_to_driver
    from sparkring.runtime.storage import local_path as local_path
    from sparkring.runtime.world import World as World
    from sparkring.runtime.world import world as world

offer(
    __name__,
    {
        "capture.versions": "show_versions",
        "checkpointing.store": "checkpoints",
        "data.parts": "partitions",
        "data.shards": "shards",
        "data.tables": "table",
        "data.watch": "watch",
        "engine.run.api": "HorovodRunner last_result run spark",
        "engine.run.background": "BackgroundRun",
        "engine.run.distributors": "MirroredStrategyRunner TorchDistributor",
        "engine.run.program_gang": "gang",
        "engine.run.result": "RunResult",
        "runtime.phase": "phase",
        "runtime.report": "log log_to_driver",
        "runtime.storage": "local_path",
        "runtime.world": "World world",
    },
    "launch gang history data checkpoints",
)
