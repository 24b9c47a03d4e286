"""What `engine.defer` calls, and when: after the handlers of the iteration that ends the open step."""

from __future__ import annotations

import pytest

from camshaft.engine import Engine, EventEnum, Events

SIZE, LENGTH = 3, 7  # of windows of accumulated gradients and of epochs: 1-3, 4-6, 7; 8-10, 11-13, 14


class Stepping(EventEnum):
    FORWARD = "forward"


def accumulating(size=SIZE, foresees=True):
    """Make an engine that accumulates; it ends a window with the epoch only if it foresees its end."""

    def step(engine, batch):
        engine.fire_event(Stepping.FORWARD)
        place = engine.iteration_in_epoch
        engine.is_accumulating = place % size > 0 and (place < LENGTH or not foresees)

    engine = Engine(step)
    engine.register_events(*Stepping)
    return engine


def calls_of(engine, event, iteration, **arguments):
    """Run with a deferred call from the first of an event at an iteration; return where it was called."""
    calls, left = [], [iteration]

    def called(engine):
        calls.append((engine.state.iteration, str(engine.last_event_name), engine.in_step))

    @engine.on(event)
    def request(engine):
        if left and engine.state.iteration == left[0]:
            left.pop()
            engine.defer(called)
            engine.defer(called)

    engine.run(range(LENGTH), **{"max_epochs": 2, **arguments})
    return calls


INSIDE = [Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Stepping.FORWARD]


@pytest.mark.parametrize("event", INSIDE, ids=str)
@pytest.mark.parametrize("iteration", [1, 6, 7, 8, 13])
def test_inside_an_iteration_at_its_end(event, iteration):
    number = iteration + (event == Events.GET_BATCH_COMPLETED)  # fires before iterations are counted
    expected = [(number, "Events.ITERATION_COMPLETED", False)]
    assert calls_of(accumulating(size=1), event, iteration) == expected


@pytest.mark.parametrize("event", [*INSIDE, Events.ITERATION_COMPLETED, Events.GET_BATCH_STARTED], ids=str)
@pytest.mark.parametrize(("iteration", "end"), [(1, 3), (2, 3), (4, 6), (5, 6), (8, 10), (11, 13)])
def test_inside_a_window_at_its_end(event, iteration, end):
    assert calls_of(accumulating(), event, iteration) == [(end, "Events.ITERATION_COMPLETED", False)]


@pytest.mark.parametrize(("event", "calls"), [(Events.ITERATION_COMPLETED, 2), (Events.EPOCH_COMPLETED, 2)])
def test_where_no_step_is_open_at_once(event, calls):
    engine = accumulating()
    assert calls_of(engine, event, LENGTH) == [(LENGTH, str(event), False)] * calls
    engine.defer(lambda engine: engine.state.metrics.update(done=True))
    assert engine.state.metrics == {"done": True}


def test_handlers_of_the_iteration_have_run_and_those_of_the_epoch_have_not():
    engine, seen = accumulating(), []
    engine.add_event_handler(Events.ITERATION_STARTED(once=5), lambda: engine.defer(lambda _: seen.append("deferred")))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda: seen.append("handler"), order=10**9)
    engine.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda: seen.append("epoch"))
    engine.run(range(6))
    assert seen == ["handler", "deferred", "epoch"]


def test_a_window_that_ends_with_an_epoch_unforeseen_ends_there():
    assert calls_of(accumulating(foresees=False), Events.ITERATION_COMPLETED, 7) == [
        (7, "Events.EPOCH_COMPLETED", False)
    ]


def test_a_terminated_run_calls_it_after_terminate():
    engine = accumulating()
    engine.add_event_handler(Events.ITERATION_STARTED(once=5), engine.terminate)
    assert calls_of(engine, Events.ITERATION_COMPLETED, 4) == [(5, "Events.TERMINATE", False)]


@pytest.mark.parametrize("event", [Events.TERMINATE, Events.INTERRUPT, Events.COMPLETED], ids=str)
def test_a_run_that_stops_in_a_step_calls_it_at_once(event):
    engine, calls = accumulating(), []
    stop = engine.interrupt if event == Events.INTERRUPT else engine.terminate
    engine.add_event_handler(Events.ITERATION_STARTED(once=5), lambda: stop())
    engine.add_event_handler(event, lambda: engine.defer(lambda engine: calls.append(engine.last_event_name)))
    engine.run(range(LENGTH))
    assert calls == [event]


def test_an_error_discards_it():
    engine, calls, errors = accumulating(), [], []
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: engine.defer(calls.append))
    engine.add_event_handler(Events.ITERATION_STARTED(once=5), lambda: 1 / 0)
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: engine.defer(lambda _: errors.append(error)))
    engine.run(range(LENGTH), max_epochs=2)
    assert calls == []
    assert len(errors) == 1


def test_a_pause_delays_it():
    engine, calls = accumulating(), []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED(once=4), lambda: engine.defer(lambda engine: calls.append(engine.state.iteration))
    )
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=5), engine.interrupt)
    engine.run(range(LENGTH))
    assert calls == []
    engine.defer(lambda engine: calls.append("in the pause"))  # which may be the end of the process
    engine.run()
    assert calls == ["in the pause", 6]


@pytest.mark.parametrize(("event", "what"), [(Events.ITERATION_STARTED, "ahead"), (Events.ITERATION_COMPLETED, "lost")])
def test_a_state_saved_in_a_step_warns(event, what):
    engine = accumulating()
    engine.add_event_handler(event(once=1), lambda: engine.state_dict())
    with pytest.warns(UserWarning, match=rf"while a step is open: .*{what}.*engine\.defer"):
        engine.run(range(LENGTH))


def test_without_a_run_nothing_accumulates():
    engine = accumulating()
    engine.is_accumulating = True
    assert not engine.is_accumulating
    assert not engine.in_step
