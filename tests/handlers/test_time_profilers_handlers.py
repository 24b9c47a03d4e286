"""HandlersTimeProfiler: which calls are measured, and the format of its results, table and file."""

from __future__ import annotations

import copy
import csv
from functools import partial

import pytest

from camshaft.engine import Engine, EventEnum, Events
from camshaft.handlers import Checkpoint, HandlersTimeProfiler
from camshaft.handlers.checkpoint import CheckpointEvents
from tests.handlers.parts import Memory, Part
from tests.handlers.profiled import profilers_clock


@pytest.fixture
def clock():
    with profilers_clock() as clock:
        yield clock


@pytest.fixture
def engine(clock):
    engine = Engine(lambda engine, batch: clock.take(batch))
    engine.profiler = HandlersTimeProfiler()
    engine.profiler.attach(engine)
    return engine


def rows(engine):
    return {(name.rpartition(".")[2], event): rest for name, event, *rest in engine.profiler.get_results()}


def test_results(engine, clock):
    def grow(engine, by=1.0):
        clock.take(by * engine.state.iteration)

    def never():
        raise AssertionError

    engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), grow, by=1 / 3)
    engine.add_event_handler(Events.EPOCH_STARTED(once=9), never)
    engine.run([1, 5, 3, 1])
    results = engine.profiler.get_results()
    prefix = "test_results.<locals>."
    assert results == [
        [f"{prefix}never", "EPOCH_STARTED", "not triggered", "None", "None", "None", "None"],
        [f"{prefix}grow", "ITERATION_COMPLETED", 2.0, (0.66667, 0), (1.33333, 1), 1.0, 0.4714],
        ["Total", "", 2.0, "", "", "", ""],
        ["Processing", "None", 10.0, (1.0, 0), (5.0, 1), 2.5, 1.91485],
        ["Dataflow", "None", 0.0, (0.0, 0), (0.0, 0), 0.0, 0.0],
    ]


def test_times_by_event_and_handler(engine, clock):
    class Own(EventEnum):
        HALFWAY = "halfway"

    def take(engine):
        clock.take(engine.state.iteration)

    profiler = engine.profiler
    assert (profiler.dataflow_times, profiler.processing_times) == ([], [])
    engine.register_events(Own.HALFWAY)
    engine.add_event_handler(Events.EPOCH_COMPLETED, take)
    engine.add_event_handler(Events.EPOCH_COMPLETED, take)
    engine.add_event_handler(Own.HALFWAY, take)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: engine.fire_event(Own.HALFWAY))
    engine.run([1, 5, 3])
    (name,) = profiler.event_handlers_times[Events.EPOCH_COMPLETED]
    assert name.endswith("take")
    assert profiler.event_handlers_times[Events.EPOCH_COMPLETED] == {name: [3.0, 3.0]}
    assert profiler.event_handlers_times[Own.HALFWAY] == {name: [2.0]}
    assert profiler.event_handlers_times[Events.STARTED] == {}
    assert profiler.processing_times == [1.0, 5.0, 3.0]
    assert profiler.dataflow_times == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("event_filter", [{"every": 2}, {"event_filter": lambda engine, count: count % 2 == 0}])
@pytest.mark.parametrize(("threshold", "kept"), [(None, [0.0001, 5.0]), (0.0, [0.00009, 0.0001, 5.0])])
def test_short_calls_of_filtered_handlers_are_ignored(engine, clock, event_filter, threshold, kept):
    assert HandlersTimeProfiler.EVENT_FILTER_THESHOLD_TIME == 0.0001
    clock.now = 0.0
    durations = {2: 0.00009, 4: 0.0001, 6: 5.0}
    engine.add_event_handler(
        Events.ITERATION_COMPLETED(**event_filter), lambda engine: clock.take(durations[engine.state.iteration])
    )
    if threshold is not None:
        engine.profiler.EVENT_FILTER_THESHOLD_TIME = threshold
    engine.run([0] * 7)
    (times,) = engine.profiler.event_handlers_times[Events.ITERATION_COMPLETED].values()
    assert times == pytest.approx(kept)
    assert rows(engine)["Processing", "None"][0] == 0.0  # their time is not counted elsewhere


def test_short_calls_of_other_handlers_count(engine):
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: None)
    engine.run([1] * 2)
    (times,) = engine.profiler.event_handlers_times[Events.ITERATION_COMPLETED].values()
    assert times == [0.0, 0.0]


def test_the_same_handler_twice_has_two_rows(engine, clock):
    handler = clock.taking(2)
    engine.add_event_handler(Events.EPOCH_STARTED | Events.EPOCH_STARTED(once=2), handler)
    engine.run([1], max_epochs=3)
    assert [row[2] for row in engine.profiler.get_results()[:2]] == [6.0, 2.0]


def test_handlers_of_nested_events_are_measured_separately(engine, clock):
    engine.register_events("inner")

    def outer(engine):
        clock.take(5)
        engine.fire_event("inner")
        clock.take(1)

    engine.add_event_handler("inner", clock.taking(20))
    engine.add_event_handler(Events.EPOCH_COMPLETED, outer)
    engine.add_event_handler(Events.ITERATION_STARTED, lambda engine: engine.fire_event("inner"))
    engine.run([3])
    found = rows(engine)
    assert found["outer", "EPOCH_COMPLETED"][0] == 6.0
    assert found["handler", "inner"][0] == 40.0
    assert found["Total", ""][0] == 46.0
    assert found["Processing", "None"][0] == 3.0


def test_handlers_that_the_process_function_fires_are_part_of_its_time(engine, clock):
    engine.register_events("inner")
    step = engine._process_function
    engine._process_function = lambda engine, batch: (engine.fire_event("inner"), step(engine, batch))
    engine.add_event_handler("inner", clock.taking(20))
    engine.run([3])
    assert rows(engine)["handler", "inner"][0] == 20.0
    assert rows(engine)["Processing", "None"][0] == 23.0


def test_events_registered_later_are_measured(engine, clock):
    checkpoint = Checkpoint({"part": Part()}, Memory())
    engine.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
    engine.add_event_handler(CheckpointEvents.SAVED_CHECKPOINT, clock.taking(3))
    engine.run([1], max_epochs=2)
    assert rows(engine)["handler", "SAVED_CHECKPOINT"][0] == 6.0
    assert rows(engine)["Checkpoint", "EPOCH_COMPLETED"][0] == 0.0


@pytest.mark.parametrize("event", [Events.STARTED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED])
def test_handlers_that_are_registered_while_the_event_fires_are_measured_at_once(engine, clock, event):
    late = clock.taking(4)
    engine.add_event_handler(
        event(every=1), lambda: engine.has_event_handler(late) or engine.add_event_handler(event, late)
    )
    engine.run([1, 1])
    found = rows(engine)
    assert found["handler", event.name][0] == 4.0 * (1 if event == Events.STARTED else 2)
    assert found["Processing", "None"][0] == 2.0


def test_a_handler_that_was_removed_keeps_its_row_until_the_next_run(engine, clock):
    handle = engine.add_event_handler(Events.ITERATION_COMPLETED, clock.taking(4))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), handle.remove)
    engine.run([1] * 4)
    assert rows(engine)["handler", "ITERATION_COMPLETED"][0] == 8.0
    engine.run([1] * 4)
    assert ("handler", "ITERATION_COMPLETED") not in rows(engine)


def test_runs_are_not_accumulated(engine, clock):
    engine.add_event_handler(Events.ITERATION_COMPLETED, clock.taking(4))
    for _ in range(3):  # H19: samples doubled
        engine.run([1] * 4)
        assert rows(engine)["handler", "ITERATION_COMPLETED"][0] == 16.0


def test_errors_are_raised_although_their_handlers_are_measured(engine, clock):
    def fail():
        clock.take(3)
        raise KeyError("on purpose")

    def note(error):
        clock.take(8)
        raise error

    engine.add_event_handler(Events.EXCEPTION_RAISED, note)
    handle = engine.add_event_handler(Events.ITERATION_STARTED, fail)
    with pytest.raises(KeyError):
        engine.run([1] * 4)
    assert rows(engine)["note", "EXCEPTION_RAISED"][0] == 8.0
    assert rows(engine)["fail", "ITERATION_STARTED"][0] == 3.0
    handle.remove()
    engine.remove_event_handler(note, Events.EXCEPTION_RAISED)
    engine.add_event_handler(Events.ITERATION_STARTED, fail)
    with pytest.raises(KeyError):  # E31
        engine.run([1] * 4)


def test_handlers_get_the_same_arguments_as_without_the_profiler(engine):
    seen = []

    class Handler:
        def __call__(self, engine, name):
            seen.append((type(engine), name))

        def on_cut(self, iter_counter):
            seen.append(iter_counter)

    engine.add_event_handler(Events.STARTED, Handler(), "a")
    engine.add_event_handler(Events.STARTED, partial(Handler().__call__, name="b"))
    engine.add_event_handler(Events.TERMINATE_SINGLE_EPOCH, Handler().on_cut)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), engine.terminate_epoch)
    engine.run([1] * 4)
    assert seen == [(Engine, "a"), (Engine, "b"), 2]
    assert {name for name, _ in rows(engine)} >= {"Handler", "__call__", "on_cut", "terminate_epoch"}


def test_the_file_has_a_column_per_handler_filled_with_zeros(engine, clock, tmp_path):
    engine.add_event_handler(Events.EPOCH_COMPLETED, clock.taking(4))
    engine.run([1, 2, 3])
    engine.profiler.write_results(tmp_path / "times.csv")
    with open(tmp_path / "times.csv", newline="") as file:
        found = list(csv.reader(file))
    name = "Clock.taking.<locals>.handler (EPOCH_COMPLETED)"
    assert found == [
        ["#", "processing_stats", "dataflow_stats", name],
        ["1", "1.0", "0.0", "4.0"],
        ["2", "2.0", "0.0", "0.0"],
        ["3", "3.0", "0.0", "0.0"],
    ]


def test_printing_does_not_change_the_results(engine, clock, capsys):
    engine.add_event_handler(Events.EPOCH_COMPLETED, clock.taking(4))
    engine.run([1, 2, 3])
    results = engine.profiler.get_results()
    before = copy.deepcopy(results)
    text = HandlersTimeProfiler.print_results(results)
    assert results == before  # H19
    assert capsys.readouterr().out == text + "\n"
    lines = text.splitlines()
    assert lines[0].split() == ["Handler", "Event", "Name", "Total(s)", "Min(s)/IDX", "Max(s)/IDX", "Mean(s)", "Std(s)"]
    assert lines[1].split() == [
        "Clock.taking.<locals>.handler",
        "EPOCH_COMPLETED",
        *["4.0", "4.0/0", "4.0/0", "4.0", "0.0"],
    ]
    assert lines[2].split() == ["Total", "4.0"]
    assert lines[3].split() == ["Processing", "None", "6.0", "1.0/0", "3.0/2", "2.0", "1.0"]
