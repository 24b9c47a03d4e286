"""Errors in a run: handlers of them, notes, and the runs after them."""

from __future__ import annotations

import pytest

from camshaft.engine import Engine, EventEnum, Events
from camshaft.engine.events import FailureEvents
from tests.engine.traces import IT, IT_AGAIN, SHORT, at, at_position, flat, traced, unsized

DATA, EPOCHS = [1, 2], 2
EVENTS = f"S ES {IT} {IT} EC ES {IT_AGAIN} {IT} EC C".split()  # what fires without any error
EVERYWHERE = range(len(EVENTS))
IN_ITERATIONS = [position for position, name in enumerate(EVENTS) if name in ("GS", "STOP", "GC", "IS", "IC")]
ERRORS = [KeyError, StopIteration, StopAsyncIteration, RuntimeError, KeyboardInterrupt, SystemExit]
ON_THE_WAY_OUT = {
    Events.TERMINATE: "terminate",
    Events.TERMINATE_SINGLE_EPOCH: "terminate_epoch",
    Events.INTERRUPT: "interrupt",
}


class Steps(EventEnum):
    STEPPED = "stepped"


def failing(error, at_iteration=2):
    """A process function that fails in one iteration, the first time it gets there."""
    left = [error]

    def step(engine, batch):
        if engine.state.iteration == at_iteration and left:
            raise left.pop()
        return batch

    return step


def raising(error):
    def fail(engine):
        raise error

    return fail


def catch(engine):
    """Register a handler that keeps the errors it gets, and so swallows them."""
    errors = []
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: errors.append(error))
    return errors


class Broken:
    """Data that fail at a fetch, or where a pass begins."""

    def __init__(self, error, at_fetch=None, at_pass=None):
        self.error, self.at_fetch, self.at_pass, self.passes = error, at_fetch, at_pass, 0

    def __len__(self):
        return 2

    def __iter__(self):
        self.passes += 1
        if self.passes == self.at_pass:
            raise self.error
        return self.fetch()

    def fetch(self):
        for number in range(2):
            if number == self.at_fetch:
                raise self.error
            yield number


# === Without handlers ===


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_leaves_the_run_unchanged_wherever_it_is_raised(kind):
    def run(engine, data=DATA):
        with pytest.raises(kind) as caught:
            engine.run(data, max_epochs=EPOCHS)
        assert caught.value is error
        assert (error.__cause__, error.__context__) == (None, None)

    for position in EVERYWHERE:
        error = kind("no")
        engine, trace = traced()
        at_position(engine, position, raising(error))
        run(engine)
        assert trace.words == EVENTS[: position + 1]
    error = kind("no")
    engine, trace = traced(failing(error))
    run(engine)
    assert trace.take() == flat(f"S ES {IT} GS GC IS")
    for event, wish in ON_THE_WAY_OUT.items():
        error = kind("no")
        engine, trace = traced()
        at(engine, Events.ITERATION_COMPLETED, lambda engine: getattr(engine, wish)())  # noqa: B023
        at(engine, event, raising(error))
        run(engine)
        assert trace.words[-1].split(":")[0] == SHORT[event]
    for place in ({"at_pass": 1}, {"at_pass": 2}):  # also a StopIteration, which is not the end of the data
        error = kind("no")
        run(traced()[0], Broken(error, **place))
    error = kind("no")
    engine, _ = traced()
    engine.add_event_handler(Events.EPOCH_COMPLETED(event_filter=lambda engine, count: raising(error)(engine)), print)
    run(engine)


@pytest.mark.parametrize("place", [{"at_fetch": 0}, {"at_fetch": 1}], ids=str)
def test_an_error_of_a_fetch_names_the_place_and_ends_the_epoch_if_it_is_handled(place):
    error = OSError("disk")
    engine, trace = traced()
    with pytest.raises(OSError, match="disk") as caught:
        engine.run(Broken(error, **place))
    assert caught.value is error
    assert "the last event was" in error.__notes__[-1]
    errors = catch(engine)
    engine.state.max_epochs = None
    engine.run(Broken(error, **place))
    assert errors == [error]
    assert trace.words[-3:] == ["GS", "EC", "C"]


# --- notes ------------------------------------------------------------------------------------------------------


def named_handler(engine):
    raise KeyError("no")


def notes_of(engine, data=DATA):
    with pytest.raises((KeyError, TypeError, AttributeError)) as caught:
        engine.run(data, max_epochs=EPOCHS)
    return caught.value.__notes__


def test_the_error_of_a_handler_names_it_the_event_and_the_counters():
    for position in EVERYWHERE:
        engine, _ = traced()
        at_position(engine, position, named_handler)
        source, place = notes_of(engine)
        (event,) = (event for event, word in SHORT.items() if word == EVENTS[position])
        assert source.startswith("in handler 'at_position.")
        assert source.endswith(f"' on {event!r}")
        assert f"epoch {engine.state.epoch}, iteration {engine.state.iteration}; the last event was {event!r}" in place


def test_an_error_inside_an_event_of_the_user_names_both_events():
    engine, _ = traced()
    engine.register_events(Steps.STEPPED)
    engine.add_event_handler(Steps.STEPPED, named_handler)
    engine.add_event_handler(Events.ITERATION_STARTED(once=2), engine.fire_event, Steps.STEPPED)
    assert notes_of(engine) == [
        "in handler 'named_handler' on Steps.STEPPED",
        "in handler 'Engine.fire_event' on Events.ITERATION_STARTED",
        "raised in epoch 1, iteration 2; the last event was Steps.STEPPED",
    ]


@pytest.mark.parametrize("is_added_by_handler", [False, True])
def test_only_the_handler_that_failed_is_named(is_added_by_handler):
    engine, _ = traced()
    add = engine.add_event_handler
    if is_added_by_handler:
        add(Events.EPOCH_COMPLETED(once=2), lambda: add(Events.EPOCH_COMPLETED, named_handler))
    else:
        add(Events.EPOCH_COMPLETED(every=2), named_handler)
    assert notes_of(engine)[:-1] == ["in handler 'named_handler' on Events.EPOCH_COMPLETED"]


def test_the_error_of_the_process_function_names_no_handler():
    engine, _ = traced(failing(KeyError("no"), at_iteration=3))
    engine.add_event_handler(Events.ITERATION_STARTED, lambda: None)
    assert notes_of(engine) == ["raised in epoch 2, iteration 3; the last event was Events.ITERATION_STARTED"]


@pytest.mark.parametrize(
    ("event", "output", "use", "is_told"),
    [
        (Events.ITERATION_COMPLETED, None, lambda output: f"{output:.2f}", True),
        (Events.EPOCH_COMPLETED, None, lambda output: -output, True),
        (Events.COMPLETED, None, lambda output: output.item(), True),
        (Events.ITERATION_COMPLETED, 1.0, lambda output: -None, False),
        (Events.STARTED, None, lambda output: -None, False),
        (Events.ITERATION_STARTED, None, lambda output: -None, False),
    ],
)
def test_the_error_of_a_handler_that_uses_an_output_of_none_says_so(event, output, use, is_told):
    engine = Engine(lambda engine, batch: output)
    engine.add_event_handler(event, lambda: use(engine.state.output))
    hint = "engine.state.output is None: return a value from the process function"
    assert (hint in notes_of(engine)) is is_told


# === With handlers ===


def handled(position, error):
    """Run with an error at a position, which a handler of exceptions gets; return the engine and the trace."""
    engine, trace = traced()
    errors = catch(engine)
    at_position(engine, position, raising(error))
    assert engine.run(DATA, max_epochs=EPOCHS) is engine.state
    assert errors == [error]
    return engine, trace


@pytest.mark.parametrize("kind", [KeyError, StopIteration, KeyboardInterrupt, SystemExit])
def test_an_exception_in_an_iteration_ends_the_epoch_any_other_error_the_run(kind):
    for position in EVERYWHERE:
        engine, trace = handled(position, kind("no"))
        if position in IN_ITERATIONS and issubclass(kind, Exception):
            assert trace.words[: position + 2] == [*EVENTS[: position + 1], "EC"]
            assert trace.words[-2:] == ["EC", "C"]
            assert trace.words.count("ES") == engine.state.epoch == EPOCHS
        else:
            assert trace.words == EVENTS[: position + 1]


def test_the_run_reads_on_in_the_same_pass():
    engine, trace = traced(failing(KeyError("no"), at_iteration=2))
    catch(engine)
    engine.run([1, 2, 3], max_epochs=3)
    assert trace.take() == flat(f"S ES {IT} GS GC IS EC · ES {IT} {IT_AGAIN} {IT} EC · ES {IT} {IT_AGAIN} {IT} EC C")
    assert trace.batches == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Events.TERMINATE, f"S ES {IT} T"),
        (Events.TERMINATE_SINGLE_EPOCH, f"S ES {IT} TSE:1"),
        (Events.INTERRUPT, f"S ES {IT} INT EC INT"),  # the wish is still there
    ],
)
def test_an_error_on_the_way_out_ends_the_run_but_that_of_a_pause_only_the_epoch(event, words):
    engine, trace = traced()
    errors, error = catch(engine), KeyError("no")
    at(engine, Events.ITERATION_COMPLETED, lambda engine: getattr(engine, ON_THE_WAY_OUT[event])())
    at(engine, event, raising(error))
    engine.run(DATA, max_epochs=EPOCHS)
    assert errors == [error]
    assert trace.take() == words


def test_a_handler_that_raises_again_lets_the_error_out_and_each_runs_once():
    for position in EVERYWHERE:
        engine, trace = traced()
        calls = []
        engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: calls.append("first"))  # noqa: B023

        @engine.on(Events.EXCEPTION_RAISED)
        def escape(engine, error):
            calls.append(engine.last_event_name.name)  # noqa: B023
            raise error

        engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: calls.append("third"))  # noqa: B023
        at_position(engine, position, raising(KeyError("no")))
        with pytest.raises(KeyError) as caught:
            engine.run(DATA, max_epochs=EPOCHS)
        assert calls == ["first", "EXCEPTION_RAISED"]
        assert any("the last event was" in note for note in caught.value.__notes__)
        assert trace.words == EVENTS[: position + 1]


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


def test_a_handler_of_errors_may_end_the_run():
    engine, trace = traced(failing(KeyError("no"), at_iteration=1))
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: engine.terminate())
    engine.run(DATA, max_epochs=3)
    assert trace.take() == "S ES GS GC IS EC T C"


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


def test_data_that_always_fail_cannot_keep_a_run_by_iterations_going():
    class Failing:
        def __iter__(self):
            return self

        def __next__(self):
            raise OSError("no data")

    engine, _ = traced()
    errors = catch(engine)
    with pytest.warns(UserWarning, match="ran out"):
        engine.run(Failing(), max_iters=5, epoch_length=2)
    assert len(errors) == 2


@pytest.mark.parametrize("event", [Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.EPOCH_STARTED])
@pytest.mark.parametrize("firing", [1, 3, 4])
def test_one_error_before_an_iteration_ends_no_run_by_iterations_that_handlers_swallow(event, firing):
    engine, _ = traced()
    errors = catch(engine)
    at(engine, event, raising(KeyError("no")), firing)
    engine.run([1, 2], max_iters=9)
    assert len(errors) == 1
    assert engine.state.iteration == (9 if event is not Events.EPOCH_STARTED else 2 * firing - 2)


# === Runs after an error ===


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("epochs", [EPOCHS, 5])
def test_the_next_run_continues_with_the_rest_of_the_epoch(kind, epochs):
    for position in range(len(EVENTS) - 4):  # iterations are left
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


def test_after_an_error_in_an_only_epoch_the_next_run_continues_in_it_also_from_a_saved_state():
    engine, trace = traced(failing(KeyError("no"), at_iteration=2))
    with pytest.raises(KeyError):
        engine.run([1, 2, 3])
    saved = engine.state_dict()
    trace.take()
    engine.run([1, 2, 3])
    other, trace_of_other = traced()
    other.load_state_dict(saved)
    other.run([1, 2, 3])
    assert trace.take() == trace_of_other.take() == flat(f"S ES {IT} {IT} EC C")
    assert engine.state.iteration == other.state.iteration == 3


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


def test_a_run_that_failed_over_unsized_data_continues():
    engine, trace = traced(failing(KeyError("no"), at_iteration=2))
    data = unsized("abcd")
    with pytest.raises(KeyError):
        engine.run(data)
    with pytest.warns(UserWarning, match="has lost a batch"):
        engine.run(data, epoch_length=4)
    assert trace.batches == ["a", "b", "c", "d"]
    assert (engine.state.epoch, engine.state.iteration) == (1, 4)
