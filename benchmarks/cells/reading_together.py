import time

import torch.distributed as dist

from sparkring import shards

dist.init_process_group("gloo")
data = shards(folder, 1024, columns={"x": [f"c{column}" for column in range(10)]})  # noqa: F821


def epochs(count: int) -> float:
    """Read `count` epochs, and return the rows per second."""
    begun, rows = time.perf_counter(), 0
    for _ in range(count):
        for x in data.as_numpy("x"):
            rows += len(x)
    return rows / (time.perf_counter() - begun)


epochs(1)
dist.barrier()
alone = epochs(10) if rank == 0 else 0.0  # noqa: F821
dist.barrier()
together = epochs(10)
dist.barrier()
dist.destroy_process_group()
(alone, together)  # noqa: B018
