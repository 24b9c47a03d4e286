"""Find the launcher that started this process, also where launchers are nested, and refuse contradictory variables."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

from camshaft.distributed.environments import horovod, mpi, slurm, torchrun
from camshaft.distributed.environments.torchrun import LOCAL_NAMES, PLACE, RENDEZVOUS
from camshaft.distributed.environments.variables import numbers
from camshaft.distributed.topology import Launch, Topology, complete
from camshaft.errors import table


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Return how this process was started, or ``None`` if no launcher started it.

    Launchers nest, and the innermost counts: the others start torchrun, and horovodrun and mpirun run within steps of
    srun. Variables set by hand, ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``, count where there is no launcher; next to
    one, they must agree with it or describe processes that the launcher's processes started.

    Args:
        environ: environment variables, such as ``os.environ``. Only the address of Slurm's rank 0, looked up when
            :attr:`Launch.master_addr` is read, needs more than these.

    Raises:
        RuntimeError: a variable is missing or not an integer, or variables contradict each other; the message contains
            the values of each source.

    >>> detect({}) is None
    True
    >>> print(detect({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}).topology)
    rank=1, world_size=2, local_rank=1, local_world_size=2, node_rank=0, num_nodes=1
    """
    if torchrun.is_worker(environ):
        return torchrun.read(environ)
    readers = (horovod.read, mpi.read_open_mpi, mpi.read_mpich)
    found = [launch for read in readers if (launch := read(environ))]
    launch, needed = (_innermost(found), PLACE) if found else (slurm.read(environ), RENDEZVOUS)
    if launch is None:
        return torchrun.read(environ)
    present, missing = [name for name in needed if name in environ], [name for name in needed if name not in environ]
    if not missing and (by_hand := torchrun.read(environ)):
        return _settle(launch, by_hand)
    if present:
        warnings.warn(
            f"{launch.launcher} started this process: {', '.join(present)} in the environment ignored, as "
            f"{', '.join(missing)} is not set; set all of them, or none",
            stacklevel=2,
        )
    return launch


def infer(
    environ: Mapping[str, str], rank: int, world_size: int, local_rank: int | None = None
) -> tuple[Topology, tuple[str, ...]]:
    """Infer the topology of a process whose group was created elsewhere, without communication.

    Args:
        environ: environment variables; used as far as they fit the rank and world size.
        rank: rank of the process.
        world_size: number of processes.
        local_rank: used where the environment does not set it.

    Returns:
        The topology, and the names of the numbers that are assumed.

    Raises:
        ValueError: ``local_rank`` is out of range.
    """
    known = {"rank": rank, "world_size": world_size} | ({} if local_rank is None else {"local_rank": local_rank})
    try:
        launch = detect(environ)
    except RuntimeError:  # contradictory, or incomplete: whoever created the group knew rank and world size
        launch = None
    try:
        if launch is None:
            here = {name: number.value for name, number in numbers(environ, LOCAL_NAMES).items()}
        elif (launch.topology.rank, launch.topology.world_size) == (rank, world_size):
            here = {name: getattr(launch.topology, name) for name in launch.sources}
        else:
            here = {}
        return complete(known | here)
    except (RuntimeError, ValueError):  # the variables are invalid, or those of another job
        return complete(known)


def _innermost(found: list[Launch]) -> Launch:
    """Return the only launch, the first of those that agree, or the one whose processes others started."""
    chosen = found[0]
    for other in found[1:]:
        if not _agree(chosen, other) and not _may_have_started(other, chosen):
            if not _may_have_started(chosen, other):
                raise _contradiction(chosen, other)
            chosen = other
    return chosen


def _settle(launch: Launch, by_hand: Launch) -> Launch:
    """Choose between a launcher and complete variables set by hand, which also contain the address."""
    if _agree(launch, by_hand):
        port = launch.master_port if by_hand.master_port is None else by_hand.master_port
        return replace(launch, address=by_hand.address or launch.address, master_port=port)
    if _may_have_started(launch, by_hand):
        return by_hand
    raise _contradiction(launch, by_hand)


def _place(launch: Launch) -> tuple[int, int, int]:
    return launch.topology.rank, launch.topology.local_rank, launch.topology.world_size


def _agree(one: Launch, other: Launch) -> bool:
    return _place(one) == _place(other)


def _may_have_started(outer: Launch, inner: Launch) -> bool:
    """Return True if processes of ``outer``, all on one node or one per node, may have started those of ``inner``."""
    if inner.topology.world_size == outer.topology.world_size:
        return False
    grown = all(mine <= its for mine, its in zip(_place(outer), _place(inner), strict=True))
    return grown and outer.topology.num_nodes in (1, outer.topology.world_size)


def _contradiction(one: Launch, other: Launch) -> RuntimeError:
    values = table({launch.launcher: launch.sources for launch in (one, other)})
    return RuntimeError(
        f"the environment is contradictory: {one.launcher} and {other.launcher} disagree, and neither can have started "
        f"the other; unset the variables of one of them\n{values}"
    )
