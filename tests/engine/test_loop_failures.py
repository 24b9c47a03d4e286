"""Errors in a run: handlers of them, notes, and the runs after them."""

from __future__ import annotations

import pytest

from camshaft.engine import Engine, EventEnum, Events
from camshaft.engine.events import FailureEvents
from tests.engine.failures import DATA, EPOCHS, EVENTS, FLAT, INSIDE, OUTSIDE, Broken, catch, failing, notes, raising
from tests.engine.traces import IT, SHORT, at, at_position, flat, traced, unsized

# === Exceptions without handlers ===


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
def test_an_error_of_the_data_leaves_the_run_unchanged(place):
    error = OSError("disk")
    engine, _ = traced()
    with pytest.raises(OSError, match="disk") as caught:
        engine.run(Broken(error, **place), max_epochs=2)
    assert caught.value is error
    assert (error.__cause__, error.__context__) == (None, None)
    assert "the last event was" in notes(error)


@pytest.mark.parametrize("at_pass", [1, 2])
def test_a_stop_iteration_where_a_pass_begins_is_not_the_end_of_the_data(at_pass):
    engine, _ = traced()
    with pytest.raises(StopIteration):
        engine.run(Broken(StopIteration("no"), at_pass=at_pass), max_epochs=2)


# --- notes ------------------------------------------------------------------------------------------------------


def named_handler(engine):
    raise KeyError("no")


@pytest.mark.parametrize("position", range(len(EVENTS)), ids=lambda position: f"{position}-{EVENTS[position]}")
def test_the_error_of_a_handler_names_it_the_event_and_the_counters(position):
    engine, _ = traced()
    at_position(engine, position, named_handler)
    with pytest.raises(KeyError) as caught:
        engine.run(DATA, max_epochs=EPOCHS)
    (event,) = (event for event, word in SHORT.items() if word == EVENTS[position])
    source, place = caught.value.__notes__
    assert source.startswith("in handler 'at_position.")
    assert source.endswith(f"' on {event!r}")
    assert f"epoch {engine.state.epoch}, iteration {engine.state.iteration}; the last event was {event!r}" in place


def test_an_error_inside_an_event_of_the_user_names_both_events():
    engine, _ = traced()
    engine.register_events(Steps.STEPPED)
    engine.add_event_handler(Steps.STEPPED, named_handler)
    engine.add_event_handler(Events.ITERATION_STARTED(once=2), engine.fire_event, Steps.STEPPED)
    with pytest.raises(KeyError) as caught:
        engine.run(DATA)
    assert caught.value.__notes__ == [
        "in handler 'named_handler' on Steps.STEPPED",
        "in handler 'Engine.fire_event' on Events.ITERATION_STARTED",
        "raised in epoch 1, iteration 2; the last event was Steps.STEPPED",
    ]


@pytest.mark.parametrize("added_by", [None, "handler"])
def test_only_the_handler_that_failed_is_named(added_by):
    engine, _ = traced()
    if added_by is None:
        engine.add_event_handler(Events.EPOCH_COMPLETED(every=2), named_handler)
    else:
        add = engine.add_event_handler
        engine.add_event_handler(Events.EPOCH_COMPLETED(once=2), lambda: add(Events.EPOCH_COMPLETED, named_handler))
    with pytest.raises(KeyError) as caught:
        engine.run(DATA, max_epochs=3)
    (source, _) = caught.value.__notes__
    assert source == "in handler 'named_handler' on Events.EPOCH_COMPLETED"


@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED])
@pytest.mark.parametrize("use", [lambda output: f"{output:.2f}", lambda output: -output, lambda output: output.item()])
def test_the_error_of_a_handler_that_uses_an_output_of_none_says_so(event, use):
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(event, lambda: use(engine.state.output))
    with pytest.raises((TypeError, AttributeError)) as caught:
        engine.run(DATA)
    assert caught.value.__notes__[1] == "engine.state.output is None: return a value from the process function"


@pytest.mark.parametrize(
    ("event", "output"), [(Events.ITERATION_COMPLETED, 1.0), (Events.STARTED, None), (Events.ITERATION_STARTED, None)]
)
def test_the_error_of_a_handler_that_uses_another_none_does_not_mention_the_output(event, output):
    engine = Engine(lambda engine, batch: output)
    engine.add_event_handler(event, lambda: -None)
    with pytest.raises(TypeError) as caught:
        engine.run(DATA)
    assert not any("state.output" in note for note in caught.value.__notes__)


def test_the_error_of_the_process_function_names_no_handler():
    engine, _ = traced(failing(KeyError("no"), at_iteration=3))
    engine.add_event_handler(Events.ITERATION_STARTED, lambda: None)
    with pytest.raises(KeyError) as caught:
        engine.run(DATA, max_epochs=EPOCHS)
    assert caught.value.__notes__ == ["raised in epoch 2, iteration 3; the last event was Events.ITERATION_STARTED"]


# === Exceptions with handlers ===


def caught(position, error):
    """Run with an error at a position, which a handler of exceptions gets; return the engine and the trace."""
    engine, trace = traced()
    errors = catch(engine)
    at_position(engine, position, raising(error))
    assert engine.run(DATA, max_epochs=EPOCHS) is engine.state
    assert errors == [error]
    return engine, trace


@pytest.mark.parametrize("position", FLAT, ids=lambda position: f"{position}-{EVENTS[position]}")
def test_an_error_inside_an_epoch_ends_the_epoch_and_the_run_continues(position):
    engine, trace = caught(position, KeyError("no"))
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
    _, trace = caught(position, KeyError("no"))
    assert trace.words == EVENTS[: position + 1]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("position", range(len(EVENTS)), ids=lambda position: f"{position}-{EVENTS[position]}")
def test_what_is_no_exception_ends_the_run_anywhere(position, kind):
    _, trace = caught(position, kind())
    assert trace.words == EVENTS[: position + 1]


def test_a_stop_iteration_is_passed_as_it_is():
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
    assert "iteration 2; the last event was Events.ITERATION_STARTED" in notes(caught.value)
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


# === Runs after an exception ===


@pytest.mark.parametrize("position", [0, *INSIDE], ids=lambda position: f"{position}-{EVENTS[position]}")
@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("epochs", [EPOCHS, 5])
def test_the_next_run_continues_with_the_rest_of_the_epoch(position, kind, epochs):
    engine, trace = traced(counters=True)
    at_position(engine, position, raising(kind("no")))
    with pytest.raises(kind):
        engine.run(DATA, max_epochs=EPOCHS)
    completed = engine.state_dict()["iteration"]
    assert completed == engine.state.iteration - (EVENTS[position] == "IS")
    trace.take()
    assert engine.run(DATA, max_epochs=epochs) is engine.state
    assert (engine.state.epoch, engine.state.iteration) == (epochs, epochs * len(DATA))
    assert trace.words[1] == f"ES {completed // len(DATA) + 1}/{completed}"


@pytest.mark.parametrize("firing", [1, 2])
def test_the_next_run_after_an_error_when_an_epoch_is_over_begins_with_the_next_epoch(firing):
    engine, trace = traced(counters=True)
    at(engine, Events.EPOCH_COMPLETED, raising(KeyError("no")), firing)
    with pytest.raises(KeyError):
        engine.run(DATA, max_epochs=EPOCHS)
    trace.take()
    engine.run(DATA, max_epochs=4)
    assert trace.words[1] == f"ES {firing + 1}/{firing * len(DATA)}"
    assert (engine.state.epoch, engine.state.iteration) == (4, 8)


def test_after_an_error_in_an_only_epoch_the_next_run_continues_in_it():
    engine, trace = traced(failing(KeyError("no"), at_iteration=2))
    with pytest.raises(KeyError):
        engine.run([1, 2, 3])
    trace.take()
    engine.run([1, 2, 3])
    assert trace.take() == flat(f"S ES {IT} {IT} EC C")
    assert engine.state.iteration == 3


def test_an_epoch_that_was_cut_before_does_not_shift_the_one_that_failed():
    engine, trace = traced(counters=True)
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.terminate_epoch())
    at(engine, Events.ITERATION_COMPLETED, raising(KeyError("no")), firing=4)
    with pytest.raises(KeyError):
        engine.run([1, 2, 3, 4], max_epochs=3)
    trace.take()
    engine.run([1, 2, 3, 4])
    assert trace.words[1] == "ES 2/4"
    assert (engine.state.epoch, engine.state.iteration) == (3, 9)


def test_a_failed_run_that_is_resumed_and_fails_again_still_knows_its_place():
    engine, trace = traced(counters=True)
    engine.load_state_dict({"iteration": 5, "epoch_length": 4, "max_epochs": 3})
    at(engine, Events.STARTED, raising(KeyError("no")))
    at(engine, Events.EPOCH_STARTED, raising(KeyError("no")))
    for _ in range(2):
        with pytest.raises(KeyError):
            engine.run(range(4))
    trace.take()
    engine.run(range(4))
    assert trace.words[1] == "ES 2/5"
    assert engine.state.iteration == 12


def test_a_failed_run_is_saved_as_it_stands():
    engine, _ = traced(failing(KeyError("no"), at_iteration=3))
    with pytest.raises(KeyError):
        engine.run(DATA, max_epochs=EPOCHS)
    other, trace = traced()
    other.load_state_dict(engine.state_dict())
    other.run(DATA)
    assert trace.take() == flat(f"S ES {IT} {IT} EC C")


def test_a_run_that_failed_over_unsized_data_continues():
    engine, trace = traced(failing(KeyError("no"), at_iteration=2))
    data = unsized("abcd")
    with pytest.raises(KeyError):
        engine.run(data)
    assert trace.batches == ["a", "b"]
    with pytest.warns(UserWarning, match="has lost a batch"):
        engine.run(data, epoch_length=4)
    assert trace.batches == ["a", "b", "c", "d"]
    assert (engine.state.epoch, engine.state.iteration) == (1, 4)


def test_an_error_of_an_event_fired_by_hand_goes_to_its_caller():
    engine, _ = traced()
    errors = catch(engine)
    engine.add_event_handler(Events.COMPLETED, raising(KeyError("no")))
    with pytest.raises(KeyError):
        engine.fire_event(Events.COMPLETED)
    assert errors == []


def test_a_handler_that_fails_to_close_something_hides_no_error_and_stops_no_later_run():
    engine, _ = traced(failing(KeyError("no"), at_iteration=1))
    errors = catch(engine)
    engine.add_event_handler(FailureEvents.ERROR_MET, raising(ValueError("cannot close")))
    engine.run(DATA, max_epochs=1)
    assert [type(error) for error in errors] == [KeyError]
    assert engine.run(DATA, max_epochs=2).epoch == 2


def test_data_that_always_fails_cannot_keep_a_run_by_iterations_going():
    class Broken:
        def __iter__(self):
            return self

        def __next__(self):
            raise OSError("no data")

    engine, _ = traced()
    errors = catch(engine)
    with pytest.warns(UserWarning, match="ran out"):
        engine.run(Broken(), max_iters=5, epoch_length=2)
    assert len(errors) == 1
