"""TensorFlow's own strategies: TF_CONFIG, which MultiWorkerMirroredStrategy reads.

Its form is that of tf.distribute.cluster_resolver.TFConfigClusterResolver's documentation.
"""

from __future__ import annotations

import json
from types import TracebackType

from sparkring.frameworks.base import Seat
from sparkring.place import World


class TensorFlow:
    """Ranks that are workers of one cluster, each with a server of its own on the port of its seat."""

    name = "tensorflow"

    def __init__(self, host: str, seats: list[Seat]) -> None:
        self._workers = [f"{seat.address}:{seat.port}" for seat in seats]

    def environment(self, world: World, seat: Seat) -> dict[str, str]:
        task = {"type": "worker", "index": world.rank}
        return {"TF_CONFIG": json.dumps({"cluster": {"worker": self._workers}, "task": task})}

    def __enter__(self) -> TensorFlow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
