"""Exceptions with handlers: handed over once, swallowed inside an epoch, the end of the run elsewhere."""

from __future__ import annotations

import pytest

from camshaft.engine import Events
from tests.engine.failures import DATA, EPOCHS, EVENTS, FLAT, OUTSIDE, Broken, catch, failing, notes, raising
from tests.engine.traces import IT, at, at_position, flat, traced


@pytest.mark.parametrize("position", FLAT, ids=lambda position: f"{position}-{EVENTS[position]}")
def test_an_error_inside_an_epoch_ends_the_epoch_and_the_run_goes_on(position):
    engine, trace = traced()
    errors, error = catch(engine), KeyError("no")
    at_position(engine, position, raising(error))
    assert engine.run(DATA, max_epochs=EPOCHS) is engine.state
    assert errors == [error]
    assert trace.words[: position + 2] == [*EVENTS[: position + 1], "EC"]
    assert trace.words[-2:] == ["EC", "C"]
    assert trace.words.count("ES") == engine.state.epoch == EPOCHS
    assert "T" not in trace.words


def test_the_run_reads_on_in_the_same_pass():
    engine, trace = traced(failing(KeyError("no"), at_iteration=2))
    catch(engine)
    engine.run([1, 2, 3], max_epochs=3)
    assert trace.take() == flat(
        f"S ES {IT} GS GC IS EC · ES {IT} GS STOP GC IS IC {IT} EC · ES {IT} GS STOP GC IS IC {IT} EC C"
    )
    assert trace.batches == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("place", [{"at_fetch": 0}, {"at_fetch": 1}], ids=str)
def test_an_error_of_the_data_ends_the_epoch_too(place):
    engine, trace = traced()
    errors, error = catch(engine), OSError("disk")
    engine.run(Broken(error, **place), max_epochs=1)
    assert errors == [error]
    assert trace.words[-3:] == ["GS", "EC", "C"]


@pytest.mark.parametrize("position", OUTSIDE, ids=lambda position: f"{position}-{EVENTS[position]}")
def test_an_error_elsewhere_ends_the_run(position):
    engine, trace = traced()
    errors, error = catch(engine), KeyError("no")
    at_position(engine, position, raising(error))
    assert engine.run(DATA, max_epochs=EPOCHS) is engine.state
    assert errors == [error]
    assert trace.words == EVENTS[: position + 1]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("position", range(len(EVENTS)), ids=lambda position: f"{position}-{EVENTS[position]}")
def test_what_is_no_exception_ends_the_run_anywhere(position, kind):
    engine, trace = traced()
    errors, error = catch(engine), kind()
    at_position(engine, position, raising(error))
    assert engine.run(DATA, max_epochs=EPOCHS) is engine.state
    assert errors == [error]
    assert trace.words == EVENTS[: position + 1]


def test_a_stop_iteration_is_handed_over_as_it_is():
    engine, _ = traced(failing(StopIteration("no")))
    errors = catch(engine)
    engine.run(DATA, max_epochs=2)
    assert [type(error) for error in errors] == [StopIteration]
    assert engine.state.epoch == 2


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Events.TERMINATE, "S ES GS GC IS IC T"),
        (Events.TERMINATE_SINGLE_EPOCH, "S ES GS GC IS IC TSE:1"),
        (Events.INTERRUPT, "S ES GS GC IS IC INT EC INT"),  # the wish is still there
    ],
)
def test_an_error_on_the_way_out_ends_the_run_but_that_of_a_pause_only_the_epoch(event, words):
    engine, trace = traced()
    errors, error = catch(engine), KeyError("no")
    wishes = {"TERMINATE": "terminate", "TERMINATE_SINGLE_EPOCH": "terminate_epoch", "INTERRUPT": "interrupt"}
    at(engine, Events.ITERATION_COMPLETED, lambda engine: getattr(engine, wishes[event.name])())
    at(engine, event, raising(error))
    engine.run(DATA, max_epochs=EPOCHS)
    assert errors == [error]
    assert trace.take() == flat(words)


def test_a_handler_that_raises_again_lets_the_error_out_and_each_runs_once():
    engine, trace = traced(failing(KeyError("no")))
    calls = []
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: calls.append("first"))

    @engine.on(Events.EXCEPTION_RAISED)
    def escape(engine, error):
        calls.append("second")
        raise error

    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: calls.append("third"))
    with pytest.raises(KeyError) as caught:
        engine.run(DATA)
    assert calls == ["first", "second"]
    assert "process function" in notes(caught.value)
    assert trace.take() == flat(f"S ES {IT} GS GC IS")


@pytest.mark.parametrize("position", range(len(EVENTS)), ids=lambda position: f"{position}-{EVENTS[position]}")
def test_handlers_of_errors_run_once_wherever_the_error_comes_from(position):
    engine, _ = traced()
    calls = []

    @engine.on(Events.EXCEPTION_RAISED)
    def escape(error):
        calls.append(error)
        raise error

    at_position(engine, position, raising(KeyError("no")))
    with pytest.raises(KeyError):
        engine.run(DATA, max_epochs=EPOCHS)
    assert len(calls) == 1


def test_a_handler_of_errors_may_raise_another_one():
    engine, _ = traced(failing(KeyError("no")))

    @engine.on(Events.EXCEPTION_RAISED)
    def translate(error):
        raise RuntimeError("training failed") from error

    with pytest.raises(RuntimeError, match="training failed") as caught:
        engine.run(DATA)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_handler_of_errors_that_was_removed_swallows_nothing():
    engine, _ = traced(failing(KeyError("no")))
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None).remove()
    with pytest.raises(KeyError):
        engine.run(DATA)


def test_a_handler_of_errors_sees_the_last_event():
    engine, _ = traced(failing(KeyError("no")))
    seen = []
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: seen.append(engine.last_event_name))
    engine.run(DATA)
    assert seen == [Events.EXCEPTION_RAISED]


def test_a_handler_of_errors_may_end_the_run():
    engine, trace = traced(failing(KeyError("no"), at_iteration=1))
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: engine.terminate())
    engine.run(DATA, max_epochs=3)
    assert trace.take() == "S ES GS GC IS EC T C"
