"""A run that one rank wants to end ends on all, after the same iteration; and what makes a rank want it."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from camshaft import distributed as idist
from camshaft.distributed.coordination.stop import StopInStore
from camshaft.distributed.coordination.watcher import Watcher
from camshaft.engine import Engine, Events, create_supervised_trainer
from camshaft.handlers import EarlyStopping, TerminateOnNan, TimeLimit
from camshaft.handlers.stopping import StopTogether
from tests.ranks import on_ranks


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "camshaft-watcher"]


def together(batch):
    """Do what needs all ranks in a step."""
    idist.all_reduce(1)
    return batch


# --- on ranks ----------------------------------------------------------------------------------------------


@on_ranks(3)
def test_one_rank_wants_to_stop_and_all_stop_at_the_same_iteration():
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
    assert threads() == []


@on_ranks(2)
def test_it_works_however_far_apart_the_ranks_are(monkeypatch):
    monkeypatch.setattr("camshaft.distributed.coordination.watcher.PERIOD", 0.05)  # else a rank gets a second ahead

    def step(engine, batch):
        if idist.get_rank() == 0 and batch % 7 == 0:
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
def test_at_the_end_of_an_epoch_all_stop_there():
    trainer = Engine(lambda engine, batch: together(batch))
    evaluator = Engine(lambda engine, batch: None)
    scores = [[3.0, 2.0, 1.0, 0.0], [3.0, 4.0, 5.0, 6.0]][idist.get_rank()]  # one of them would go on
    stopping = EarlyStopping(2, lambda engine: scores[trainer.state.epoch - 1], trainer)
    stopping.attach(evaluator)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: (evaluator.run(range(2)), idist.barrier()))
    trainer.run(range(4), max_epochs=4)
    iterations = idist.all_gather(trainer.state.iteration)
    assert iterations[0] == iterations[1]
    assert 12 <= iterations[0] <= 13  # at the end of the epoch, unless the other had begun the next
    assert threads() == []


@on_ranks(2)
def test_all_want_it_at_once():
    trainer = Engine(lambda engine, batch: together(batch))
    stopping = EarlyStopping(1, lambda engine: 1.0, trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, stopping)
    completed = []
    trainer.add_event_handler(Events.COMPLETED, lambda: completed.append(1))
    trainer.run(range(4), max_epochs=4)
    assert (trainer.state.iteration, trainer.state.epoch, completed) == (8, 2, [1])


@on_ranks(2)
def test_nan_on_one_rank_stops_all_and_so_does_time_on_one():
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
def test_a_run_that_nobody_ends_leaves_nothing_and_a_second_run_works_again():
    engine = Engine(lambda engine, batch: together(batch))
    stopping = StopTogether()
    stopping.attach(engine)
    engine.run(range(5))
    assert (engine.state.iteration, threads()) == (5, [])
    engine.state.max_epochs = None
    engine.state.iteration = engine.state.epoch = 0
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: stopping.stop(engine))
    engine.run(range(5))
    assert (idist.all_gather(engine.state.iteration), threads()) == ([2, 2], [])


@on_ranks(2)
def test_a_run_that_fails_on_one_rank_leaves_no_thread():
    engine = Engine(lambda engine, batch: 1 / (2 - batch))
    stopping = StopTogether()
    stopping.attach(engine)
    with pytest.raises(ZeroDivisionError):
        engine.run(range(5))
    assert threads() == []


@on_ranks(2)
def test_a_rank_that_was_never_told_of_it_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr("camshaft.distributed.coordination.stop._PATIENCE", 0.2)
    engine = Engine(lambda engine, batch: None)
    if idist.get_rank() == 0:
        engine.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit(1e-6))
    engine.run(range(10))
    assert engine.state.iteration == (1 if idist.get_rank() == 0 else 10)


@on_ranks(2)
def test_a_handler_on_one_rank_alone_touches_no_other(monkeypatch):
    monkeypatch.setattr("camshaft.distributed.coordination.stop._PATIENCE", 0.2)
    first = Engine(lambda engine, batch: None)
    if idist.get_rank() == 1:
        first.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit(1e-6))
    first.run(range(10))
    idist.barrier()
    second = Engine(lambda engine, batch: together(batch))
    second.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    assert second.run(range(50)).iteration == 50


def test_the_name_is_the_line_of_the_user():
    handlers = [TerminateOnNan(), TimeLimit()]
    assert all("test_stopping.py" in handler._together._name for handler in handlers)


def test_one_process_just_terminates_with_nothing_added(monkeypatch):
    engine = Engine(lambda engine, batch: None)
    stopping = StopTogether()
    stopping.attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: stopping.stop(engine))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: counts.append(len(stopping._handles)))
    counts = []
    engine.run(range(10))
    assert (engine.state.iteration, counts, threads()) == (2, [0], [])


# --- numbers that are none ---------------------------------------------------------------------------------


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
        (None, False),
        (Strange(), False),
        (np.array([1.0, np.nan]), True),
        (np.float32("inf"), True),
        (np.array([1, 2]), False),
        (np.array(["nan"]), False),
        ([np.array([1.0]), True], False),
    ],
)
def test_what_counts_as_a_number_that_is_none(output, stops, caplog):
    engine = Engine(lambda engine, batch: output)
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    engine.run(range(3))
    assert engine.state.iteration == (1 if stops else 3)
    assert ("is NaN or infinite" in caplog.text) == stops


def test_a_part_of_the_output_can_be_chosen():
    engine = Engine(lambda engine, batch: (1.0, math.nan))
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan(lambda output: output[0]))
    assert engine.run(range(3)).iteration == 3
    with pytest.raises(TypeError, match="output_transform must be callable, got 3"):
        TerminateOnNan(3)


def test_the_loss_of_a_supervised_trainer_is_looked_at_and_stays_lazy():
    model = nn.Linear(1, 1)
    trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), nn.MSELoss())
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    good, bad = (torch.ones(1, 1), torch.ones(1, 1)), (torch.full((1, 1), math.nan), torch.ones(1, 1))
    assert trainer.run([good, bad, good]).iteration == 2


def test_on_a_device_the_answer_is_read_an_iteration_later_and_at_the_end(monkeypatch):
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


def test_the_clock_runs_from_when_it_is_made_and_is_monotonic(monkeypatch, caplog):
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


def test_tensors_without_plain_elements_are_not_looked_at():
    sparse = torch.sparse_coo_tensor([[0]], [math.nan], (2,), check_invariants=True)
    engine = Engine(lambda engine, batch: (sparse, 1.0))
    engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    assert engine.run(range(3)).iteration == 3


def test_a_stop_that_is_wanted_when_the_others_have_gone_ends_this_rank():
    class Gone:
        """A store whose process has ended."""

        def check(self, keys):
            return False

        def set(self, *args):
            raise torch.distributed.DistNetworkError("Broken pipe")

        compare_set = set

    store = Gone()
    stop = StopInStore(Watcher(store), "stop", store, rank=1, size=2, step=3)
    stop.want()
    assert stop.may_begin(3)
    assert not stop.may_begin(4)
    stop.leave()
