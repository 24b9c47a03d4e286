"""Run the checks on the ranks that a launcher started, and print a line for each that all ranks passed.

torchrun --nproc-per-node 2 -m tests.distributed.run_conformance --backend gloo [NAME ...]
mpirun -np 2 python -m tests.distributed.run_conformance --backend mpi [NAME ...]
python -m tests.distributed.run_conformance [NAME ...]      # one process, without a backend

A line ``lacks NAME: ...`` before that of ``passed NAME`` tells what the backend refused to do.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import traceback

import torch

import camshaft.distributed as idist
from tests.distributed.conformance import CHECKS, lack_of
from tests.limits import HANG


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help="a check to run; all of them if none is named")
    parser.add_argument("--backend", help="what initialize is told; without, there is one process")
    parser.add_argument("--limit", type=float, default=HANG, help="seconds that all of it may take")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    torch.set_num_threads(1)
    if arguments.backend is not None:
        idist.initialize(arguments.backend)
    for name in arguments.names or CHECKS:
        run(name)
    idist.finalize()
    faulthandler.cancel_dump_traceback_later()


def run(name: str) -> None:
    """Run a check; a rank that fails ends its process, so that the launcher ends the others."""
    try:
        lack = lack_of(name)
        idist.barrier()
    except BaseException:
        say(f"rank {idist.get_rank()} failed {name}\n{traceback.format_exc()}")
        os._exit(1)  # what runs at exit may wait for the others
    if idist.get_rank() == 0:
        say(f"lacks {name}: {lack}\npassed {name}" if lack else f"passed {name}")


def say(text: str) -> None:
    """Write at once, so that the lines of several ranks stay whole."""
    sys.stdout.flush()
    os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    main()
