"""Fixtures of watchers that have no processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from camshaft.distributed.coordination.watcher import Watcher
from tests.distributed.coordination.stand_in import watching


@pytest.fixture
def watcher_at() -> Iterator[Callable[..., Watcher]]:
    """Return a function that returns the watcher of a rank; the watchers end with the test."""
    with ExitStack() as stack:
        yield lambda store, rank=0, size=2: stack.enter_context(watching(store, rank, size))
