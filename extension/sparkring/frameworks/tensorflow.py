"""TensorFlow's own strategies: TF_CONFIG, which MultiWorkerMirroredStrategy reads.

Its form is that of tf.distribute.cluster_resolver.TFConfigClusterResolver's documentation.
"""

from __future__ import annotations

import json

from sparkring.frameworks.base import Framework
from sparkring.place import World


class TensorFlow(Framework):
    """Ranks that are workers of one cluster, each with a server of its own on the port of its seat."""

    def environment(self, world: World) -> dict[str, str]:
        workers = [f"{each.address}:{each.port}" for each in self.seats]
        task = {"type": "worker", "index": world.rank}
        return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}
