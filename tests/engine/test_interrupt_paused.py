"""A paused run that is asked to end, or is given up."""

from __future__ import annotations

import gc

import pytest

from camshaft.engine import Engine, Events
from tests.engine.traces import IT, at, at_position, echo, flat, traced, unsized

DATA, EPOCHS = [1, 2], 3


def interrupt(engine):
    engine.interrupt()


# --- other wishes while paused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "rest"),
    [
        (lambda engine: engine.terminate(), "GS T C"),
        (lambda engine: engine.terminate(skip_completed=True), "GS T"),
        (lambda engine: engine.terminate_epoch(), f"GS TSE:1 EC ES {IT} {IT} EC C"),
        (lambda engine: engine.interrupt(), "GS INT"),
    ],
)
def test_a_wish_while_paused_is_obeyed_after_one_more_event(wish, rest):
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, interrupt)
    engine.run(DATA, max_epochs=2)
    trace.take()
    wish(engine)
    engine.run()
    assert trace.take() == flat(rest)


def test_a_wish_while_paused_is_obeyed_before_more_data_is_taken_also_without_handlers():
    data = unsized("abc")
    engine = Engine(echo)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), interrupt)
    engine.run(data, epoch_length=3)
    engine.terminate()
    engine.run()
    assert list(data) == ["b", "c"]


# --- given up ---------------------------------------------------------------------------------------------------


def paused(position=4):
    """Make a paused engine, and the list of what its handlers of errors see."""
    engine, trace = traced()
    errors = []
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: errors.append(error))
    at_position(engine, position, interrupt)
    engine.run(DATA, max_epochs=EPOCHS)
    trace.take()
    trace.batches.clear()
    return engine, trace, errors


@pytest.mark.parametrize("position", range(16))
def test_a_paused_run_is_given_up_without_a_trace(position, caplog):
    engine, trace, errors = paused(position)
    engine.state.max_epochs = None
    engine.run([7, 8])
    assert trace.take() == flat(f"S ES {IT} {IT} EC C")
    assert trace.batches == [7, 8]
    assert errors == []
    assert caplog.records == []


@pytest.mark.parametrize("position", range(16))
def test_a_paused_engine_is_freed_without_a_trace(position, caplog):
    engine, trace, errors = paused(position)
    del engine
    gc.collect()
    assert trace.take() == ""
    assert errors == []
    assert caplog.records == []


@pytest.mark.parametrize("position", range(16))
def test_loading_a_state_gives_the_paused_run_up(position, caplog):
    engine, trace, errors = paused(position)
    engine.load_state_dict({"iteration": 4, "epoch_length": 2, "max_epochs": 3})
    engine.run([7, 8])
    assert trace.take() == flat(f"S ES {IT} {IT} EC C")
    assert trace.batches == [7, 8]
    assert errors == []
    assert caplog.records == []


def test_a_refused_state_does_not_give_the_paused_run_up():
    engine, trace, _ = paused()
    with pytest.raises(ValueError, match="epoch_length"):
        engine.load_state_dict({})
    engine.run()
    assert trace.batches == [2, *DATA, *DATA]
