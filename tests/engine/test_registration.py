"""Registering: which events, filters and process functions an engine accepts."""

from __future__ import annotations

import functools
import logging

import pytest

from camshaft.engine import CallableEventWithFilter, Engine, EventEnum, Events
from tests.engine.traces import echo

EPOCH = Events.EPOCH_COMPLETED
GOT: list[tuple] = []


class Steps(EventEnum):
    STEPPED = "stepped"
    LOADED = "loaded"


def note(engine, *args):
    GOT.append(args)


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@pytest.fixture(autouse=True)
def nothing_got():
    GOT.clear()


@pytest.mark.parametrize(
    "event", [*Events, "EPOCH_STARTED", EPOCH(every=2), EPOCH(event_filter=lambda engine, count: True)]
)
def test_the_built_in_events_are_registered(event):
    assert Engine(echo).has_registered_events(event)


@pytest.mark.parametrize("event", ["epoch_started", "FOO", Steps.STEPPED, CallableEventWithFilter("FOO"), 3, None])
def test_an_event_never_registered_is_refused_everywhere(event, caplog):
    engine = Engine(echo)
    assert not engine.has_registered_events(event)
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="event"):
        engine.add_event_handler(event, note)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    with pytest.raises(ValueError, match="event"):
        engine.on(event)
    with pytest.raises(ValueError, match="event"):
        engine.fire_event(event)
    assert engine.last_event_name is None


@pytest.mark.parametrize(
    ("event", "hint"),
    [
        ("epoch_started", "did you mean EPOCH_STARTED"),
        ("EPOCH_COMPLETD", "did you mean EPOCH_COMPLETED"),
        ("FOO", "register_events"),
        (logging.INFO, "of type int"),
    ],
)
def test_the_message_about_an_unknown_event_says_what_to_do(event, hint):
    with pytest.raises(ValueError, match=hint):
        Engine(echo).add_event_handler(event, note)


@pytest.mark.parametrize("counters", [{Steps.STEPPED: 3}, {Steps.STEPPED: "max_epochs"}, {Steps.STEPPED: "output"}])
def test_a_counter_that_cannot_count_is_refused_and_nothing_is_registered(counters):
    engine = Engine(echo)
    with pytest.raises(ValueError, match="event_to_attr"):
        engine.register_events(Steps.STEPPED, event_to_attr=counters)
    assert not engine.has_registered_events(Steps.STEPPED)


@pytest.mark.parametrize(
    ("registered", "used"),
    [
        ("FOO", "FOO"),
        ("FOO", CallableEventWithFilter("anything", name="FOO")),
        (Steps.STEPPED, Steps.STEPPED),
        (Steps.STEPPED, "STEPPED"),
    ],
)
def test_a_registered_event_can_be_used_by_each_of_its_names(registered, used):
    engine = Engine(echo)
    engine.register_events(registered, "another")
    assert engine.has_registered_events(used)
    engine.add_event_handler(used, note, 1)
    for event in (registered, used):
        engine.fire_event(event)
        assert engine.last_event_name == registered
    assert GOT == [(1,)] * 2


def test_registering_twice_keeps_the_handlers():
    engine = Engine(echo)
    engine.register_events("foo", Steps.STEPPED)
    engine.add_event_handler("foo", note)
    engine.register_events("foo", Steps.STEPPED, *Events)
    engine.fire_event("foo")
    assert GOT == [()]


@pytest.mark.parametrize(
    ("events", "counters", "error"),
    [
        ((3,), None, TypeError),
        (("foo", None), None, TypeError),
        ((CallableEventWithFilter("foo"),), None, TypeError),
        ((Steps.STEPPED(every=2),), None, TypeError),
        (("foo",), [("foo", "foos")], ValueError),
        (("foo",), "foos", ValueError),
    ],
)
def test_a_wrong_registration_changes_nothing(events, counters, error):
    engine = Engine(echo)
    with pytest.raises(error, match="got"):
        engine.register_events(*events, event_to_attr=counters)
    assert not engine.has_registered_events("foo")


COUNTLESS = [event for event in Events if event not in Engine(echo).state.event_to_attr]


@pytest.mark.parametrize("event", [*COUNTLESS, "foo", Steps.STEPPED])
def test_a_filter_on_an_event_that_nothing_counts_is_refused_at_once(event):
    engine = Engine(echo)
    engine.register_events("foo", Steps.STEPPED)
    event = CallableEventWithFilter(event) if event == "foo" else event
    for filtered in (event(once=1), event(every=2), event(event_filter=lambda engine, count: True)):
        with pytest.raises(RuntimeError, match="event_to_attr"):
            engine.add_event_handler(filtered, note)
        with pytest.raises(RuntimeError, match="event_to_attr"):
            engine.add_event_handler(Events.STARTED | filtered, note)
    assert not engine.has_event_handler(note)
    engine.add_event_handler(event(every=1), note)  # no filter, no need to count


def test_a_filter_works_once_the_event_is_counted():
    engine = Engine(echo)
    engine.register_events(Steps.STEPPED)
    engine.register_events(Steps.STEPPED, event_to_attr={Steps.STEPPED: "steps"})
    engine.add_event_handler(Steps.STEPPED(every=2), lambda: GOT.append(engine.state.steps))
    for engine.state.steps in range(1, 6):
        engine.fire_event(Steps.STEPPED)
    assert GOT == [2, 4]


def test_a_counter_of_one_engine_says_nothing_about_another():
    first, second = Engine(echo), Engine(echo)
    first.register_events(Steps.STEPPED, event_to_attr={Steps.STEPPED: "steps"})
    second.register_events(Steps.STEPPED)
    first.add_event_handler(Steps.STEPPED(every=2), note)
    with pytest.raises(RuntimeError, match="event_to_attr"):
        second.add_event_handler(Steps.STEPPED(every=2), note)


@pytest.mark.parametrize("unknown", ["foo", Steps.LOADED])
def test_a_list_with_one_wrong_event_registers_nothing(unknown):
    engine = Engine(echo)
    with pytest.raises(ValueError, match="unknown event"):
        engine.add_event_handler(Events.STARTED | unknown | Events.COMPLETED, note)
    assert not engine.has_event_handler(note)


@pytest.mark.parametrize(
    ("process_function", "error"),
    [
        (None, ValueError),
        (3, TypeError),
        ("step", TypeError),
        (lambda: None, ValueError),
        (lambda engine: None, ValueError),
        (lambda engine, batch, more: None, ValueError),
        (lambda engine, *, batch: None, ValueError),
    ],
)
def test_a_wrong_process_function_is_refused(process_function, error):
    with pytest.raises(error, match="process_function"):
        Engine(process_function)


@pytest.mark.parametrize(
    "process_function",
    [
        echo,
        logged(echo),
        lambda *args: args[1],
        lambda engine, batch, more=None: batch,
        functools.partial(lambda more, engine, batch: batch, 1),
        type("Step", (), {"__call__": lambda self, engine, batch: batch})(),
    ],
)
def test_any_callable_of_engine_and_batch_is_a_process_function(process_function):
    assert Engine(process_function).run([1, 2]).output == 2


def test_a_new_engine_has_no_event_and_no_wish_to_stop():
    engine = Engine(echo)
    flags = engine.should_terminate, engine.should_terminate_single_epoch, engine.should_interrupt
    assert flags == (False, False, False)
    assert (engine.last_event_name, engine.state_dict_user_keys) == (None, [])
    assert Engine.interrupt_resume_enabled is True
