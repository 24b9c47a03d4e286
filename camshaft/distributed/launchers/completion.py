"""Complete a place in a run from the part of it that a launcher says."""

from __future__ import annotations

import math
from collections.abc import Mapping

from camshaft.distributed.topology import Topology


def complete(known: Mapping[str, int]) -> tuple[Topology, tuple[str, ...]]:
    """Find the topology, and which of its numbers do not follow from what is known.

    Those are chosen as if all nodes held equally many processes, as many as possible, with neighbouring ranks.

    Args:
        known: ``rank`` and ``world_size``, and any of the topology's other numbers.

    Raises:
        ValueError: the numbers contradict each other.

    >>> topology, assumed = complete({"rank": 2, "world_size": 4, "local_rank": 0, "local_world_size": 2})
    >>> topology.node_rank, topology.num_nodes, assumed
    (1, 2, ('num_nodes', 'node_rank'))
    """
    Topology(rank=known["rank"], world_size=known["world_size"])  # the rest divides by them
    all_known = dict(known)
    assumed: list[str] = []
    for what, derive in _DERIVATIONS.items():
        if what not in all_known:
            all_known[what], follows = derive(all_known)
            if assumed or not follows:
                assumed.append(what)
    return Topology(**all_known), tuple(assumed)


def _local_world_size(known: Mapping[str, int]) -> tuple[int, bool]:
    """Give the number, and whether it follows."""
    world_size, num_nodes, least = known["world_size"], known.get("num_nodes"), known.get("local_rank", 0) + 1
    if num_nodes == 1 or world_size == 1:
        return world_size, True
    # With equal nodes, the number of ranks on the nodes before this one is a multiple of it, and the world too.
    before = known["rank"] - known.get("local_rank", known["rank"])
    equal = math.gcd(before, world_size) if num_nodes is None else world_size // max(num_nodes, 1)
    others = (num_nodes or known.get("node_rank", 0) + 1) - 1
    return max(1, min(max(equal, least), world_size - others)), num_nodes == world_size


def _local_rank(known: Mapping[str, int]) -> tuple[int, bool]:
    here = max(known["local_world_size"], 1)
    return known["rank"] % here, here in (1, known["world_size"])


def _num_nodes(known: Mapping[str, int]) -> tuple[int, bool]:
    world_size, here = known["world_size"], max(known["local_world_size"], 1)
    return max(-(-world_size // here), known.get("node_rank", 0) + 1), here == world_size


def _node_rank(known: Mapping[str, int]) -> tuple[int, bool]:
    num_nodes = known["num_nodes"]
    return min(known["rank"] // max(known["local_world_size"], 1), num_nodes - 1), num_nodes == 1


_DERIVATIONS = {
    "local_world_size": _local_world_size,
    "local_rank": _local_rank,
    "num_nodes": _num_nodes,
    "node_rank": _node_rank,
}
