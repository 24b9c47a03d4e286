"""Debug mode when a rank ends its process: the others do not wait for it, and show a table, also if it was rank 0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchrun.launching import free_port

pytestmark = pytest.mark.jobs

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from datetime import timedelta
import camshaft.distributed as idist

rank, who, how, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
idist.initialize("gloo", debug=True, init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=300))
if rank == who and how == "raise":
    raise LookupError("the cause")
if rank == who and how == "finalize":
    idist.finalize()
else:
    idist.all_reduce(1)
"""


@pytest.mark.parametrize("how", ["raise", "finalize"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_ends_before_its_first_collective_is_shown(who: int, how: str) -> None:
    """Long before the run's timeout; rank 0 serves the store."""
    address = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", PROGRAM]
    processes = [
        subprocess.Popen([*command, str(rank), str(who), how, address], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    table = texts[1 - who].split("RankDivergenceError: some ranks never come:\n")[1].splitlines()
    rows = [line.split("]: ")[-1].split() for line in table]  # torch names the rank before each line
    assert rows[1 + who][:3] == [str(who), "has", "ended"]
    assert rows[2 - who][:2] == [str(1 - who), "all_reduce"]
    assert processes[who].returncode == (how == "raise")
