"""Fixtures of boards and watchers that have no processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from camshaft.distributed.failures.board import Board
from tests.distributed.failures.stand_in import watching


@pytest.fixture
def board_at() -> Iterator[Callable[..., Board]]:
    """Return a function that returns the board of a rank; the threads end with the test."""
    with ExitStack() as stack:
        yield lambda store, rank=0, size=2: stack.enter_context(watching(store, rank, size)).board
