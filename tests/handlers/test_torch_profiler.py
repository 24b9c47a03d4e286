"""TorchProfiler: which iterations are recorded, and traces of runs that end early."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from torch.profiler import ProfilerActivity

from camshaft.engine import Engine, Events
from camshaft.handlers import TorchProfiler
from tests.limits import wait_until
from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning")


def trainer():
    """Return an engine whose iterations are labeled in a trace."""

    def step(engine, batch):
        with torch.profiler.record_function(f"iteration {engine.state.iteration}"):
            torch.ones(2, 2) @ torch.ones(2, 2)

    return Engine(step)


def read(path):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if "name" in event]


def recorded(path):
    """Return the numbers of the iterations in a trace."""
    names = {event["name"] for event in read(path) if event.get("ph") == "X"}
    return sorted(int(name.split()[1]) for name in names if name.startswith("iteration "))


def profiled(engine, directory, **options):
    profiler = TorchProfiler(directory, activities=[ProfilerActivity.CPU], **options)
    profiler.attach(engine)
    return profiler


def files(directory):
    return sorted(directory.iterdir()) if directory.exists() else []


def test_a_trace_that_cannot_be_written_warns(tmp_path, monkeypatch):
    def fail(profiler, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fail)
    engine = trainer()
    profiler = profiled(engine, tmp_path)
    with pytest.warns(UserWarning, match="TorchProfiler cannot write to .*, the trace is lost: .*No space"):
        engine.run(range(10))
    assert engine.state.iteration == 10
    assert profiler.traces == []


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        ({}, [[3, 4, 5]]),
        ({"wait": 0, "warmup": 0, "active": 1}, [[1]]),
        ({"wait": 2, "warmup": 1, "active": 2, "repeat": 0}, [[4, 5], [9, 10]]),
        ({"wait": 0, "warmup": 1, "active": 2, "repeat": 2, "skip_first": 3}, [[5, 6], [8, 9]]),
        ({"wait": 0, "warmup": 0, "active": 4, "repeat": 0}, [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]),
    ],
)
def test_the_cycle(tmp_path, options, iterations):
    engine = trainer()
    profiler = profiled(engine, tmp_path / "traces", **options)
    engine.run(range(4), max_epochs=3)
    assert [recorded(path) for path in profiler.traces] == iterations
    assert files(tmp_path / "traces") == profiler.traces
    assert all(path.name.startswith("rank0.") and path.name.endswith(".pt.trace.json") for path in profiler.traces)


def test_traces_are_readable_by_perfetto_and_tensorboard(tmp_path):
    engine = trainer()
    profiler = profiled(engine, tmp_path, record_shapes=True)
    engine.run(range(6))
    (path,) = profiler.traces
    worker, span, *rest = path.name.split(".")
    assert (worker, span.isdigit(), rest) == ("rank0", True, ["pt", "trace", "json"])
    events = {event["name"]: event for event in read(path)}
    assert {"ts", "dur", "pid", "tid", "ph"} <= events["aten::mm"].keys()
    assert events["aten::mm"]["args"]["Input Dims"][:2] == [[2, 2], [2, 2]]
    assert any(name.startswith("ProfilerStep#") for name in events)


@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_COMPLETED])
@pytest.mark.parametrize("how", ["terminate", "interrupt", "fail", "skip_completed"])
def test_a_run_that_ends_early_leaves_what_was_recorded(tmp_path, how, event):
    engine = trainer()
    profiler = profiled(engine, tmp_path, active=100)

    def end():
        if how == "fail":
            raise KeyError("on purpose")
        engine.terminate(skip_completed=True) if how == "skip_completed" else getattr(engine, how)()

    engine.add_event_handler(event(lambda *_: engine.state.iteration == 5), end)
    if how == "fail":
        with pytest.raises(KeyError):
            engine.run(range(10))
    else:
        engine.run(range(10))
    (path,) = profiler.traces
    last = 5 if event == Events.ITERATION_COMPLETED or event == Events.GET_BATCH_COMPLETED else 4
    assert recorded(path) == list(range(3, last + 1))
    assert not torch.autograd.profiler._is_profiler_enabled


def test_the_next_cycle_starts_after_a_pause(tmp_path):
    engine = trainer()
    profiler = profiled(engine, tmp_path, wait=0, warmup=1, active=2, repeat=3)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=5), engine.interrupt)
    engine.run(range(20))
    assert [recorded(path) for path in profiler.traces] == [[2, 3], [5]]
    engine.run()
    assert [recorded(path) for path in profiler.traces] == [[2, 3], [5], [8, 9]]


def test_a_pause_before_recording_does_not_count_as_a_cycle(tmp_path):
    engine = trainer()
    profiler = profiled(engine, tmp_path, wait=0, warmup=2, active=1)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), engine.interrupt)
    engine.run(range(20))
    engine.run()
    assert [recorded(path) for path in profiler.traces] == [[5]]


def test_a_handled_error_does_not_end_profiling(tmp_path):
    engine = trainer()
    profiler = profiled(engine, tmp_path, wait=0, warmup=0, active=3, repeat=2)

    def fail():
        raise KeyError("on purpose")

    engine.add_event_handler(Events.ITERATION_STARTED(once=3), fail)
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    engine.run(range(5), max_epochs=2)
    assert [recorded(path) for path in profiler.traces] == [[1, 2], [5, 6, 7]]


def test_each_run_is_profiled_and_overwrites_nothing(tmp_path):
    engine = trainer()
    profiler = profiled(engine, tmp_path, active=2, repeat=2)
    engine.run(range(12))
    engine.run(range(12))
    assert len(files(tmp_path)) == 4
    assert [recorded(path) for path in profiler.traces] == [[3, 4], [7, 8]] * 2


def test_the_handle_detaches_it(tmp_path):
    engine = trainer()
    profiler = TorchProfiler(tmp_path / "traces")
    profiler.attach(engine).remove()
    engine.run(range(6))
    assert not (tmp_path / "traces").exists()


def test_on_trace_ready_receives_the_profiler(tmp_path):
    engine = trainer()
    tables = []
    profiled(engine, tmp_path, on_trace_ready=lambda profile: tables.append(profile.key_averages().table()))
    engine.run(range(6))
    assert len(tables) == 1
    assert "aten::mm" in tables[0]


def test_traces_can_be_compressed(tmp_path):
    engine = trainer()
    profiler = profiled(engine, tmp_path, compress=True)
    engine.run(range(6))
    (path,) = profiler.traces
    assert path.name.endswith(".pt.trace.json.gz")
    assert recorded(path) == [3, 4, 5]


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    engine = trainer()
    profiled(engine, tmp_path / "file" / "traces")
    with pytest.raises(OSError, match="file"):
        engine.run(range(6))
    assert not torch.autograd.profiler._is_profiler_enabled


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"active": 0}, ValueError, "active must be at least 1, got 0"),
        ({"wait": -1}, ValueError, "wait must be at least 0, got -1"),
        ({"repeat": 1.5}, TypeError, "repeat must be an integer, got 1.5"),
        ({"warmup": True}, TypeError, "warmup must be an integer, got True"),
        ({"on_trace_ready": 3}, TypeError, "on_trace_ready must be callable, got 3"),
        ({"shapes": True}, TypeError, "shapes"),
        ({"schedule": None}, TypeError, "schedule"),
    ],
)
def test_bad_arguments(tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        TorchProfiler(tmp_path, **options)


@on_ranks(2)
def test_each_rank_writes_a_trace(tmp_path):
    engine = trainer()
    profiled(engine, tmp_path / "all")
    profiled(engine, tmp_path / "none", ranks=[])
    engine.run(range(6))
    wait_until(lambda: len(files(tmp_path / "all")) == 2)
    assert [path.name.partition(".")[0] for path in files(tmp_path / "all")] == ["rank0", "rank1"]
    assert files(tmp_path / "none") == []


@on_ranks(2)
def test_one_rank_can_be_chosen(tmp_path):
    engine = trainer()
    profiler = profiled(engine, tmp_path, ranks=[1])
    engine.run(range(6))
    assert [path.name.partition(".")[0] for path in profiler.traces] in ([], ["rank1"])
    assert len(profiler.traces) == torch.distributed.get_rank()
