"""Run the checks of this folder together with those of every backend: ``run_conformance`` with more checks.

horovodrun -np 2 python -m tests.horovod.run_checks --backend horovod [NAME ...]
"""

from __future__ import annotations

from tests.distributed.run_conformance import main
from tests.horovod import check_optimizers, check_pitfalls, check_training

MODULES = (check_pitfalls, check_optimizers, check_training)  # importing them registers their checks

if __name__ == "__main__":
    main()
