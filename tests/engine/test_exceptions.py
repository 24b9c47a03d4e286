"""Exceptions without handlers: they leave the run as they are, and say where they come from."""

from __future__ import annotations

import pytest

from camshaft.engine import Engine, EventEnum, Events
from tests.engine.failures import DATA, EPOCHS, EVENTS, Broken, failing, notes, raising
from tests.engine.traces import IT, SHORT, at, at_position, flat, traced


class Steps(EventEnum):
    STEPPED = "stepped"


ERRORS = [KeyError, StopIteration, StopAsyncIteration, RuntimeError, KeyboardInterrupt, SystemExit]


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("position", range(len(EVENTS)), ids=lambda position: f"{position}-{EVENTS[position]}")
def test_an_error_of_a_handler_leaves_the_run_unchanged(position, kind):
    engine, trace = traced()
    error = kind("no")
    at_position(engine, position, raising(error))
    with pytest.raises(kind) as caught:
        engine.run(DATA, max_epochs=EPOCHS)
    assert caught.value is error
    assert (error.__cause__, error.__context__) == (None, None)
    assert trace.words == EVENTS[: position + 1]


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_the_process_function_leaves_the_run_unchanged(kind):
    error = kind("no")
    engine, trace = traced(failing(error))
    with pytest.raises(kind) as caught:
        engine.run(DATA, max_epochs=EPOCHS)
    assert caught.value is error
    assert (error.__cause__, error.__context__) == (None, None)
    assert trace.take() == flat(f"S ES {IT} GS GC IS")


@pytest.mark.parametrize("event", [Events.TERMINATE, Events.TERMINATE_SINGLE_EPOCH, Events.INTERRUPT])
@pytest.mark.parametrize("kind", [KeyError, StopIteration])
def test_an_error_on_the_way_out_leaves_the_run_unchanged(event, kind):
    engine, trace = traced()
    error = kind("no")
    wishes = {"TERMINATE": "terminate", "TERMINATE_SINGLE_EPOCH": "terminate_epoch", "INTERRUPT": "interrupt"}
    at(engine, Events.ITERATION_COMPLETED, lambda engine: getattr(engine, wishes[event.name])())
    at(engine, event, raising(error))
    with pytest.raises(kind) as caught:
        engine.run(DATA)
    assert caught.value is error
    assert (error.__cause__, error.__context__) == (None, None)
    assert trace.words[-1].split(":")[0] == SHORT[event]


@pytest.mark.parametrize("event", [Events.STARTED, Events.EPOCH_COMPLETED, Events.ITERATION_COMPLETED], ids=str)
def test_a_stop_iteration_of_a_filter_leaves_the_run_unchanged(event):
    engine, error = Engine(lambda engine, batch: batch), StopIteration("no")

    def ask(engine, count):
        raise error

    engine.add_event_handler(event(event_filter=ask), lambda: None)
    with pytest.raises(StopIteration) as caught:
        engine.run(DATA)
    assert caught.value is error


BROKEN = [{"at_fetch": 0}, {"at_fetch": 1}, {"at_pass": 1}, {"at_pass": 2}]


@pytest.mark.parametrize("place", BROKEN, ids=str)
def test_an_error_of_the_data_leaves_the_run_unchanged_and_is_named(place):
    error = OSError("disk")
    engine, _ = traced()
    with pytest.raises(OSError, match="disk") as caught:
        engine.run(Broken(error, **place), max_epochs=2)
    assert caught.value is error
    assert (error.__cause__, error.__context__) == (None, None)
    assert "the data" in notes(error)
    assert "process function" not in notes(error)


@pytest.mark.parametrize("at_pass", [1, 2])
def test_a_stop_iteration_where_a_pass_begins_is_not_the_end_of_the_data(at_pass):
    engine, _ = traced()
    with pytest.raises(StopIteration):
        engine.run(Broken(StopIteration("no"), at_pass=at_pass), max_epochs=2)


# --- notes ------------------------------------------------------------------------------------------------------


def named_handler(engine):
    raise KeyError("no")


@pytest.mark.parametrize("position", range(len(EVENTS)), ids=lambda position: f"{position}-{EVENTS[position]}")
def test_the_error_of_a_handler_says_where_it_comes_from(position):
    engine, _ = traced()
    at_position(engine, position, lambda engine: engine.fire_event("HERE"))
    engine.register_events("HERE")
    engine.add_event_handler("HERE", named_handler)
    with pytest.raises(KeyError) as caught:
        engine.run(DATA, max_epochs=EPOCHS)
    for text in ("named_handler", "HERE", f"epoch {engine.state.epoch}", f"iteration {engine.state.iteration}"):
        assert text in caught.value.__notes__[0]
    (event,) = (event for event, word in SHORT.items() if word == EVENTS[position])
    assert event.name in caught.value.__notes__[1]
    assert "process function" not in notes(caught.value)


def test_only_the_handler_that_failed_is_named():
    engine, _ = traced()
    engine.add_event_handler(Events.EPOCH_COMPLETED(every=2), named_handler)
    with pytest.raises(KeyError) as caught:
        engine.run(DATA, max_epochs=3)
    (note,) = caught.value.__notes__
    assert "named_handler" in note
    assert "Events.EPOCH_COMPLETED" in note
    assert "epoch 2, iteration 4" in note


def test_a_handler_without_a_name_is_shown():
    class Handler:
        def __call__(self):
            raise KeyError("no")

    engine, _ = traced()
    engine.add_event_handler(Events.STARTED, Handler())
    with pytest.raises(KeyError) as caught:
        engine.run(DATA)
    assert "Handler object" in notes(caught.value)


def test_the_error_of_the_process_function_names_it():
    engine, _ = traced(failing(KeyError("no"), at_iteration=3))
    with pytest.raises(KeyError) as caught:
        engine.run(DATA, max_epochs=EPOCHS)
    (note,) = caught.value.__notes__
    for text in ("process function", "failing.<locals>.step", "epoch 2", "iteration 3"):
        assert text in note


def test_the_error_of_the_process_function_inside_an_event_of_its_own_names_the_handler():
    def step(engine, batch):
        engine.fire_event(Steps.STEPPED)

    engine = Engine(step)
    engine.register_events(Steps.STEPPED)
    engine.add_event_handler(Steps.STEPPED, named_handler)
    with pytest.raises(KeyError) as caught:
        engine.run(DATA)
    assert "named_handler" in notes(caught.value)
    assert "STEPPED" in notes(caught.value)


def test_the_data_is_named_also_after_an_event_of_the_users_own():
    engine, _ = traced()
    engine.register_events("foo")
    engine.add_event_handler(Events.GET_BATCH_STARTED, lambda: engine.fire_event("foo"))
    with pytest.raises(OSError, match="disk") as caught:
        engine.run(Broken(OSError("disk"), at_fetch=1))
    assert "the data" in notes(caught.value)
