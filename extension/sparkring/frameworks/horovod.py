"""Runs Horovod without horovodrun: sets the variables that its Gloo controller reads.

The variables are those of Horovod 0.28 (horovod/common/gloo/gloo_context.cc). The ranks find each other through
worker/rank/rendezvous.py.
"""

from __future__ import annotations

from typing import ClassVar

from sparkring.frameworks.base import Framework, Lesson, Start, Timeline
from sparkring.runtime.world import World

# Gloo's default is 30 s. The timeout applies to hvd.init(), too: the last rank must call hvd.init() at most this long
# after the first rank. If a rank is lost, sparkring ends the gang, so no rank waits this long for it.
GLOO_TIMEOUT_S = 600


class Horovod(Framework):
    """A ring of Horovod ranks over Gloo."""

    lesson = Lesson(
        "horovod",
        "a ring of Horovod ranks",
        """
        import horovod.tensorflow.keras as hvd
        hvd.init()
        print("rank", hvd.rank(), "of", hvd.size())
        model.fit(x[rank::size], y[rank::size], callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        """,
        "model, x, y",
    )
    # Only rank 0 writes the file, but the ring hangs unless the variable is set on all ranks. The timeline should show
    # when each rank was ready for a collective. Horovod leaves this out if its cache is on, so the cache is turned off.
    timeline = Timeline("HOROVOD_TIMELINE", {"HOROVOD_CACHE_CAPACITY": "0"})
    makes_ring: ClassVar = {
        "torch": "after `import horovod.torch as hvd`, call `hvd.init()`, train with "
        "`hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())`, and first call "
        "`hvd.broadcast_parameters(model.state_dict(), 0)`",
        "keras": "after `import horovod.tensorflow.keras as hvd`, call `hvd.init()`, compile the model with "
        "`hvd.DistributedOptimizer(optimizer)`, and fit with `hvd.callbacks.BroadcastGlobalVariablesCallback(0)`",
    }

    def environment(self, world: World, start: Start) -> dict[str, str]:
        interface = self.endpoints[world.rank].interface
        variables = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",  # each rank asks its own store, and sets the port
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT_S),
            "HOROVOD_HOSTNAME": world.node,
            "HOROVOD_RANK": str(world.rank),
            "HOROVOD_SIZE": str(world.size),
            "HOROVOD_LOCAL_RANK": str(world.local_rank),
            "HOROVOD_LOCAL_SIZE": str(world.local_size),
            "HOROVOD_CROSS_RANK": str(world.cross_rank),
            "HOROVOD_CROSS_SIZE": str(world.cross_size),
        }
        if interface:
            variables["HOROVOD_GLOO_IFACE"] = interface
        return variables

    def defaults(self, world: World) -> dict[str, str]:
        interface = self.endpoints[world.rank].interface
        return {"NCCL_SOCKET_IFNAME": interface} if interface else {}
