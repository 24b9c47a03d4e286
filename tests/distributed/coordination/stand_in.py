"""A backend that has nothing but a store, for watchers without processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from camshaft.distributed.backends.serial import SerialBackend
from camshaft.distributed.coordination.watcher import Watcher
from camshaft.distributed.topology import Topology


class StoreOnly(SerialBackend):
    """One of several ranks that share a store, and whose records nobody sees."""

    def __init__(self, store: Any, rank: int = 0, size: int = 2) -> None:
        self._store = store
        self.topology = Topology(rank=rank, world_size=size, local_rank=rank, local_world_size=size)

    def store(self) -> Any:
        return self._store


@contextmanager
def watching(store: Any, rank: int = 0, size: int = 2) -> Iterator[Watcher]:
    """Return the watcher of a rank, which ends with the block."""
    backend = StoreOnly(store, rank, size)
    try:
        yield Watcher.of(backend)
    finally:
        backend.job.close()
