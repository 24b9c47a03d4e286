"""How far a call travels: the functions of camshaft that it enters, and the files that these are in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import camshaft
import camshaft.distributed as idist
from camshaft.distributed import failures
from camshaft.distributed.failures import record, watcher
from camshaft.distributed.failures.trace import RECORDS_GLOO
from camshaft.distributed.job import current
from camshaft.errors import RankFailedError
from tests.limits import HANG, TIMEOUT
from tests.ranks import await_watchers, on_ranks, run_on_ranks

PACKAGE = str(Path(camshaft.__file__).parent)


def visited(function: Callable[[], Any]) -> tuple[set[tuple[str, str]], set[str]]:
    """Return the functions of camshaft that a call enters in this thread, and their files.

    What is part of a function, such as a comprehension, does not count as one.
    """
    functions = set()

    def count(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            functions.add((code.co_filename, code.co_qualname if sys.version_info >= (3, 11) else code.co_name))

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return functions, {file for file, _ in functions}


# Functions, and files. These are ceilings, to be lowered only.
ALL_REDUCE = (8, 5) if RECORDS_GLOO else (11, 6)  # with a list of calls of our own
AUTO_DATALOADER = 15, 9
INITIALIZE = 63, 18  # aim: 35 in 8; 22 of them, in 7 files, are in failures
RUN = 40, 13
# on the threads of both ranks: 20 in 8, or 41 in 11 if the library's error comes before the news; more if it has to be
# found out whether the call had begun
FAIL = 60, 14


def check(functions: set[tuple[str, str]], limits: tuple[int, int]) -> None:
    files = {file for file, _ in functions}
    assert len(functions) <= limits[0], (len(functions), len(files), sorted(functions))
    assert len(files) <= limits[1], (len(functions), len(files), sorted(files))


def reduce_at_two_lines(folder: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    idist.initialize("gloo", rank=rank, world_size=size, init_method=f"file://{folder}/store", timeout=TIMEOUT)
    idist.all_reduce(torch.ones(1))  # what is found out once for a job
    for _ in range(2):  # the first call at this line, and a repeated one
        check(visited(lambda: idist.all_reduce(torch.ones(1)))[0], ALL_REDUCE)
    idist.barrier()
    idist.finalize()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the harness destroys


def test_all_reduce(tmp_path: Path) -> None:
    run_on_ranks(2, reduce_at_two_lines, str(tmp_path))


@on_ranks(2)
def test_auto_dataloader() -> None:
    await_watchers()
    with idist.use_backend(current()):  # which is not looked for, as in a job that `initialize` has joined
        check(visited(lambda: idist.auto_dataloader(range(12), batch_size=4))[0], AUTO_DATALOADER)


def begin(folder: str) -> None:
    """Initialize twice, as what is imported on demand runs only once, and check how far the second call travels."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    for name in ("warm", "counted"):
        method = f"file://{folder}/{name}"
        start = partial(idist.initialize, "gloo", rank=rank, world_size=size, init_method=method, timeout=TIMEOUT)
        with mock.patch.object(record, "_remove_old"):  # which depends on what other jobs have left
            functions, _ = visited(start)
        idist.barrier()
        idist.finalize()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the harness destroys
    check(functions, INITIALIZE)


def test_initialize(tmp_path: Path) -> None:
    run_on_ranks(2, begin, str(tmp_path))


def fail(folder: str) -> list[tuple[str, str]]:
    """Return what the last rank enters to say that it has failed, and the first, which waits for it, to raise this."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    idist.initialize("gloo", rank=rank, world_size=size, init_method=f"file://{folder}/store", timeout=TIMEOUT)
    idist.all_reduce(torch.ones(1))  # what is found out once for a job
    successful, _ = visited(lambda: idist.all_reduce(torch.ones(1)))

    def end() -> None:
        if rank == size - 1:
            failures.publish(ValueError("the last rank"), current())
        else:
            with mock.patch.object(watcher, "_LEARNING", HANG), pytest.raises(RankFailedError, match="the last rank"):
                idist.all_reduce(torch.ones(1))

    functions, _ = visited(end)
    idist.finalize()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the harness destroys
    return sorted(functions - successful)


def test_a_failure_until_another_rank_raises(tmp_path: Path) -> None:
    """Its watcher's rounds, which look for more than failures, run beside, on a thread of their own."""
    both = set().union(*run_on_ranks(2, fail, str(tmp_path)))
    check(both, FAIL)
    assert {name for _, name in both} >= {"publish", "translate"}


def test_parallel_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that starts the others, which end at once."""
    for name in ("start", "terminate", "join", "kill"):
        monkeypatch.setattr(BaseProcess, name, lambda process, *args: None)
    monkeypatch.setattr(BaseProcess, "exitcode", 0)
    monkeypatch.setattr(BaseProcess, "sentinel", 0)
    with idist.Parallel("gloo", nproc_per_node=2) as parallel:
        parallel.run(print)
        check(visited(lambda: parallel.run(print))[0], RUN)
