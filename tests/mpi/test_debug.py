"""Debug mode over MPI: a rank that waits for one that has ended learns how, also if that is rank 0."""

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


@pytest.mark.parametrize(
    ("end", "how"), [("idist.finalize()", "has left the run without an error"), ("pass", "has exited: it returned")]
)
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_has_ended_is_named(who: int, end: str, how: str) -> None:
    run = mpirun(2, "-c", PROGRAM.format(who=who, end=end))
    assert f"rank {who} {how}" in run.stdout, run.stdout
    assert "in all_reduce" in run.stdout
    assert run.returncode == 0
