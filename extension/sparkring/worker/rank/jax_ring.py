"""Makes `jax.distributed.initialize()` work without arguments on the ranks of %%jax.

JAX finds the number of processes and the number of this process only in environments that it knows, such as Slurm.
Here, it learns to find them in the variables that `frameworks/jax.py` sets. This module does not import JAX.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

from sparkring.runtime.world import world
from sparkring.worker.rank.imports import when_imported

_begun_early = False  # whether this module has called initialize(), and the user's code has not called it yet


def prepare() -> None:
    """Have JAX adapted as soon as it is imported."""
    when_imported("jax._src.clusters", _add_environment)
    when_imported("jax._src.distributed", _adapt_initialize)
    when_imported("jax._src.array", _initialize_before_arrays)
    for name in ("jaxlib._jax", "jaxlib.xla_extension"):  # the second is the name in older versions
        when_imported(name, _use_interface)


def _in_ring() -> bool:
    """Return whether the rank is running a cell of %%jax, or another request with this framework."""
    return "JAX_NUM_PROCESSES" in os.environ


def _add_environment(clusters: types.ModuleType) -> None:
    """Add the ranks of %%jax to the environments that JAX knows, before those in which the notebook may be running."""

    class Ranks(clusters.ClusterEnv):  # type: ignore[name-defined, misc]
        name = "sparkring"

        @classmethod
        def is_env_present(cls) -> bool:
            return _in_ring()

        @classmethod
        def get_coordinator_address(cls, *args: Any, **kwargs: Any) -> str:
            return os.environ["JAX_COORDINATOR_ADDRESS"]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["JAX_NUM_PROCESSES"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["JAX_PROCESS_ID"])

    known = clusters.ClusterEnv._cluster_types  # the class statement has added the class at the end
    known.remove(Ranks)
    known.insert(0, Ranks)


def _adapt_initialize(distributed: types.ModuleType) -> None:
    """Make initialize() use the rank's own GPUs and collectives on CPUs, and do nothing if it has been called early."""
    real = distributed.initialize

    @functools.wraps(real)
    def initialize(*args: Any, **kwargs: Any) -> None:
        global _begun_early
        if _begun_early:
            _begun_early = False
            return
        if _in_ring():
            _choose_collectives()
        own = own_gpus() if _in_ring() else []
        if own and len(args) < 4:  # local_device_ids is the fourth parameter
            kwargs.setdefault("local_device_ids", own)
        real(*args, **kwargs)

    distributed.initialize = initialize  # type: ignore[attr-defined]


def _choose_collectives() -> None:
    """Use the collectives on CPUs that the environment names, because JAX 0.4 does not read this variable itself."""
    config, name = sys.modules["jax._src.config"].config, "jax_cpu_collectives_implementation"
    chosen = os.environ.get(name.upper())
    if chosen and config.values.get(name) == "none":
        config.update(name, chosen)


def own_gpus() -> list[int]:
    """Return the numbers that CUDA gives to the rank's own GPUs; an empty list if it has none, or they are unknown."""
    own, visible = world().gpus, os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [int(address) for address in own if address.isdecimal()]
    names = [name.strip() for name in visible.split(",")]
    return [names.index(address) for address in own if address in names]


def _initialize_before_arrays(array: types.ModuleType) -> None:
    """Have JAX initialised before the first array from the notebook is rebuilt.

    JAX refuses initialize() once it has made an array, and the cell calls it only after its values have been rebuilt.
    """
    real = array._reconstruct_array

    @functools.wraps(real)
    def _reconstruct_array(*args: Any) -> Any:
        global _begun_early
        distributed = sys.modules["jax._src.distributed"]
        if _in_ring() and distributed.global_state.client is None and not _backends_are_up():
            distributed.initialize()
            _begun_early = True
        return real(*args)

    array._reconstruct_array = _reconstruct_array  # type: ignore[attr-defined]


def _backends_are_up() -> bool:
    return bool(sys.modules["jax._src.xla_bridge"].backends_are_initialized())


def _use_interface(extension: types.ModuleType) -> None:
    """Have Gloo use the network interface that leads to the other ranks, and not the address of the host's name."""
    real = getattr(extension, "make_gloo_tcp_collectives", None)
    if real is None:
        return

    def make_gloo_tcp_collectives(*args: Any, **kwargs: Any) -> Any:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        if _in_ring() and interface and len(args) < 2 and not kwargs.get("hostname"):
            kwargs.setdefault("interface", interface)
        return real(*args, **kwargs)

    extension.make_gloo_tcp_collectives = make_gloo_tcp_collectives  # type: ignore[attr-defined]
