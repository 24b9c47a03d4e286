"""Run the checks of every backend and those of this folder over MPI; those on as many ranks share one mpirun."""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.distributed.conformance import CHECKS
from tests.mpi.checking import mpirun

# read, not imported: the test process must not import the torch modules that the checks use
FILES = sorted(Path(__file__).parent.glob("check_*.py"))
OF_MPI = [name for file in FILES for name in re.findall(r"^@check\ndef (\w+)", file.read_text(), re.MULTILINE)]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.jobs)], ids=["2_ranks", "4_ranks"])
def ran(request: pytest.FixtureRequest) -> CompletedProcess[str]:
    return mpirun(request.param, "-m", "tests.mpi.run_checks", "--backend", "mpi")


@pytest.mark.parametrize("name", [*CHECKS, *OF_MPI])
def test_mpi_passes(ran: CompletedProcess[str], name: str) -> None:
    assert f"passed {name}\n" in ran.stdout, ran.stdout[-6000:]


def test_mpi_supports_everything_and_exits_with_0(ran: CompletedProcess[str]) -> None:
    assert "lacks " not in ran.stdout
    assert ran.returncode == 0, ran.stdout[-6000:]
