"""Run the checks of every backend over MPI; all of them share one mpirun."""

from __future__ import annotations

from subprocess import CompletedProcess

import pytest

from tests.distributed.conformance import CHECKS
from tests.mpi.checking import mpirun

pytestmark = pytest.mark.jobs


@pytest.fixture(scope="module")
def ran() -> CompletedProcess[str]:
    return mpirun(2, "-m", "tests.distributed.run_conformance", "--backend", "mpi")


@pytest.mark.parametrize("name", CHECKS)
def test_mpi_passes(ran: CompletedProcess[str], name: str) -> None:
    assert f"passed {name}\n" in ran.stdout, ran.stdout[-6000:]


def test_mpi_supports_everything_and_exits_with_0(ran: CompletedProcess[str]) -> None:
    assert "lacks " not in ran.stdout
    assert ran.returncode == 0, ran.stdout[-6000:]
