"""Filters by count: the table of what they accept, and the law that ties `following` to it."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.engine import Events
from camshaft.engine.events import NEVER, Every, Once, Window
from tests.engine.strategies import onces, windows

EVENT = Events.ITERATION_COMPLETED

filters = (windows | onces).map(lambda arguments: EVENT(**arguments).filter).filter(lambda found: found is not None)


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        ({"every": 1}, list(range(31))),
        ({"every": 7}, [0, 7, 14, 21, 28]),
        ({"every": numpy.int64(10)}, [0, 10, 20, 30]),
        ({"once": 5}, [5]),
        ({"once": numpy.int32(5)}, [5]),
        ({"once": [4, 2, 4]}, [2, 4]),
        ({"once": (1, 30)}, [1, 30]),
        ({"once": range(3, 6)}, [3, 4, 5]),
        ({"before": 4}, [1, 2, 3]),
        ({"before": 0}, []),
        ({"before": 1}, []),
        ({"after": 27}, [28, 29, 30]),
        ({"after": 0}, list(range(1, 31))),
        ({"before": 6, "after": 2}, [3, 4, 5]),
        ({"before": 3, "after": 2}, []),
        ({"before": 2, "after": 9}, []),
        ({"every": 5, "before": 25}, [1, 6, 11, 16, 21]),
        ({"every": 5, "after": 12}, [13, 18, 23, 28]),
        ({"every": 3, "after": 3, "before": 13}, [4, 7, 10]),
        ({"every": 1, "after": 3, "before": 6}, [4, 5]),
        ({"every": numpy.int64(3), "after": numpy.int8(3), "before": numpy.uint8(13)}, [4, 7, 10]),
    ],
    ids=str,
)
def test_a_filter_accepts_the_counts_of_the_table(arguments, accepted):
    found = EVENT(**arguments).filter
    assert [count for count in range(31) if found is None or found(None, count)] == accepted


@settings(deadline=None)
@given(filters, st.integers(-3, 60))
def test_following_is_the_smallest_accepted_count_above(found, count):
    accepted = (later for later in range(count + 1, count + 120) if found(None, later))
    assert found.following(count) == next(accepted, NEVER)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"every": 10}, "every=10"),
        ({"once": 3}, "once=3"),
        ({"once": [5, 3]}, "once=[3, 5]"),
        ({"before": 4}, "before=4"),
        ({"every": 2, "before": 10, "after": 3}, "every=2, after=3, before=10"),
    ],
)
def test_a_filter_is_shown_as_the_arguments_that_made_it(arguments, shown):
    assert repr(EVENT(**arguments).filter) == shown
    assert repr(EVENT(**arguments)) == f"Events.ITERATION_COMPLETED({shown})"


@pytest.mark.parametrize(
    ("made", "same"),
    [
        (EVENT.every_event_filter(3), Every(3)),
        (EVENT.once_event_filter([3, 1]), Once((1, 3))),
        (EVENT.before_and_after_event_filter(before=3), Window(first=1, every=1, before=3)),
        (EVENT.before_and_after_event_filter(), Window(first=1, every=1)),
        (EVENT.before_and_after_event_filter(4, 1), Window(first=2, every=1, before=4)),
        (EVENT.every_before_and_after_event_filter(2, 9, 1), Window(first=2, every=2, before=9)),
    ],
)
def test_the_helpers_of_an_event_make_the_same_filters(made, same):
    assert made == same


def test_the_default_filter_accepts_everything_and_is_deprecated():
    with pytest.warns(UserWarning, match="deprecated"):
        assert EVENT.default_event_filter(None, 3) is True
