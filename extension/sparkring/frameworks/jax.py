"""Sets the environment variables that tell JAX's processes where the coordinator is and which process each rank is.

JAX itself reads only the first of these variables. On the ranks, `worker/rank/jax_ring.py` makes
`jax.distributed.initialize()` use all of them.
"""

from __future__ import annotations

from sparkring.frameworks.base import Framework, Lesson, Start
from sparkring.runtime.world import World


class Jax(Framework):
    """Ranks that connect through the coordination service that JAX runs on rank 0."""

    lesson = Lesson(
        "jax",
        "ranks set up for jax.distributed: initialize() needs no arguments",
        """
        import jax
        jax.distributed.initialize()
        ranks = jax.sharding.Mesh(jax.devices(), ("ranks",))
        by_rank = jax.sharding.NamedSharding(ranks, jax.sharding.PartitionSpec("ranks"))
        batch = jax.make_array_from_process_local_data(by_rank, x[rank::size])
        loss, gradients = jax.jit(jax.value_and_grad(loss_of))(params, batch)
        """,
        "params, x, loss_of",
    )

    def environment(self, world: World, start: Start) -> dict[str, str]:
        interface = self.endpoints[world.rank].interface
        coordinator = self.endpoints[0].host_and_port
        variables = {
            "JAX_COORDINATOR_ADDRESS": coordinator,
            # Without this variable, the coordinator would listen on all network interfaces.
            "JAX_COORDINATOR_BIND_ADDRESS": coordinator,
            "JAX_NUM_PROCESSES": str(world.size),
            "JAX_PROCESS_ID": str(world.rank),
        }
        if interface:
            # As for torch: Gloo and NCCL would otherwise choose an interface that other ranks may not reach.
            variables["GLOO_SOCKET_IFNAME"] = variables["NCCL_SOCKET_IFNAME"] = interface
        return variables

    def defaults(self, world: World) -> dict[str, str]:
        # JAX 0.4 has no collectives on CPUs by default.
        return {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
