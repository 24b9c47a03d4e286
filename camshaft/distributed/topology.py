"""Where a process stands in a distributed run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Topology:
    """The place of one process among all that run together.

    Args:
        rank: number of the process, in ``[0, world_size)``.
        world_size: number of processes.
        local_rank: number of the process on its node, in ``[0, local_world_size)``.
        local_world_size: number of processes on this node; nodes may hold different numbers.
        node_rank: number of the node, in ``[0, num_nodes)``.
        num_nodes: number of nodes.

    Raises:
        ValueError: a number is out of its range.

    >>> Topology(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1, num_nodes=2).is_first
    False
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for number, size in (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "num_nodes")):
            got, limit = getattr(self, number), getattr(self, size)
            if not 0 <= got < limit:
                raise ValueError(f"{number} must be in [0, {size}), got {number}={got} and {size}={limit}")
        for smaller in ("local_world_size", "num_nodes"):
            if getattr(self, smaller) > self.world_size:
                got = getattr(self, smaller)
                raise ValueError(f"{smaller} must not be above world_size={self.world_size}, got {got}")
        if self.local_world_size + self.num_nodes - 1 > self.world_size:
            raise ValueError(f"each of the num_nodes must hold a process, got {self}")

    @classmethod
    def from_hosts(cls, rank: int, hosts: Sequence[str]) -> Topology:
        """Find the place of a process when the host of each rank is known; nodes may hold any ranks.

        Args:
            rank: number of the process.
            hosts: for each rank the name of its node; nodes are numbered in the order of their first ranks.

        Raises:
            ValueError: ``rank`` is not one of those of ``hosts``.

        >>> print(Topology.from_hosts(2, ["a", "b", "b"]))
        rank=2, world_size=3, local_rank=1, local_world_size=2, node_rank=1, num_nodes=2
        """
        if not 0 <= rank < len(hosts):
            raise ValueError(f"rank must be in [0, {len(hosts)}), as there are so many hosts, got {rank}")
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        nodes = list(dict.fromkeys(hosts))
        return cls(
            rank=rank,
            world_size=len(hosts),
            local_rank=here.index(rank),
            local_world_size=len(here),
            node_rank=nodes.index(hosts[rank]),
            num_nodes=len(nodes),
        )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
