"""camshaft.distributed over MPI, initialized with `initialize("mpi")` under a real mpirun."""

from __future__ import annotations

from tests.mpi.checking import mpirun

PROGRAM = """
import os

import torch
import camshaft.distributed as idist

idist.initialize("mpi")
rank, size = idist.get_rank(), idist.get_world_size()
assert (idist.backend(), idist.model_name()) == ("mpi", "native-dist")
assert (idist.get_local_rank(), idist.get_nnodes()) == (rank, 1)
assert idist.all_gather({"rank": rank, "text": "gr\u00f6\u00dfer" * 200}) == [
    {"rank": other, "text": "gr\u00f6\u00dfer" * 200} for other in range(size)
]
assert idist.all_reduce(torch.ones(2, dtype=torch.bfloat16) * 1.5).tolist() == [1.5 * size] * 2
assert idist.broadcast(2**53 + 1 if rank == 1 else None, src=1, safe_mode=True) == 2**53 + 1
assert idist.all_to_all([f"{rank}{other}" for other in range(size)]) == [f"{other}{rank}" for other in range(size)]
assert idist.all_reduce(1, group=[0]) == 1
with idist.one_rank_first():
    pass
idist.finalize()
assert idist.backend() is None
os.write(1, f"rank {rank} of {size} is done\\n".encode())  # one write, because the ranks share the output
"""


def test_the_collectives_work_over_mpi():
    done = mpirun(2, "-c", PROGRAM)
    assert done.returncode == 0, done.stdout[-4000:]
    assert all(f"rank {rank} of 2 is done" in done.stdout for rank in range(2))
