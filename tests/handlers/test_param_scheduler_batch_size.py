"""Batch sizes that change from epoch to epoch."""

from __future__ import annotations

import copy
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from camshaft.data.orders import Sequential
from camshaft.data.samplers import ExactBatchSampler
from camshaft.distributed import auto_dataloader
from camshaft.engine import Engine, Events
from camshaft.handlers import BatchSizeScheduler
from tests.handlers.schedules import reread


def plain(length=24, size=4):
    return DataLoader(range(length), batch_size=size)


def exact(length=24, size=4):
    return auto_dataloader(list(range(length)), batch_size=size)


def observed(loader, function, state=None, data=None, adapt_epoch_length=True, **target):
    """Run, and return the batches of each epoch; resume from states if given."""
    rows, states = [], []
    trainer = Engine(lambda engine, batch: rows[-1].append(batch.tolist()))
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda: rows.append([]))
    scheduler = BatchSizeScheduler(loader, function, adapt_epoch_length=adapt_epoch_length)
    scheduler.attach(trainer)
    for one, saved in zip((trainer, scheduler), state or (), strict=False):
        one.load_state_dict(saved)

    @trainer.on(Events.EPOCH_STARTED | Events.ITERATION_COMPLETED)
    def save():
        states.append(copy.deepcopy((trainer.state_dict(), scheduler.state_dict())))

    trainer.run(loader if data is None else data, **target)
    return rows, states, trainer.state


def flat(rows):
    return list(itertools.chain.from_iterable(rows))


def doubling(epoch):
    return 2 ** (epoch + 1)


@pytest.mark.parametrize("make", [plain, exact])
@pytest.mark.parametrize(
    ("function", "sizes"),
    [(doubling, [[2] * 12, [4] * 6, [8] * 3, [16, 8]]), (lambda epoch: 8 - 2 * epoch, [[8] * 3, [6] * 4, [4] * 6])],
)
def test_adapt_epoch_length_keeps_an_epoch_a_pass(make, function, sizes):
    """[H25]"""
    rows, states, state = observed(make(), function, max_epochs=len(sizes))
    assert [[len(batch) for batch in row] for row in rows] == sizes
    assert all(sorted(flat(row)) == list(range(24)) for row in rows)
    assert (state.epoch_length, state.iteration) == (len(sizes[-1]), sum(map(len, sizes)))
    if make is exact:
        starts = [saved["position"] for saved, _ in states if saved["iteration"] == len(sizes[0])]
        assert (starts[-1]["epoch"], starts[-1]["consumed"]) == (1, 0)


@pytest.mark.parametrize(
    ("options", "epoch_length", "iteration"),
    [
        ({"max_epochs": 2, "adapt_epoch_length": False}, 6, 12),
        ({"max_epochs": 2, "epoch_length": 5}, 5, 10),
        ({"max_iters": 9}, 6, 9),
        ({"max_epochs": 2, "data": plain(12, 2)}, 6, 12),
    ],
)
def test_other_epochs_keep_their_length(options, epoch_length, iteration):
    """By default, and where they are not passes over the loader."""
    rows, _, state = observed(plain(), lambda epoch: 8, **options)
    assert (state.epoch_length, state.iteration) == (epoch_length, iteration)
    assert {len(batch) for batch in flat(rows)} == {2 if "data" in options else 8}


@settings(max_examples=30)
@given(st.integers(0, 1000), st.lists(st.integers(2, 9), min_size=3, max_size=3))
def test_a_resumed_run_continues_with_the_next_sample(place, wanted):
    rows, states, _ = observed(exact(), wanted.__getitem__, max_epochs=3)
    state = reread(states[place % (len(states) - 1)])
    resumed, _, after = observed(exact(), wanted.__getitem__, state, max_epochs=3)
    assert flat(resumed) == flat(rows)[state[0]["iteration"] :]
    assert after.epoch == 3


def test_a_scheduler_attached_during_an_epoch_keeps_its_length():
    _, states, _ = observed(exact(), doubling, max_epochs=2)
    _, _, state = observed(exact(size=2), lambda epoch: 4, states[6][:1], max_epochs=2)
    assert (state.epoch, state.epoch_length, state.iteration) == (2, 12, 24)


def test_the_size_is_per_rank():
    ranks = [ExactBatchSampler(Sequential(24), 4, num_replicas=2, rank=rank) for rank in range(2)]
    for sampler in ranks:
        scheduler = BatchSizeScheduler(DataLoader(range(24), batch_sampler=sampler), lambda index: 6)
        scheduler(None)
        assert scheduler.batch_size == sampler.batch_size == 6
    assert [list(sampler) for sampler in ranks] == [
        [[0, 1, 2, 3, 4, 5], [12, 13, 14, 15, 16, 17]],
        [[6, 7, 8, 9, 10, 11], [18, 19, 20, 21, 22, 23]],
    ]


def test_simulations_and_histories_have_the_sizes_of_each_call():
    trainer, loader = Engine(lambda engine, batch: None), plain()
    BatchSizeScheduler(loader, doubling, save_history=True).attach(trainer, Events.ITERATION_STARTED(every=2))
    trainer.run(loader)
    assert trainer.state.param_history == {"batch_size": [2, 4, 8]}
    assert BatchSizeScheduler.simulate_values(3, doubling) == [[0, 2], [1, 4], [2, 8]]
    with pytest.raises(ValueError, match="scheduler_fn"):
        BatchSizeScheduler.simulate_values(3, lambda index: index)


def test_a_loaded_state_sets_the_size():
    scheduler, fresh = (BatchSizeScheduler(plain(), doubling) for _ in range(2))
    scheduler(None)
    scheduler(None)
    fresh.load_state_dict(reread(scheduler.state_dict()))
    assert (fresh.dataloader.batch_sampler.batch_size, fresh.event_index) == (4, 2)


@pytest.mark.parametrize("size", [0, 2.0, "4", None])
def test_an_invalid_size_is_rejected_and_changes_nothing(size):
    scheduler = BatchSizeScheduler(plain(), lambda index: size)
    with pytest.raises(ValueError, match="scheduler_fn"):
        scheduler(None)
    assert (scheduler.batch_size, scheduler.event_index) == (4, 0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))


def test_the_batch_size_of_a_stream_can_be_scheduled():
    rows, _, state = observed(DataLoader(Stream(), batch_size=2), lambda epoch: 3, max_epochs=2)
    assert rows == [[[0, 1, 2], [3, 4, 5]]] * 2
    assert state.epoch_length == 2


def test_a_size_larger_than_the_data_does_not_end_the_run():
    loader = DataLoader(range(4), batch_size=2, drop_last=True)
    with pytest.warns(UserWarning, match="the data ran out in epoch 2"):
        rows, *_ = observed(loader, lambda epoch: (2, 8, 2)[epoch], max_epochs=3)
    assert rows == [[[0, 1], [2, 3]], [], [[0, 1], [2, 3]]]
