"""Run checks on several CPU devices of one process, one thread per device, with XLA's own collectives.

CPU_NUM_DEVICES=2 XLA_THREAD_POOL_SIZE=8 PJRT_DEVICE=CPU python -m tests.xla.replicas [NAME ...]

torch_xla starts one thread per device if a process has several. This module works around three problems on the CPU:
Two threads that compile the same program at the same time get two programs, whose collectives never match; here, a lock
serializes compilation. A thread without a tensor waits for the first device instead of its own; here, each thread keeps
one. A replica that waits for the others occupies a thread of a pool with one thread per core; XLA_THREAD_POOL_SIZE must
be at least the number of replicas.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xla_model
import torch_xla.runtime as runtime
from torch_xla._internal import pjrt

import camshaft.distributed as idist
from camshaft.distributed.backends.xla import XlaBackend, topology_of
from camshaft.distributed.job import use_backend
from tests.distributed.conformance import CHECKS, lack_of
from tests.distributed.run_conformance import say
from tests.limits import HANG
from tests.xla import check_replicas

assert check_replicas.__name__, "importing it registers its checks"

_turn = threading.Lock()
_sync = torch_xla.sync


def sync(*args: Any, **kwargs: Any) -> None:
    """Compile and launch one thread at a time, then wait for the device."""
    with _turn:
        _sync(*args, **kwargs)
    xla_model.wait_device_ops(xla_model.xla_real_devices([str(torch_xla.device())]))


def on_replicas(function: Callable[[], object]) -> None:
    """Call a function on each replica; exit the process if one fails, because the others would wait for it."""

    def on_one() -> None:
        kept = torch.ones(1, device=torch_xla.device())
        try:
            with use_backend(XlaBackend(topology_of(runtime), torch_xla.device())):
                function()
            assert kept.item() == 1
        except BaseException:
            say(f"rank {runtime.global_ordinal()} failed\n{traceback.format_exc()}")
            os._exit(1)

    torch_xla.sync = sync
    pjrt._run_thread_per_device(0, 1, on_one, pjrt.initialize_multiprocess)


def run(names: list[str]) -> None:
    """Run checks and print on rank 0 which ones have passed."""
    for name in names:
        lack = lack_of(name)
        idist.barrier()
        if idist.get_rank() == 0:
            say((f"lacks {name}: {lack}\n" if lack else "") + f"passed {name}")


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.dump_traceback_later(HANG, exit=True)
    on_replicas(functools.partial(run, sys.argv[1:] or list(CHECKS)))
    sys.stdout.flush()
    os._exit(0)  # with several devices in one process, the runtime sometimes crashes at interpreter exit
