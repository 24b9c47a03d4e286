"""mpirun and mpiexec: those of Open MPI, and those of MPICH and its kin, Intel MPI among them.

Neither says which node a process is on. Open MPI's ``OMPI_COMM_WORLD_NODE_RANK`` is a number on the node, not that of
the node.
"""

from __future__ import annotations

from collections.abc import Mapping

from camshaft.distributed.launchers.launch import Launch, build
from camshaft.distributed.launchers.variables import master_addr, master_port, place

_OPEN_MPI = {
    "rank": ("OMPI_COMM_WORLD_RANK",),
    "world_size": ("OMPI_COMM_WORLD_SIZE",),
    "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
    "local_world_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
}
_MPICH = {
    "rank": ("PMI_RANK",),
    "world_size": ("PMI_SIZE",),
    "local_rank": ("MPI_LOCALRANKID",),
    "local_world_size": ("MPI_LOCALNRANKS",),
}


def read_open_mpi(environ: Mapping[str, str]) -> Launch | None:
    """Read what the mpirun of Open MPI tells its processes; ``None`` when it did not start this one.

    Raises:
        RuntimeError: rank or size is missing, or a number is wrong.

    >>> read_open_mpi({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).topology.world_size
    2
    """
    return _launch("openmpi", _OPEN_MPI, environ, host="PMIX_HOSTNAME")


def read_mpich(environ: Mapping[str, str]) -> Launch | None:
    """Read what the mpirun of MPICH or Intel MPI tells its processes; ``None`` when it did not start this one.

    Raises:
        RuntimeError: rank or size is missing, or a number is wrong.

    >>> read_mpich({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}).mpi
    True
    """
    if "MPI_LOCALRANKID" not in environ and "SLURM_STEP_ID" in environ:
        return None  # srun --mpi=pmi2: the variables of the step say more
    return _launch("mpich", _MPICH, environ, host="PMI_HOSTNAME")


def _launch(
    launcher: str, names: Mapping[str, tuple[str, ...]], environ: Mapping[str, str], host: str
) -> Launch | None:
    if not (said := place(environ, names)):
        return None
    address, port = master_addr(environ), master_port(environ)
    return build(launcher, said, address=address, master_port=port, mpi=True, host=environ.get(host))
