"""A clock that stands until somebody moves it, in the place of the one that handlers look at."""

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
        """Let something take so long."""
        self.now += seconds

    def taking(self, seconds):
        """Make a handler that takes so long."""

        def handler():
            self.now += seconds

        return handler


@contextlib.contextmanager
def clock_in(*classes):
    """Give a clock that what is in the modules of these classes looks at in the block."""
    clock = Clock()
    with contextlib.ExitStack() as stack:
        for one in classes:
            stack.enter_context(mock.patch.dict(one.__init__.__globals__, perf_counter=clock))
        yield clock
