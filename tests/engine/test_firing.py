"""Firing: the order of the handlers, and what happens when they change while an event fires."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.engine import Engine, EventEnum, Events
from tests.engine.traces import echo

EVENT = Events.EPOCH_COMPLETED


class Steps(EventEnum):
    STEPPED = "stepped"


@pytest.fixture
def engine():
    return Engine(echo)


def names(engine, event=EVENT):
    """Fire an event whose handlers append their names to `engine.log`."""
    engine.log = []
    engine.fire_event(event)
    return "".join(engine.log)


def append(engine, name):
    engine.log.append(name)


def test_handlers_run_in_the_order_of_registration(engine):
    for name in "abc":
        engine.add_event_handler(EVENT, append, name)
    assert names(engine) == "abc"


def test_handlers_of_a_smaller_order_run_earlier(engine):
    for name, order in zip("abcdef", (0, 5, -1, 0, -7, 5), strict=True):
        engine.add_event_handler(EVENT, append, name, order=order)
    engine.on(EVENT, "g", order=-1)(append)
    engine.add_event_handler(EVENT, append, "h")
    assert names(engine) == "ecgadhbf"


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), max_size=12))
def test_the_order_is_a_stable_sort(orders):
    engine = Engine(echo)
    engine.log = []
    for place, order in enumerate(orders):
        engine.add_event_handler(EVENT, append, (order, place), order=order)
    engine.fire_event(EVENT)
    assert engine.log == sorted((order, place) for place, order in enumerate(orders))


def test_order_counts_among_filtered_handlers_and_in_lists(engine):
    engine.state.epoch = 2
    engine.add_event_handler(EVENT, append, "a")
    engine.add_event_handler(
        Events.STARTED | EVENT(every=2) | EVENT(event_filter=lambda e, c: c == 2), append, "b", order=-1
    )
    engine.add_event_handler(EVENT(once=2), append, "c", order=-2)
    assert names(engine) == "cbba"
    assert names(engine, Events.STARTED) == "b"


@pytest.mark.parametrize("order", [1.5, "first", None])
def test_an_order_that_is_no_integer_is_refused(engine, order):
    with pytest.raises(TypeError, match="order must be"):
        engine.add_event_handler(EVENT, append, "a", order=order)
    assert not engine.has_event_handler(append)


def test_order_is_not_handed_to_the_handler(engine):
    engine.log = []
    engine.add_event_handler(EVENT, lambda engine, **kwargs: engine.log.append(kwargs), order=1, a=2)
    engine.fire_event(EVENT)
    assert engine.log == [{"a": 2}]


# --- change while an event fires --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [0, 5, -5])
def test_a_handler_added_during_a_firing_runs_at_the_end_of_it(engine, order):
    def add(engine):
        append(engine, "+")
        engine.add_event_handler(EVENT, append, "n", order=order)

    with engine.add_event_handler(EVENT, add):
        engine.add_event_handler(EVENT, append, "a")
        assert names(engine) == "+an"
    assert names(engine) == ("na" if order < 0 else "an")


def test_a_handler_added_by_an_added_one_runs_too(engine):
    def add(engine, left):
        append(engine, str(left))
        if left:
            engine.add_event_handler(EVENT, add, left - 1)

    engine.add_event_handler(EVENT, add, 3)
    assert names(engine) == "3210"


def test_an_added_handler_with_a_filter_runs_only_at_its_counts(engine):
    def add(engine):
        engine.add_event_handler(EVENT(once=1), append, "1")
        engine.add_event_handler(EVENT(once=2), append, "2")
        engine.add_event_handler(EVENT(event_filter=lambda engine, count: count == 2), append, "3")

    engine.state.epoch = 2
    with engine.add_event_handler(EVENT, add):
        assert names(engine) == "23"
    engine.state.epoch = 1
    assert names(engine) == "1"


def test_a_handler_added_to_another_event_waits_for_that(engine):
    engine.add_event_handler(EVENT, lambda: engine.add_event_handler(Events.COMPLETED, append, "c"))
    assert names(engine) == ""
    assert names(engine, Events.COMPLETED) == "c"


def test_a_handler_added_during_a_run_fires_in_that_run():
    engine, seen = Engine(echo), []

    @engine.on(Events.ITERATION_COMPLETED(once=3))
    def add(engine):
        for event in (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED(every=5), Events.GET_BATCH_STARTED(once=8)):
            engine.add_event_handler(event, lambda name: seen.append((name, engine.state.iteration)), event.name)

    engine.run(range(5), max_epochs=2)
    expected = {("ITERATION_STARTED", n) for n in range(4, 11)} | {("ITERATION_COMPLETED", n) for n in (5, 10)}
    assert set(seen) == expected | {("GET_BATCH_STARTED", 8)}
    assert len(seen) == 10


def test_a_handler_removed_during_a_firing_still_runs_to_its_end(engine):
    handles = []
    engine.add_event_handler(EVENT, lambda: handles[0].remove())
    handles.append(engine.add_event_handler(EVENT, append, "a"))
    engine.add_event_handler(EVENT, append, "b")
    assert names(engine) == "ab"
    assert names(engine) == "b"


def test_a_handler_that_removes_itself_disturbs_no_other(engine):
    def once(engine):
        append(engine, "o")
        engine.remove_event_handler(once, EVENT)

    for name, handler in (("a", append), ("", once), ("b", append)):
        engine.add_event_handler(EVENT, handler, *name)
    assert names(engine) == "aob"
    assert names(engine) == "ab"


def test_a_handler_added_and_removed_during_a_firing_does_not_run(engine):
    engine.add_event_handler(EVENT, lambda: engine.add_event_handler(EVENT, append, "a").remove())
    assert names(engine) == ""


def test_an_error_keeps_the_other_handlers_from_running(engine):
    def fail(engine):
        raise KeyError("no")

    for name, handler in (("a", append), ("", fail), ("b", append)):
        engine.add_event_handler(EVENT, handler, *name)
    with pytest.raises(KeyError):
        names(engine)
    assert engine.log == ["a"]
    with pytest.raises(KeyError):
        names(engine)
    assert engine.log == ["a"]


# --- events inside events ---------------------------------------------------------------------------------------


def test_a_handler_sees_the_event_it_is_called_for(engine):
    seen = []
    engine.register_events(Steps.STEPPED)
    engine.add_event_handler(EVENT, lambda engine: engine.fire_event(Steps.STEPPED))
    engine.add_event_handler(EVENT | Steps.STEPPED, lambda engine: seen.append(engine.last_event_name))
    engine.fire_event(EVENT)
    assert seen == [Steps.STEPPED, EVENT]


def test_the_last_event_is_known_also_without_handlers(engine):
    engine.register_events("foo")
    engine.fire_event("foo")
    assert engine.last_event_name == "foo"
    engine.run([1])
    assert engine.last_event_name == Events.COMPLETED


def test_an_event_can_fire_inside_itself(engine):
    def again(engine):
        append(engine, "a")
        if len(engine.log) < 3:
            engine.fire_event(EVENT)

    engine.add_event_handler(EVENT, again)
    engine.add_event_handler(EVENT, append, "b")
    assert names(engine) == "aaabbb"


def test_events_of_ones_own_fire_from_the_process_function_and_from_handlers():
    seen = []

    def step(engine, batch):
        engine.state.steps += 1
        engine.fire_event(Steps.STEPPED)

    engine = Engine(step)
    engine.register_events(Steps.STEPPED, "rested", event_to_attr={Steps.STEPPED: "steps"})
    engine.add_event_handler(Steps.STEPPED(every=2), lambda: seen.append(engine.state.steps))
    engine.add_event_handler(EVENT, lambda: engine.fire_event("rested"))
    engine.add_event_handler("rested", lambda: seen.append("rested"))
    engine.run([1, 2, 3], max_epochs=2)
    assert seen == [2, "rested", 4, 6, "rested"]
