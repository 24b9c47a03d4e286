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


# --- on ranks ----------------------------------------------------------------------------------------------


@on_ranks(3)
def test_all_ranks_stop_after_the_same_iteration():
    engine = Engine(lambda engine, batch: together(batch))
    stopping = StopTogether()
    stopping.attach(engine)

    def stop_on_one():
        if idist.get_rank() == 1:
            stopping.stop(engine)

    engine.add_event_handler(Events.ITERATION_COMPLETED(once=5), stop_on_one)
    engine.run(range(100_000), max_epochs=1)
    assert idist.all_gather(engine.state.iteration) == [engine.state.iteration] * 3
    assert 5 <= engine.state.iteration < 100_000
    assert watchers() == 1


@on_ranks(2)
def test_ranks_may_be_far_apart(monkeypatch):
    await_watchers()
    monkeypatch.setattr("camshaft.distributed.failures.board.PERIOD", 0.05)  # otherwise a rank gets a second ahead
    monkeypatch.setattr("camshaft.distributed.agreement.stop._PATIENCE", HANG)  # with one that begins late, too

    def step(engine, batch):
        if idist.get_rank() == 0 and batch < 3000 and batch % 7 == 0:  # then it catches up, however far the other is
            time.sleep(0.002)

    for number in range(3):
        engine = Engine(step)
        stopping = StopTogether()
        stopping.attach(engine)

        def stop(engine, stopping=stopping, number=number):
            if idist.get_rank() == number % 2:
                stopping.stop(engine)

        engine.add_event_handler(Events.ITERATION_COMPLETED(once=50), stop)
        engine.run(range(10_000_000))
        assert len(set(idist.all_gather(engine.state.iteration))) == 1


@on_ranks(2)
def test_a_stop_at_the_end_of_an_epoch():
    trainer = Engine(lambda engine, batch: together(batch))
    evaluator = Engine(lambda engine, batch: None)
    scores = [[3.0, 2.0, 1.0, 0.0], [3.0, 4.0, 5.0, 6.0]][idist.get_rank()]  # rank 1 would continue
    stopping = EarlyStopping(2, lambda engine: scores[trainer.state.epoch - 1], trainer)
    stopping.attach(evaluator)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: (evaluator.run(range(2)), idist.barrier()))
    trainer.run(range(4), max_epochs=4)
    iterations = idist.all_gather(trainer.state.iteration)
    assert iterations[0] == iterations[1]
    assert 12 <= iterations[0] <= 13  # at the end of the epoch, unless the other rank had started the next one
    assert watchers() == 1


@on_ranks(2)
def test_all_ranks_request_a_stop_at_once():
    trainer = Engine(lambda engine, batch: together(batch))
    stopping = EarlyStopping(1, lambda engine: 1.0, trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, stopping)
    completed = []
    trainer.add_event_handler(Events.COMPLETED, lambda: completed.append(1))
    trainer.run(range(4), max_epochs=4)
    assert (trainer.state.iteration, trainer.state.epoch, completed) == (8, 2, [1])


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
def test_a_completed_run_leaves_no_thread_and_a_second_run_can_be_stopped():
    engine = Engine(lambda engine, batch: together(batch))
    stopping = StopTogether()
    stopping.attach(engine)
    engine.run(range(5))
    assert (engine.state.iteration, watchers()) == (5, 1)
    engine.state.max_epochs = None
    engine.state.iteration = engine.state.epoch = 0
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: stopping.stop(engine))
    engine.run(range(5))
    assert (idist.all_gather(engine.state.iteration), watchers()) == ([2, 2], 1)


@on_ranks(2)
def test_a_run_that_fails_on_one_rank_leaves_no_thread():
    engine = Engine(lambda engine, batch: 1 / (2 - batch))
    stopping = StopTogether()
    stopping.attach(engine)
    with pytest.raises(ZeroDivisionError):
        engine.run(range(5))
    assert watchers() == 1


@on_ranks(2)
def test_missing_ranks_time_out(monkeypatch):
    monkeypatch.setattr("camshaft.distributed.agreement.stop._PATIENCE", 0.2)
    engine = Engine(lambda engine, batch: None)
    if idist.get_rank() == 0:
        engine.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit(1e-6))
    engine.run(range(10))
    assert engine.state.iteration == (1 if idist.get_rank() == 0 else 10)


@on_ranks(2)
def test_a_handler_on_one_rank_does_not_affect_others(monkeypatch):
    monkeypatch.setattr("camshaft.distributed.agreement.stop._PATIENCE", 0.2)
    first = Engine(lambda engine, batch: None)
    if idist.get_rank() == 1:
        first.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit(1e-6))
    first.run(range(10))
    idist.barrier()
    second = Engine(lambda engine, batch: together(batch))
    second.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    assert second.run(range(50)).iteration == 50


def test_the_name_is_the_line_of_the_users_code():
    handlers = [TerminateOnNan(), TimeLimit()]
    assert all("test_stopping.py" in handler._together._name for handler in handlers)


def test_a_single_process_adds_no_handlers(monkeypatch):
    engine = Engine(lambda engine, batch: None)
    stopping = StopTogether()
    stopping.attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: stopping.stop(engine))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: counts.append(len(stopping._handles)))
    counts = []
    engine.run(range(10))
    assert (engine.state.iteration, counts, watchers()) == (2, [0], 0)


# --- stop_together --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("how", ["step", "handler", "thread", "evaluation", "all"])
def test_any_rank_stops_all(size, how):
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
    trainer = Engine(lambda engine, batch: batch)
    epochs = []
    trainer.add_event_handler(event, stop_together(trainer))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: epochs.append(trainer.state.epoch))
    assert trainer.run(range(4), max_epochs=3).iteration == last
    assert epochs == [1][: last // 4]


def test_a_paused_run_can_be_stopped_when_it_continues():
    trainer = Engine(lambda engine, batch: batch)
    stop = stop_together(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.interrupt)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), stop)
    trainer.run(range(10))
    with pytest.raises(RuntimeError, match="stop was called while the engine is not running"):
        stop()
    assert trainer.run().iteration == 4


def test_stop_together_needs_an_engine_and_a_run():
    with pytest.raises(TypeError, match="engine must be an Engine, got None"):
        stop_together(None)
    stop = stop_together(Engine(lambda engine, batch: None))
    with pytest.raises(RuntimeError, match="stop was called while the engine is not running"):
        stop()


# --- NaN and infinity ---------------------------------------------------------------------------------


class Strange:
    pass


@pytest.mark.parametrize(
    ("output", "stops"),
    [
        (1.0, False),
        (math.nan, True),
        (math.inf, True),
        (10**400, False),
        (complex(1, math.inf), True),
        (np.complex64(complex(1, math.inf)), True),
        (torch.tensor(1), False),
        (torch.tensor([1.0, math.nan]), True),
        (torch.tensor([[1.0, -math.inf]]), True),
        ({"loss": 1.0, "parts": [1.0, (math.nan,)]}, True),
        ({"loss": 1.0, "parts": [1.0, ("nan", b"nan")]}, False),
        ({"loss": None}, False),
        (Strange(), False),
        (np.array([1.0, np.nan]), True),
        (np.float32("inf"), True),
        (np.array([1, 2]), False),
        (np.array(["nan"]), False),
        ([np.array([1.0]), True], False),
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
    with pytest.raises(TypeError, match="output_transform must be callable, got 3"):
        TerminateOnNan(3)


def test_the_lazy_loss_of_a_supervised_trainer_is_checked():
    model = nn.Linear(1, 1)
    trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), nn.MSELoss())
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    good, bad = (torch.ones(1, 1), torch.ones(1, 1)), (torch.full((1, 1), math.nan), torch.ones(1, 1))
    assert trainer.run([good, bad, good]).iteration == 2


def test_results_on_a_device_are_read_one_iteration_later_and_at_the_end(monkeypatch):
    reads = []

    class Answer:
        def __init__(self, tensors):
            self.tensors = tensors

        def read(self):
            reads.append(engine.state.iteration)
            return engine.state.iteration < 3

    monkeypatch.setattr("camshaft.handlers.terminate_on_nan._PendingCheck", Answer)
    engine = Engine(lambda engine, batch: torch.empty(1, device="meta"))
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    engine.run(range(5))
    assert (engine.state.iteration, reads[:2]) == (3, [2, 3])

    engine = Engine(lambda engine, batch: torch.empty(1, device="meta"))
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    reads.clear()
    engine.run(range(1))
    assert reads == [1]


# --- time --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("limit", "error"),
    [
        ("1", TypeError),
        (None, TypeError),
        (True, TypeError),
        (0, ValueError),
        (-1.5, ValueError),
        (math.nan, ValueError),
    ],
)
def test_a_limit_must_be_a_number_above_0(limit, error):
    with pytest.raises(error, match="limit_sec"):
        TimeLimit(limit)


def test_a_limit_may_be_any_number():
    assert TimeLimit(np.int64(3)).limit_sec == 3
    assert TimeLimit().limit_sec == 28800
    assert TimeLimit(math.inf).limit_sec == math.inf


def test_sparse_tensors_are_ignored():
    sparse = torch.sparse_coo_tensor([[0]], [math.nan], (2,), check_invariants=True)
    engine = Engine(lambda engine, batch: (sparse, 1.0))
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    assert engine.run(range(3)).iteration == 3


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
