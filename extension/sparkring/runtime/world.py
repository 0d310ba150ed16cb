"""A rank's place among the others, in the terms of Horovod and MPI."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

# Every member imports this module at start-up. Importing `dataclasses`, which imports `inspect`, would take a third of
# the start-up time, so World is a NamedTuple. `from __future__ import annotations` would turn annotations into
# strings, and typing would have to compile each string.


_Gpu = TypeVar("_Gpu")


class World(NamedTuple):
    """The position of a rank among all ranks and on its node, and the position of its node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    node: str = "localhost"
    gpus: tuple[str, ...] = ()  # the GPUs assigned to this rank, written as in CUDA_VISIBLE_DEVICES
    node_rank: int = 0  # the node's number among all nodes, even those that have no rank with this `local_rank`
    nodes: int = 1


_current = World()


def world() -> World:
    """Return this process's World. A process that is not a rank, such as the driver, is rank 0 of 1."""
    return _current


def enter(place: World) -> None:
    """Make `place` this process's World. Each rank calls this once, when it starts."""
    global _current
    _current = place


def place_ranks(nodes: Sequence[str], gpus: Sequence[Sequence[str]] = (), *, by_node: bool = True) -> list[World]:
    """Return the World of each member. `nodes[i]` is the node that member i runs on, and `gpus[i]` are its GPUs.

    Ranks on one node are consecutive, as under mpirun: nodes are numbered in the order in which they first appear, and
    members keep their order within a node. `cross_rank` counts the nodes that have a rank with the same `local_rank`,
    as Horovod's cross communicator does. If `by_node` is false, member i is rank i, whichever node it runs on.
    """
    members_of: dict[str, list[int]] = {}
    for member, node in enumerate(nodes):
        members_of.setdefault(node, []).append(member)
    placed: dict[int, World] = {}
    for node_rank, (node, members) in enumerate(members_of.items()):
        for local_rank, member in enumerate(members):
            peers = [other for other in members_of if len(members_of[other]) > local_rank]
            placed[member] = World(
                rank=len(placed) if by_node else member,
                size=len(nodes),
                local_rank=local_rank,
                local_size=len(members),
                cross_rank=peers.index(node),
                cross_size=len(peers),
                node=node,
                gpus=tuple(gpus[member]) if gpus else (),
                node_rank=node_rank,
                nodes=len(members_of),
            )
    return [placed[member] for member in range(len(nodes))]


def share_gpus(gpus: Sequence[_Gpu], ranks: int, per_rank: int) -> list[tuple[_Gpu, ...]]:
    """Divide a node's GPUs among its ranks: the first `per_rank` are for local rank 0, and so on."""
    return [tuple(gpus[rank * per_rank : (rank + 1) * per_rank]) for rank in range(ranks)]


def is_mig(address: str) -> bool:
    """Return whether the address is that of an instance of a GPU that MIG divides."""
    return address.startswith("MIG-")


def usable_gpus(nodes: Sequence[str], gpus: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the GPUs that each member can use of those that it was given. Member i runs on `nodes[i]`.

    A CUDA process can use either whole GPUs or a single MIG instance. So a member that was given whole GPUs uses only
    these. Otherwise, it uses one of its instances, if possible one that no other member on its node uses.
    """
    usable: list[tuple[str, ...]] = []
    taken: set[tuple[str, str]] = set()  # nodes and addresses
    for node, given in zip(nodes, gpus, strict=True):
        own = tuple(address for address in given if not is_mig(address))
        if given and not own:
            free = (address for address in given if (node, address) not in taken)
            own = (next(free, given[0]),)
        taken.update((node, address) for address in own)
        usable.append(own)
    return usable


def gpu_environments(worlds: Sequence[World]) -> list[dict[str, str]]:
    """Return, for each rank, the environment variables that tell CUDA which GPUs the rank sees.

    Each rank sees the GPUs of all ranks on its node, in the order of local ranks, so that NCCL can copy between GPUs.
    If each rank has one GPU, the GPU's number is the rank's local rank, as code for horovodrun and torchrun expects.
    A GPU that tasks share is listed once, because CUDA does not accept an address twice.

    If a rank on the node has a MIG instance, each rank on this node sees only its own GPUs, because CUDA would show
    a process only the first instance of a list.
    """
    seen: dict[str, dict[str, None]] = {}
    for world in sorted(worlds):  # sorted by rank, and so, on each node, also by local rank
        seen.setdefault(world.node, {}).update(dict.fromkeys(world.gpus))
    divided = {node for node, addresses in seen.items() if any(map(is_mig, addresses))}
    visible = (world.gpus if world.node in divided else seen[world.node] for world in worlds)
    return [gpu_environment(addresses) for addresses in visible]


def gpu_environment(addresses: Iterable[str]) -> dict[str, str]:
    """Return the environment variables with which CUDA shows only these GPUs, in this order."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(addresses)}
