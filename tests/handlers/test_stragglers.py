"""Stragglers: own time per phase, the comparison of ranks, and what is logged."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import camshaft.distributed as idist
from camshaft import activity
from camshaft.activity import OwnClock
from camshaft.distributed.failures import record, watcher
from camshaft.engine import Engine, Events
from camshaft.handlers import Stragglers, stragglers
from camshaft.handlers.stragglers import slow
from tests.handlers.clocks import Clock, clock_in
from tests.ranks import on_ranks

EVEN = {"iteration": 0.1, "loading": 0.02, "step": 0.05}


class Messages(logging.Handler):
    """The lines that a handler logs."""

    def __init__(self, handler):
        super().__init__()
        self.lines = []
        handler.logger.addHandler(self)

    def emit(self, record):
        assert record.levelno == logging.WARNING
        self.lines += record.getMessage().splitlines()

    def about(self):
        """Return how each line begins, up to its figures."""
        return [line.split(":")[0] for line in self.lines]


def burn(seconds):
    """Use the processor for this long, however busy the machine is."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@contextmanager
def fast():
    """Let watchers look often."""
    with mock.patch.multiple(watcher, PERIOD=0.05, SHARING=0.05), mock.patch.object(stragglers, "_LASTING", 1.0):
        idist.get_rank()  # adopts the group, and starts the watcher
        yield


def on_a_busy_machine():
    """Let seconds of the processor matter in iterations that take much longer, as other processes use it, too."""
    return mock.patch.object(stragglers, "_LEAST", 0.002)


def train(step, data=lambda: range(20), epochs=1_000_000, prepare=lambda trainer: None, iterations=20):
    """Train until rank 0 has logged something, or for some epochs; return what each rank has logged first."""
    model = DistributedDataParallel(nn.Linear(4, 4))

    def update(engine, batch):
        step()
        model(torch.ones(2, 4)).sum().backward()

    trainer = Engine(update)
    handler = Stragglers(window=iterations)
    handler.attach(trainer)
    messages = Messages(handler)
    prepare(trainer)

    @trainer.on(Events.EPOCH_COMPLETED)
    def stop():
        if idist.all_reduce(len(messages.lines), "MAX"):
            trainer.terminate()

    with fast():
        trainer.run(data(), max_epochs=epochs, epoch_length=20)
        idist.barrier()
    return messages.about()


def forever(seconds):
    while True:
        if seconds:  # to sleep for 0 s would let other processes run
            time.sleep(seconds)
        yield 1


def own(node, is_urgent=False):
    """Read the records of a node that has one rank only."""
    one = record.read(node._record.path)
    return {one.rank: one}


@on_ranks(2)
@pytest.mark.parametrize("read", [record.Node.read, own], ids=["one node", "two nodes, through the store"])
def test_a_slow_step_is_named_although_all_ranks_wait_for_it_in_backward(read):
    with mock.patch.object(record.Node, "read", read), on_a_busy_machine():
        found = train(lambda: burn(0.006 if idist.get_rank() == 1 else 0.002))
    assert found == (["rank 1 is slow in the step"] if idist.get_rank() == 0 else [])


@on_ranks(3)
def test_a_slow_loader_is_named():
    found = train(lambda: burn(0.001), lambda: forever(0.02 if idist.get_rank() == 2 else 0))
    assert found == (["rank 2 is slow in data loading"] if idist.get_rank() == 0 else [])


@on_ranks(2)
def test_waiting_in_a_collective_of_the_loader_is_not_own_time():
    def agreeing():
        while True:
            idist.barrier()
            yield 1

    def prepare(trainer):
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: time.sleep(0.01 * idist.get_rank()))

    assert train(lambda: None, agreeing, epochs=15, prepare=prepare) == []


@on_ranks(2)
def test_nothing_is_left_after_a_run():
    trainer, handler = Engine(lambda engine, batch: idist.all_reduce(1)), Stragglers(window=10)
    handler.attach(trainer)
    with fast():
        assert activity.own_clock is None
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: clocks.append(activity.own_clock))
        clocks = []
        for _ in range(2):
            trainer.run(range(30))
            assert activity.own_clock is None
            assert not idist.job.current().job.find(watcher.Watcher)._sharing.exchanges
        assert isinstance(clocks[0], OwnClock)
        idist.barrier()


# --- a single process -------------------------------------------------------------------------------------


def test_a_single_process_measures_nothing():
    def fail():
        raise AssertionError

    trainer = Engine(lambda engine, batch: None)
    Stragglers(window=10).attach(trainer)
    with mock.patch.multiple(stragglers, perf_counter=fail), mock.patch.multiple(activity, thread_time=fail):
        trainer.run(range(100))


def test_arguments_are_checked_and_it_is_attached_once():
    for options, error in (
        ({"factor": 1}, ValueError),
        ({"factor": float("nan")}, ValueError),
        ({"window": 9}, ValueError),
        ({"window": 10.5}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(options))):
            Stragglers(**options)
    handler, trainer = Stragglers(), Engine(lambda engine, batch: None)
    with pytest.raises(TypeError, match="engine must be an Engine"):
        handler.attach(None)
    handler.attach(trainer)
    with pytest.raises(RuntimeError, match="already attached"):
        handler.attach(trainer)


# --- measuring --------------------------------------------------------------------------------------------


@pytest.fixture
def clocks():
    """Yield a clock of seconds, and one of seconds of the processor."""
    used = Clock()
    with clock_in(OwnClock, Stragglers) as clock, mock.patch.object(activity, "thread_time", used):
        yield clock, used


def test_the_time_in_collectives_is_not_own_time(clocks):
    clock, used = clocks
    own = OwnClock()

    def passing():
        seconds, cpu = own.seconds(), own.cpu_seconds()
        clock.take(8.0)
        used.take(2.0)
        return own.seconds() - seconds, own.cpu_seconds() - cpu

    assert passing() == (8.0, 2.0)
    before = own.seconds(), own.cpu_seconds()
    own.pause()
    own.pause()  # a collective inside of another
    passing()
    own.resume()
    passing()
    own.resume()
    assert (own.seconds(), own.cpu_seconds()) == before
    own.resume()  # of a collective that began before
    assert passing() == (8.0, 2.0)
    thread = threading.Thread(target=own.pause)
    thread.start()
    thread.join()
    assert passing() == (8.0, 2.0)


def test_each_phase_is_a_median_of_parts_per_iteration(clocks):
    clock, used = clocks

    def data():
        for number in range(30):
            clock.take(50.0 if number == 3 else 2.0)
            yield number

    def step(engine, batch):
        clock.take(4.0)
        used.take(3.0)

    engine, own = Engine(step), OwnClock()
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: used.take(100.0))
    with stragglers._Times(engine, own, part=2, measures_step=True) as times:
        seen = []
        engine.add_event_handler(Events.ITERATION_COMPLETED(every=5), lambda: seen.append(times.published))
        engine.run(data(), max_epochs=1, epoch_length=30)
    assert seen[0] is None
    assert seen[1] is seen[2]
    assert {**seen[1], "iteration": None} == {"iteration": None, "loading": 2.0, "step": 3.0, "half": 1}
    assert {**seen[3], "iteration": None} == {"iteration": None, "loading": 2.0, "step": 3.0, "half": 2}
    assert seen[3]["iteration"] == 6.0


def test_nothing_is_measured_of_the_step_where_threads_wait_actively(clocks):
    engine = Engine(lambda engine, batch: None)
    with stragglers._Times(engine, OwnClock(), part=1, measures_step=False) as times:
        engine.run(range(10))
    assert set(times.published) == {"iteration", "loading", "half"}


# --- comparing --------------------------------------------------------------------------------------------


def test_slow_is_what_exceeds_the_median_by_a_factor_and_matters():
    def found(**other):
        return {key: value[0] for key, value in slow({0: EVEN, 1: EVEN, 2: {**EVEN, **other}}, 1.3).items()}

    assert found() == {}
    assert found(step=0.064) == {}
    assert found(step=0.07) == {("step", 2): pytest.approx(1.4)}
    assert found(step=0.07, loading=0.06) == {("loading", 2): pytest.approx(3.0), ("step", 2): pytest.approx(1.4)}
    assert found(step=0.001) == {}  # a fast rank
    assert found(iteration=10.0, step=0.07) == {}  # of no importance
    assert slow({0: EVEN, 1: {**EVEN, "loading": 0.04}}, 1.3).keys() == {("loading", 1)}
    assert slow({0: {**EVEN, "loading": 0.04}, 1: EVEN}, 1.3).keys() == {("loading", 0)}
    assert slow({0: EVEN}, 1.3) == slow({}, 1.3) == {}


class Ranks:
    """Own times of ranks, as the watcher passes them on."""

    def __init__(self, size=4):
        self.handler = Stragglers()
        self.messages = Messages(self.handler)
        self.size, self.half = size, 0
        self.clock = Clock()

    def compare(self, step, num_slow=1, is_new=True, after=30.0):
        """Compare the next half of a window, in which the last ranks have slow steps; return what is logged."""
        self.half += is_new
        times = {rank: {**EVEN, "half": self.half} for rank in range(self.size)}
        for rank in range(self.size - num_slow, self.size):
            times[rank]["step"] = step
        self.messages.lines.clear()
        self.clock.take(after)
        with mock.patch.object(stragglers, "monotonic", self.clock):
            self.handler._compare(times)
        return self.messages.lines


SLOW = "rank 3 is slow in the step: 100.0 ms per iteration, 2.0 times the median of the ranks, 50.0 ms"


def test_a_straggler_is_logged_once_if_it_is_slow_in_two_halves():
    ranks = Ranks()
    assert ranks.compare(0.1) == []
    ranks.handler._compare({})  # nothing could be read for once
    assert ranks.compare(0.1, is_new=False) == []
    assert ranks.compare(0.05) == []
    assert ranks.compare(0.1) == []
    assert ranks.compare(0.1) == [SLOW]
    assert [ranks.compare(0.1), ranks.compare(0.1)] == [[], []]
    assert [ranks.compare(0.13), ranks.compare(0.13)] == [[], []]


def test_a_straggler_is_slow_in_most_halves_of_thirty_seconds():
    ranks = Ranks()
    for step in (0.05, 0.1, 0.1, 0.1, 0.07, 0.1, 0.05, 0.1, 0.1, 0.1):
        assert ranks.compare(step, after=3.0) == []
    assert ranks.compare(0.1, after=3.0) == [SLOW]
    for step in (0.05, 0.2, 0.2, 0.2, 0.05, 0.2, 0.05, 0.2, 0.2, 0.2, 0.2):
        assert ranks.compare(step, after=3.0) == []


def test_a_straggler_is_logged_again_when_it_changes_or_after_ten_minutes():
    ranks = Ranks()

    def compare(step, after=30.0):
        assert ranks.compare(step) == []
        return ranks.compare(step, after=after)

    assert compare(0.1) == [SLOW]
    assert ["3.2 times" in line for line in compare(0.16)] == [True]
    assert compare(0.16) == []
    assert compare(0.1) == [SLOW]
    assert compare(0.1, after=568.0) == []
    assert compare(0.1) == [SLOW]


def test_many_stragglers_are_counted_and_huge_factors_rounded():
    ranks = Ranks(64)
    ranks.compare(0.1, num_slow=20)
    lines = ranks.compare(0.1, num_slow=20)
    assert len(lines) == 9
    assert lines[-1] == "and 12 more"
    assert ranks.compare(0.1, num_slow=20) == []
    ranks = Ranks()
    ranks.compare(50.0)
    assert "over 100 times" in ranks.compare(50.0)[0]
