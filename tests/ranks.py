"""Run tests on real ranks: several processes that gloo connects.

The processes are forked from a server that has imported torch already, so two of them cost a tenth of a second.
Functions, arguments, and results are pickled, so functions must be defined at module level. The processes see no
changes made in this process after the server was started, not even environment variables.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import pickle
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from camshaft.distributed import set_local_rank
from camshaft.distributed.failures import Watcher, board, hang_reports, watcher
from camshaft.distributed.job import current
from tests.limits import HANG, SOON

GRACE = SOON  # seconds for the other ranks after one has failed
ENDED = "ended with exit code"
LIMITS = {  # after which a rank goes on without the others, or says that they stand still
    watcher: ("_LEARNING", "_NOTICING", "_TELLING", "_RAISING", "PLACES", "ANSWER"),
    board: ("SILENCE", "_INFORMING"),
    hang_reports: ("STALE",),
}

context: Any = multiprocessing.get_context("forkserver")
# optimizers import torch._dynamo in their first step
context.set_forkserver_preload(["torch.nn.parallel.distributed", "torch._dynamo", "pytest", "camshaft.engine"])


def on_ranks(size: int, limit: float = HANG) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Run the decorated test on this number of ranks; it must pass on all of them."""

    def decorate(test: Callable[..., object]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_each(*args: Any, **kwargs: Any) -> None:
            run_on_ranks(size, on_each, *args, limit=limit, **kwargs)

        return on_each

    return decorate


def run_on_ranks(
    size: int, function: Callable[..., Any], /, *args: Any, limit: float = HANG, **kwargs: Any
) -> list[Any]:
    """Call a function on this number of ranks, and return the results in rank order.

    If it raises on a rank or takes too long, the test fails with the traceback of every rank.
    """
    ranks = _run(size, limit, (function, args, kwargs))
    if any(rank.failure for rank in ranks):
        _fail(f"not all of the {size} ranks passed", ranks)
    return [rank.result for rank in ranks]


def kill_on_ranks(size: int, function: Callable[..., Any], /, *args: Any, limit: float = HANG, **kwargs: Any) -> None:
    """Call a function on this number of ranks, and fail unless it ends each of them by SIGKILL."""
    ranks = _run(size, limit, (function, args, kwargs))
    if not all(rank.failure and rank.failure.startswith(f"{ENDED} {-signal.SIGKILL}\n") for rank in ranks):
        _fail(f"not all of the {size} ranks were killed", ranks)


def hurried() -> AbstractContextManager[Any]:
    """Return a block in which a wait for other ranks, but no request to the store, soon comes to its timeout."""
    return mock.patch(
        "camshaft.distributed.failures.store.time", mock.Mock(wraps=time, monotonic=lambda: 10_000 * time.monotonic())
    )


def await_watchers() -> None:
    """Adopt the group of the test, and wait until the watchers of all ranks have made their first requests.

    From then on, ranks wait for the watchers however long these stand still.
    """
    for module, names in LIMITS.items():
        for name in names:
            assert hasattr(module, name)
            setattr(module, name, HANG)  # the process of a rank ends with the test
    assert current().job.find(Watcher).board.has_connected.wait(HANG)
    dist.barrier()


def _run(size: int, limit: float, task: Any) -> list[Rank]:
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ranks = [stack.enter_context(Rank(number, Path(folder) / str(number))) for number in range(size)]
        for rank in ranks:
            rank.start(size, store.port, limit, task)
        wait_for(ranks, limit)
        return ranks


def _fail(message: str, ranks: list[Rank]) -> None:
    reports = (f"--- rank {rank.number}: {rank.failure or 'passed'}" for rank in ranks)
    pytest.fail("\n".join([message, *reports]), pytrace=False)


class Rank:
    """A rank, as seen by the test process.

    Attributes:
        result: the return value of the function on this rank.
        failure: a traceback or another description; ``None`` if the rank passed.
    """

    def __init__(self, number: int, dump: Path) -> None:
        self.number = number
        self.result: Any = None
        self.failure: str | None = None
        self.connection, self._theirs = context.Pipe(duplex=False)
        self._dump = dump
        self._dump.touch()
        self._process: Any = None

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
        self._theirs.close()
        self.connection.close()

    def start(self, *task: Any) -> None:
        arguments = (self.number, self._theirs, str(self._dump), *task)
        process = context.Process(target=run_rank, args=arguments, daemon=True)
        process.start()
        self._process = process  # a process that was not started cannot be killed
        self._theirs.close()

    def receive(self) -> None:
        """Receive the outcome from the process, or read its dump if it died."""
        try:
            passed, outcome = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self._process.join()
            passed, outcome = False, f"{ENDED} {self._process.exitcode}\n{self._dump.read_text()}"
        self.result, self.failure = (outcome, None) if passed else (None, outcome)

    def abort(self) -> None:
        """Abort the process, which dumps its traceback."""
        os.kill(self._process.pid, signal.SIGABRT)
        self.receive()
        self.failure = f"timed out: {self.failure}"


def wait_for(ranks: list[Rank], limit: float) -> None:
    """Receive the outcome of every rank, and abort ranks that exceed the limit."""
    deadline = time.monotonic() + limit
    waiting = {rank.connection: rank for rank in ranks}
    while waiting and (ready := wait(waiting, max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            rank = waiting.pop(connection)
            rank.receive()
            if rank.failure:
                deadline = min(deadline, time.monotonic() + GRACE)
    for rank in waiting.values():
        rank.abort()


def run_rank(number: int, connection: Any, dump: str, size: int, port: int, limit: float, task: Any) -> None:
    """Run in each process: connect to the others, call the function, and send the outcome."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    with open(dump, "w") as file:
        faulthandler.enable(file)
        try:
            outcome = pickle.dumps((True, call(number, size, port, timedelta(seconds=limit), *task)))
        except BaseException:
            outcome = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(outcome)
        faulthandler.disable()


def call(
    rank: int, size: int, port: int, timeout: timedelta, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    dist.barrier()  # a rank that returns before its peers have connected would break their connections
    set_local_rank(rank)  # no launcher sets it; all ranks are on one node
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    try:
        return getattr(function, "__wrapped__", function)(*args, **kwargs)  # a decorated test, or any function
    finally:
        if dist.is_initialized():  # otherwise, the function has destroyed the group
            dist.destroy_process_group()
