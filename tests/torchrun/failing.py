"""Fail or wait after the ranks have connected, as the command line says.

torchrun --nproc-per-node 2 -m tests.torchrun.failing BEHAVIOR
"""

from __future__ import annotations

import os
import sys
import time

import camshaft.distributed as idist
from camshaft.distributed.failures import watcher
from tests.guards import is_running
from tests.limits import FOREVER, HANG, TIMEOUT, wait_until


def raise_or_reduce(local_rank: int) -> None:
    if idist.get_rank() == 1:
        raise LookupError("the cause")
    idist.all_reduce(1.0)


def raise_or_compute(local_rank: int) -> None:
    if idist.get_rank() == 1:
        raise LookupError("the cause")
    time.sleep(FOREVER)


def reduce_or_compute(local_rank: int) -> None:
    vars(watcher).update(_ORPHANED=HANG, _LEARNING=HANG, PATIENCE=HANG)  # they may be slow to learn what happened
    pids = idist.all_gather(os.getpid())
    print("all ranks have started\n", end="", flush=True)
    if idist.get_rank() == 1:
        wait_until(lambda: not is_running(pids[0]))  # it has learnt that torchrun was killed, not that this rank ended
        watcher._ORPHANED = 5.0
        time.sleep(FOREVER)
    idist.all_reduce(1.0)


BEHAVIORS = {function.__name__: function for function in (raise_or_reduce, raise_or_compute, reduce_or_compute)}


def main(behavior: str, way: str = "parallel") -> None:
    if way == "parallel":
        with idist.Parallel("gloo", timeout=TIMEOUT) as parallel:
            parallel.run(BEHAVIORS[behavior])
    else:
        idist.initialize("gloo", timeout=TIMEOUT)
        BEHAVIORS[behavior](idist.get_local_rank())
        idist.finalize()


if __name__ == "__main__":
    main(*sys.argv[1:])
