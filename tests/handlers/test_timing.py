"""Timer: which time is measured."""

from __future__ import annotations

import pytest

from camshaft.engine import Engine, Events
from camshaft.handlers import Timer
from tests.handlers.clocks import clock_in


@pytest.fixture
def clock():
    with clock_in(Timer) as clock:
        yield clock


def test_pauses_do_not_count_and_pausing_and_resuming_are_idempotent(clock):
    timer = Timer()
    clock.take(2)
    assert (timer.value(), timer.total, timer.step_count, timer.running) == (2.0, 0.0, 0.0, True)
    timer.resume()
    clock.take(2)
    timer.pause()
    clock.take(5)
    timer.pause()
    assert (timer.value(), timer.total, timer.running) == (4.0, 4.0, False)
    timer.resume()
    clock.take(1)
    assert timer.value() == 5.0


def test_average_divides_by_the_steps_and_reset_restarts_the_timer(clock):
    timer = Timer(average=True)
    clock.take(6)
    assert timer.value() == 6.0
    for _ in range(3):
        timer.step()
    assert (timer.value(), timer.step_count) == (2.0, 3.0)
    timer.pause()
    assert timer.reset() is timer
    clock.take(1)
    assert (timer.value(), timer.total, timer.step_count, timer.running) == (1.0, 0.0, 0.0, True)


@pytest.mark.parametrize("name", ["reset", "pause", "resume", "step"])
def test_methods_accept_arguments_of_handlers(name):
    getattr(Timer(), name)(object(), "more")


def trainer(clock):
    engine = Engine(lambda engine, batch: clock.take(3))
    engine.add_event_handler(Events.STARTED, clock.taking(100), order=1)
    engine.add_event_handler(Events.EPOCH_STARTED, clock.taking(10))
    return engine


def test_an_attached_timer_measures_a_run(clock):
    engine, timer = trainer(clock), Timer()
    clock.take(50)
    assert timer.attach(engine) is timer
    engine.run(range(2), max_epochs=2)
    clock.take(50)
    assert timer.value() == 100 + 2 * 10 + 4 * 3
    engine.run(range(1))
    assert timer.value() == 100 + 10 + 3


def test_time_before_the_first_pause_counts_unless_it_starts_paused_and_events_may_have_filters(clock):
    engine, each = trainer(clock), {"resume": Events.ITERATION_STARTED, "pause": Events.ITERATION_COMPLETED}
    whole = Timer().attach(engine, **each)
    steps = Timer(average=True).attach(engine, **each, step=Events.ITERATION_COMPLETED(every=2), start_paused=True)
    second = Timer().attach(engine, Events.EPOCH_STARTED(once=2), Events.EPOCH_COMPLETED)
    engine.run(range(2), max_epochs=2)
    assert whole.value() == 100 + 10 + 4 * 3
    assert (steps.value(), steps.step_count) == (6.0, 2.0)
    assert second.value() == 2 * 3
