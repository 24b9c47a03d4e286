"""Run the checks on every rank under horovodrun, and print a line for each that all ranks passed.

horovodrun -np 2 python -m tests.horovod.run_checks [NAME ...]
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback

import torch

import camshaft.distributed as idist
from tests.horovod import check_optimizers, check_pitfalls, check_training
from tests.horovod.checking import CHECKS
from tests.limits import HANG

MODULES = (check_pitfalls, check_optimizers, check_training)


def main(*names: str) -> None:
    faulthandler.dump_traceback_later(HANG, exit=True)
    torch.set_num_threads(1)
    idist.initialize("horovod")
    for name in names or CHECKS:
        try:
            CHECKS[name]()
            idist.barrier()
        except BaseException:
            os.write(1, f"rank {idist.get_rank()} failed {name}\n{traceback.format_exc()}".encode())
            os._exit(1)
        if idist.get_rank() == 0:
            os.write(1, f"passed {name}\n".encode())
    idist.finalize()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
