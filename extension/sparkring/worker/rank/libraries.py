"""Configures libraries on a rank if environment variables are not enough, but does not import any library."""

from __future__ import annotations

import functools
import os
import socket
import types
from typing import Any

from sparkring.compat import horovod_autograph, horovod_keras_3
from sparkring.errors import SparkringError
from sparkring.worker.rank import jax_ring
from sparkring.worker.rank.imports import when_imported

# Lightning's packages: for the Trainer and for Fabric, under the new and the old names.
_LIGHTNING = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")


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
    for package in _LIGHTNING:
        when_imported(f"{package}.accelerators.cpu", _count_ranks_as_devices)
        when_imported(f"{package}.strategies.launchers.multiprocessing", _refuse_spawned_ranks)
    when_imported("torch.distributed.rendezvous", _bind_store)
    when_imported("torch.distributed.launcher.api", _refuse_elastic_launches)
    for package in ("keras", "tf_keras"):
        when_imported(f"{package}.src.callbacks", _send_histories_without_model)


def _start_no_notification_service(module: types.ModuleType) -> None:
    """Keep `@hvd.elastic.run` from starting the server that reports when hosts change.

    A ring of a fixed size does not need the server. The server would listen on all network interfaces, and unpickle
    anything that is signed with its key, which it sends to the rendezvous in clear text.
    """
    module.notification_manager.init = lambda *args, **kwargs: None


def _send_histories_without_model(module: types.ModuleType) -> None:
    """Leave out the model when the History of Keras' fit() is pickled, for example as the value of a cell.

    The notebook needs the losses. A model whose optimizer Horovod wraps could not be rebuilt there, and the run would
    fail after the training.
    """

    def state(self: Any) -> dict[str, Any]:
        return {name: None if name in ("model", "_model") else value for name, value in vars(self).items()}

    module.History.__getstate__ = state


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


def _bind_store(module: types.ModuleType) -> None:
    """Have the store of `init_process_group()` listen on the address that the other ranks use.

    torch itself would have the store, which has no authentication, listen on all network interfaces.
    """
    real = module.TCPStore
    parameters = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant")

    def store(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        bound = _bound(given["host_name"], given["port"]) if given.get("is_master") else None
        if bound is not None:
            try:
                return real(**given, master_listen_fd=bound)
            except NotImplementedError:  # some versions of torch cannot do this with libuv
                os.close(bound)
        return real(**given)

    module.TCPStore = store  # type: ignore[attr-defined]


def _bound(host: str, port: int) -> int | None:
    """Return the descriptor of a socket on this address; None if torch must choose its address itself.

    A host's name may stand for another address on the other ranks. If this process already has a store on the port,
    torch uses it again.
    """
    if not port:
        return None
    try:
        numeric = "127.0.0.1" if host == "localhost" else host
        ((family, _, _, _, address),) = socket.getaddrinfo(
            numeric, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
        bound = socket.socket(family)
    except OSError:
        return None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        return None
    return bound.detach()


def _refuse_elastic_launches(module: types.ModuleType) -> None:
    """Refuse to start ranks from a rank with torch's elastic launch, as Accelerate's notebook_launcher() does."""
    _refuse_on_a_ring(
        getattr(module, "elastic_launch", None),
        "__call__",
        "Call the training function itself, instead of passing it to notebook_launcher() or another launcher.",
    )


def _refuse_spawned_ranks(module: types.ModuleType) -> None:
    """Refuse to start ranks from a rank, as Lightning's strategies "ddp_notebook" and "ddp_spawn" do."""
    _refuse_on_a_ring(
        getattr(module, "_MultiProcessingLauncher", None),
        "launch",
        'Use strategy="ddp" instead of "ddp_notebook" or "ddp_spawn", which start processes of their own.',
    )


def _refuse_on_a_ring(owner: type | None, name: str, advice: str) -> None:
    """Make the method `name` of `owner` raise SparkringError on a rank of a ring of torch.distributed.

    Each rank would start a ring of its own. So the same training would run several times, or it would fail because all
    rings use the same port.
    """
    if owner is None:  # another version of the library
        return
    method = getattr(owner, name)

    @functools.wraps(method)
    def method_unless_on_a_ring(*args: object, **kwargs: object) -> object:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if "TORCHELASTIC_RUN_ID" in os.environ and size > 1:
            raise SparkringError(f"The cell already runs on {size} ranks. {advice}")
        return method(*args, **kwargs)

    setattr(owner, name, method_unless_on_a_ring)
