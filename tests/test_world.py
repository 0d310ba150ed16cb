"""Tests of the numbers of ranks: on their node, among all ranks, and across the nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkring.runtime.world import World, gpu_environments, place_ranks, share_gpus, usable_gpus, world


def test_two_nodes():
    """Ranks on one node have successive numbers, in the order in which nodes and members first appear."""
    placed = place_ranks(["b", "a", "b"])
    assert placed[0] == World(0, 3, local_rank=0, local_size=2, cross_rank=0, cross_size=2, node="b", nodes=2)
    assert placed[2] == World(1, 3, local_rank=1, local_size=2, cross_rank=0, cross_size=1, node="b", nodes=2)
    assert placed[1] == World(
        2, 3, local_rank=0, local_size=1, cross_rank=1, cross_size=2, node="a", node_rank=1, nodes=2
    )


def test_the_driver_is_rank_0_of_1():
    """A process that is not a rank has a World, too."""
    assert world() == World(0, 1)


def test_members_in_their_own_order():
    """With by_node=False, rank i is member i; the other numbers do not change."""
    nodes = ["a", "b", "a"]
    placed = place_ranks(nodes, by_node=False)
    assert [place.rank for place in placed] == [0, 1, 2]
    assert [place._replace(rank=0) for place in placed] == [place._replace(rank=0) for place in place_ranks(nodes)]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_places_are_complete_and_agree(nodes):
    """Every rank, every local rank of a node and every cross rank of a row exists exactly once."""
    placed = place_ranks(nodes)
    assert sorted(place.rank for place in placed) == list(range(len(nodes)))
    assert [place.node for place in placed] == nodes
    order = list(dict.fromkeys(nodes))
    for node in order:
        here = sorted((place for place in placed if place.node == node), key=lambda place: place.rank)
        assert [place.local_rank for place in here] == list(range(nodes.count(node)))
        assert {place.local_size for place in here} == {nodes.count(node)}
        assert [place.rank for place in here] == list(range(here[0].rank, here[0].rank + len(here)))
        assert {(place.node_rank, place.nodes) for place in here} == {(order.index(node), len(order))}
    for row in {place.local_rank for place in placed}:
        across = sorted((place for place in placed if place.local_rank == row), key=lambda place: place.cross_rank)
        assert [place.cross_rank for place in across] == list(range(len(across)))
        assert {place.cross_size for place in across} == {len(across)}


@given(st.integers(1, 9), st.integers(0, 4), st.integers(0, 3))
def test_each_rank_gets_the_next_gpus(ranks, each, more):
    """Each rank gets the same number of GPUs, in order. No GPU is given to two ranks, and spare GPUs are left over."""
    addresses = [str(index) for index in range(ranks * each + more)]
    shared = share_gpus(addresses, ranks, each)
    assert [len(own) for own in shared] == [each] * ranks
    assert [address for own in shared for address in own] == addresses[: ranks * each]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.integers(0, 3))
def test_every_rank_finds_its_gpus_by_its_local_rank(nodes, each):
    """If each rank has K GPUs, local rank r's GPUs begin at index r × K of the GPUs that the node's ranks see."""
    gpus = [
        [f"{node}{nodes[:member].count(node) * each + n}" for n in range(each)] for member, node in enumerate(nodes)
    ]
    placed = place_ranks(nodes, usable_gpus(nodes, gpus))
    for member, (place, seen) in enumerate(zip(placed, gpu_environments(placed), strict=True)):
        assert place.gpus == tuple(gpus[member])
        visible = seen["CUDA_VISIBLE_DEVICES"].split(",") if each else []
        assert len(visible) == each * place.local_size
        assert visible[place.local_rank * each :][:each] == gpus[member]


def visible_on(nodes, gpus):
    """Return the GPUs that each member uses, and what CUDA_VISIBLE_DEVICES is for it."""
    placed = place_ranks(nodes, usable_gpus(nodes, gpus))
    return [
        (place.gpus, seen["CUDA_VISIBLE_DEVICES"]) for place, seen in zip(placed, gpu_environments(placed), strict=True)
    ]


def test_a_shared_gpu_stands_there_once():
    """Tasks that each have a fraction of a GPU may share one, which is then listed only once."""
    assert [seen for _, seen in visible_on("aaa", [["1"], ["1"], ["0"]])] == ["1,0"] * 3


def test_each_rank_sees_only_its_mig_instance():
    """A process can use only one MIG instance. On a node with instances, ranks with whole GPUs see only these, too."""
    found = visible_on("aaab", [["MIG-a"], ["GPU-1"], ["MIG-b"], ["0"]])
    assert found == [(("MIG-a",), "MIG-a"), (("GPU-1",), "GPU-1"), (("MIG-b",), "MIG-b"), (("0",), "0")]


def test_tasks_that_share_a_divided_gpu():
    """If Spark gives tasks the same divided GPU, each gets another instance of it, until there are no more."""
    both = ["MIG-a", "MIG-b"]
    found = visible_on("aaab", [both] * 4)
    assert [gpus for gpus, _ in found] == [("MIG-a",), ("MIG-b",), ("MIG-a",), ("MIG-a",)]
    assert visible_on("a", [["MIG-a", "0", "1"]]) == [(("0", "1"), "0,1")], "whole GPUs are larger, and it sees both"
