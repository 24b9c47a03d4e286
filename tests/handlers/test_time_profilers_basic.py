"""BasicTimeProfiler: the format of its results, report and file."""

from __future__ import annotations

import csv
import tracemalloc

import pytest
import torch

from camshaft.engine import Engine, Events
from camshaft.handlers import BasicTimeProfiler
from tests.handlers.profiled import profilers_clock

NAMES = [
    "STARTED",
    "COMPLETED",
    "EPOCH_STARTED",
    "EPOCH_COMPLETED",
    "ITERATION_STARTED",
    "ITERATION_COMPLETED",
    "GET_BATCH_STARTED",
    "GET_BATCH_COMPLETED",
]


@pytest.fixture
def clock():
    with profilers_clock() as clock:
        yield clock


@pytest.fixture
def engine(clock):
    """An engine whose batches are the seconds that they take to process, and half of that to fetch."""

    def batches():
        for batch in (2, 6, 4):
            clock.take(batch / 2)
            yield batch

    class Data:
        def __iter__(self):
            return batches()

    engine = Engine(lambda engine, batch: clock.take(batch))
    engine.state.dataloader = Data()
    for seconds, event in enumerate(Events, start=1):
        if event.name in NAMES:
            engine.add_event_handler(event, clock.taking(10 * seconds))
    engine.profiler = BasicTimeProfiler()
    engine.profiler.attach(engine)
    return engine


def run(engine, **arguments):
    engine.run(engine.state.dataloader, **arguments)
    return engine.profiler


def test_results(engine):
    results = run(engine, max_epochs=2).get_results()
    assert list(results) == ["processing_stats", "dataflow_stats", "event_handlers_stats", "event_handlers_names"]
    std = torch.tensor([2.0, 6, 4, 2, 6, 4]).std().item()
    assert results["processing_stats"] == {
        "total": 24.0,
        "min/index": (2.0, 0),
        "max/index": (6.0, 1),
        "mean": 4.0,
        "std": pytest.approx(std),
    }
    assert results["dataflow_stats"]["max/index"] == (3.0, 1)
    events = results["event_handlers_stats"]
    assert list(events) == [*NAMES, "total_time"]
    assert events["STARTED"] == {"total": 30.0}
    assert events["EPOCH_COMPLETED"] == {
        "total": 40.0,
        "min/index": (20.0, 0),
        "max/index": (20.0, 0),
        "mean": 20.0,
        "std": 0.0,
    }
    assert events["total_time"] == torch.tensor(sum(events[name]["total"] for name in NAMES))
    assert results["event_handlers_names"]["STARTED_names"] == ["Clock.taking.<locals>.handler"]
    assert list(results["event_handlers_names"]) == [f"{name}_names" for name in NAMES]


def test_attributes(engine):
    profiler = run(engine, max_epochs=2)
    assert (profiler.max_epochs, profiler.total_num_iters) == (2, 6)
    assert profiler.processing_times.tolist() == [2.0, 6.0, 4.0] * 2
    assert profiler.dataflow_times.tolist() == [1.0, 3.0, 2.0] * 2
    assert profiler.event_handlers_times[Events.EPOCH_STARTED].tolist() == [10.0, 10.0]
    assert profiler.event_handlers_names["STARTED"] == ["Clock.taking.<locals>.handler"]
    assert Events.EXCEPTION_RAISED in profiler.events_to_ignore
    assert set(profiler.events_to_ignore) | set(profiler.event_handlers_times) == set(Events)


def test_results_without_a_run(engine):
    results = engine.profiler.get_results()
    assert results["processing_stats"] == results["dataflow_stats"] == {"total": "not yet triggered"}
    assert results["event_handlers_stats"]["STARTED"] == {"total": "not yet triggered"}
    assert results["event_handlers_stats"]["total_time"] == 0


def test_samples_match_their_batches_if_an_epoch_is_longer_than_the_data(engine):
    profiler = run(engine, epoch_length=5)  # H18: was an IndexError, and shifted by one
    assert profiler.processing_times.tolist() == [2.0, 6.0, 4.0, 2.0, 6.0]
    assert profiler.dataflow_times.tolist() == [1.0, 3.0, 2.0, 1.0, 3.0]


def test_runs_with_max_iters_are_measured(engine):
    profiler = run(engine, max_iters=4)  # H18: was a TypeError
    assert (profiler.max_epochs, profiler.total_num_iters) == (None, 4)


def test_handlers_attached_during_a_run_are_listed(engine):
    def late():
        """Attached in the second epoch."""

    def early():
        """Removed in the second epoch."""

    handle = engine.add_event_handler(Events.EPOCH_COMPLETED, early)
    engine.add_event_handler(Events.EPOCH_STARTED(once=2), handle.remove)
    engine.add_event_handler(
        Events.EPOCH_STARTED(once=2), lambda: engine.add_event_handler(Events.EPOCH_COMPLETED, late)
    )
    names = run(engine, max_epochs=2).event_handlers_names[Events.EPOCH_COMPLETED]
    assert [name.rpartition(".")[2] for name in names] == ["handler", "early", "late"]


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_file_has_a_row_per_iteration_and_its_columns_add_up(engine, tmp_path):
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), engine.terminate_epoch)
    profiler = run(engine, epoch_length=3, max_epochs=2)
    profiler.write_results(tmp_path / "times.csv")
    rows = read(tmp_path / "times.csv")
    events = [f"Event_{name}" for name in NAMES]
    assert list(rows[0]) == ["epoch", "iteration", "processing_stats", "dataflow_stats", *events]
    assert [(row["epoch"], row["iteration"]) for row in rows] == [
        ("1", "1"),
        ("1", "2"),
        ("2", "3"),
        ("2", "4"),
        ("2", "5"),
    ]
    assert [float(row["processing_stats"]) for row in rows] == [2.0, 6.0, 2.0, 6.0, 4.0]
    assert [float(row["Event_EPOCH_STARTED"]) for row in rows] == [10.0, 0.0, 10.0, 0.0, 0.0]
    assert [float(row["Event_EPOCH_COMPLETED"]) for row in rows] == [0.0, 20.0, 0.0, 0.0, 20.0]
    for name in NAMES:
        column = sum(float(row[f"Event_{name}"]) for row in rows)
        assert column == profiler.event_handlers_times[Events[name]].sum()


def test_an_empty_file_has_a_header(tmp_path):
    profiler = BasicTimeProfiler()
    profiler.write_results(str(tmp_path / "times.csv"))
    assert read(tmp_path / "times.csv") == []
    engine = Engine(lambda engine, batch: None)
    profiler.attach(engine)
    engine.add_event_handler(Events.STARTED, engine.terminate)
    engine.run([1])
    profiler.write_results(tmp_path / "times.csv")
    assert read(tmp_path / "times.csv") == []


def test_the_report(engine, capsys):
    results = run(engine).get_results()
    text = BasicTimeProfiler.print_results(results)
    assert capsys.readouterr().out == text + "\n"
    assert "Processing function\n12.00000 | 2.00000/0 | 6.00000/1 | 4.00000 | 2.00000\n" in text
    assert "Dataflow\n6.00000 | 1.00000/0 | 3.00000/1 | 2.00000 | 1.00000\n" in text
    assert "- Events.STARTED: ['Clock.taking.<locals>.handler']\n30.00000\n" in text
    assert "GET_BATCH" not in text
    assert text.index("Events.STARTED") < text.index("Events.EPOCH_STARTED") < text.index("Events.COMPLETED")


def test_an_iteration_takes_the_memory_of_its_six_samples():
    """Sixteen bytes each, and for epoch and iteration, plus the spare capacity of the arrays."""
    engine, profiler = Engine(lambda engine, batch: None), BasicTimeProfiler()
    profiler.attach(engine)
    tracemalloc.start()
    try:
        engine.run(range(1000), max_epochs=20)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert profiler.total_num_iters == 20_000
    assert taken / 20_000 < 7 * 16 * 9 / 8 + 8
