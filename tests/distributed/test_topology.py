from __future__ import annotations

import pytest

from camshaft.distributed.topology import Topology


@pytest.mark.parametrize(
    ("rank", "local_rank", "local_world_size", "node_rank"),
    [(0, 0, 2, 0), (1, 0, 3, 1), (2, 1, 2, 0), (3, 1, 3, 1), (4, 0, 1, 2), (5, 2, 3, 1)],
)
def test_with_the_host_of_each_rank_nodes_may_hold_any_ranks(rank, local_rank, local_world_size, node_rank):
    topology = Topology.from_hosts(rank, ["b", "a", "b", "a", "c", "a"])
    assert topology == Topology(rank, 6, local_rank, local_world_size, node_rank, 3)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_without_a_host_is_refused(rank):
    with pytest.raises(ValueError, match=rf"rank must be in \[0, 2\).*got {rank}"):
        Topology.from_hosts(rank, ["a", "a"])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"rank": 2}, r"rank must be in \[0, world_size\), got rank=2"),
        ({"local_rank": -1}, r"local_rank must be in \[0, local_world_size\), got local_rank=-1"),
        ({"node_rank": 1}, r"node_rank must be in \[0, num_nodes\), got node_rank=1"),
        ({"local_world_size": 3}, "local_world_size must not be above world_size=2, got 3"),
        ({"num_nodes": 3}, "num_nodes must not be above world_size=2, got 3"),
        ({"local_world_size": 2, "num_nodes": 2}, "each of the num_nodes must hold a process"),
    ],
)
def test_a_place_that_cannot_be_is_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        Topology(**{"world_size": 2, **numbers})
