"""What libraries have to be told on a rank, and find in no environment variable. Nothing is imported for this."""

from __future__ import annotations

import os
import types

from sparkring.worker.imports import when_imported

# Lightning under both of its names, the Trainer's and Fabric's.
_LIGHTNING = (
    "lightning.pytorch.accelerators.cpu",
    "lightning.fabric.accelerators.cpu",
    "pytorch_lightning.accelerators.cpu",
    "lightning_fabric.accelerators.cpu",
)


def prepare() -> None:
    """Tell them as soon as the user's code imports them."""
    when_imported("horovod.common.elastic", _start_no_notification_service)
    for name in _LIGHTNING:
        when_imported(name, _count_ranks_as_devices)


def _start_no_notification_service(module: types.ModuleType) -> None:
    """Let `@hvd.elastic.run` begin without a server that waits for news of hosts: the ring stays as it is.

    That server would listen on all interfaces and unpickle what arrives. It checks a signature first, but its key
    would go to the rendezvous in clear text.
    """
    module.notification_manager.init = lambda *args, **kwargs: None


def _count_ranks_as_devices(module: types.ModuleType) -> None:
    """Make devices="auto" mean every rank of this node on CPUs, too, as it does on GPUs.

    Lightning counts one CPU, so that under torchrun each process would train by itself, on all of the data.
    """
    accelerator = module.CPUAccelerator
    count_cpus = accelerator.auto_device_count

    def auto_device_count() -> int:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return int(os.environ["LOCAL_WORLD_SIZE"])
        return int(count_cpus())

    accelerator.auto_device_count = staticmethod(auto_device_count)
