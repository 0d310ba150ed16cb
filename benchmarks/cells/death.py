"""Rank 1 notes the time and is killed, while the others sleep."""

import os
import signal
import time

rank = int(os.environ.get("HOROVOD_RANK") or os.environ["RANK"])
print("ready")
time.sleep(1.0)
if rank == 1:
    with open(os.environ["BENCHMARK_NOTE"], "w") as file:
        file.write(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
