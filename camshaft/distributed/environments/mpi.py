"""mpirun and mpiexec of Open MPI, and of MPICH and its derivatives, such as Intel MPI.

Neither sets the index of the node. Open MPI's ``OMPI_COMM_WORLD_NODE_RANK`` is the index of the process on its node.
"""

from __future__ import annotations

from collections.abc import Mapping

from camshaft.distributed.environments.variables import read_launch
from camshaft.distributed.topology import Launch

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
    """Return what the mpirun of Open MPI sets, or ``None`` if it did not start this process.

    Raises:
        RuntimeError: rank or size is missing, or a value is invalid.

    >>> read_open_mpi({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).topology.world_size
    2
    """
    return read_launch("openmpi", environ, _OPEN_MPI, mpi=True, host=environ.get("PMIX_HOSTNAME"))


def read_mpich(environ: Mapping[str, str]) -> Launch | None:
    """Return what the mpirun of MPICH or Intel MPI sets, or ``None`` if it did not start this process.

    Raises:
        RuntimeError: rank or size is missing, or a value is invalid.

    >>> read_mpich({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}).mpi
    True
    """
    if "MPI_LOCALRANKID" not in environ and "SLURM_STEP_ID" in environ:
        return None  # srun --mpi=pmi2 sets these as well, and Slurm's own variables contain more
    return read_launch("mpich", environ, _MPICH, mpi=True, host=environ.get("PMI_HOSTNAME"))
