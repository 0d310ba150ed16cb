"""Training on a stream: a cell that a warm gang runs for each micro-batch.

sources       micro-batches from an iterator or a watched folder
spark_source  micro-batches from a streaming DataFrame
replay_log    the micro-batches that Spark considers done, but that no checkpoint contains yet
ring          runs the cell on the gang; if the gang is lost, starts another one and restores the last checkpoint
run           one run, from its spec to its result
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkring.products import offer

if TYPE_CHECKING:
    from sparkring.engine.stream.run import StreamResult as StreamResult

offer(
    __name__,
    {
        "engine.stream.run": "StreamResult",
    },
    "stream",
)
