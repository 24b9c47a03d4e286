"""A DeterministicEngine in a run: what it has in common with Engine, what it warns of, what it leaves behind."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from torch.utils.data import DataLoader

from camshaft.engine import DeterministicEngine, Engine, Events
from camshaft.utils import manual_seed
from tests.engine.loaders import SEED, SizedNoisy, Stream, batches_of, loader_of
from tests.engine.traces import SHORT, Sizeless, Trace, at, at_position, echo, unsized

DATA = (1, 2, 3)


def compare(make_data, prepare=lambda engine: None, runs=1, **arguments):
    """Check that events, counters and batches are those of Engine."""
    traces = []
    for kind in (Engine, DeterministicEngine):
        engine = kind(echo)
        trace = Trace(engine, counters=True)
        prepare(engine)
        for _ in range(runs):
            engine.run(make_data(), **arguments)
        traces.append((trace.words, trace.batches, engine.should_terminate))
    assert traces[0] == traces[1]
    assert traces[0][0]


@pytest.mark.parametrize("make_data", [lambda: list(DATA), lambda: Sizeless(*DATA), lambda: DataLoader(DATA)])
@pytest.mark.parametrize(
    "arguments", [{"max_epochs": 2}, {"max_epochs": 2, "epoch_length": 2}, {"max_iters": 5}, {"max_iters": 6}], ids=str
)
def test_events_come_in_the_same_order(make_data, arguments):
    compare(make_data, **arguments)


def test_a_generator_gives_one_pass():
    with pytest.warns(UserWarning, match="the data ran out in epoch 2 after 3 iterations"):
        compare(lambda: unsized(DATA), max_epochs=2)


@pytest.mark.parametrize("event", [event for event in SHORT if event not in (Events.TERMINATE, Events.INTERRUPT)])
@pytest.mark.parametrize("firing", [1, 2])
@pytest.mark.parametrize("skipping", [False, True])
def test_it_ends_where_it_is_told_to(event, firing, skipping):
    compare(lambda: list(DATA), lambda engine: at(engine, event, lambda e: e.terminate(skipping), firing), max_epochs=2)


@pytest.mark.parametrize("event", list(SHORT)[1:8])
@pytest.mark.parametrize("firing", [1, 2])
@pytest.mark.parametrize("skipping", [False, True])
def test_an_epoch_ends_where_it_is_told_to(event, firing, skipping):
    def prepare(engine):
        at(engine, event, lambda engine: engine.terminate_epoch(skipping), firing)

    compare(lambda: list(DATA), prepare, max_epochs=3)


@pytest.mark.parametrize("position", range(0, 24, 3))
def test_it_pauses_where_it_is_told_to(position):
    compare(lambda: list(DATA), lambda e: at_position(e, position, lambda e: e.interrupt()), runs=2, max_epochs=2)


@pytest.mark.parametrize("pause_at", range(1, 8))
def test_a_pause_changes_no_batch(pause_at):
    engine = DeterministicEngine(lambda engine, batch: seen.append(batch))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=pause_at), lambda engine: engine.interrupt())
    seen = []
    manual_seed(SEED)
    engine.run(loader_of(8), max_epochs=2)
    assert len(seen) == pause_at
    engine.run(loader_of(8), max_epochs=2)
    assert seen == batches_of(loader_of(8))


def test_an_error_leaves_the_engine_usable():
    def fail_once(engine, batch):
        seen.append(batch)
        if engine.state.iteration == 2 and not failed:
            failed.append(batch)
            raise KeyError("no")

    seen, failed = [], []
    engine = DeterministicEngine(fail_once)
    manual_seed(SEED)
    with pytest.raises(KeyError):
        engine.run(loader_of(8), max_epochs=2)
    manual_seed(SEED)
    engine.run(loader_of(8), max_epochs=2)
    whole = batches_of(loader_of(8))
    assert seen == [*whole[:2], *whole[1:]]  # the second batch, with which the step failed, comes again


def test_data_over_a_stream_of_unknown_length_run():
    assert [len(batch) for batch in batches_of(DataLoader(Stream(3), batch_size=2, collate_fn=list), 2)] == [2, 1] * 2


# --- drift, freedom, settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "warnings"), [(None, 0), (2, 0), (1, 1), (3, 1)])
def test_epochs_that_drift_from_those_of_the_sampler_are_told_of(recwarn, length, warnings):
    DeterministicEngine(echo).run(loader_of(8, sampler="distributed"), max_epochs=2, epoch_length=length)
    messages = [str(one.message) for one in recwarn.list]
    assert len(messages) == warnings
    assert all(f"of 2 batches, but epoch_length is {length}" in message for message in messages)


@pytest.mark.parametrize("sampler", ["random", "weighted", "backwards"])
def test_samplers_without_epochs_do_not_drift(recwarn, sampler):
    DeterministicEngine(echo).run(loader_of(8, sampler=sampler), epoch_length=3)
    assert [str(one.message) for one in recwarn.list] == []


@pytest.mark.parametrize("make_data", [lambda: DATA, lambda: loader_of(4), lambda: SizedNoisy(3)])
def test_it_is_freed_by_reference_counting(make_data):
    engine = DeterministicEngine(echo)
    engine.logger = logging.Logger("silent", logging.CRITICAL)  # noqa: LOG001 - pytest keeps the records of others
    engine.run(make_data(), max_epochs=2)
    gc.collect()
    gc.disable()
    try:
        watched = weakref.ref(engine)
        del engine
        assert watched() is None
    finally:
        gc.enable()


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )


@pytest.fixture(params=[(False, False, True), (True, False, False), (True, True, True)], ids=str)
def settings_of_the_user(request):
    enabled, warn_only, benchmark = request.param
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.backends.cudnn.benchmark = benchmark
    yield request.param
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("ending", ["end", "pause", "error"])
@pytest.mark.parametrize("with_cuda", [None, True, False], ids=["this machine", "CUDA", "no CUDA"])
def test_torch_is_deterministic_on_cuda_during_the_run_alone(monkeypatch, settings_of_the_user, with_cuda, ending):
    if with_cuda is not None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: with_cuda)
    during = []
    engine = DeterministicEngine(lambda engine, batch: 1 / 0 if ending == "error" else None)
    engine.add_event_handler(Events.STARTED | Events.ITERATION_STARTED, lambda engine: during.append(settings()))
    if ending == "pause":
        at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt())
    if ending == "error":
        engine.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: None)
    engine.run([1])
    assert during == [(True, True, False) if torch.cuda.is_available() else settings_of_the_user] * 2
    assert settings() == settings_of_the_user


def test_an_error_that_leaves_the_run_leaves_the_settings_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = settings()
    with pytest.raises(ZeroDivisionError):
        DeterministicEngine(lambda engine, batch: 1 / 0).run([1])
    assert settings() == before
