"""Stopping on all ranks after the same iteration, TerminateOnNan, and TimeLimit."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from camshaft import distributed as idist
from camshaft.distributed.agreement.stop import StopInStore
from camshaft.engine import Engine, Events, create_supervised_trainer
from camshaft.handlers import EarlyStopping, TerminateOnNan, TimeLimit, stop_together
from camshaft.handlers.stopping import StopTogether
from tests.distributed.failures.stand_in import watching
from tests.limits import HANG
from tests.ranks import await_watchers, on_ranks, run_on_ranks


def watchers():
    """Return the number of watchers' threads: one in a job of several ranks, whatever is attached."""
    return len([thread for thread in threading.enumerate() if thread.name == "camshaft-watcher"])


def together(batch):
    """Run a collective in a step."""
    idist.all_reduce(1)
    return batch


# --- on ranks ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_ranks_may_be_far_apart(monkeypatch):
    await_watchers()
    monkeypatch.setattr("camshaft.distributed.failures.board.PERIOD", 0.05)  # otherwise a rank gets a second ahead
    monkeypatch.setattr("camshaft.distributed.agreement.stop._PATIENCE", HANG)  # with one that begins late, too

    def step(engine, batch):
        if idist.get_rank() == 0 and batch < 3000 and batch % 7 == 0:  # then it catches up, however far the other is
            time.sleep(0.002)

    for number in range(2):
        engine, stopping = Engine(step), StopTogether()
        stopping.attach(engine)
        if idist.get_rank() == number:
            engine.add_event_handler(Events.ITERATION_COMPLETED(once=50), stopping.stop)
        engine.run(range(10_000_000))
        assert len(set(idist.all_gather(engine.state.iteration))) == 1


@on_ranks(2)
@pytest.mark.parametrize("best", [3, 0])  # in which epoch: rank 1 would continue, or stops too
def test_a_stop_at_the_end_of_an_epoch_by_one_rank_or_by_all(best):
    trainer, evaluator = Engine(lambda engine, batch: together(batch)), Engine(lambda engine, batch: None)
    best *= idist.get_rank()
    stopping = EarlyStopping(2, lambda engine: -abs(trainer.state.epoch - 1 - best), trainer)
    stopping.attach(evaluator)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: (evaluator.run(range(2)), idist.barrier()))
    trainer.run(range(4), max_epochs=4)
    iterations = idist.all_gather(trainer.state.iteration)
    assert iterations[0] == iterations[1]
    assert 12 <= iterations[0] <= 13  # at the end of the epoch, unless the other rank had started the next one


@on_ranks(2)
def test_nan_or_a_time_limit_on_one_rank_stops_all():
    rank = idist.get_rank()
    engine = Engine(lambda engine, batch: torch.tensor(together(math.nan if rank == 1 and batch == 3 else batch)))
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    engine.run(range(1_000_000))
    assert len(set(idist.all_gather(engine.state.iteration))) == 1
    assert engine.state.iteration >= 4

    engine = Engine(lambda engine, batch: together(batch))
    engine.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit(1e-6 if rank == 0 else 1e6))
    engine.run(range(1_000_000))
    assert len(set(idist.all_gather(engine.state.iteration))) == 1


@on_ranks(2)
def test_a_run_that_has_completed_or_failed_leaves_no_thread_and_a_later_one_can_be_stopped():
    engine, stopping = Engine(lambda engine, batch: together(1 / batch)), StopTogether()
    stopping.attach(engine)
    engine.run(range(1, 6))
    assert (engine.state.iteration, watchers()) == (5, 1)
    with pytest.raises(ZeroDivisionError):
        engine.run([1, 0, 1], max_epochs=2)
    assert (stopping._handles, watchers()) == ([], 1)
    engine.state.max_epochs = None
    engine.state.iteration = engine.state.epoch = 0
    with engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), stopping.stop):
        engine.run([1] * 5)
    assert (idist.all_gather(engine.state.iteration), watchers()) == ([2, 2], 1)


@on_ranks(2)
def test_missing_ranks_time_out_and_a_handler_on_one_rank_does_not_affect_others(monkeypatch):
    monkeypatch.setattr("camshaft.distributed.agreement.stop._PATIENCE", 0.2)
    engine = Engine(lambda engine, batch: None)
    if idist.get_rank() == 1:
        engine.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit(1e-6))
    engine.run(range(10))
    assert engine.state.iteration == (1 if idist.get_rank() == 1 else 10)
    idist.barrier()
    second = Engine(lambda engine, batch: together(batch))
    second.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    assert second.run(range(50)).iteration == 50


def test_a_stop_request_after_the_others_have_exited_stops_this_rank():
    class Gone(torch.distributed.Store):
        """A store whose process has exited."""

        def check(self, keys):
            return False

        def set(self, *args):
            raise torch.distributed.DistNetworkError("Broken pipe")

        compare_set = add = set

    store = Gone()
    with watching(store, rank=1) as watcher:
        stop = StopInStore(watcher.board, "stop", store, rank=1, size=2, step=3)
        stop.want()
        assert stop.may_begin(3)
        assert not stop.may_begin(4)
        stop.leave()


def test_the_name_is_the_line_of_the_users_code():
    handlers = [TerminateOnNan(), TimeLimit()]
    assert all("test_stopping.py" in handler._together._name for handler in handlers)


def test_a_single_process_adds_no_handlers():
    engine, stopping = Engine(lambda engine, batch: None), StopTogether()
    stopping.attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), stopping.stop)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: counts.append(len(stopping._handles)))
    counts = []
    engine.run(range(10))
    assert (engine.state.iteration, counts, watchers()) == (2, [0], 0)


# --- stop_together -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "size"), [("step", 2), ("handler", 3), ("thread", 3), ("evaluation", 2), ("all", 2), ("all", 3)]
)
def test_any_rank_stops_all(how, size):
    run_on_ranks(size, stop_on_last_rank, how)


def stop_on_last_rank(how):
    trainer = Engine(lambda engine, batch: stop_in_step(together(batch)))
    evaluator = Engine(lambda engine, batch: stop() if batch == 1 and how == "evaluation" and calls else None)
    stop = stop_together(trainer)
    calls = how == "all" or idist.get_rank() == idist.get_world_size() - 1

    def stop_in_step(batch):
        if calls and how == "step" and batch == 4:
            stop()

    if calls and how in ("handler", "all"):
        trainer.add_event_handler(Events.GET_BATCH_COMPLETED(once=5), stop)
    if calls and how == "thread":
        thread = threading.Timer(0.05, stop)
        trainer.add_event_handler(Events.ITERATION_STARTED(once=5), thread.start)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: evaluator.run(range(3)))
    ended = []
    trainer.add_event_handler(Events.TERMINATE | Events.COMPLETED, lambda: ended.append(trainer.last_event_name.name))
    trainer.run(range(1_000_000))
    last = trainer.state.iteration
    assert idist.all_gather(last) == [last] * idist.get_world_size()
    assert 5 <= last < 1_000_000
    assert ended == ["TERMINATE", "COMPLETED"]
    assert watchers() == 1
    trainer.run(range(3))  # nothing is left of the stop
    assert trainer.state.iteration == (last // 1_000_000) + 3


@pytest.mark.parametrize(
    ("event", "last"),
    [
        (Events.GET_BATCH_STARTED(once=3), 4),
        (Events.ITERATION_STARTED(once=3), 3),
        (Events.ITERATION_COMPLETED(once=4), 4),
        (Events.EPOCH_COMPLETED(once=1), 4),
    ],
)
def test_a_single_process_completes_the_iteration_and_the_epoch(event, last):
    trainer, epochs = Engine(lambda engine, batch: batch), []
    trainer.add_event_handler(event, stop_together(trainer))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: epochs.append(trainer.state.epoch))
    assert trainer.run(range(4), max_epochs=3).iteration == last
    assert epochs == [1][: last // 4]


def test_it_needs_an_engine_that_is_running_and_a_paused_run_can_be_stopped_when_it_continues():
    with pytest.raises(TypeError, match="engine must be an Engine"):
        stop_together(None)
    trainer = Engine(lambda engine, batch: batch)
    stop = stop_together(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.interrupt)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), stop)
    for before in (lambda: None, lambda: trainer.run(range(10))):
        before()
        with pytest.raises(RuntimeError, match="stop was called while the engine is not running"):
            stop()
    assert trainer.run().iteration == 4


# --- NaN and infinity ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "stops"),
    [
        (1.0, False),
        (math.nan, True),
        (math.inf, True),
        (10**400, False),
        (complex(1, math.inf), True),
        (torch.tensor(1), False),
        (torch.tensor([[1.0, -math.inf]]), True),
        ((torch.sparse_coo_tensor([[0]], [math.nan], (2,), check_invariants=True), 1.0), False),  # ignored
        ({"loss": 1.0, "parts": [1.0, (math.nan,)]}, True),
        ({"loss": 1.0, "parts": [1.0, ("nan", b"nan")]}, False),
        ({"loss": None}, False),
        (object(), False),
        (np.complex64(complex(1, math.inf)), True),
        (np.array([1.0, np.nan]), True),
        (np.float32("inf"), True),
        (np.array([1, 2]), False),
        (np.array(["nan"]), False),
    ],
)
def test_what_counts_as_nan_or_infinite(output, stops, caplog):
    engine = Engine(lambda engine, batch: output)
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    engine.run(range(3))
    assert engine.state.iteration == (1 if stops else 3)
    assert ("is NaN or infinite" in caplog.text) == stops


def test_output_transform_selects_a_part_of_the_output():
    engine = Engine(lambda engine, batch: (1.0, math.nan))
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan(lambda output: output[0]))
    assert engine.run(range(3)).iteration == 3
    with pytest.raises(TypeError, match="output_transform"):
        TerminateOnNan(3)


def test_the_lazy_loss_of_a_supervised_trainer_is_checked():
    model = nn.Linear(1, 1)
    trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), nn.MSELoss())
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    good, bad = (torch.ones(1, 1), torch.ones(1, 1)), (torch.full((1, 1), math.nan), torch.ones(1, 1))
    assert trainer.run([good, bad, good]).iteration == 2


@pytest.mark.parametrize(("length", "reads"), [(5, [2, 3]), (2, [2, 2])])  # one iteration later, and at the end
def test_results_on_a_device_are_read_later(length, reads, monkeypatch):
    found = []

    class Answer:
        def __init__(self, tensors):
            pass

        def read(self):
            found.append(engine.state.iteration)
            return engine.state.iteration < 3

    monkeypatch.setattr("camshaft.handlers.terminate_on_nan._PendingCheck", Answer)
    engine = Engine(lambda engine, batch: torch.empty(1, device="meta"))
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    assert engine.run(range(length)).iteration == min(length, 3)
    assert found[:2] == reads


# --- time ----------------------------------------------------------------------------------------------------------


def test_the_time_limit_starts_at_construction_with_a_monotonic_clock(monkeypatch, caplog):
    now = 100.0
    monkeypatch.setattr("camshaft.handlers.time_limit.monotonic", lambda: now)
    limit = TimeLimit(10)
    caplog.set_level("INFO")

    def step(engine, batch):
        nonlocal now
        now += 3

    engine = Engine(step)
    engine.add_event_handler(Events.ITERATION_COMPLETED, limit)
    assert engine.run(range(10)).iteration == 4
    assert (limit.limit_sec, limit.start_time) == (10, 100.0)
    assert "Reached the time limit: 10 sec" in caplog.text


def test_a_limit_must_be_a_number_above_0():
    assert [TimeLimit(one).limit_sec for one in (np.int64(3), math.inf)] == [3, math.inf]
    assert TimeLimit().limit_sec == 28800
    for limit, error in (
        ("1", TypeError),
        (True, TypeError),
        (0, ValueError),
        (-1.5, ValueError),
        (math.nan, ValueError),
    ):
        with pytest.raises(error, match="limit_sec"):
            TimeLimit(limit)
