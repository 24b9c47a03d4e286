"""Events, lists of events, and handles of registrations."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
import weakref
from enum import Enum

import pytest

from camshaft.engine import CallableEventWithFilter, Engine, EventEnum, Events, EventsList, RemovableEventHandle
from camshaft.engine import events as events_module
from tests.engine.traces import echo

# === Events and lists of events ===


EVENT = Events.EPOCH_COMPLETED


class Backprop(EventEnum):
    BACKWARD_STARTED = "backward_started"
    STARTED = "backprop_started"


class Other(EventEnum):
    BACKWARD_STARTED = "backward_started"


class Plain(Enum):
    STARTED = "started"


def accept(engine, count):
    return True


def test_the_events_have_the_names_values_and_order_of_the_api():
    names = (
        "EPOCH_STARTED EPOCH_COMPLETED STARTED COMPLETED ITERATION_STARTED ITERATION_COMPLETED EXCEPTION_RAISED "
        "GET_BATCH_STARTED GET_BATCH_COMPLETED DATALOADER_STOP_ITERATION TERMINATE TERMINATE_SINGLE_EPOCH INTERRUPT"
    )
    assert [event.name for event in Events] == names.split()
    assert [event.value for event in Events] == names.lower().split()


def test_the_names_are_importable_from_the_module_of_events():
    assert events_module.Events is Events
    assert set(events_module.__all__) == {
        *("CallableEventWithFilter", "EventEnum", "Events", "EventsList", "OptimizerEvents", "RemovableEventHandle"),
        "State",
    }  # fmt: skip


# --- filtered events --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [EVENT, Backprop.BACKWARD_STARTED, CallableEventWithFilter("foo", name="FOO")])
def test_calling_an_event_gives_another_one_of_the_same_name(event):
    filtered = event(every=3)
    assert type(filtered) is CallableEventWithFilter
    assert (filtered.name, filtered.value) == (event.name, event.value)
    assert event.filter is None
    assert filtered.filter(None, 3)


def test_every_1_gives_an_event_without_filter_that_is_no_member():
    event = EVENT(every=1)
    assert event.filter is None
    assert type(event) is CallableEventWithFilter
    assert event == EVENT


def test_a_second_filter_replaces_the_first():
    event = EVENT(every=3)
    again = event(once=4)
    assert (again.filter(None, 3), again.filter(None, 4)) == (False, True)
    assert event.filter(None, 3)


def test_a_filter_of_the_user_is_kept_as_it_is():
    assert EVENT(event_filter=accept).filter is accept
    assert EVENT(accept).filter is accept


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({}, ValueError, "event_filter"),
        ({"event_filter": accept, "every": 2}, ValueError, "every=2"),
        ({"event_filter": accept, "once": 2}, ValueError, "once=2"),
        ({"once": 1, "every": 2}, ValueError, "every=2"),
        ({"once": 1, "before": 2}, ValueError, "before=2"),
        ({"once": 1, "after": 2}, ValueError, "after=2"),
        ({"event_filter": 3}, TypeError, "event_filter.*3"),
        ({"event_filter": "every"}, TypeError, "event_filter.*every"),
        ({"event_filter": lambda: True}, ValueError, "event_filter"),
        ({"event_filter": lambda engine: True}, ValueError, "event_filter"),
        ({"event_filter": lambda engine, count, more: True}, ValueError, "event_filter"),
        ({"event_filter": lambda engine, *, count: True}, ValueError, "event_filter"),
        *[({"every": bad}, ValueError, "every.*got") for bad in (0, -1, 1.0, "2", [2])],
        *[({"once": bad}, ValueError, "once.*got") for bad in (0, -1, 1.0, "2", [], [1, 0], [1.0], {1}, ["1"])],
        *[({"before": bad}, ValueError, "before.*got") for bad in (-1, 1.5, "2")],
        *[({"after": bad}, ValueError, "after.*got") for bad in (-1, 1.5, "2")],
        ({"every": 0, "before": 3}, ValueError, "every.*got 0"),
        ({"every": 2, "before": -3}, ValueError, "before.*got -3"),
    ],
)
def test_a_wrong_filter_is_rejected_by_name(arguments, error, named):
    with pytest.raises(error, match=named):
        EVENT(**arguments)


# --- equality ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        EVENT,
        EVENT(every=3),
        EVENT(event_filter=accept),
        "EPOCH_COMPLETED",
        CallableEventWithFilter("anything", name="EPOCH_COMPLETED"),
        CallableEventWithFilter("EPOCH_COMPLETED"),
    ],
)
def test_events_of_one_name_are_equal_whatever_their_filter(other):
    for event in (EVENT, EVENT(once=2)):
        assert event == other
        assert other == event
        assert hash(event) == hash(other) == hash("EPOCH_COMPLETED")
        assert {event: 1}[other] == 1


@pytest.mark.parametrize(
    "other", [Events.EPOCH_STARTED, "epoch_completed", "Events.EPOCH_COMPLETED", None, 3, EVENT | EVENT, Plain.STARTED]
)
def test_events_differ_from_everything_else(other):
    assert EVENT != other
    assert other != EVENT(every=2)


def test_members_of_two_enums_with_one_name_differ_but_each_is_its_name():
    first, second = Backprop.BACKWARD_STARTED, Other.BACKWARD_STARTED
    for one, other in ((first, second), (first(every=2), second), (first, second(once=1))):
        assert one != other
    assert Backprop.STARTED != Events.STARTED
    for event in (first, second, first(every=2), second(once=1)):
        assert event == "BACKWARD_STARTED"
        assert event == CallableEventWithFilter("x", name="BACKWARD_STARTED")
    assert len({first, second, first(every=2), second(once=3)}) == 2


def test_members_of_two_enums_with_one_name_are_two_events_of_an_engine():
    engine, fired = Engine(echo), []
    engine.register_events(Backprop.BACKWARD_STARTED, Other.BACKWARD_STARTED)
    for event in (Backprop.BACKWARD_STARTED, Other.BACKWARD_STARTED):
        engine.add_event_handler(event, lambda event: fired.append(event), event)
    engine.fire_event(Other.BACKWARD_STARTED)
    assert fired == [Other.BACKWARD_STARTED]


def test_an_event_without_name_is_named_by_its_value():
    event = CallableEventWithFilter("FOO", accept)
    assert (event.name, event.value, event.filter) == ("FOO", "FOO", accept)


@pytest.mark.parametrize("attribute", ["name", "value", "filter"])
@pytest.mark.parametrize("event", [EVENT, EVENT(every=2)], ids=repr)
def test_an_event_does_not_change(event, attribute):
    with pytest.raises(AttributeError):
        setattr(event, attribute, "x")


def test_a_misspelled_event_gets_one_suggestion(capsys):
    with pytest.raises(AttributeError) as raised:
        Events.COMPLETE  # noqa: B018
    sys.__excepthook__(raised.type, raised.value, None)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "AttributeError: Events has no event 'COMPLETE': did you mean Events.COMPLETED?"


@pytest.mark.parametrize("event", [EVENT, Backprop.STARTED])
def test_copies_of_events_are_the_same_events(event):
    assert pickle.loads(pickle.dumps(event)) is copy.deepcopy(event) is event
    again = pickle.loads(pickle.dumps(event(every=3)))
    assert again == event
    assert again.filter == event(every=3).filter
    assert again != Other.BACKWARD_STARTED


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (EVENT, "Events.EPOCH_COMPLETED"),
        (EVENT(every=1), "Events.EPOCH_COMPLETED"),
        (EVENT(every=2, before=9), "Events.EPOCH_COMPLETED(every=2, before=9)"),
        (EVENT(event_filter=accept), f"Events.EPOCH_COMPLETED(event_filter={accept!r})"),
        (CallableEventWithFilter("foo", name="FOO"), "Events.FOO"),
        (Backprop.STARTED(every=2), "Backprop.STARTED(every=2)"),
        (EVENT | Events.STARTED(once=1), "Events.EPOCH_COMPLETED | Events.STARTED(once=1)"),
    ],
    ids=["plain", "every=1", "several", "callable", "named", "of the user", "list"],
)
def test_an_event_is_shown_as_it_is_written(event, shown):
    assert repr(event) == shown


# --- lists ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("joined", "parts"),
    [
        (EVENT | Events.STARTED, [EVENT, Events.STARTED]),
        (EVENT | EVENT(every=2), [EVENT, EVENT]),
        (EVENT | Backprop.STARTED | Events.STARTED(once=1), [EVENT, Backprop.STARTED, Events.STARTED]),
        (EVENT | (Events.STARTED | Events.COMPLETED), [EVENT, Events.STARTED, Events.COMPLETED]),
        ((EVENT | EVENT) | (EVENT | EVENT), [EVENT] * 4),
        (EVENT | "foo", [EVENT, "foo"]),
        ("foo" | EVENT, ["foo", EVENT]),
        ((EVENT | EVENT) | "foo", [EVENT, EVENT, "foo"]),
        ("foo" | (EVENT | EVENT), ["foo", EVENT, EVENT]),
        (EventsList() | EVENT, [EVENT]),
    ],
    ids=repr,
)
def test_events_are_joined_in_order(joined, parts):
    assert isinstance(joined, EventsList)
    assert list(joined) == parts
    assert len(joined) == len(parts)
    assert [joined[index] for index in range(len(joined))] == parts
    assert joined[-1] == parts[-1]


def test_joining_changes_neither_side():
    base = EVENT | Events.STARTED
    other = Events.COMPLETED | Events.TERMINATE
    assert len(base | Events.INTERRUPT) == 3
    assert len(base | other) == 4
    extended = base
    extended |= Events.INTERRUPT
    assert (len(base), len(other), len(extended)) == (2, 2, 3)
    assert base[0].filter is None


def test_lists_keep_the_filters_of_their_events():
    joined = EVENT | EVENT(every=3)
    assert [event.filter for event in joined] == [None, EVENT(every=3).filter]


def test_lists_of_equal_events_are_equal():
    assert EVENT | Events.STARTED == EVENT | Events.STARTED
    assert len({EVENT | Events.STARTED, EVENT | Events.STARTED}) == 1
    assert EVENT | Events.STARTED != Events.STARTED | EVENT
    assert EVENT | Events.STARTED != [EVENT, Events.STARTED]


@pytest.mark.parametrize(
    "other", [3, None, Plain.STARTED, [EVENT], accept], ids=["int", "None", "Enum", "list", "function"]
)
@pytest.mark.parametrize("event", [EVENT, EVENT(every=2), EVENT | EVENT], ids=repr)
def test_only_events_their_names_and_lists_of_them_can_be_joined(event, other):
    with pytest.raises(TypeError):
        event | other
    with pytest.raises(TypeError):
        other | event


def test_a_handler_runs_once_for_each_element_of_a_list():
    engine, fired = Engine(echo), []
    engine.add_event_handler(EVENT | EVENT(every=2) | Events.COMPLETED, lambda: fired.append(engine.state.epoch))
    engine.run([1], max_epochs=3)
    assert fired == [1, 2, 2, 3, 3]


# === Handles, and removing handlers ===


EVENT_HANDLES = Events.EPOCH_COMPLETED


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


def fire(engine, event=EVENT_HANDLES):
    engine.fire_event(event)


def test_a_handle_knows_event_handler_and_engine(engine):
    counter = Counter()
    handle = engine.add_event_handler(EVENT_HANDLES(every=2), counter.add)
    assert isinstance(handle, RemovableEventHandle)
    assert handle.event_name == EVENT_HANDLES
    assert handle.handler() == counter.add
    assert handle.engine() is engine


@pytest.mark.parametrize(
    "event",
    [EVENT_HANDLES, EVENT_HANDLES(every=1), EVENT_HANDLES(event_filter=lambda engine, count: True), EVENT_HANDLES.name],
)
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
    handles = [engine.add_event_handler(EVENT_HANDLES, calls.append, name) for name in "abc"]
    handles[1].remove()
    fire(engine)
    assert len(calls) == 2
    engine.add_event_handler(EVENT_HANDLES, calls.append)
    handles[1].remove()
    fire(engine)
    assert len(calls) == 5


def test_a_handle_of_a_list_removes_all_that_the_list_registered(engine):
    counter = Counter()
    engine.add_event_handler(Events.STARTED, counter.add)
    handle = engine.add_event_handler(Events.STARTED | EVENT_HANDLES | EVENT_HANDLES(every=2), counter.add)
    engine.run([1], max_epochs=2)
    assert counter.count == 1 + 1 + 2 + 1
    handle.remove()
    engine.run([1], max_epochs=4)
    assert counter.count == 6


def test_a_handle_ends_with_a_block_also_after_an_error(engine):
    counter = Counter()
    handle = engine.add_event_handler(EVENT_HANDLES, counter.add)
    with pytest.raises(KeyError), handle as entered:
        assert entered is handle
        fire(engine)
        raise KeyError
    fire(engine)
    assert counter.count == 1


def test_a_handle_can_be_entered_again_and_in_itself(engine):
    counter = Counter()
    with engine.add_event_handler(EVENT_HANDLES, counter.add) as handle:
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
        handles = [
            engine.add_event_handler(EVENT_HANDLES, one) for one in (counter.add, functools.partial(id), lambda: 1)
        ]
        watched = weakref.ref(engine), weakref.ref(counter)
        engine.remove_event_handler(counter.add, EVENT_HANDLES)
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
    with engine.add_event_handler(EVENT_HANDLES, handler) as handle:
        assert handle.handler() == handler
        assert engine.has_event_handler(handler)
    assert not engine.has_event_handler(handler)


def test_a_handle_made_by_hand_removes_every_registration_of_the_handler_there(engine):
    counter = Counter()
    for event in (EVENT_HANDLES, EVENT_HANDLES(every=2), Events.STARTED):
        engine.add_event_handler(event, counter.add)
    handle = RemovableEventHandle(EVENT_HANDLES, counter.add, engine)
    handle.remove()
    handle.remove()
    assert not engine.has_event_handler(counter.add, EVENT_HANDLES)
    assert engine.has_event_handler(counter.add, Events.STARTED)


# --- has_event_handler, remove_event_handler --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "found"),
    [
        (None, True),
        (EVENT_HANDLES, True),
        (EVENT_HANDLES(once=9), True),
        ("EPOCH_COMPLETED", True),
        (EVENT_HANDLES | Events.STARTED, True),
        (Events.STARTED | EVENT_HANDLES(every=7), True),
        (Events.STARTED, False),
        (Events.STARTED | Events.COMPLETED, False),
        ("unknown", False),
    ],
)
def test_a_handler_is_found_under_each_form_of_its_event(engine, event, found):
    counter = Counter()
    engine.add_event_handler(EVENT_HANDLES(every=3), counter.add)
    assert engine.has_event_handler(counter.add, event) is found
    assert not engine.has_event_handler(Counter().add, event)


@pytest.mark.parametrize(
    "event", [EVENT_HANDLES, EVENT_HANDLES(once=9), "EPOCH_COMPLETED", EVENT_HANDLES | Events.STARTED(every=2)]
)
def test_removing_takes_all_registrations_of_the_handler_and_only_those(engine, event):
    counter, other = Counter(), Counter()
    for one in (counter.add, other.add, counter.add):
        engine.add_event_handler(EVENT_HANDLES, one)
        engine.add_event_handler(EVENT_HANDLES(every=2), one)
        engine.add_event_handler(Events.COMPLETED, one)
    engine.remove_event_handler(counter.add, event)
    assert not engine.has_event_handler(counter.add, event)
    assert engine.has_event_handler(counter.add, Events.COMPLETED)
    engine.run([1])
    assert (counter.count, other.count) == (2, 2)


def test_a_handler_on_one_event_of_a_list_is_enough_to_remove_it(engine):
    counter = Counter()
    engine.add_event_handler(Events.COMPLETED, counter.add)
    engine.remove_event_handler(counter.add, EVENT_HANDLES | Events.COMPLETED)
    assert not engine.has_event_handler(counter.add)


@pytest.mark.parametrize("event", [Events.STARTED, "unknown", 3, Events.STARTED | Events.COMPLETED])
def test_removing_what_is_not_there_is_rejected(engine, event):
    counter = Counter()
    engine.add_event_handler(EVENT_HANDLES, counter.add)
    with pytest.raises(ValueError, match="not registered"):
        engine.remove_event_handler(counter.add, event)
    with pytest.raises(ValueError, match="not registered"):
        engine.remove_event_handler(Counter().add, EVENT_HANDLES)
    assert engine.has_event_handler(counter.add)


def test_methods_are_the_same_handler_if_they_are_equal(engine):
    counter = Counter()
    engine.add_event_handler(EVENT_HANDLES, counter.add)
    engine.remove_event_handler(counter.add, EVENT_HANDLES)  # another object than the one registered
    assert not engine.has_event_handler(counter.add)
