"""How failures and hangs are noticed and reported: who failed first, who is missing, and which calls differ."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from camshaft.distributed.backends.contract import Backend
from camshaft.distributed.failures import verdicts
from camshaft.distributed.failures.board import Board
from camshaft.distributed.failures.record import Record, Snapshot, find, read
from camshaft.distributed.failures.status import user_line
from camshaft.distributed.failures.watcher import OUR_OWN, Watcher

__all__ = [
    "OUR_OWN",
    "Board",
    "Snapshot",
    "Watcher",
    "explain_end",
    "inspect",
    "publish",
    "translate",
    "user_line",
    "watch",
]

logger = logging.getLogger("camshaft.distributed")


def watch(backend: Backend, report_after: float = 60.0, agent: int | None = None) -> Watcher:
    """Return the watcher of a job, which is started on first use.

    Args:
        backend: of the job.
        report_after: seconds that a rank waits in a collective until the log names the ranks that have not arrived.
        agent: process id of the torchrun that started this process, if any.
    """
    job, topology = backend.job, backend.topology
    if Watcher not in job.resources:
        record = None
        if topology.world_size > 1:
            try:
                record = Record(topology.rank, topology.world_size)
            except OSError as error:
                logger.warning("rank %d has no record: %s", topology.rank, error)
        job.resource(Watcher, backend, record, report_after, agent).start()
    watcher: Watcher = job.resources[Watcher]
    return watcher


def translate(error: BaseException, backend: Backend, ranks: Iterable[int] = ()) -> BaseException:
    """Return the error to raise in place of one of a library, if another rank has failed before.

    Args:
        error: the error.
        backend: of the job.
        ranks: whom this rank may have waited for.
    """
    watcher = backend.job.find(Watcher)
    return error if watcher is None else watcher.translate(error, frozenset(ranks))


def publish(error: BaseException, backend: Backend) -> BaseException:
    """Publish that an error ends this rank, before it has any consequences; return the error to raise."""
    watcher = backend.job.find(Watcher)
    return error if watcher is None else watcher.fail(error)


def inspect() -> list[Snapshot]:
    """Return what the ranks on this machine are doing, or did before they were killed."""
    return [one for path in find() if (one := read(path)) is not None]


def explain_end(pid: int | None, pids: Iterable[int | None]) -> str:
    """Return what the records say of a process that was killed or crashed; ``""`` if there is none.

    Args:
        pid: of the process.
        pids: of all processes of its job.
    """
    ranks = {one.rank: one for one in inspect() if one.pid in set(pids)}
    own = next((one for one in ranks.values() if one.pid == pid), None)
    if own is None:
        return ""
    if (final := next((one.status["final"] for one in ranks.values() if one.status.get("final")), None)) is not None:
        return str(final["text"])  # what the other ranks raise; they know their own calls
    found = verdicts.verdict(ranks.values(), time.monotonic())
    return found.text if found is not None and found.kind == "diverged" else verdicts.end_text(own, ranks)
