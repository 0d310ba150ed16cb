"""Configures libraries on a rank where environment variables cannot. It imports none of them."""

from __future__ import annotations

import os
import types

from sparkring.compat import horovod_keras_3
from sparkring.worker.rank.imports import when_imported

# Lightning's Trainer and Fabric, each in its old and its new package.
_LIGHTNING = (
    "lightning.pytorch.accelerators.cpu",
    "lightning.fabric.accelerators.cpu",
    "pytorch_lightning.accelerators.cpu",
    "lightning_fabric.accelerators.cpu",
)


def prepare() -> None:
    """Configure each library as soon as the user's code imports it."""
    when_imported("horovod.common.elastic", _start_no_notification_service)
    when_imported("horovod._keras", horovod_keras_3.adapt)
    when_imported("horovod._keras.callbacks", horovod_keras_3.adapt_callbacks)
    when_imported("horovod.tensorflow.elastic", horovod_keras_3.adapt_elastic)
    for name in _LIGHTNING:
        when_imported(name, _count_ranks_as_devices)


def _start_no_notification_service(module: types.ModuleType) -> None:
    """Let `@hvd.elastic.run` start without the server that reports changes of hosts: the ring has a fixed size.

    The server would listen on all interfaces and unpickle what arrives. It checks a signature first, but its key would
    go to the rendezvous in clear text.
    """
    module.notification_manager.init = lambda *args, **kwargs: None


def _count_ranks_as_devices(module: types.ModuleType) -> None:
    """Make devices="auto" use every rank of this node, even on CPUs.

    Lightning counts one CPU device, so under torchrun each process would train alone, on all of the data.
    """
    accelerator = module.CPUAccelerator
    count_cpus = accelerator.auto_device_count

    def auto_device_count() -> int:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return int(os.environ["LOCAL_WORLD_SIZE"])
        return int(count_cpus())

    accelerator.auto_device_count = staticmethod(auto_device_count)
