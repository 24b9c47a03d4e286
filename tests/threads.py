"""Run tests on ranks that are threads of this process, which takes milliseconds.

The threads share the state of the process: random state, environment, loggers, and warning filters.
"""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from camshaft.distributed.job import use_backend
from camshaft.distributed.topology import Topology
from tests.limits import HANG, SOON
from tests.thread_backend import Mailbox, ReleasedError, ThreadBackend

GRACE = SOON  # seconds for a rank to end after a failure or a timeout
THE_END = "the end"


def on_threads(
    size: int, limit: float = HANG, nodes: int = 1
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Run the decorated test on this number of ranks; it must pass on all of them."""

    def decorate(test: Callable[..., object]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_each(*args: Any, **kwargs: Any) -> None:
            run_on_threads(size, test, *args, limit=limit, nodes=nodes, **kwargs)

        return on_each

    return decorate


def run_on_threads(
    size: int, function: Callable[..., Any], /, *args: Any, limit: float = HANG, nodes: int = 1, **kwargs: Any
) -> list[Any]:
    """Call a function on this number of ranks and nodes, and return the results in rank order.

    If it raises on a rank or takes too long, the test fails with the traceback of every rank.
    """
    mailbox = Mailbox(limit)
    hosts = [f"node {rank * nodes // size}" for rank in range(size)]
    backends = [ThreadBackend(Topology.from_hosts(rank, hosts), mailbox) for rank in range(size)]
    ranks = [Rank(backend, functools.partial(function, *args, **kwargs)) for backend in backends]
    for rank in ranks:
        rank.start()
    grace = GRACE
    with suppress(ReleasedError):
        mailbox.take(THE_END, size)
        grace = HANG  # all have passed
    for rank in ranks:
        rank.join(grace)
    if any(rank.report() for rank in ranks):
        reports = (f"--- {rank.name}: {rank.report() or 'passed'}" for rank in ranks)
        pytest.fail(f"not all of the {size} ranks passed\n" + "\n".join(reports), pytrace=False)
    return [rank.result for rank in ranks]


class Rank(threading.Thread):
    """The thread of a rank.

    Attributes:
        result: the return value of the function on this rank.
    """

    def __init__(self, backend: ThreadBackend, function: Callable[[], Any]) -> None:
        super().__init__(name=f"rank {backend.topology.rank}", daemon=True)
        self.result: Any = None
        self._backend = backend
        self._mailbox = backend.mailbox
        self._function = function
        self._failure: str | None = None

    def run(self) -> None:
        """Call the function, and release the others if it fails."""
        try:
            with use_backend(self._backend):
                self.result = self._function()
        except BaseException as error:  # also pytest's own, and KeyboardInterrupt
            self._failure = traceback.format_exc()
            self._mailbox.end(f"{self.name} failed: {error!r}")
        else:
            self._mailbox.put(THE_END, self._backend.topology.rank, None, self._backend.topology.world_size)

    def report(self) -> str | None:
        """Return the traceback of the failure or of the running thread; ``None`` if the rank passed."""
        if self.is_alive():
            frame = sys._current_frames().get(self.ident or 0)
            return "timed out\n" + "".join(traceback.format_stack(frame))
        return self._failure
