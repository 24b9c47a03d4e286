"""TorchProfiler: which iterations are recorded, and traces of runs that end early."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity

from camshaft.engine import Engine, Events
from camshaft.handlers import TorchProfiler
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


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        ({}, [[3, 4, 5]]),
        ({"wait": 0, "warmup": 0, "active": 1, "compress": True}, [[1]]),
        ({"wait": 2, "warmup": 1, "active": 2, "repeat": 0}, [[4, 5], [9, 10]]),
        ({"wait": 0, "warmup": 1, "active": 2, "repeat": 2, "skip_first": 3}, [[5, 6], [8, 9]]),
        ({"wait": 0, "warmup": 0, "active": 4, "repeat": 0}, [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]),
    ],
)
def test_the_cycle_of_each_run_which_overwrites_nothing(tmp_path, options, iterations):
    engine = trainer()
    profiler = profiled(engine, tmp_path / "traces", **options)
    for runs in (1, 2):
        engine.run(range(4), max_epochs=3)
        assert [recorded(path) for path in profiler.traces] == iterations * runs
        assert files(tmp_path / "traces") == profiler.traces
    suffix = ".pt.trace.json.gz" if "compress" in options else ".pt.trace.json"
    assert all(path.name.startswith("rank0.") and path.name.endswith(suffix) for path in profiler.traces)


def test_traces_are_readable_by_perfetto_and_tensorboard_and_the_profiler_by_the_user(tmp_path):
    engine, tables = trainer(), []
    profiler = profiled(
        engine, tmp_path, record_shapes=True, on_trace_ready=lambda one: tables.append(one.key_averages().table())
    )
    engine.run(range(6))
    (path,) = profiler.traces
    worker, span, *rest = path.name.split(".")
    assert (worker, span.isdigit(), rest) == ("rank0", True, ["pt", "trace", "json"])
    events = {event["name"]: event for event in read(path)}
    assert {"ts", "dur", "pid", "tid", "ph"} <= events["aten::mm"].keys()
    assert events["aten::mm"]["args"]["Input Dims"][:2] == [[2, 2], [2, 2]]
    assert any(name.startswith("ProfilerStep#") for name in events)
    assert ["aten::mm" in table for table in tables] == [True]


@pytest.mark.parametrize(
    ("how", "event", "last"),
    [
        ("terminate", Events.ITERATION_STARTED, 4),
        ("terminate", Events.GET_BATCH_COMPLETED, 5),
        ("interrupt", Events.ITERATION_STARTED, 4),
        ("interrupt", Events.ITERATION_COMPLETED, 5),
        ("fail", Events.ITERATION_STARTED, 4),
        ("skip_completed", Events.ITERATION_COMPLETED, 5),
    ],
)
def test_a_run_that_ends_early_leaves_what_was_recorded(tmp_path, how, event, last):
    engine = trainer()
    profiler = profiled(engine, tmp_path, active=100)

    def end():
        if how == "fail":
            raise KeyError("on purpose")
        engine.terminate(skip_completed=True) if how == "skip_completed" else getattr(engine, how)()

    engine.add_event_handler(event(lambda *_: engine.state.iteration == 5), end)
    with pytest.raises(KeyError) if how == "fail" else nullcontext():
        engine.run(range(10))
    (path,) = profiler.traces
    assert recorded(path) == list(range(3, last + 1))
    assert not torch.autograd.profiler._is_profiler_enabled


@pytest.mark.parametrize(
    ("options", "pause", "traces"),
    [
        ({"warmup": 1, "active": 2, "repeat": 3}, 5, [[2, 3], [5], [8, 9]]),
        ({"warmup": 2, "active": 1}, 1, [[5]]),  # before recording, it does not count as a cycle
    ],
)
def test_the_next_cycle_starts_after_a_pause(tmp_path, options, pause, traces):
    engine = trainer()
    profiler = profiled(engine, tmp_path, wait=0, **options)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=pause), engine.interrupt)
    engine.run(range(20))
    assert [recorded(path) for path in profiler.traces] == traces[:-1]
    engine.run()
    assert [recorded(path) for path in profiler.traces] == traces


def test_a_handled_error_does_not_end_profiling(tmp_path):
    engine = trainer()
    profiler = profiled(engine, tmp_path, wait=0, warmup=0, active=3, repeat=2)
    engine.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: {}["on purpose"])
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    engine.run(range(5), max_epochs=2)
    assert [recorded(path) for path in profiler.traces] == [[1, 2], [5, 6, 7]]


def test_the_handle_detaches_it(tmp_path):
    engine = trainer()
    TorchProfiler(tmp_path / "traces").attach(engine).remove()
    engine.run(range(6))
    assert not (tmp_path / "traces").exists()


def test_a_trace_that_cannot_be_written_warns_and_a_directory_that_cannot_be_created_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    engine = trainer()
    profiled(engine, tmp_path / "file" / "traces")
    with pytest.raises(OSError, match="file"):
        engine.run(range(6))
    assert not torch.autograd.profiler._is_profiler_enabled

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", mock.Mock(side_effect=OSError("No space left")))
    engine = trainer()
    profiler = profiled(engine, tmp_path)
    with pytest.warns(UserWarning, match="TorchProfiler cannot write to .*, the trace is lost: No space"):
        engine.run(range(10))
    assert (engine.state.iteration, profiler.traces) == (10, [])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"active": 0}, ValueError),
        ({"wait": -1}, ValueError),
        ({"repeat": 1.5}, TypeError),
        ({"on_trace_ready": 3}, TypeError),
        ({"shapes": True}, TypeError),
        ({"schedule": None}, TypeError),
    ],
)
def test_bad_arguments(tmp_path, options, error):
    with pytest.raises(error, match=next(iter(options))):
        TorchProfiler(tmp_path, **options)


@on_ranks(2)
def test_each_chosen_rank_writes_a_trace(tmp_path):
    for name, ranks in (("all", None), ("one", [1]), ("none", [])):
        engine = trainer()
        profiled(engine, tmp_path / name, ranks=ranks)
        engine.run(range(6))
    torch.distributed.barrier()
    found = {name: [path.name[:5] for path in files(tmp_path / name)] for name in ("all", "one", "none")}
    assert found == {"all": ["rank0", "rank1"], "one": ["rank1"], "none": []}
