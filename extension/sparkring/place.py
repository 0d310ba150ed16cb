"""A rank's place among the others, in the words of Horovod and MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# A NamedTuple, not a dataclass: every member imports this module at start-up, and
# importing `dataclasses` (it pulls in `inspect`) would be a third of that time.


class World(NamedTuple):
    """Where a rank stands: among all ranks, on its node, and across the nodes."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    node: str = "localhost"


_current = World()


def world() -> World:
    """This process's World. On the driver, and in any process that is no rank: rank 0 of 1."""
    return _current


def enter(place: World) -> None:
    """Make `place` this process's World; called once, when a rank comes up."""
    global _current
    _current = place


def place_ranks(nodes: Sequence[str], *, by_node: bool = True) -> list[World]:
    """Give each member its World from the node it runs on; `nodes[i]` is member i's node.

    Ranks on one node are neighbours, as under mpirun: nodes count in the order in which they
    first appear, members keep their order within a node. `cross_rank` counts the nodes that
    have a rank with the same `local_rank`, which is what Horovod's cross communicator is.
    Not `by_node`, member i is rank i, wherever it runs; the rest is the same.
    """
    members_of: dict[str, list[int]] = {}
    for member, node in enumerate(nodes):
        members_of.setdefault(node, []).append(member)
    placed: dict[int, World] = {}
    for node, members in members_of.items():
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
            )
    return [placed[member] for member in range(len(nodes))]
