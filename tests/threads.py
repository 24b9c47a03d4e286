"""Ranks as threads of this process, for tests: a function runs on several of them at once, in milliseconds.

They share what a process has once: the random state, the environment, loggers, the kinds of warnings that are errors.
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

from camshaft.distributed.run import use_backend
from camshaft.distributed.topology import Topology
from tests.thread_backend import Meeting, ReleasedError, ThreadBackend

LIMIT = 30.0  # seconds that a test may take on its ranks
PATIENCE = 1.0  # seconds that a rank gets to end when one has failed, or the time is over
THE_END = "the end"


def on_threads(
    size: int, limit: float = LIMIT, nodes: int = 1
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Run the decorated test on so many ranks: it passes when it passes on each of them."""

    def decorate(test: Callable[..., object]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_each(*args: Any, **kwargs: Any) -> None:
            run_on_threads(size, test, *args, limit=limit, nodes=nodes, **kwargs)

        return on_each

    return decorate


def run_on_threads(
    size: int, function: Callable[..., Any], /, *args: Any, limit: float = LIMIT, nodes: int = 1, **kwargs: Any
) -> list[Any]:
    """Call a function on so many ranks, on as many nodes, and give what it returned on each of them.

    If it raises on one of them, or takes too long, the test fails with the traceback of every rank.
    """
    meeting = Meeting(limit)
    hosts = [f"node {rank * nodes // size}" for rank in range(size)]
    backends = [ThreadBackend(Topology.from_hosts(rank, hosts), meeting) for rank in range(size)]
    ranks = [Rank(backend, functools.partial(function, *args, **kwargs)) for backend in backends]
    for rank in ranks:
        rank.start()
    with suppress(ReleasedError):
        meeting.take(THE_END, size)
    for rank in ranks:
        rank.join(PATIENCE)
    if any(rank.report() for rank in ranks):
        reports = (f"--- {rank.name}: {rank.report() or 'passed'}" for rank in ranks)
        pytest.fail(f"not all of the {size} ranks passed\n" + "\n".join(reports), pytrace=False)
    return [rank.result for rank in ranks]


class Rank(threading.Thread):
    """One of the threads.

    Attributes:
        result: what the function returned there.
    """

    def __init__(self, backend: ThreadBackend, function: Callable[[], Any]) -> None:
        super().__init__(name=f"rank {backend.topology.rank}", daemon=True)
        self.result: Any = None
        self._backend = backend
        self._meeting = backend.meeting
        self._function = function
        self._failure: str | None = None

    def run(self) -> None:
        """Call the function, and release the others if it fails."""
        try:
            with use_backend(self._backend):
                self.result = self._function()
        except BaseException as error:  # also pytest's own, and KeyboardInterrupt
            self._failure = traceback.format_exc()
            self._meeting.end(f"{self.name} failed: {error!r}")
        else:
            self._meeting.bring(THE_END, self._backend.topology.rank, None, self._backend.topology.world_size)

    def report(self) -> str | None:
        """Return the traceback of the failure, or where the thread stands; ``None`` if all went well."""
        if self.is_alive():
            frame = sys._current_frames().get(self.ident or 0)
            return "did not come to its end\n" + "".join(traceback.format_stack(frame))
        return self._failure
