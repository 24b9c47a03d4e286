"""Handles, and finding and removing handlers."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest

from camshaft.engine import Engine, Events, RemovableEventHandle
from tests.engine.traces import echo

EVENT = Events.EPOCH_COMPLETED


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, engine):
        self.count += 1


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1


@pytest.fixture
def engine():
    return Engine(echo)


def fire(engine, event=EVENT):
    engine.fire_event(event)


def test_a_handle_knows_event_handler_and_engine(engine):
    counter = Counter()
    handle = engine.add_event_handler(EVENT(every=2), counter.add)
    assert isinstance(handle, RemovableEventHandle)
    assert handle.event_name == EVENT
    assert handle.handler() == counter.add
    assert handle.engine() is engine


@pytest.mark.parametrize("event", [EVENT, EVENT(every=1), EVENT(event_filter=lambda engine, count: True), EVENT.name])
def test_a_handle_removes_its_registration_once(engine, event):
    counter = Counter()
    handle = engine.add_event_handler(event, counter.add)
    fire(engine)
    handle.remove()
    handle.remove()
    fire(engine)
    assert counter.count == 1
    assert not engine.has_event_handler(counter.add)


def test_a_handle_removes_no_other_registration_of_its_handler(engine):
    calls = []
    handles = [engine.add_event_handler(EVENT, calls.append, name) for name in "abc"]
    handles[1].remove()
    fire(engine)
    assert len(calls) == 2
    engine.add_event_handler(EVENT, calls.append)
    handles[1].remove()
    fire(engine)
    assert len(calls) == 5


def test_a_handle_of_a_list_removes_all_that_the_list_registered(engine):
    counter = Counter()
    engine.add_event_handler(Events.STARTED, counter.add)
    handle = engine.add_event_handler(Events.STARTED | EVENT | EVENT(every=2), counter.add)
    engine.run([1], max_epochs=2)
    assert counter.count == 1 + 1 + 2 + 1
    handle.remove()
    engine.run([1], max_epochs=4)
    assert counter.count == 6


def test_a_handle_ends_with_a_block_also_after_an_error(engine):
    counter = Counter()
    handle = engine.add_event_handler(EVENT, counter.add)
    with pytest.raises(KeyError), handle as entered:
        assert entered is handle
        fire(engine)
        raise KeyError
    fire(engine)
    assert counter.count == 1


def test_a_handle_can_be_entered_again_and_in_itself(engine):
    counter = Counter()
    with engine.add_event_handler(EVENT, counter.add) as handle:
        with handle:
            fire(engine)
        assert not engine.has_event_handler(counter.add)
        with handle:
            fire(engine)
    assert counter.count == 1


def test_a_handle_keeps_neither_engine_nor_handler_alive():
    gc.disable()
    try:
        engine, counter = Engine(echo), Counter()
        handles = [engine.add_event_handler(EVENT, one) for one in (counter.add, functools.partial(id), lambda: 1)]
        watched = weakref.ref(engine), weakref.ref(counter)
        engine.remove_event_handler(counter.add, EVENT)
        del counter
        assert watched[1]() is None
        assert handles[0].handler() is None
        del engine
        assert watched[0]() is None
        assert all(handle.engine() is None and handle.handler() is None for handle in handles)
        for handle in handles:
            handle.remove()
    finally:
        gc.enable()


@pytest.mark.parametrize("make", [lambda: [].append, Slotted, lambda: functools.partial(id)])
def test_a_handle_works_for_any_callable(engine, make):
    handler = make()
    with engine.add_event_handler(EVENT, handler) as handle:
        assert handle.handler() == handler
        assert engine.has_event_handler(handler)
    assert not engine.has_event_handler(handler)


def test_a_handle_made_by_hand_removes_every_registration_of_the_handler_there(engine):
    counter = Counter()
    for event in (EVENT, EVENT(every=2), Events.STARTED):
        engine.add_event_handler(event, counter.add)
    handle = RemovableEventHandle(EVENT, counter.add, engine)
    handle.remove()
    handle.remove()
    assert not engine.has_event_handler(counter.add, EVENT)
    assert engine.has_event_handler(counter.add, Events.STARTED)


# --- has_event_handler, remove_event_handler --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "found"),
    [
        (None, True),
        (EVENT, True),
        (EVENT(once=9), True),
        ("EPOCH_COMPLETED", True),
        (EVENT | Events.STARTED, True),
        (Events.STARTED | EVENT(every=7), True),
        (Events.STARTED, False),
        (Events.STARTED | Events.COMPLETED, False),
        ("unknown", False),
    ],
)
def test_a_handler_is_found_under_each_form_of_its_event(engine, event, found):
    counter = Counter()
    engine.add_event_handler(EVENT(every=3), counter.add)
    assert engine.has_event_handler(counter.add, event) is found
    assert not engine.has_event_handler(Counter().add, event)


@pytest.mark.parametrize("event", [EVENT, EVENT(once=9), "EPOCH_COMPLETED", EVENT | Events.STARTED(every=2)])
def test_removing_takes_all_registrations_of_the_handler_and_only_those(engine, event):
    counter, other = Counter(), Counter()
    for one in (counter.add, other.add, counter.add):
        engine.add_event_handler(EVENT, one)
        engine.add_event_handler(EVENT(every=2), one)
        engine.add_event_handler(Events.COMPLETED, one)
    engine.remove_event_handler(counter.add, event)
    assert not engine.has_event_handler(counter.add, event)
    assert engine.has_event_handler(counter.add, Events.COMPLETED)
    engine.run([1])
    assert (counter.count, other.count) == (2, 2)


def test_a_handler_on_one_event_of_a_list_is_enough_to_remove_it(engine):
    counter = Counter()
    engine.add_event_handler(Events.COMPLETED, counter.add)
    engine.remove_event_handler(counter.add, EVENT | Events.COMPLETED)
    assert not engine.has_event_handler(counter.add)


@pytest.mark.parametrize("event", [Events.STARTED, "unknown", 3, Events.STARTED | Events.COMPLETED])
def test_removing_what_is_not_there_is_refused(engine, event):
    counter = Counter()
    engine.add_event_handler(EVENT, counter.add)
    with pytest.raises(ValueError, match="not registered"):
        engine.remove_event_handler(counter.add, event)
    with pytest.raises(ValueError, match="not registered"):
        engine.remove_event_handler(Counter().add, EVENT)
    assert engine.has_event_handler(counter.add)


def test_methods_are_the_same_handler_if_they_are_equal(engine):
    counter = Counter()
    engine.add_event_handler(EVENT, counter.add)
    engine.remove_event_handler(counter.add, EVENT)  # another object than the one registered
    assert not engine.has_event_handler(counter.add)
