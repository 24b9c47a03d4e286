"""What a launcher says about this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from camshaft.distributed.launchers.completion import complete
from camshaft.distributed.launchers.table import table
from camshaft.distributed.launchers.variables import Number
from camshaft.distributed.topology import Topology


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Args:
        launcher: ``"torchrun"``, ``"horovodrun"``, ``"openmpi"``, ``"mpich"``, ``"slurm"``, or ``"environment"``
            for variables set by hand.
        topology: the place of this process.
        address: where rank 0 listens, or what looks it up, as that may need other programs and name servers; ``None``
            where nobody says.
        master_port: the port it listens on, ``None`` where nobody says.
        restart_count: how often the launcher has started the processes again, ``None`` where it does not.
        agent_store: whether the launcher itself keeps the store at that address, also over restarts.
        mpi: whether MPI, initialised in this process, meets the other ranks.
        host: what the launcher calls this node.
        assumed: the numbers of ``topology`` that follow from no variable. They are those of nodes that hold equally
            many processes, as many as can be, with neighbouring ranks. Once the hosts of all ranks are known,
            :meth:`Topology.from_hosts` gives the numbers of any run.
        sources: which variable said what, ``{"rank": "RANK=3", ...}``.
    """

    launcher: str
    topology: Topology
    address: str | Callable[[], str] | None = None
    master_port: int | None = None
    restart_count: int | None = None
    agent_store: bool = False
    mpi: bool = False
    host: str | None = None
    assumed: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @cached_property
    def master_addr(self) -> str | None:
        """Where rank 0 listens, looked up by whoever asks first; ``None`` where nobody says.

        Raises:
            RuntimeError: the launcher names no host.
        """
        return self.address() if callable(self.address) else self.address


def build(launcher: str, said: Mapping[str, Number], **others: Any) -> Launch:
    """Make a launch of the numbers that its variables say.

    Args:
        launcher: its name.
        said: ``rank`` and ``world_size``, and any of the topology's other numbers.
        others: further fields of the launch.

    Raises:
        RuntimeError: the numbers contradict each other.

    >>> build("mpich", {"rank": Number(0, "PMI_RANK=0"), "world_size": Number(1, "PMI_SIZE=1")}).topology.num_nodes
    1
    """
    sources = {what: number.source for what, number in said.items()}
    try:
        topology, assumed = complete({what: number.value for what, number in said.items()})
    except ValueError as error:
        raise RuntimeError(f"the environment contradicts itself: {error}\n{table({launcher: sources})}") from error
    return Launch(launcher, topology, assumed=assumed, sources=sources, **others)
