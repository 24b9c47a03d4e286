"""Ranks without processes: backends that have nothing but a store, and snapshots of what ranks report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from camshaft.distributed.backends.serial import SerialBackend
from camshaft.distributed.failures.record import Snapshot
from camshaft.distributed.failures.trace import RECORDS_GLOO
from camshaft.distributed.failures.watcher import Watcher
from camshaft.distributed.topology import Topology

needs_recorder = pytest.mark.skipif(
    not RECORDS_GLOO, reason="torch 2.9 does not record what gloo sends, so only calls of camshaft are known"
)


class StoreOnly(SerialBackend):
    """One of several ranks that share a store, and whose records nobody sees."""

    def __init__(self, store: Any, rank: int = 0, size: int = 2, local_size: int | None = None) -> None:
        self._store = store
        local = local_size or size
        nodes = size // local
        self.topology = Topology(rank, size, rank % local, local, rank // local, nodes)

    def store(self) -> Any:
        return self._store


@contextmanager
def watching(store: Any, rank: int = 0, size: int = 2) -> Iterator[Watcher]:
    """Return the watcher of a rank without a record; its threads end with the block."""
    backend = StoreOnly(store, rank, size)
    watcher = backend.job.resource(Watcher, backend, None)
    watcher.start()
    try:
        yield watcher
    finally:
        backend.job.close()


def snapshot(rank: int, size: int = 2, is_alive: bool = True, **status: Any) -> Snapshot:
    """Return what a rank reports at time 100."""
    return Snapshot(Path(f"rank-{rank}"), "job", rank, size, rank + 1, is_alive, "host", {"time": 100.0, **status})


def sent(*calls: tuple[str, int, str] | tuple[str, int, str, str]) -> dict[str, Any]:
    """Return what a status says of calls: group, number, operation, and dtype and size."""
    rows = [[group, number, name, *(size or [""]), *(size or [""])] for group, number, name, *size in calls]
    return {"calls": rows, "begun": {group: number for group, number, *_ in rows}, "at_most": {}}


def waiting(
    group: str, number: int, operation: str, ranks: str, line: str = "train.py:1 in f", **more: Any
) -> dict[str, Any]:
    """Return the status of a rank that is stuck in a call which it has sent ten seconds ago."""
    wait = {"group": group, "sequence": number, "operation": operation, "ranks": ranks, "value": more.pop("value", "")}
    wait |= {"began": 90.0, "what": operation, "line": line, "via": ""}
    size = (wait["value"],) if wait["value"] else ()
    return {**sent((group, number, operation, *size)), "waits": [wait], "is_stuck": True, **more}


class CountingStore:
    """A store that counts its requests, as those over a network do.

    Attributes:
        requests: how often each method was called.
    """

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.requests = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        if name not in ("timeout", "num_keys", "has_extended_api"):
            self.requests[name] += 1
        return getattr(self._store, name)
