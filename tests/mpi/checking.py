"""Start mpirun, and what the checks ask and assert with torch alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[2]
# Let waiting ranks yield their core, and Open MPI run as root and with more ranks than cores.
MPI_VARIABLES = {
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def mpirun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments under mpirun."""
    launcher = [str(Path(sys.executable).parent / "mpirun"), "-np", str(ranks)]
    environment = {**os.environ, **MPI_VARIABLES, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [*launcher, sys.executable, "-W", "error::UserWarning", *arguments]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=HANG, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = result.stdout.decode(errors="replace")
    return subprocess.CompletedProcess(command, result.returncode, output)


def place() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Assert that two tensors agree in values, shape and dtype."""
    torch.testing.assert_close(got.detach(), wanted)
