"""The place of a process in a distributed job, and how the process was started."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """The place of one process among all processes of a job.

    Args:
        rank: index of the process, in ``[0, world_size)``.
        world_size: number of processes.
        local_rank: index of the process on its node, in ``[0, local_world_size)``.
        local_world_size: number of processes on this node; nodes may have different numbers of processes.
        node_rank: index of the node, in ``[0, num_nodes)``.
        num_nodes: number of nodes.

    Raises:
        ValueError: a number is out of range.

    >>> print(Topology(rank=1, world_size=2, local_rank=1, local_world_size=2))
    rank=1, world_size=2, local_rank=1, local_world_size=2, node_rank=0, num_nodes=1
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for index, size in (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "num_nodes")):
            got, limit = getattr(self, index), getattr(self, size)
            if not 0 <= got < limit:
                raise ValueError(f"{index} must be in [0, {size}), got {index}={got} and {size}={limit}")
        if self.local_world_size + self.num_nodes - 1 > self.world_size:
            raise ValueError(f"every node must have a process: world_size is too small, got {self}")

    @classmethod
    def from_hosts(cls, rank: int, hosts: Sequence[str]) -> Topology:
        """Return the place of a process from the host of each rank; ranks of a node need not be contiguous.

        Args:
            rank: rank of the process.
            hosts: name of the node of each rank; nodes are numbered in order of their first rank.

        Raises:
            ValueError: ``rank`` is not an index of ``hosts``.

        >>> print(Topology.from_hosts(2, ["a", "b", "b"]))
        rank=2, world_size=3, local_rank=1, local_world_size=2, node_rank=1, num_nodes=2
        """
        if not 0 <= rank < len(hosts):
            raise ValueError(f"rank must be in [0, {len(hosts)}), the number of hosts, got {rank}")
        local_ranks = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        nodes = list(dict.fromkeys(hosts))
        return cls(
            rank=rank,
            world_size=len(hosts),
            local_rank=local_ranks.index(rank),
            local_world_size=len(local_ranks),
            node_rank=nodes.index(hosts[rank]),
            num_nodes=len(nodes),
        )

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def complete(known: Mapping[str, int]) -> tuple[Topology, tuple[str, ...]]:
    """Complete a partly known topology.

    Numbers that do not follow from the known ones are assumed: equally sized nodes with contiguous ranks, as many
    processes per node as possible.

    Args:
        known: ``rank``, ``world_size``, and any other fields of :class:`Topology`.

    Returns:
        The topology, and the names of the numbers that are assumed.

    Raises:
        ValueError: the numbers contradict each other.

    >>> topology, assumed = complete(
    ...     {"rank": 2, "world_size": 4, "local_rank": 0, "local_world_size": 2}
    ... )
    >>> topology.node_rank, topology.num_nodes, assumed
    (1, 2, ('num_nodes', 'node_rank'))
    """
    rank, world_size, num_nodes = known["rank"], known["world_size"], known.get("num_nodes")
    Topology(rank=rank, world_size=world_size)  # validates them: the rest divides by them
    numbers, assumed = dict(known), list[str]()

    def derive(name: str, value: int, follows: bool) -> None:
        if name not in numbers:
            numbers[name] = value
            if assumed or not follows:
                assumed.append(name)

    # With equally sized nodes, the size divides both the world size and the number of ranks on the preceding nodes.
    preceding = rank - known.get("local_rank", rank)
    equal = math.gcd(preceding, world_size) if num_nodes is None else world_size // max(num_nodes, 1)
    other_nodes = (num_nodes or known.get("node_rank", 0) + 1) - 1
    local_size = max(1, min(max(equal, known.get("local_rank", 0) + 1), world_size - other_nodes))
    derive("local_world_size", local_size, follows=world_size == 1 or num_nodes in (1, world_size))
    local_size = max(numbers["local_world_size"], 1)
    derive("local_rank", rank % local_size, follows=local_size in (1, world_size))
    nodes = max(-(-world_size // local_size), known.get("node_rank", 0) + 1)
    derive("num_nodes", nodes, follows=local_size == world_size)
    nodes = numbers["num_nodes"]
    derive("node_rank", min(rank // local_size, nodes - 1), follows=nodes == 1)
    return Topology(**numbers), tuple(assumed)


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Args:
        launcher: ``"torchrun"``, ``"horovodrun"``, ``"openmpi"``, ``"mpich"``, ``"slurm"``, ``"spawn"``, or
            ``"environment"`` for variables set by hand.
        topology: place of this process.
        address: host where rank 0 listens, or a function that returns it, as Slurm's needs a subprocess and name
            lookups; ``None`` if unknown.
        master_port: port where rank 0 listens, ``None`` if unknown.
        agent_store: whether the launcher itself hosts the store at that address.
        mpi: whether MPI, initialized in this process, connects it to the other ranks.
        host: the launcher's name for this node.
        assumed: numbers of ``topology`` that do not follow from any variable; see :func:`complete`. Where the hosts of
            all ranks are known, use :meth:`Topology.from_hosts` instead.
        sources: which variable set each number, ``{"rank": "RANK=3", ...}``.
    """

    launcher: str
    topology: Topology
    address: str | Callable[[], str] | None = None
    master_port: int | None = None
    agent_store: bool = False
    mpi: bool = False
    host: str | None = None
    assumed: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @cached_property
    def master_addr(self) -> str | None:
        """Host where rank 0 listens, looked up on first access; ``None`` if unknown.

        Raises:
            RuntimeError: the launcher names no host.
        """
        return self.address() if callable(self.address) else self.address
