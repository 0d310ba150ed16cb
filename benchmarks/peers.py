"""Runs the peers. Their ranks import functions from here by name, so this folder is on PYTHONPATH."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Ear, Measured, cell, new_array, notebook, spark_session


def horovod_on_spark(marker: str) -> Measured:
    import horovod.spark

    spark_session()
    ear, begun = Ear(marker), time.perf_counter()
    with printing_to(ear):
        horovod.spark.run(_as_cell, args=("tensorflow_line",), num_proc=2, stdout=ear, stderr=ear, verbose=0)
    return _seconds(ear, begun)


def horovod_estimator(folder: Path, **settings: Any) -> Any:
    """Return horovod.spark's KerasEstimator with these parameters, whose ranks are two Spark tasks.

    Horovod reads attributes of data sets that pyarrow has had only with use_legacy_dataset=True since version 11.
    Otherwise, fit() fails: 'pyarrow.lib.Schema' object has no attribute 'to_arrow_schema'.
    """
    from horovod.spark.common.backend import SparkBackend
    from horovod.spark.common.store import LocalStore
    from horovod.spark.keras import KerasEstimator
    from pyarrow.parquet import ParquetDataset

    class Store(LocalStore):  # type: ignore[misc]
        def get_parquet_dataset(self, path: str) -> ParquetDataset:
            return ParquetDataset(self.get_localized_path(path), filesystem=self.fs, use_legacy_dataset=True)

    return KerasEstimator(backend=SparkBackend(2, verbose=0), store=Store(str(folder / "store")), **settings)


def torch_distributor_sum(*, local: bool, connect: bool = False) -> Measured:
    from pyspark.ml.torch.distributor import TorchDistributor

    if not connect:
        spark_session()
    names: dict[str, Any] = {"__name__": "__main__"}  # so that the function is sent by value, as in a notebook
    exec(cell("torch_sum"), names)
    begun = time.perf_counter()
    with printing_to(Ear("nothing")):
        found = TorchDistributor(num_processes=2, local_mode=local, use_gpu=False).run(names["torch_sum"])
    seconds = time.perf_counter() - begun
    if found != [2.0] * 3:
        raise RuntimeError(f"the function returned {found}")
    return {"total": seconds}


def torch_distributor_death(note: str, *, local: bool, in_allreduce: bool) -> None:
    """Run a function in which a rank is killed, and return when the driver has the error."""
    from pyspark.ml.torch.distributor import TorchDistributor

    spark_session()
    function = _die_in_allreduce if in_allreduce else _die
    try:
        with printing_to(Ear("nothing")):
            TorchDistributor(num_processes=2, local_mode=local, use_gpu=False).run(function, note)
    except Exception:  # any error: only the time until it is raised is measured
        return
    raise RuntimeError("no error was raised")


class Engines:
    """Two engines of ipyparallel. The first use starts them, and close() ends them."""

    def __init__(self) -> None:
        self._cluster: Any = None

    @functools.cached_property
    def client(self) -> Any:
        import ipyparallel

        self._cluster = ipyparallel.Cluster(n=2, log_level=logging.ERROR)
        self._cluster.start_cluster_sync()
        client = self._cluster.connect_client_sync()
        client.wait_for_engines(2, interactive=False)
        return client

    def magic(self) -> str:
        """Start the engines, and return the magic with which a cell for them begins."""
        notebook()
        self.client.activate()
        return "%%px --stream"

    def array(self) -> Measured:
        """Push an array to both engines, pull one from the first, and return the MB/s of the push and of the pull."""
        engines, array = self.client[:], new_array()
        megabytes = array.nbytes / 1e6
        begun = time.perf_counter()
        engines.push({"sent": array}, block=True)
        pushed = time.perf_counter()
        engines.execute("made = sent + 1", block=True)
        pull = time.perf_counter()
        found = self.client[0].pull("made", block=True)
        pulled = time.perf_counter()
        if found[-1] != array[-1] + 1:
            raise RuntimeError(f"the pulled array ends with {found[-1]}")
        return {"push": megabytes / (pushed - begun), "pull": megabytes / (pulled - pull)}

    def close(self) -> None:
        if self._cluster is not None:
            self.client.close()
            self._cluster.stop_cluster_sync()


@contextlib.contextmanager
def printing_to(ear: Ear) -> Iterator[None]:
    """In this context, `ear` gets what a peer prints on the driver: its log, and the ranks' lines on both streams."""
    with contextlib.redirect_stdout(ear), contextlib.redirect_stderr(ear):
        logging.disable(logging.INFO)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _seconds(ear: Ear, begun: float) -> Measured:
    ended = time.perf_counter()
    if ear.at is None:
        raise RuntimeError("the expected line was not printed")
    return {"first": ear.at - begun, "total": ended - begun}


def _as_cell(name: str) -> None:
    exec(cell(name), {"__name__": "__main__"})


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
