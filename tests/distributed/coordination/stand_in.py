"""A backend that has nothing but a store, for watchers without processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

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


class CountingStore:
    """A store that counts its requests, as those over a network do.

    Attributes:
        requests: how often each method was called.
    """

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.requests = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        if name not in ("timeout", "num_keys"):
            self.requests[name] += 1
        return getattr(self._store, name)
