"""Configures libraries on a rank if environment variables are not enough, but does not import any library."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import socket
import sys
import time
import types
from typing import Any

from sparkring.compat import horovod_autograph, horovod_keras_3
from sparkring.errors import SparkringError
from sparkring.worker.rank import exchange, jax_ring
from sparkring.worker.rank.imports import when_imported

# Lightning's packages: for the Trainer and for Fabric, under the new and the old names.
_LIGHTNING = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")

_PETASTORM = "sparkring.data.petastorm.own_name"  # this product can be taken out of sparkring


@functools.cache
def prepare() -> None:
    """Configure each library as soon as it is imported. Only the first call has an effect."""
    when_imported("petastorm.reader", _accompany_petastorm)
    when_imported("horovod.common.elastic", _start_no_notification_service)
    when_imported("horovod._keras", horovod_keras_3.adapt)
    when_imported("horovod._keras.callbacks", horovod_keras_3.adapt_callbacks)
    when_imported("horovod.tensorflow", horovod_autograph.adapt_tape)
    when_imported("horovod.tensorflow.util", horovod_autograph.adapt_subgraphs)
    when_imported("horovod.tensorflow.elastic", horovod_keras_3.adapt_elastic)
    jax_ring.prepare()
    exchange.prepare()
    for package in _LIGHTNING:
        when_imported(f"{package}.accelerators.cpu", _count_ranks_as_devices)
        when_imported(f"{package}.strategies.launchers.multiprocessing", _refuse_spawned_ranks)
    when_imported("torch.distributed.rendezvous", _bind_store)
    when_imported("torch.distributed.launcher.api", _refuse_elastic_launches)
    when_imported("torch.multiprocessing.spawn", _refuse_processes_of_torch)
    when_imported("horovod.runner", _refuse_horovod_runs)
    when_imported("subprocess", _warn_of_launchers)
    for package in ("keras", "tf_keras"):
        when_imported(f"{package}.src.callbacks", _send_histories_without_model)


def begin() -> None:
    """Begin a request."""
    if (module := sys.modules.get(_PETASTORM)) is not None:
        module.begin()


def _accompany_petastorm(module: types.ModuleType) -> None:
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(_PETASTORM).prepare(module)


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
    """Have the store of `init_process_group()` listen on the address that the other ranks use, which wait for it.

    torch itself would have the store, which has no authentication, listen on all network interfaces. A rank that tried
    to connect before the store listens would try again only after half a second.
    """
    real = module.TCPStore
    parameters = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant")

    def store(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        if not given.get("is_master"):
            _wait_for_listener(given["host_name"], given["port"])
        bound = _bound(given["host_name"], given["port"]) if given.get("is_master") else None
        if bound is not None:
            try:
                return real(**given, master_listen_fd=bound)
            except NotImplementedError:  # some versions of torch cannot do this with libuv
                os.close(bound)
        return real(**given)

    module.TCPStore = store  # type: ignore[attr-defined]


def _wait_for_listener(host: str, port: int) -> None:
    """Return when the port accepts connections. If that takes long, or cannot be seen, leave the waiting to torch."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        except OSError:
            return
        else:
            return


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


_CALL_IT = "Call the training function itself, instead of passing it to {}."
# Programs that start a ring of their own. Words that begin with a dash or that are paths are not recognised.
_LAUNCHERS = re.compile(
    r"(?:^|[\s/])(torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed|horovodrun)\s"
)


def _refuse_elastic_launches(module: types.ModuleType) -> None:
    """Refuse to start ranks from a rank with torch's elastic launch, as Accelerate's notebook_launcher() does."""
    advice = _CALL_IT.format("notebook_launcher() or another launcher")
    _refuse_on_a_ring(getattr(module, "elastic_launch", None), "__call__", advice)


def _refuse_processes_of_torch(module: types.ModuleType) -> None:
    """Refuse torch.multiprocessing.spawn() and start_processes(), which Accelerate's debug_launcher() calls."""
    _refuse_on_a_ring(module, "start_processes", _CALL_IT.format("mp.spawn() or another launcher"), several=True)
    package: Any = sys.modules["torch.multiprocessing"]
    if hasattr(package, "start_processes"):  # otherwise it is being imported, and takes the new function afterwards
        package.start_processes = module.start_processes


def _refuse_horovod_runs(module: types.ModuleType) -> None:
    """Refuse horovod.run() on a rank."""
    _refuse_on_a_ring(module, "run", _CALL_IT.format("horovod.run()"))


def _refuse_spawned_ranks(module: types.ModuleType) -> None:
    """Refuse to start ranks from a rank, as Lightning's strategies "ddp_notebook" and "ddp_spawn" do."""
    _refuse_on_a_ring(
        getattr(module, "_MultiProcessingLauncher", None),
        "launch",
        'Use strategy="ddp" instead of "ddp_notebook" or "ddp_spawn", which start processes of their own.',
    )


def _warn_of_launchers(module: types.ModuleType) -> None:
    """Say so if a rank starts a program such as torchrun, which starts a ring of its own."""
    popen = module.Popen
    start = popen.__init__

    @functools.wraps(start)
    def init(self: Any, args: Any, *others: Any, **options: Any) -> None:
        size = _ring_size()
        if size > 1:
            words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
            launcher = _LAUNCHERS.search(f"{' '.join(map(os.fsdecode, words))} ")
            if launcher is not None:
                starts = f"each of the {size} ranks starts `{launcher[1]}`, which starts a ring of its own"
                print(f"sparkring: {starts}: use %run, or -n -1", file=sys.stderr)
        start(self, args, *others, **options)

    popen.__init__ = init


def _ring_size() -> int:
    """Return the number of ranks of this rank's ring of torch.distributed or Horovod; 1 if there is no such ring."""
    torch = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    return max(int(torch), int(os.environ.get("HOROVOD_SIZE", "1")))


def _refuse_on_a_ring(owner: Any, name: str, advice: str, *, several: bool = False) -> None:
    """Make the function or method `name` of `owner` raise SparkringError on a rank of a ring.

    Each rank would start a ring of its own. So the same training would run several times, or it would fail because all
    rings use the same port. With `several`, calls with nprocs=1 are allowed.
    """
    original = getattr(owner, name, None)
    if original is None:  # another version of the library
        return

    @functools.wraps(original)
    def unless_on_a_ring(*args: Any, **kwargs: Any) -> Any:
        size = _ring_size()
        if size > 1 and not (several and _number_of_processes(*args, **kwargs) == 1):
            raise SparkringError(f"The cell already runs on {size} ranks. {advice}")
        return original(*args, **kwargs)

    setattr(owner, name, unless_on_a_ring)


def _number_of_processes(fn: object, args: object = (), nprocs: int = 1, *_: object, **__: object) -> int:
    """Take the arguments of torch.multiprocessing.start_processes(), and return the number of processes."""
    return nprocs
