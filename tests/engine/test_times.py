"""How long an epoch and a run took, by a clock that only moves when told to."""

from __future__ import annotations

import pytest

from camshaft.engine import Engine, Events
from tests.engine.traces import at


class Clock:
    """A clock that only moves when told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def later(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("camshaft.engine.loop.perf_counter", clock)
    return clock


def timed(clock):
    """Make an engine in which each event takes its own time, and the times that each event sees."""
    seconds = {Events.STARTED: 10_000, Events.EPOCH_STARTED: 1, Events.EPOCH_COMPLETED: 100, Events.COMPLETED: 1000}
    engine, seen = Engine(lambda engine, batch: clock.later(10)), []
    for event, delay in seconds.items():
        engine.add_event_handler(event, lambda: seen.append(tuple(engine.state.times.values())))
        engine.add_event_handler(event, lambda delay: clock.later(delay), delay)
    return engine, seen


def test_times_cover_the_epoch_and_the_run_each_with_its_handlers(clock):
    engine, seen = timed(clock)
    assert engine.state.times == {"EPOCH_COMPLETED": None, "COMPLETED": None}
    engine.run([1, 2], max_epochs=2)
    assert list(engine.state.times) == ["EPOCH_COMPLETED", "COMPLETED"]
    assert seen == [(0.0, 0.0), (0.0, 0.0), (21.0, 0.0), (121.0, 0.0), (21.0, 0.0), (121.0, 10_242.0)]
    assert engine.state.times == {"EPOCH_COMPLETED": 121.0, "COMPLETED": 11_242.0}


def test_the_time_of_the_run_is_there_also_where_completed_is_skipped(clock):
    engine, _ = timed(clock)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: engine.terminate(skip_completed=True))
    engine.run([1, 2])
    assert engine.state.times["COMPLETED"] == 10_011.0


def test_times_begin_anew_with_a_run_but_not_after_a_pause(clock):
    engine, _seen = timed(clock)
    at(engine, Events.EPOCH_COMPLETED, lambda engine: engine.interrupt())
    engine.run([1], max_epochs=2)
    assert engine.state.times == {"EPOCH_COMPLETED": 111.0, "COMPLETED": 0.0}
    engine.run()
    assert engine.state.times["COMPLETED"] == 11_222.0
    engine.run([1])
    assert engine.state.times["COMPLETED"] == 11_111.0
