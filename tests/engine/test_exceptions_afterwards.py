"""After an exception has left a run, the next run goes on where it failed."""

from __future__ import annotations

import pytest

from camshaft.engine import Events
from camshaft.engine.events import FailureEvents
from tests.engine.failures import DATA, EPOCHS, EVENTS, INSIDE, catch, failing, raising
from tests.engine.traces import IT, at, at_position, flat, traced, unsized


@pytest.mark.parametrize("position", [0, *INSIDE], ids=lambda position: f"{position}-{EVENTS[position]}")
@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("epochs", [EPOCHS, 5])
def test_the_next_run_goes_on_with_the_rest_of_the_epoch(position, kind, epochs):
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


def test_after_an_error_in_an_only_epoch_the_next_run_goes_on_in_it():
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


def test_a_run_that_failed_over_unsized_data_goes_on():
    engine, trace = traced(failing(KeyError("no"), at_iteration=2))
    data = unsized("abcd")
    with pytest.raises(KeyError):
        engine.run(data)
    assert trace.batches == ["a", "b"]
    engine.run(data, epoch_length=4)
    assert trace.batches == ["a", "b", "b", "c", "d"]
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
