"""Configures libraries on a rank if environment variables are not enough, but does not import any library."""

from __future__ import annotations

import functools
import os
import types

from sparkring.compat import horovod_autograph, horovod_keras_3
from sparkring.errors import SparkringError
from sparkring.worker.rank import jax_ring
from sparkring.worker.rank.imports import when_imported

# The modules that define Lightning's CPUAccelerator: for the Trainer and for Fabric, in the new and the old packages.
_LIGHTNING = (
    "lightning.pytorch.accelerators.cpu",
    "lightning.fabric.accelerators.cpu",
    "pytorch_lightning.accelerators.cpu",
    "lightning_fabric.accelerators.cpu",
)


@functools.cache
def prepare() -> None:
    """Configure each library as soon as it is imported. Only the first call has an effect."""
    when_imported("horovod.common.elastic", _start_no_notification_service)
    when_imported("horovod._keras", horovod_keras_3.adapt)
    when_imported("horovod._keras.callbacks", horovod_keras_3.adapt_callbacks)
    when_imported("horovod.tensorflow", horovod_autograph.adapt_tape)
    when_imported("horovod.tensorflow.util", horovod_autograph.adapt_subgraphs)
    when_imported("horovod.tensorflow.elastic", horovod_keras_3.adapt_elastic)
    jax_ring.prepare()
    for name in _LIGHTNING:
        when_imported(name, _count_ranks_as_devices)
    when_imported("torch.distributed.launcher.api", _refuse_launches)


def _start_no_notification_service(module: types.ModuleType) -> None:
    """Keep `@hvd.elastic.run` from starting the server that reports when hosts change.

    A ring of a fixed size does not need the server. The server would listen on all network interfaces, and unpickle
    anything that is signed with its key, which it sends to the rendezvous in clear text.
    """
    module.notification_manager.init = lambda *args, **kwargs: None


def _count_ranks_as_devices(module: types.ModuleType) -> None:
    """Make devices="auto" use every rank of this node, even on CPUs.

    Lightning itself counts one CPU device, so each rank would train alone, on all of the data.
    """
    accelerator = module.CPUAccelerator
    count_cpus = accelerator.auto_device_count

    def auto_device_count() -> int:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return int(os.environ["LOCAL_WORLD_SIZE"])
        return int(count_cpus())

    accelerator.auto_device_count = staticmethod(auto_device_count)


def _refuse_launches(module: types.ModuleType) -> None:
    """Refuse to start ranks from a rank, as Accelerate's notebook_launcher() would.

    Each rank would start a ring of its own, so the same training would run several times, or fail because all rings use
    the same port.
    """
    launch = module.elastic_launch.__call__

    @functools.wraps(launch)
    def launch_unless_on_a_ring(self: object, *args: object) -> object:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if "TORCHELASTIC_RUN_ID" in os.environ and size > 1:
            raise SparkringError(
                f"The cell already runs on {size} ranks. Call the training function itself, instead of passing it to "
                "notebook_launcher() or another launcher."
            )
        return launch(self, *args)

    module.elastic_launch.__call__ = launch_unless_on_a_ring
