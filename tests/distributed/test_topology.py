from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from camshaft.distributed.topology import Topology, complete


@pytest.mark.parametrize(
    ("rank", "local_rank", "local_world_size", "node_rank"),
    [(0, 0, 2, 0), (1, 0, 3, 1), (2, 1, 2, 0), (3, 1, 3, 1), (4, 0, 1, 2), (5, 2, 3, 1)],
)
def test_with_the_host_of_each_rank_nodes_may_hold_any_ranks(rank, local_rank, local_world_size, node_rank):
    topology = Topology.from_hosts(rank, ["b", "a", "b", "a", "c", "a"])
    assert topology == Topology(rank, 6, local_rank, local_world_size, node_rank, 3)


def test_a_rank_without_a_host_is_refused():
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="rank must be in"):
            Topology.from_hosts(rank, ["a", "a"])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"rank": 2}, r"rank must be in \[0, world_size\), got rank=2"),
        ({"local_rank": -1}, r"local_rank must be in \[0, local_world_size\), got local_rank=-1"),
        ({"node_rank": 1}, r"node_rank must be in \[0, num_nodes\), got node_rank=1"),
        ({"local_world_size": 3}, "every node must have a process: .* local_world_size=3"),
        ({"num_nodes": 3}, "every node must have a process: .* num_nodes=3"),
        ({"local_world_size": 2, "num_nodes": 2}, "every node must have a process: world_size is too small"),
    ],
)
def test_a_place_that_cannot_be_is_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        Topology(**{"world_size": 2, **numbers})


OPTIONAL = ("local_rank", "local_world_size", "node_rank", "num_nodes")


@st.composite
def places(draw, even):
    """Draw a rank of a run with neighbouring ranks on each node, and what of its place is known."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    sizes = sizes[:1] * len(sizes) if even else sizes
    hosts = [node for node, size in enumerate(sizes) for _ in range(size)]
    topology = Topology.from_hosts(draw(st.integers(0, len(hosts) - 1)), [str(host) for host in hosts])
    known = draw(st.sets(st.sampled_from(OPTIONAL)))
    return topology, {what: value for what, value in asdict(topology).items() if what not in OPTIONAL or what in known}


@given(places(even=False))
def test_what_is_not_assumed_is_right_and_what_is_known_stays(place):
    topology, known = place
    completed, assumed = complete(known)
    wrong = {what for what, value in asdict(topology).items() if asdict(completed)[what] != value}
    assert wrong <= set(assumed)
    assert not set(assumed) & known.keys()


@given(places(even=True))
def test_with_equal_nodes_the_local_numbers_are_enough(place):
    topology, _ = place
    known = {what: value for what, value in asdict(topology).items() if what not in ("node_rank", "num_nodes")}
    assert complete(known)[0] == topology


@pytest.mark.parametrize(
    "known",
    [
        *({"world_size": 0}, {"rank": 4}, {"local_rank": 4}, {"local_world_size": 0}, {"local_world_size": 5}),
        *({"num_nodes": 0}, {"num_nodes": 5}, {"node_rank": 4}, {"local_world_size": 3, "num_nodes": 3}),
    ],
)
def test_what_cannot_be_is_refused(known):
    with pytest.raises(ValueError, match="must"):
        complete({"rank": 0, "world_size": 4, **known})


@pytest.mark.parametrize(
    ("known", "assumed"),
    [
        ({"world_size": 1}, ()),
        ({"world_size": 4, "num_nodes": 1}, ()),
        ({"world_size": 4, "num_nodes": 4}, ("node_rank",)),
        ({"world_size": 4, "local_world_size": 4}, ()),
        ({"world_size": 4, "local_world_size": 1}, ("num_nodes", "node_rank")),
        ({"world_size": 4, "node_rank": 0, "num_nodes": 2}, ("local_world_size", "local_rank")),
    ],
)
def test_what_follows_is_not_called_assumed(known, assumed):
    assert complete({"rank": 0, **known})[1] == assumed
