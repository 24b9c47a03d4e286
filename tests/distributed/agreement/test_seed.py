"""Ranks share the seed of rank 0, and raise if they read different data, without waiting for each other."""

from __future__ import annotations

import copy
import logging
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler, Sampler

import camshaft.distributed as idist
from camshaft.data import ExactBatchSampler, Sequential, Shuffled
from camshaft.distributed.failures import store as job_store
from camshaft.distributed.job import current
from camshaft.engine import Engine, Events
from camshaft.errors import RankDivergenceError
from tests.limits import TIMEOUT
from tests.ranks import await_watchers, on_ranks
from tests.threads import run_on_threads


def make(length=12, batch_size=4, **options):
    return idist.auto_dataloader(range(length), batch_size=batch_size, **options)


def given(loader):
    return [index for batch in loader for index in batch.tolist()]


# --- ranks that would read different data raise ---------------------------------------------------------------------


class Own(Sampler):
    """Yields different indices on each rank, independent of torch's generator."""

    def __len__(self):
        return 12

    def __iter__(self):
        return iter([idist.get_rank()] * 12)


def at_epoch(epoch):
    loader = make()
    loader.sampler.set_epoch(epoch)
    return loader


def at_sample(consumed):
    loader = make()
    loader.batch_sampler.seek({**loader.batch_sampler.position(0), "consumed": consumed})
    return loader


def resumed(rank):
    engine, saved = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None)
    saved.run(make(), max_epochs=1)
    if rank:
        engine.load_state_dict(saved.state_dict())
    loader = make()
    return [*range(engine.run(loader, max_epochs=1 + rank).epoch)]


ORDERS = "order is 'Shuffled(length=12), version 1' on rank 0, but 'Sequential(length=12), version 1' on rank 1"
LENGTHS = "order is 'Sequential(length=12), version 1' on rank 0, but 'Sequential(length=13), version 1' on rank 1"
DIFFERENT = [
    (lambda rank: make(seed=rank), "seed is 0 on rank 0, but 1 on rank 1"),
    (lambda rank: make(12 + rank, shuffle=False), LENGTHS),
    (lambda rank: make(shuffle=not rank), ORDERS),
    (lambda rank: make(batch_size=4 + rank), "batch_size is 4 on rank 0, but 5 on rank 1"),
    (lambda rank: make(drop_last=bool(rank)), "drop_last is False on rank 0, but True on rank 1"),
    (lambda rank: make(sampler=Own()), "hash of the samples drawn is '"),
    (lambda rank: at_epoch(5 + rank), "epoch is 5 on rank 0, but 6 on rank 1"),
    (lambda rank: at_sample(4 * rank), "samples skipped is 0 on rank 0, but 4 on rank 1"),
    (resumed, "epoch is 0 on rank 0, but 1 on rank 1"),
    (
        lambda rank: DataLoader(range(12), batch_sampler=ExactBatchSampler(Shuffled(12), 4, seed=rank)),
        "seed is 0 on rank 0, but 1 on rank 1",
    ),
]


def one_after_the_other(function):
    """Run on rank 0 before rank 1; return what the function returned, or its error."""
    outcome = None
    for turn in range(idist.get_world_size()):
        if turn == idist.get_rank():
            try:
                outcome = function()
            except ValueError as error:
                outcome = str(error)
        idist.barrier()
    return outcome


@on_ranks(2)
def test_the_second_rank_that_reads_other_data_raises():
    rank = idist.get_rank()
    for make_one, message in DIFFERENT:
        loaders = []
        found = one_after_the_other(lambda made=loaders, one=make_one: made.append(one(rank)) or len(list(made[0])))
        if rank == 0:
            assert isinstance(found, int), "it came first, and does not wait"
        else:
            assert found.startswith("the ranks do not read the same data, so samples would be repeated or skipped: ")
            assert message in found
        if loaders and isinstance(loaders[0], DataLoader) and "epoch" not in message and "skipped" not in message:
            loaders[0].batch_sampler.set_epoch(0)  # the first pass that is announced is compared, too
            found = one_after_the_other(lambda made=loaders: len(list(made[0])))
            assert isinstance(found, int) == (rank == 0)


@on_ranks(2)
def test_later_passes_are_compared_in_debug_mode():
    job = current().job
    for debug, epoch in ((False, 0), (False, 1), (True, 0), (True, 1)):
        if epoch == 0:
            loader = make()
        loader.sampler.set_epoch(epoch + 5 * epoch * idist.get_rank())
        job.compares_collectives = debug
        try:
            found = len(list(loader))
        except ValueError as error:
            found = str(error)
        job.compares_collectives = False  # not what the test does in between
        outcomes = idist.all_gather(found)
        if debug and epoch:
            assert 3 in outcomes
            assert any("epoch is " in str(one) and "samples drawn" not in str(one) for one in outcomes)
        else:
            assert outcomes == [3, 3]


class Counted:
    """A store that counts its requests."""

    asked = 0

    def __init__(self, prefix, store):
        self.store = dist.PrefixStore(prefix, store)

    def compare_set(self, *arguments):
        Counted.asked += 1
        return self.store.compare_set(*arguments)

    def __getattr__(self, name):
        Counted.asked += 1
        return getattr(self.store, name)


@on_ranks(2)
def test_only_the_first_pass_costs_a_request_and_it_leaves_one_key():
    loader = make(batch_size=2, seed=0)
    store = dist.distributed_c10d._get_default_store()
    await_watchers()
    before = store.num_keys()
    idist.barrier()
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        Counted.asked = 0
        with mock.patch("camshaft.distributed.failures.store.PrefixStore", Counted):
            assert len(list(loader)) == 6
        assert Counted.asked == (epoch == 0)
        idist.barrier()
    assert store.num_keys() == before + 1
    idist.barrier()


# --- what a single rank may do ----------------------------------------------------------------------------------


def reads_a_batch_at_any_time(rank):
    loader = make()

    def look(*_):
        if rank == 0:
            assert next(iter(loader)).shape == (2,)

    look()
    for _ in range(2):
        engine = Engine(lambda engine, batch: idist.all_reduce(1))
        for event in (Events.STARTED, Events.EPOCH_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED):
            engine.add_event_handler(event, look)
        engine.add_event_handler(Events.EPOCH_STARTED, lambda one: loader.sampler.set_epoch(one.state.epoch - 1))
        engine.run(loader, max_epochs=3)


def reads_a_batch_before_a_run_resumes(rank):
    loader = make()
    stopped = Engine(lambda engine, batch: engine.terminate() if engine.state.iteration == 4 else None)
    stopped.run(loader, max_epochs=4)
    engine = Engine(lambda engine, batch: idist.all_reduce(1))
    engine.load_state_dict(stopped.state_dict())
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: rank or next(iter(loader)))
    assert engine.run(loader, max_epochs=4).iteration == 12


def creates_a_loader_of_its_own(rank):
    loaders = {}
    for number in range(3):
        if rank == number % 2:
            loaders["alone"] = idist.auto_dataloader(range(20), batch_size=2, seed=number)  # on a line of its own
        loaders[number] = make(seed=number)
    for _ in range(2):
        for loader in loaders.values():
            list(loader)
        idist.barrier()


def copies_a_loader(rank):
    batches = ExactBatchSampler(Shuffled(12), 4)
    twin = copy.deepcopy(batches)
    for epoch in range(3):
        for one, number in ((batches, epoch), (twin, 7 - epoch))[:: -1 if rank else 1]:
            one.set_epoch(number)
            assert len(list(one)) == 3


def samples_for_other_ranks(rank):
    for ranks in (1, 2, 3):
        for number in range(ranks):
            if (number, ranks) != (rank, 2):
                assert len(list(ExactBatchSampler(Sequential(12 + rank), 6, num_replicas=ranks, rank=number))) > 1


def reads_after_the_job(rank):
    loader = make(12 - rank, seed=0)
    dist.destroy_process_group()
    assert len(list(loader)) == 3


@on_ranks(2)
def test_what_does_not_prove_a_difference_raises_nothing():
    for case in (
        reads_a_batch_at_any_time,
        reads_a_batch_before_a_run_resumes,
        creates_a_loader_of_its_own,
        copies_a_loader,
        samples_for_other_ranks,
        reads_after_the_job,
    ):
        case(idist.get_rank())
        if dist.is_initialized():
            idist.barrier()


# --- the seed of rank 0 ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_loaders_without_a_seed_share_torchs_seed_of_rank_0():
    rank, orders = idist.get_rank(), set()
    for seed in (5, 6, 2**64 - 1, 5):
        torch.manual_seed(seed - rank)
        for options in ({}, {"sampler": RandomSampler(range(12))}, {"shuffle": False}):
            loader = make(**options)
            torch.manual_seed(100 + rank)  # it counts what torch was seeded with when the loader was made
            parts = idist.all_gather(given(loader))
            assert sorted(parts[0] + parts[1]) == list(range(12))
            assert loader.batch_sampler.seed == loader.sampler.seed == seed
            assert copy.deepcopy(loader).batch_sampler.seed == seed
            torch.manual_seed(seed - rank)
            orders.add((*options, str(parts)))
    assert len(orders) == 3 + 3 + 1, "shuffled by three seeds, drawn by three, and as they are"


@on_ranks(2)
def test_creating_a_loader_does_not_block_and_the_seed_is_requested_once():
    rank = idist.get_rank()
    await_watchers()
    with mock.patch("camshaft.distributed.failures.store.PrefixStore", Counted):
        if rank == 1:
            loader = make()
        idist.barrier()
        if rank == 0:
            loader = make()
        idist.barrier()
        assert Counted.asked == 0
        assert loader.batch_sampler.seed == loader.batch_sampler.seed == torch.initial_seed()
        assert Counted.asked == 2 * rank, "whether it is there, and what it is"
    idist.barrier()


@on_ranks(2)
def test_a_loader_created_within_one_rank_only_does_not_block_and_a_seed_that_was_not_read_in_the_job_is_lost():
    rank = idist.get_rank()
    torch.manual_seed(rank)
    assert idist.one_rank_only(rank=1)(lambda: make().batch_sampler.seed)() == (None, 1)[rank]
    idist.barrier()
    with idist.one_rank_first():
        loader = make()
    assert loader.batch_sampler.seed == 0
    idist.barrier()
    loader = make()
    if rank == 0:
        assert loader.batch_sampler.seed == 0
    dist.destroy_process_group()
    if rank == 1:
        with pytest.raises(RankDivergenceError, match="which rank 0 chose: iterate over the loader during the job, or"):
            next(iter(loader))


@on_ranks(2)
def test_a_rank_logs_and_raises_if_rank_0_does_not_create_the_loader():
    if idist.get_rank() == 1:
        loader, store, messages = make(), dist.distributed_c10d._get_default_store(), []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger(job_store.__name__).addHandler(handler)
        job_store.SILENCE = 0.0
        store.set_timeout(timedelta(seconds=0.3))
        with pytest.raises(RankDivergenceError, match=r"rank 1 timed out after 0.3 s waiting for rank 0 to create"):
            next(iter(loader))
        (message,) = messages
        assert "pass seed= to auto_dataloader" in message
        store.set_timeout(TIMEOUT)
    idist.barrier()


def seeds_without_a_store():
    with idist.one_rank_first():
        first = make()
    return make().batch_sampler.seed, first.batch_sampler.seed


def test_where_there_is_no_store_the_seed_is_broadcast(monkeypatch):
    monkeypatch.setattr(torch, "initial_seed", lambda: 5 + idist.get_rank())
    assert run_on_threads(2, seeds_without_a_store) == [(5, 5)] * 2


@on_ranks(2)
def test_a_saved_position_holds_the_seed():
    rank = idist.get_rank()
    torch.manual_seed(3)
    whole, part, rest = [], [], []
    Engine(lambda engine, batch: whole.extend(batch.tolist())).run(make(), max_epochs=2)
    engine = Engine(lambda engine, batch: part.extend(batch.tolist()))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), engine.terminate)
    engine.run(make(), max_epochs=2)
    state = engine.state_dict()
    torch.manual_seed(4)
    resumed = Engine(lambda engine, batch: rest.extend(batch.tolist()))
    resumed.load_state_dict(state)
    if rank == 1:
        loader = make()
        loader.batch_sampler.seek(state["position"])  # without the seed of rank 0, which is not there yet
    idist.barrier()
    resumed.run(loader if rank == 1 else make(), max_epochs=2)
    assert part + rest == whole
