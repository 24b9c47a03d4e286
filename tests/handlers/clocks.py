"""A fake clock that replaces the one of handlers, and advances only on request."""

from __future__ import annotations

import contextlib
from unittest import mock


class Clock:
    """Time in whole seconds, so that sums are exact."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def take(self, seconds):
        """Advance the clock."""
        self.now += seconds

    def taking(self, seconds):
        """Return a handler that takes this long."""

        def handler():
            self.now += seconds

        return handler


@contextlib.contextmanager
def clock_in(*classes):
    """Yield a clock that replaces the one in the modules of these classes."""
    clock = Clock()
    with contextlib.ExitStack() as stack:
        for one in classes:
            stack.enter_context(mock.patch.dict(one.__init__.__globals__, perf_counter=clock))
        yield clock
