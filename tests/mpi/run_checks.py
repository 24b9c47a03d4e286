"""Run the checks on every rank under mpirun, and print a line for each that all ranks passed.

mpirun -np 2 python -m tests.mpi.run_checks [NAME ...]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from camshaft.distributed.backends.mpi import initialize_mpi
from tests.limits import TIMEOUT
from tests.mpi import check_collectives, check_devices, check_groups, check_messages, check_training
from tests.mpi.checking import CHECKS

MODULES = (check_collectives, check_messages, check_groups, check_training, check_devices)


def main(*names: str) -> None:
    torch.set_num_threads(1)
    initialize_mpi(TIMEOUT)
    for name in names or CHECKS:
        CHECKS[name]()
        dist.barrier()
        if dist.get_rank() == 0:
            print("passed", name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
