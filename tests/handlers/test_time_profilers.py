"""Both time profilers: exact sums and counts in any run, their results, reports and files, and no side effects."""

from __future__ import annotations

import copy
import csv
import gc
import tracemalloc
import weakref

import pytest
import torch
from hypothesis import given, settings

from camshaft.engine import Engine, EventEnum, Events
from camshaft.handlers import BasicTimeProfiler, Checkpoint, HandlersTimeProfiler
from camshaft.handlers.checkpoint import CheckpointEvents
from tests.handlers.parts import Memory, Part
from tests.handlers.profiled import FETCH, PLANS, PROCESS, REGULAR, STOP, Course, Own, profilers_clock

NAMES = [
    *("STARTED", "COMPLETED", "EPOCH_STARTED", "EPOCH_COMPLETED", "ITERATION_STARTED", "ITERATION_COMPLETED"),
    *("GET_BATCH_STARTED", "GET_BATCH_COMPLETED"),
]
TAKING = "Clock.taking.<locals>.handler"


@pytest.fixture
def clock():
    with profilers_clock() as clock:
        yield clock


@pytest.fixture(params=[BasicTimeProfiler, HandlersTimeProfiler])
def profiler(request):
    return request.param()


def idle():
    return Engine(lambda engine, batch: None)


def read(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


# --- both ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(PLANS)
def test_times_add_up_and_each_call_is_counted_in_any_run(plan):
    with profilers_clock() as clock:
        course, basic, handlers = Course(clock, plan), BasicTimeProfiler(), HandlersTimeProfiler()
        basic.attach(course.engine)
        handlers.attach(course.engine)
        course.run()
    fired = course.seconds_on(Own.HALF)  # by the process function
    processing, results = PROCESS * course.processed + fired, basic.get_results()
    assert basic.processing_times.sum() == processing
    assert len(basic.processing_times) == course.processed
    assert [seconds % STOP for seconds in basic.dataflow_times.tolist()] == [FETCH] * course.fetched
    for event in REGULAR:
        assert len(basic.event_handlers_times[event]) == course.fired[event]
        assert basic.event_handlers_times[event].sum() == course.seconds_on(event)
    assert results["event_handlers_stats"]["total_time"] == course.handlers_seconds - fired

    times, by_event = handlers.event_handlers_times, {}
    for number, (event, _, seconds) in enumerate(plan.handlers):
        by_event.setdefault(event.name, []).extend([float(seconds)] * course.calls[number])
    assert {name: times[name]["Course._take"] for name in by_event} == by_event
    stops = sum(map(sum, times.get("DATALOADER_STOP_ITERATION", {}).values()))
    assert stops % STOP == 0
    assert [row[:3] for row in handlers.get_results()[-3:]] == [
        ["Total", "", course.handlers_seconds + stops],
        ["Processing", "None", processing or "not triggered"],
        ["Dataflow", "None", FETCH * course.fetched or "not triggered"],
    ]


@pytest.mark.parametrize(("event", "seconds"), [(Events.GET_BATCH_STARTED, 8), (Events.ITERATION_STARTED, 6)])
def test_time_in_which_a_run_is_paused_does_not_count(clock, profiler, event, seconds):
    engine = Engine(lambda engine, batch: clock.take(2))
    profiler.attach(engine)
    engine.add_event_handler(event(once=2), engine.interrupt)
    engine.run(range(4))
    clock.take(1000)
    assert engine.run().iteration == 4
    assert (sum(profiler.processing_times), sum(profiler.dataflow_times)) == (seconds, 0)


def test_each_run_is_measured_separately_also_one_without_data_or_from_its_middle(clock, profiler):
    engine = Engine(lambda engine, batch: clock.take(2))
    with engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: profiler.attach(engine)):
        engine.run(range(5))
    assert list(profiler.processing_times) == [2.0] * 3
    engine.add_event_handler(Events.STARTED, clock.taking(5))
    for _ in range(2):  # H19: samples doubled
        engine.run(range(4))
        assert list(profiler.processing_times) == [2.0] * 4
        profiler.attach(engine)  # has no effect
        results = profiler.get_results()
        if isinstance(profiler, BasicTimeProfiler):
            assert results["event_handlers_stats"]["STARTED"] == {"total": 5.0}
        else:
            assert [row[2] for row in results] == [5.0, 5.0, 8.0, 0.0]
    engine = Engine(lambda engine, batch: clock.take(2))
    profiler.detach()
    profiler.attach(engine)
    engine.run(max_iters=5, epoch_length=3)
    assert (list(profiler.processing_times), len(profiler.dataflow_times)) == ([2.0] * 5, 0)


def test_two_profilers_do_not_measure_each_other(clock):
    engine = Engine(lambda engine, batch: clock.take(2))
    engine.add_event_handler(Events.ITERATION_COMPLETED, clock.taking(5))
    one, other, third = BasicTimeProfiler(), HandlersTimeProfiler(), HandlersTimeProfiler()
    for profiler in (third, one, other):
        profiler.attach(engine)
    engine.run(range(2))
    assert one.event_handlers_names[Events.ITERATION_COMPLETED] == [TAKING]
    assert other.get_results() == third.get_results()
    assert [row[:3] for row in other.get_results()] == [
        [TAKING, "ITERATION_COMPLETED", 10.0],
        ["Total", "", 10.0],
        ["Processing", "None", 4.0],
        ["Dataflow", "None", 0.0],
    ]
    other.detach()
    engine.run(range(3))
    assert [one.get_results()[1][2] for one in (other, third)] == [10.0, 15.0]


def test_detaching_restores_the_engine(profiler):
    def calls(engine):
        plans = engine._dispatcher.plans.items()
        return {event: [(one.serial, one.invoke) for one in plan.registrations] for event, plan in plans}

    def serials(plans):
        return {event: [serial for serial, _ in ones] for event, ones in plans.items()}

    engine = idle()
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: None)
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    before = calls(engine)
    profiler.attach(engine)
    assert calls(engine) != before
    with pytest.raises(ValueError, match="use another profiler"):
        profiler.attach(idle())
    profiler.detach()
    assert serials(calls(engine)) == serials(before)
    assert calls(engine)[Events.ITERATION_COMPLETED] == before[Events.ITERATION_COMPLETED]
    profiler.detach()  # does nothing
    other = idle()
    profiler.attach(other)
    assert other.run([1]).iteration == 1


def test_errors_are_raised_and_wrong_arguments_rejected(profiler):
    engine = Engine(lambda engine, batch: {}[batch])
    profiler.attach(engine)
    with pytest.raises(KeyError):  # E31
        engine.run([1])
    with pytest.raises(TypeError, match="engine must be an Engine"):
        profiler.attach(None)


def test_it_does_not_keep_an_engine_alive(profiler):
    engine = idle()
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
    profiler.attach(idle())


def test_results_are_available_before_and_during_a_run(profiler, capsys):
    engine = idle()
    profiler.attach(engine)
    profiler.print_results(profiler.get_results())
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: profiler.print_results(profiler.get_results()))
    engine.run(range(3))
    assert capsys.readouterr().out


# --- BasicTimeProfiler ---------------------------------------------------------------------------------------------


@pytest.fixture
def basic(clock):
    """A profiler of an engine whose batches are the seconds that they take to process, and half of that to fetch."""

    class Data:
        def __iter__(self):
            for batch in (2, 6, 4):
                clock.take(batch / 2)
                yield batch

    engine, profiler = Engine(lambda engine, batch: clock.take(batch)), BasicTimeProfiler()
    for seconds, event in enumerate(Events, start=1):
        if event.name in NAMES:
            engine.add_event_handler(event, clock.taking(10 * seconds))
    profiler.attach(engine)
    profiler.engine, profiler.run = engine, lambda **arguments: engine.run(Data(), **arguments)
    return profiler


def test_results_and_attributes_of_the_basic_profiler(basic):
    results = basic.get_results()
    assert results["processing_stats"] == results["dataflow_stats"] == {"total": "not yet triggered"}
    assert results["event_handlers_stats"]["STARTED"] == {"total": "not yet triggered"}
    assert results["event_handlers_stats"]["total_time"] == 0
    basic.run(max_epochs=2)
    results = basic.get_results()
    assert list(results) == ["processing_stats", "dataflow_stats", "event_handlers_stats", "event_handlers_names"]
    std = pytest.approx(torch.tensor([2.0, 6, 4, 2, 6, 4]).std().item())
    expected = {"total": 24.0, "min/index": (2.0, 0), "max/index": (6.0, 1), "mean": 4.0, "std": std}
    assert results["processing_stats"] == expected
    assert list(results["processing_stats"]) == list(expected)
    assert results["dataflow_stats"]["max/index"] == (3.0, 1)
    events = results["event_handlers_stats"]
    assert list(events) == [*NAMES, "total_time"]
    assert events["STARTED"] == {"total": 30.0}
    constant = {"total": 40.0, "min/index": (20.0, 0), "max/index": (20.0, 0), "mean": 20.0, "std": 0.0}
    assert events["EPOCH_COMPLETED"] == constant
    assert events["total_time"] == torch.tensor(sum(events[name]["total"] for name in NAMES))
    assert results["event_handlers_names"] == {f"{name}_names": [TAKING] for name in NAMES}
    assert (basic.max_epochs, basic.total_num_iters) == (2, 6)
    assert basic.processing_times.tolist() == [2.0, 6.0, 4.0] * 2
    assert basic.dataflow_times.tolist() == [1.0, 3.0, 2.0] * 2
    assert basic.event_handlers_times[Events.EPOCH_STARTED].tolist() == [10.0, 10.0]
    assert basic.event_handlers_names["STARTED"] == [TAKING]
    assert Events.EXCEPTION_RAISED in basic.events_to_ignore
    assert set(basic.events_to_ignore) | set(basic.event_handlers_times) == set(Events)


@pytest.mark.parametrize(("arguments", "size"), [({"epoch_length": 5}, 5), ({"max_iters": 4}, 4)])
def test_samples_match_their_batches_however_long_a_run_is(basic, arguments, size):
    basic.run(**arguments)  # H18: was an IndexError and shifted by one, or a TypeError
    assert (basic.max_epochs, basic.total_num_iters) == (1 if size == 5 else None, size)
    assert basic.processing_times.tolist() == [2.0, 6.0, 4.0, 2.0, 6.0][:size]
    assert basic.dataflow_times.tolist() == [1.0, 3.0, 2.0, 1.0, 3.0][:size]


def test_handlers_attached_or_removed_during_a_run_are_listed(basic):
    def early():
        """Removed in the second epoch."""

    def late():
        """Attached in the second epoch."""

    add = basic.engine.add_event_handler
    handle = add(Events.EPOCH_COMPLETED, early)
    add(Events.EPOCH_STARTED(once=2), lambda: (handle.remove(), add(Events.EPOCH_COMPLETED, late)))
    basic.run(max_epochs=2)
    names = basic.event_handlers_names[Events.EPOCH_COMPLETED]
    assert [name.rpartition(".")[2] for name in names] == ["handler", "early", "late"]


def test_the_file_has_a_row_per_iteration_and_its_columns_add_up(basic, tmp_path):
    path, events = tmp_path / "times.csv", [f"Event_{name}" for name in NAMES]
    basic.write_results(str(path))
    assert read(path) == [["epoch", "iteration", "processing_stats", "dataflow_stats", *events]]
    with basic.engine.add_event_handler(Events.STARTED, basic.engine.terminate):
        basic.run()
    basic.write_results(path)
    assert len(read(path)) == 1
    basic.engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), basic.engine.terminate_epoch)
    basic.run(epoch_length=3, max_epochs=2)
    basic.write_results(path)
    header, *rows = read(path)
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    assert (columns.pop("epoch"), columns.pop("iteration")) == (tuple("11222"), tuple("12345"))
    seconds = {name: list(map(float, column)) for name, column in columns.items()}
    assert seconds["processing_stats"] == [2.0, 6.0, 2.0, 6.0, 4.0]
    assert seconds["Event_EPOCH_STARTED"] == [10.0, 0.0, 10.0, 0.0, 0.0]
    assert seconds["Event_EPOCH_COMPLETED"] == [0.0, 20.0, 0.0, 0.0, 20.0]
    for name in NAMES:
        assert sum(seconds[f"Event_{name}"]) == basic.event_handlers_times[Events[name]].sum()


def test_the_report(basic, capsys):
    basic.run()
    text = BasicTimeProfiler.print_results(basic.get_results())
    assert capsys.readouterr().out == text + "\n"
    assert "Processing function\n12.00000 | 2.00000/0 | 6.00000/1 | 4.00000 | 2.00000\n" in text
    assert "Dataflow\n6.00000 | 1.00000/0 | 3.00000/1 | 2.00000 | 1.00000\n" in text
    assert f"- Events.STARTED: ['{TAKING}']\n30.00000\n" in text
    assert "GET_BATCH" not in text
    assert text.index("Events.STARTED") < text.index("Events.EPOCH_STARTED") < text.index("Events.COMPLETED")


def test_an_iteration_takes_the_memory_of_its_six_samples():
    """Sixteen bytes each, and for epoch and iteration, plus the spare capacity of the arrays."""
    engine, profiler = idle(), BasicTimeProfiler()
    profiler.attach(engine)
    tracemalloc.start()
    try:
        engine.run(range(1000), max_epochs=20)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert profiler.total_num_iters == 20_000
    assert taken / 20_000 < 7 * 16 * 9 / 8 + 8


# --- HandlersTimeProfiler ------------------------------------------------------------------------------------------


@pytest.fixture
def engine(clock):
    """An engine whose batches are the seconds that they take, and its profiler."""
    engine = Engine(lambda engine, batch: clock.take(batch))
    engine.profiler = HandlersTimeProfiler()
    engine.profiler.attach(engine)
    return engine


def rows(engine):
    """Return the total of each row."""
    return {(name.rpartition(".")[2], event): total for name, event, total, *_ in engine.profiler.get_results()}


def times(engine, event=Events.ITERATION_COMPLETED):
    """Return the times of the only handler of an event."""
    (found,) = engine.profiler.event_handlers_times[event].values()
    return found


def test_results_report_and_file_of_the_profiler_of_handlers(engine, clock, capsys, tmp_path):
    def grow(engine, by=1.0):
        clock.take(by * engine.state.iteration)

    def never():
        raise AssertionError

    engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), grow, by=1 / 3)
    engine.add_event_handler(Events.EPOCH_STARTED(once=9), never)
    engine.run([1, 5, 3, 1])
    results, prefix = engine.profiler.get_results(), f"{never.__qualname__.rpartition('.')[0]}."
    assert results == [
        [f"{prefix}never", "EPOCH_STARTED", "not triggered", "None", "None", "None", "None"],
        [f"{prefix}grow", "ITERATION_COMPLETED", 2.0, (0.66667, 0), (1.33333, 1), 1.0, 0.4714],
        ["Total", "", 2.0, "", "", "", ""],
        ["Processing", "None", 10.0, (1.0, 0), (5.0, 1), 2.5, 1.91485],
        ["Dataflow", "None", 0.0, (0.0, 0), (0.0, 0), 0.0, 0.0],
    ]
    before = copy.deepcopy(results)
    text = HandlersTimeProfiler.print_results(results)
    assert results == before  # H19
    assert capsys.readouterr().out == text + "\n"
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["Handler", "Event", "Name", "Total(s)", "Min(s)/IDX", "Max(s)/IDX", "Mean(s)", "Std(s)"]
    grown = [f"{prefix}grow", "ITERATION_COMPLETED", "2.0", "0.66667/0", "1.33333/1", "1.0", "0.4714"]
    assert lines[2:4] == [grown, ["Total", "2.0"]]

    engine.profiler.write_results(tmp_path / "times.csv")
    header, *found = read(tmp_path / "times.csv")
    names = [f"{prefix}never (EPOCH_STARTED)", f"{prefix}grow (ITERATION_COMPLETED)"]
    assert header == ["#", "processing_stats", "dataflow_stats", *names]
    expected = [[1, 1, 0, 0, 2 / 3], [2, 5, 0, 0, 4 / 3], [3, 3, 0, 0, 0], [4, 1, 0, 0, 0]]
    assert [list(map(float, row)) for row in found] == [pytest.approx(row) for row in expected]


def test_times_by_event_and_handler(engine, clock):
    class Half(EventEnum):
        WAY = "half-way"

    def take(engine):
        clock.take(engine.state.iteration)

    profiler = engine.profiler
    assert (profiler.dataflow_times, profiler.processing_times) == ([], [])
    engine.register_events(Half.WAY)
    engine.add_event_handler(Events.EPOCH_COMPLETED, take)
    engine.add_event_handler(Events.EPOCH_COMPLETED(every=1), take)
    engine.add_event_handler(Half.WAY, take)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: engine.fire_event(Half.WAY))
    engine.run([1, 5, 3])
    name = take.__qualname__
    assert profiler.event_handlers_times[Events.EPOCH_COMPLETED] == {name: [3.0, 3.0]}
    assert profiler.event_handlers_times[Half.WAY] == {name: [2.0]}
    assert profiler.event_handlers_times[Events.STARTED] == {}
    assert (profiler.processing_times, profiler.dataflow_times) == ([1.0, 5.0, 3.0], [0.0, 0.0, 0.0])
    assert [row[0] for row in profiler.get_results()].count(name) == 3  # rows of their own


@pytest.mark.parametrize(
    ("event_filter", "threshold", "kept"),
    [
        ({"every": 2}, None, [0.0001, 5.0]),
        ({"every": 2}, 0.0, [0.00009, 0.0001, 5.0]),
        ({"event_filter": lambda engine, count: count % 2 == 0}, None, [0.0001, 5.0]),
        ({}, None, [0.0, 0.00009, 0.0, 0.0001, 0.0, 5.0, 0.0]),
    ],
)
def test_short_calls_of_filtered_handlers_are_ignored(engine, clock, event_filter, threshold, kept):
    assert HandlersTimeProfiler.EVENT_FILTER_THESHOLD_TIME == 0.0001
    clock.now, durations = 0.0, {2: 0.00009, 4: 0.0001, 6: 5.0}
    event = Events.ITERATION_COMPLETED(**event_filter) if event_filter else Events.ITERATION_COMPLETED
    engine.add_event_handler(event, lambda engine: clock.take(durations.get(engine.state.iteration, 0.0)))
    if threshold is not None:
        engine.profiler.EVENT_FILTER_THESHOLD_TIME = threshold
    engine.run([0] * 7)
    assert times(engine) == pytest.approx(kept)
    assert rows(engine)["Processing", "None"] == 0.0  # their time is not counted elsewhere


def test_handlers_of_nested_events_are_measured_separately_and_those_of_a_step_are_also_part_of_it(engine, clock):
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
    assert (found["outer", "EPOCH_COMPLETED"], found["handler", "inner"]) == (6.0, 40.0)
    assert (found["Total", ""], found["Processing", "None"]) == (46.0, 3.0)
    step = engine._process_function
    engine._process_function = lambda engine, batch: (engine.fire_event("inner"), step(engine, batch))
    engine.run([3])
    found = rows(engine)
    assert (found["handler", "inner"], found["Processing", "None"]) == (60.0, 23.0)


def test_events_registered_later_are_measured(engine, clock):
    checkpoint = Checkpoint({"part": Part()}, Memory())
    engine.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
    engine.add_event_handler(CheckpointEvents.SAVED_CHECKPOINT, clock.taking(3))
    engine.run([1], max_epochs=2)
    assert rows(engine)["handler", "SAVED_CHECKPOINT"] == 6.0
    assert rows(engine)["Checkpoint", "EPOCH_COMPLETED"] == 0.0


@pytest.mark.parametrize("event", [Events.STARTED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED])
def test_handlers_that_are_registered_while_the_event_fires_are_measured_at_once(engine, clock, event):
    late = clock.taking(4)
    engine.add_event_handler(
        event(every=1), lambda: engine.has_event_handler(late) or engine.add_event_handler(event, late)
    )
    engine.run([1, 1])
    assert rows(engine)["handler", event.name] == 4.0 * (1 if event == Events.STARTED else 2)
    assert rows(engine)["Processing", "None"] == 2.0


def test_a_handler_that_was_removed_keeps_its_row_until_the_next_run(engine, clock):
    handle = engine.add_event_handler(Events.ITERATION_COMPLETED, clock.taking(4))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), handle.remove)
    engine.run([1] * 4)
    assert rows(engine)["handler", "ITERATION_COMPLETED"] == 8.0
    engine.run([1] * 4)
    assert ("handler", "ITERATION_COMPLETED") not in rows(engine)


def test_handlers_that_raise_and_those_of_the_error_are_measured(engine, clock):
    def fail():
        clock.take(3)
        raise KeyError("on purpose")

    def note(error):
        clock.take(8)
        raise error

    engine.add_event_handler(Events.EXCEPTION_RAISED, note)
    engine.add_event_handler(Events.ITERATION_STARTED, fail)
    with pytest.raises(KeyError):
        engine.run([1] * 4)
    assert (rows(engine)["note", "EXCEPTION_RAISED"], rows(engine)["fail", "ITERATION_STARTED"]) == (8.0, 3.0)


def test_handlers_get_the_same_arguments_as_without_the_profiler(engine):
    seen = []

    class Handler:
        def __call__(self, engine, name):
            seen.append((type(engine), name))

        def on_cut(self, iter_counter):
            seen.append(iter_counter)

    engine.add_event_handler(Events.STARTED, Handler(), "a")
    engine.add_event_handler(Events.TERMINATE_SINGLE_EPOCH, Handler().on_cut)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), engine.terminate_epoch)
    engine.run([1] * 4)
    assert seen == [(Engine, "a"), 2]
    assert {name for name, _ in rows(engine)} >= {"Handler", "on_cut", "terminate_epoch"}
