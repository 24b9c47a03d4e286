"""Run the checks of this folder together with those of every backend: ``run_conformance`` with more checks.

mpirun -np 2 python -m tests.mpi.run_checks --backend mpi [NAME ...]
"""

from __future__ import annotations

from tests.distributed.run_conformance import main
from tests.mpi import check_collectives, check_devices, check_groups, check_messages, check_training

# importing them registers their checks
MODULES = (check_collectives, check_messages, check_groups, check_training, check_devices)

if __name__ == "__main__":
    main()
