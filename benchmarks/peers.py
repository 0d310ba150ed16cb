"""What runs on the peers' ranks: imported by name there, so it lies on PYTHONPATH."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator

from harness import Ear, Measured, cell, spark_session


def horovod_on_spark(marker: str) -> Measured:
    import horovod.spark

    spark_session()
    ear, begun = Ear(marker), time.perf_counter()
    with _printing_to(ear):
        horovod.spark.run(_as_cell, args=("tensorflow_line",), num_proc=2, stdout=ear, stderr=ear, verbose=0)
    return _seconds(ear, begun)


def torch_distributor(marker: str, *, local: bool) -> Measured:
    from pyspark.ml.torch.distributor import TorchDistributor

    spark_session()
    ear, begun = Ear(marker), time.perf_counter()
    with _printing_to(ear):
        TorchDistributor(num_processes=2, local_mode=local, use_gpu=False).run(_torch_line)
    return _seconds(ear, begun)


def torch_distributor_death(note: str, *, local: bool, in_allreduce: bool) -> None:
    """Returns when the driver has the error."""
    from pyspark.ml.torch.distributor import TorchDistributor

    spark_session()
    function = _die_in_allreduce if in_allreduce else _die
    try:
        with _printing_to(Ear("nothing")):
            TorchDistributor(num_processes=2, local_mode=local, use_gpu=False).run(function, note)
    except Exception:  # of several kinds; that it came is what is measured
        return
    raise RuntimeError("no error came")


@contextlib.contextmanager
def _printing_to(ear: Ear) -> Iterator[None]:
    """What a peer prints on the driver goes to `ear`: ranks' lines to either stream, and its own log."""
    with contextlib.redirect_stdout(ear), contextlib.redirect_stderr(ear):
        logging.disable(logging.INFO)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _seconds(ear: Ear, begun: float) -> Measured:
    ended = time.perf_counter()
    if ear.at is None:
        raise RuntimeError("its line did not come")
    return {"first": ear.at - begun, "total": ended - begun}


def _as_cell(name: str) -> None:
    exec(cell(name), {"__name__": "__main__"})


def _torch_line() -> None:
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    print("hello from rank", torch.distributed.get_rank(), flush=True)
    torch.distributed.destroy_process_group()


def _die(note: str) -> None:
    os.environ["BENCHMARK_NOTE"] = note
    _as_cell("death")


def _die_in_allreduce(note: str) -> None:
    import torch
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    torch.distributed.all_reduce(torch.ones(3))
    if torch.distributed.get_rank() == 1:
        time.sleep(1.0)
        with open(note, "w") as file:
            file.write(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.all_reduce(torch.ones(3))
