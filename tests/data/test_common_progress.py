"""Ranks whose steps have no collectives save what all of them have completed."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

import camshaft.distributed as idist
from camshaft.distributed.agreement import seed as data
from camshaft.engine import DeterministicEngine, Engine, Events
from tests.ranks import on_ranks

LENGTH = 30
MESSAGE = (
    "rank 0 saves after 5 iterations, but not all ranks have saved in this run, and no collectives keep them together: "
    "what is saved is the progress that all of them have made for certain, which is that of the start of the run; save "
    "on all ranks"
)


def loader():
    return idist.auto_dataloader(list(range(LENGTH)), batch_size=2, seed=3)


def fail():
    raise ZeroDivisionError


def work(engine_class, stops, state=None, step=lambda: None, max_epochs=1, fails=False):
    """Process samples, save every fifth iteration, and end the run of this rank at an iteration, early or by an error.

    Returns:
        The samples, the states, and the warnings.
    """
    seen, states, stop = [], [], stops[idist.get_rank()]

    def process(engine, batch):
        step()
        seen.extend((engine.state.epoch, index) for index in batch.tolist())

    engine = engine_class(process)
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=5), lambda: states.append(engine.state_dict()))
    if stop is not None:
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=stop), fail if fails else engine.terminate)
    if state is not None:
        engine.load_state_dict(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(ZeroDivisionError):
            engine.run(loader(), max_epochs=max_epochs)
    return seen, states, [str(one.message) for one in caught]


@on_ranks(2)
@pytest.mark.parametrize("engine_class", [Engine, DeterministicEngine])
@pytest.mark.parametrize(
    ("stops", "reached"),
    [
        ((14, 7), 5),  # rank 1 failed after it had saved once, which is as if it had been killed
        ((24, 19), 15),  # likewise, in the second epoch of the other one
        ((14, 3), 0),  # before it had saved
        ((9, 9), 5),
    ],
)
def test_a_run_resumes_from_what_all_ranks_have_completed(engine_class, stops, reached):
    epochs, store, readings = -(-max(stops) // 15), dist.distributed_c10d._get_default_store(), []

    def patience():
        """Stand still until the other rank has ended: it may take its time to save."""
        if store.check([f"rank {1 - idist.get_rank()} has ended"]):
            readings.append(1.0)
        return sum(readings)

    clock = SimpleNamespace(monotonic=patience, sleep=lambda seconds: time.sleep(min(seconds, 0.1)))
    with mock.patch.object(data, "time", clock), mock.patch.object(data, "_PATIENCE", 3.0):
        before, states, messages = work(engine_class, stops, max_epochs=epochs, fails=True)
    store.set(f"rank {idist.get_rank()} has ended", "")
    dist.barrier()
    (state,) = idist.all_gather((states[-1] if states else None,))[0]  # rank 0 writes the file
    assert state["iteration"] == reached
    if idist.get_rank() == 0:
        assert (MESSAGE in messages) == (reached == 0)
    after, _, _ = work(engine_class, (None, None), state, max_epochs=epochs)
    parts = idist.all_gather((before, after))
    done = set().union(*(samples for part in parts for samples in part))
    assert done == {(epoch, index) for epoch in range(1, epochs + 1) for index in range(LENGTH)}
    repeated = Counter(sample for part in parts for samples in part for sample in samples)
    assert sum(repeated.values()) - len(repeated) == sum(stop - reached for stop in stops)


@on_ranks(2)
def test_a_save_waits_for_ranks_that_come_later():
    store, pauses = dist.distributed_c10d._get_default_store(), []

    def sleep(seconds):
        pauses.append(seconds)
        store.set("rank 0 waits", "")
        time.sleep(seconds)

    if idist.get_rank() == 1:
        store.get("rank 0 waits")
    with (
        mock.patch.object(data, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep)),
        mock.patch.object(data, "_PATIENCE", 1e6),
    ):
        _, states, messages = work(Engine, (6, 6))
    assert pauses or idist.get_rank() == 1
    assert states[-1]["iteration"] == 5
    assert messages == []
    dist.barrier()


@on_ranks(2)
def test_ranks_that_do_not_save_are_waited_for_once():
    states, slept, store = [], [], dist.distributed_c10d._get_default_store()
    engine = Engine(lambda engine, batch: None)
    if idist.get_rank() == 1:
        engine.add_event_handler(Events.COMPLETED, lambda: store.get("rank 0 has ended"))
    else:
        engine.add_event_handler(Events.COMPLETED, lambda: store.set("rank 0 has ended", ""))
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: states.append(engine.state_dict()["iteration"]))
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    with mock.patch.object(data, "time", clock), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.run(loader(), max_epochs=2)
    assert states == ([0] * 30 if idist.get_rank() == 0 else [])
    assert len(caught) == (idist.get_rank() == 0)
    assert sum(slept) < 4 * data._PATIENCE
    dist.barrier()


@on_ranks(2)
@pytest.mark.parametrize(("stops", "saved"), [((None, None), 15), ((None, 7), 7), ((7, None), 7)])
def test_a_rank_whose_run_has_ended_is_not_waited_for(stops, saved):
    states, every, stop = [], (1, 4)[idist.get_rank()], stops[idist.get_rank()]
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=every), lambda: states.append(engine.state_dict()))
    if stop is not None:
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=stop), engine.terminate)
    with mock.patch.object(data, "_PATIENCE", 1e6):
        engine.run(loader())
    dist.barrier()
    if idist.get_rank() == 0:
        assert states[-1]["iteration"] == saved


@on_ranks(2)
@pytest.mark.parametrize("in_group", [False, True])
def test_steps_with_collectives_exchange_nothing(in_group):
    group = dist.new_group([0, 1]) if in_group else None
    requests, store_of = [], data.SharedSource._store

    def counted(source):
        requests.append(source)
        return store_of(source)

    with mock.patch.object(data.SharedSource, "_store", counted):
        _, states, _ = work(Engine, (11, 11), step=lambda: idist.all_reduce(1, group=group))
    assert [state["iteration"] for state in states] == [5, 10]
    assert len(requests) == 1, "when the first pass begins"


@on_ranks(2)
def test_groups_of_other_ranks_do_not_disturb_those_that_run_alone():
    dist.new_group([1])
    ran = []
    idist.one_rank_only(with_barrier=True)(lambda: ran.append(idist.get_rank()))()
    assert ran == ([0] if idist.get_rank() == 0 else [])


@on_ranks(2)
def test_ranks_that_run_alone_are_not_waited_for():
    @idist.one_rank_only()
    def save(engine):
        states.append(engine.state_dict()["iteration"])

    states = []
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=5), save)
    with mock.patch.object(data, "_PATIENCE", 1e6):
        engine.run(loader())
    assert states == ([5, 10, 15] if idist.get_rank() == 0 else [])
    dist.barrier()
