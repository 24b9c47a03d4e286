"""Ask the readers of all launchers, in a fixed order, who started this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from camshaft.distributed.launchers import horovodrun, mpirun, plain, slurm, torchrun
from camshaft.distributed.launchers.conflict import check, settle
from camshaft.distributed.launchers.launch import Launch
from camshaft.distributed.launchers.variables import PLACE

_READERS = (horovodrun.read, mpirun.read_open_mpi, mpirun.read_mpich)


def detect(
    environ: Mapping[str, str],
    *,
    expand: Callable[[str], list[str]] = slurm.expand,
    resolves: Callable[[str], bool] = slurm.resolves,
) -> Launch | None:
    """Find who started this process and where it stands; ``None`` if it stands alone.

    Launchers nest, and the innermost counts: torchrun is started by the others, horovodrun and mpirun run within
    steps of srun. Variables set by hand, ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``, count where no launcher is
    found; beside one they must say the same, or come from what its processes started.

    Args:
        environ: the variables of the environment, such as ``os.environ``; it is only read.
        expand: lists the hosts of a list of Slurm's; by default with ``scontrol`` if there is one. Like ``resolves``,
            it is called when ``master_addr`` is read, not before: the place of a process needs neither.
        resolves: whether a host name has an address.

    Raises:
        RuntimeError: a variable is missing or holds no number, or they contradict each other; the message
            shows what each source says.

    >>> detect({}) is None
    True
    >>> print(detect({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}).topology)
    rank=1, world_size=2, local_rank=1, local_world_size=2, node_rank=0, num_nodes=1
    """
    if launch := torchrun.read(environ):
        return launch
    if found := [launch for read in _READERS if (launch := read(environ))]:
        launch = check(found)
        by_hand = plain.read_beside(launch.launcher, environ, PLACE)
        return launch if by_hand is None else settle(launch, by_hand)
    return slurm.read(environ, expand=expand, resolves=resolves) or plain.read(environ)
