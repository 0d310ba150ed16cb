"""Sets the environment variables that torchrun would set, so that `init_process_group()` needs no arguments.

The variables are those of torch.distributed's "env://" initialisation and of torchrun's documentation.
TORCHELASTIC_RUN_ID tells libraries such as Lightning that the ranks have already been started.
"""

from __future__ import annotations

from typing import ClassVar

from sparkring.frameworks.base import Framework, Lesson, Start
from sparkring.runtime.world import World


class Torch(Framework):
    """Ranks that connect through a store that torch runs on rank 0."""

    lesson = Lesson(
        "torchrun",
        "ranks set up for torch.distributed, with the environment variables that torchrun sets",
        """
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        train(DistributedDataParallel(model))
        dist.destroy_process_group()
        """,
        "model, train",
    )
    makes_ring: ClassVar = {
        "torch": "call `torch.distributed.init_process_group()`, and train `DistributedDataParallel(model)` from "
        "torch.nn.parallel",
        "lightning": 'make the Trainer with `devices="auto"`, or leave `devices` out',
        "accelerate": "pass the model, the optimizer and the DataLoader to `accelerator.prepare()`",
    }

    def environment(self, world: World, start: Start) -> dict[str, str]:
        interface = self.endpoints[world.rank].interface
        variables = {
            "MASTER_ADDR": self.endpoints[0].address,
            "MASTER_PORT": str(self.endpoints[0].port),
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.size),
            "LOCAL_RANK": str(world.local_rank),
            "LOCAL_WORLD_SIZE": str(world.local_size),
            "GROUP_RANK": str(world.node_rank),
            "GROUP_WORLD_SIZE": str(world.nodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(world.rank),
            "ROLE_WORLD_SIZE": str(world.size),
            "TORCHELASTIC_RUN_ID": start.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(start.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(start.max_restarts),
            # Under torchrun, an agent runs the store through which the ranks connect. Here, rank 0 runs it.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        if interface:
            # Without these variables, Gloo would use the address that the host's name resolves to, which other ranks
            # may be unable to reach, and so would TensorPipe, which torch.distributed.rpc uses. NCCL would avoid the
            # loopback interface, through which local ranks connect.
            for library in ("GLOO_SOCKET", "NCCL_SOCKET", "TP_SOCKET"):
                variables[f"{library}_IFNAME"] = interface
        return variables

    def defaults(self, world: World) -> dict[str, str]:
        return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
