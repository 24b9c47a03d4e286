"""Debug mode over MPI: the table shows ranks that have ended, also rank 0, which hosts the store."""

from __future__ import annotations

import pytest

from tests.mpi.checking import mpirun

pytestmark = pytest.mark.jobs

PROGRAM = """
import sys
from datetime import timedelta
import torch
import camshaft.distributed as idist

idist.initialize("mpi", debug=True, timeout=timedelta(seconds=300))
if idist.get_rank() == {who}:
    {end}
    sys.exit(0)
try:
    idist.all_reduce(torch.ones(1))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("end", ["idist.finalize()", "pass"])
@pytest.mark.parametrize("who", [0, 1])
def test_the_table_shows_a_rank_that_has_ended(who: int, end: str) -> None:
    run = mpirun(2, "-c", PROGRAM.format(who=who, end=end), seconds=100)
    assert f"\nrank {who}  has ended" in run.stdout, run.stdout
    assert f"\nrank {1 - who}  all_reduce" in run.stdout
    assert run.returncode == 0
