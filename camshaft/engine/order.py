"""Order of the handlers of an event."""

from __future__ import annotations

import sys
from enum import IntEnum


class Order(IntEnum):
    """The orders with which the library adds handlers.

    ``add_event_handler(..., order=...)`` takes any integer. Handlers with a smaller order run earlier, those with the
    same order as they were added. The default is 0, also for the library's handlers that users add themselves, such as
    checkpoints and schedulers.

    Attributes:
        TIME_FIRST: time profilers start the clock. They also measure the handlers with the orders below.
        MEASURE_FIRST: throughput and traces end an iteration, which excludes the handlers that follow.
        STEP: accumulated gradients are applied, so that handlers see the final weights of the epoch.
        RESULTS: metrics and averages are computed, and loggers resume, before other handlers use them.
        DEFAULT: handlers of users.
        MEASURE_LAST: throughput and traces start an iteration.
        LAST: handlers that must have the last word: the rate search sets the rate, and ranks agree on stopping.
        TIME_LAST: time profilers stop the clock.
    """

    TIME_FIRST = -(2**100)  # beyond sys.maxsize, which users may pass
    MEASURE_FIRST = -(2**40)
    STEP = -(10**9)
    RESULTS = -1
    DEFAULT = 0
    MEASURE_LAST = 2**40
    LAST = sys.maxsize
    TIME_LAST = 2**100
