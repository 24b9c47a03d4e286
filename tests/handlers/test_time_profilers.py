"""What both profilers have in common: exact sums and counts in any run, and no side effects after detaching."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings

from camshaft.engine import Engine, Events
from camshaft.handlers import BasicTimeProfiler, HandlersTimeProfiler
from tests.handlers.profiled import FETCH, PLANS, PROCESS, REGULAR, STOP, Course, Own, profilers_clock

PROFILERS = [BasicTimeProfiler, HandlersTimeProfiler]


@pytest.fixture
def clock():
    with profilers_clock() as clock:
        yield clock


@pytest.fixture(params=PROFILERS)
def profiler(request):
    return request.param()


@settings(deadline=None, max_examples=150)
@given(PLANS)
def test_the_basic_profiler_adds_up_in_any_run(plan):
    with profilers_clock() as clock:
        course = Course(clock, plan)
        profiler = BasicTimeProfiler()
        profiler.attach(course.engine)
        course.run()
    own = course.seconds_on(Own.HALF)  # within processing
    results = profiler.get_results()
    assert profiler.processing_times.sum() == PROCESS * course.processed + own
    assert len(profiler.processing_times) == course.processed
    assert [seconds % STOP for seconds in profiler.dataflow_times.tolist()] == [FETCH] * course.fetched
    for event in REGULAR:
        assert len(profiler.event_handlers_times[event]) == course.fired[event]
        assert profiler.event_handlers_times[event].sum() == course.seconds_on(event)
    assert results["event_handlers_stats"]["total_time"] == course.handlers_seconds - own


@settings(deadline=None, max_examples=150)
@given(PLANS)
def test_the_profiler_of_handlers_counts_each_call_in_any_run(plan):
    with profilers_clock() as clock:
        course = Course(clock, plan)
        profiler = HandlersTimeProfiler()
        profiler.attach(course.engine)
        course.run()
    times, by_event = profiler.event_handlers_times, {}
    for number, (event, _, seconds) in enumerate(plan.handlers):
        by_event.setdefault(event.name, []).extend([float(seconds)] * course.calls[number])
    for name, expected in by_event.items():
        assert times[name]["Course._take"] == expected
    *_, total, processing, fetching = profiler.get_results()
    stops = sum(map(sum, times.get("DATALOADER_STOP_ITERATION", {}).values()))
    assert stops % STOP == 0
    assert total == ["Total", "", course.handlers_seconds + stops, "", "", "", ""]
    fired = course.seconds_on(Own.HALF)  # by the process function
    assert processing[2] == (PROCESS * course.processed + fired or "not triggered")
    assert fetching[2] == (FETCH * course.fetched or "not triggered")


@pytest.mark.parametrize("event", [Events.GET_BATCH_STARTED, Events.ITERATION_STARTED])
def test_time_in_which_a_run_is_paused_does_not_count(clock, profiler, event):
    def slow(engine, batch):
        clock.take(2)

    engine = Engine(slow)
    profiler.attach(engine)
    engine.add_event_handler(event(once=2), engine.interrupt)
    engine.run(range(4))
    clock.take(1000)
    engine.run()
    assert engine.state.iteration == 4
    assert sum(profiler.processing_times) == (8 if event == Events.GET_BATCH_STARTED else 6)
    assert sum(profiler.dataflow_times) == 0


def test_each_run_is_measured_separately(clock, profiler):
    engine = Engine(lambda engine, batch: clock.take(2))
    profiler.attach(engine)
    engine.run(range(4))
    engine.run(range(3))
    assert list(profiler.processing_times) == [2.0] * 3


def test_attaching_twice_has_no_effect(clock, profiler):
    engine = Engine(lambda engine, batch: None)
    profiler.attach(engine)
    profiler.attach(engine)
    engine.add_event_handler(Events.STARTED, clock.taking(5))
    engine.run([1])
    if isinstance(profiler, BasicTimeProfiler):
        assert profiler.event_handlers_times[Events.STARTED].tolist() == [5.0]
    else:
        assert [row[2] for row in profiler.get_results()] == [5.0, 5.0, 0.0, 0.0]


def test_two_profilers_do_not_measure_each_other(clock):
    engine = Engine(lambda engine, batch: clock.take(2))
    engine.add_event_handler(Events.ITERATION_COMPLETED, clock.taking(5))
    one, other, third = BasicTimeProfiler(), HandlersTimeProfiler(), HandlersTimeProfiler()
    for profiler in (third, one, other):
        profiler.attach(engine)
    engine.run(range(2))
    assert one.event_handlers_names[Events.ITERATION_COMPLETED] == ["Clock.taking.<locals>.handler"]
    assert other.get_results() == third.get_results()
    assert [row[:3] for row in other.get_results()] == [
        ["Clock.taking.<locals>.handler", "ITERATION_COMPLETED", 10.0],
        ["Total", "", 10.0],
        ["Processing", "None", 4.0],
        ["Dataflow", "None", 0.0],
    ]
    other.detach()
    engine.run(range(3))
    assert other.get_results()[1][2] == 10.0
    assert third.get_results()[1][2] == 15.0


def test_detaching_restores_the_engine(profiler):
    def plans(engine):
        return {
            event: [(one.serial, one.invoke) for one in plan.registrations]
            for event, plan in engine._dispatcher.plans.items()
        }

    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: None)
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    before = plans(engine)
    profiler.attach(engine)
    assert plans(engine) != before
    profiler.detach()
    after = plans(engine)
    assert {event: [serial for serial, _ in ones] for event, ones in after.items()} == {
        event: [serial for serial, _ in ones] for event, ones in before.items()
    }
    assert after[Events.ITERATION_COMPLETED] == before[Events.ITERATION_COMPLETED]
    profiler.detach()  # does nothing
    other = Engine(lambda engine, batch: None)
    profiler.attach(other)
    assert other.run([1]).iteration == 1


def test_errors_are_raised(profiler):
    engine = Engine(lambda engine, batch: {}[batch])
    profiler.attach(engine)
    with pytest.raises(KeyError):
        engine.run([1])


def test_only_a_single_engine_can_be_measured(profiler):
    with pytest.raises(TypeError, match="engine must be an Engine, got None"):
        profiler.attach(None)
    engine = Engine(lambda engine, batch: None)
    profiler.attach(engine)
    with pytest.raises(ValueError, match="use another profiler"):
        profiler.attach(Engine(lambda engine, batch: None))


def test_it_does_not_keep_an_engine_alive(profiler):
    engine = Engine(lambda engine, batch: None)
    profiler.attach(engine)
    engine.run(range(3))
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()
    assert profiler.get_results()
    profiler.attach(Engine(lambda engine, batch: None))


def test_results_are_available_before_and_during_a_run(profiler, capsys):
    engine = Engine(lambda engine, batch: None)
    profiler.attach(engine)
    profiler.print_results(profiler.get_results())
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: profiler.print_results(profiler.get_results()))
    engine.run(range(3))
    assert capsys.readouterr().out


def test_an_engine_without_data_is_measured(clock, profiler):
    engine = Engine(lambda engine, batch: clock.take(2))
    profiler.attach(engine)
    engine.run(max_iters=5, epoch_length=3)
    assert list(profiler.processing_times) == [2.0] * 5
    assert len(profiler.dataflow_times) == 0


def test_attached_during_a_run_it_measures_the_rest(clock, profiler):
    engine = Engine(lambda engine, batch: clock.take(2))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: profiler.attach(engine))
    engine.run(range(5))
    assert list(profiler.processing_times) == [2.0] * 3
