"""The order of the handlers of an event."""

from __future__ import annotations

import sys
from enum import IntEnum


class Order(IntEnum):
    """Places of the library's handlers among those of an event.

    ``add_event_handler(..., order=...)`` takes any integer: handlers with a smaller order run earlier, those with the
    same order as they were registered. Handlers of users are at 0 unless they say otherwise, and so is what users
    attach to an event themselves: loggers, checkpoints, schedulers.

    Attributes:
        TIME_FIRST: time profilers start the clock. They also measure the handlers at the other places.
        MEASURE_FIRST: throughput and traces end an iteration, before the time that other handlers take.
        STEP: accumulated gradients are applied, so that handlers see the weights of the whole epoch.
        RESULTS: metrics and averages are computed, and loggers find their place, before other handlers read them.
        DEFAULT: handlers of users.
        MEASURE_LAST: throughput and traces start an iteration, after all that precedes it.
        LAST: what must have the last word: a rate search sets the rate, and ranks agree on stopping.
        TIME_LAST: time profilers stop the clock.
    """

    TIME_FIRST = -(2**100)  # beyond sys.maxsize, the most that users will think of
    MEASURE_FIRST = -(2**40)
    STEP = -(10**9)
    RESULTS = -1
    DEFAULT = 0
    MEASURE_LAST = 2**40
    LAST = sys.maxsize
    TIME_LAST = 2**100
