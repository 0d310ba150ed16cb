"""Rank 1 notes the time and is killed, while the others wait for it in an allreduce."""

import os
import signal
import time

import horovod.torch as hvd
import torch

hvd.init()
hvd.allreduce(torch.ones(3))
if hvd.rank() == 1:
    time.sleep(1.0)
    with open(os.environ["BENCHMARK_NOTE"], "w") as file:
        file.write(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce(torch.ones(3))
