"""Batch sizes that change from epoch to epoch."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

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


def observed(loader, function, epochs, state=None, **options):
    """Run, and return the batches of each epoch; resume from states if given."""
    rows = []
    trainer = Engine(lambda engine, batch: rows[-1].append(batch.tolist()))
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda: rows.append([]))
    scheduler = BatchSizeScheduler(loader, function, **options)
    scheduler.attach(trainer)
    if state is not None:
        trainer.load_state_dict(state[0])
        scheduler.load_state_dict(state[1])
    states = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: states.append(copy.deepcopy((trainer.state_dict(), scheduler.state_dict()))),
    )
    trainer.run(loader, max_epochs=epochs)
    return rows, states, trainer


def sizes(rows):
    return [[len(batch) for batch in row] for row in rows]


def flat(rows):
    return [one for row in rows for one in row]


def doubling(epoch):
    return 2 ** (epoch + 1)


@pytest.mark.parametrize("make", [plain, exact])
def test_adapt_epoch_length_keeps_an_epoch_a_pass(make):
    """[H25]"""
    rows, _, trainer = observed(make(), doubling, 4, adapt_epoch_length=True)
    assert sizes(rows) == [[2] * 12, [4] * 6, [8] * 3, [16, 8]]
    assert all(sorted(flat(row)) == list(range(24)) for row in rows)
    assert (trainer.state.epoch, trainer.state.epoch_length, trainer.state.iteration) == (4, 2, 12 + 6 + 3 + 2)


@pytest.mark.parametrize("make", [plain, exact])
def test_shrinking_batches(make):
    rows, _, trainer = observed(make(), lambda epoch: 8 - 2 * epoch, 3, adapt_epoch_length=True)
    assert sizes(rows) == [[8] * 3, [6] * 4, [4] * 6]
    assert trainer.state.iteration == 3 + 4 + 6


@pytest.mark.parametrize("make", [plain, exact])
def test_epoch_length_is_unchanged_by_default(make):
    rows, _, trainer = observed(make(), lambda epoch: 8, 2)
    assert sizes(rows) == [[8] * 6, [8] * 6]
    assert (trainer.state.epoch_length, trainer.state.iteration) == (6, 12)


def test_epochs_that_are_not_passes_over_the_loader_keep_their_length():
    loader = plain()
    trainer = Engine(lambda engine, batch: None)
    BatchSizeScheduler(loader, doubling, adapt_epoch_length=True).attach(trainer)
    trainer.run(loader, max_epochs=2, epoch_length=5)
    assert (trainer.state.epoch_length, trainer.state.iteration) == (5, 10)
    other, loader = Engine(lambda engine, batch: None), plain()
    BatchSizeScheduler(loader, doubling, adapt_epoch_length=True).attach(other)
    other.run(range(6))
    assert (other.state.epoch_length, other.state.iteration) == (6, 6)
    third, loader = Engine(lambda engine, batch: None), plain()
    BatchSizeScheduler(loader, doubling, adapt_epoch_length=True).attach(third)
    third.run(loader, max_iters=9)
    assert (third.state.epoch_length, third.state.iteration) == (6, 9)


@settings(max_examples=30)
@given(st.integers(0, 1000), st.lists(st.integers(2, 9), min_size=3, max_size=3))
def test_a_resumed_run_continues_with_the_next_sample(place, wanted):
    rows, states, _ = observed(exact(), wanted.__getitem__, 3, adapt_epoch_length=True)
    batches = flat(rows)
    done = place % (len(batches) - 1) + 1
    resumed, _, trainer = observed(exact(), wanted.__getitem__, 3, reread(states[done - 1]), adapt_epoch_length=True)
    assert flat(resumed) == batches[done:]
    assert trainer.state.epoch == 3


def test_a_scheduler_attached_during_an_epoch_keeps_its_length():
    _, states, _ = observed(exact(), doubling, 2, adapt_epoch_length=True)
    loader = exact(size=2)
    trainer = Engine(lambda engine, batch: None)
    BatchSizeScheduler(loader, lambda epoch: 4, adapt_epoch_length=True).attach(trainer)
    trainer.load_state_dict(states[4][0])
    trainer.run(loader, max_epochs=2)
    assert (trainer.state.epoch, trainer.state.epoch_length, trainer.state.iteration) == (2, 12, 24)


def test_a_state_saved_at_the_start_of_an_epoch_is_at_the_start_of_a_pass():
    loader, saved = exact(), []
    trainer = Engine(lambda engine, batch: None)
    scheduler = BatchSizeScheduler(loader, doubling, adapt_epoch_length=True)
    scheduler.attach(trainer)
    trainer.add_event_handler(
        Events.EPOCH_STARTED(after=1),
        lambda: saved.append(copy.deepcopy((trainer.state_dict(), scheduler.state_dict()))),
    )
    trainer.run(loader, max_epochs=3)
    for epoch, (engine_state, _) in enumerate(saved, start=1):
        assert engine_state["position"]["epoch"] == epoch
        assert engine_state["position"]["consumed"] == 0
        assert engine_state["iteration"] == [12, 12 + 6][epoch - 1]


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


def test_history_and_index():
    trainer, loader, seen = Engine(lambda engine, batch: None), plain(), []
    scheduler = BatchSizeScheduler(loader, lambda index: seen.append(index) or index + 1, save_history=True)
    scheduler.attach(trainer, Events.ITERATION_STARTED(every=3))
    trainer.run(loader, max_epochs=2)
    assert trainer.state.param_history == {"batch_size": [1, 2, 3, 4]}
    assert seen == [0, 1, 2, 3]
    assert loader.batch_sampler.batch_size == 4


def test_a_loaded_state_continues():
    scheduler = BatchSizeScheduler(plain(), doubling)
    scheduler(None)
    scheduler(None)
    loader = plain()
    fresh = BatchSizeScheduler(loader, doubling)
    fresh.load_state_dict(reread(scheduler.state_dict()))
    assert loader.batch_sampler.batch_size == 4
    fresh(None)
    assert loader.batch_sampler.batch_size == 8


def test_simulated_values():
    assert BatchSizeScheduler.simulate_values(3, doubling) == [[0, 2], [1, 4], [2, 8]]


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", None])
def test_an_invalid_size_is_rejected_and_changes_nothing(size):
    loader = plain()
    scheduler = BatchSizeScheduler(loader, lambda index: size)
    with pytest.raises(ValueError, match="scheduler_fn must return an integer of at least 1"):
        scheduler(None)
    assert (loader.batch_sampler.batch_size, scheduler.event_index) == (4, 0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))


class Pairs(BatchSampler):
    """A custom batch sampler without a batch size."""

    def __init__(self, pairs=((0, 1), (2, 3))):
        self.pairs = pairs

    def __iter__(self):
        return iter(self.pairs)

    def __len__(self):
        return len(self.pairs)

    def __repr__(self):
        return "<pairs>"


def test_the_batch_size_of_a_stream_can_be_scheduled():
    rows, _, trainer = observed(DataLoader(Stream(), batch_size=2), lambda epoch: 3, 2, adapt_epoch_length=True)
    assert rows == [[[0, 1, 2], [3, 4, 5]]] * 2
    assert trainer.state.epoch_length == 2


def test_a_size_larger_than_the_data_does_not_end_the_run():
    loader = DataLoader(range(4), batch_size=2, drop_last=True)
    with pytest.warns(UserWarning, match="the data ran out in epoch 2"):
        rows, *_ = observed(loader, lambda epoch: (2, 8, 2)[epoch], 3, adapt_epoch_length=True)
    assert rows == [[[0, 1], [2, 3]], [], [[0, 1], [2, 3]]]


@pytest.mark.parametrize(
    ("loader", "error", "message"),
    [
        ([1, 2], TypeError, "dataloader must be a DataLoader, got"),
        (
            DataLoader(range(4), batch_size=None),
            ValueError,
            "torch.utils.data.BatchSampler, got None",
        ),
        (
            DataLoader(range(4), batch_sampler=[[0], [1]]),
            ValueError,
            r"got \[\[0\], \[1\]\]: pass batch_size",
        ),
        (DataLoader(range(4), batch_sampler=Pairs([])), ValueError, "torch.utils.data.BatchSampler, got <pairs>"),
        (
            DataLoader(range(4), batch_sampler=ExactBatchSampler(Pairs(), None)),
            ValueError,
            r"got those of <pairs>: call auto_dataloader with batch_size=\.\.\.",
        ),
    ],
)
def test_loaders_without_a_batch_size_are_rejected(loader, error, message):
    with pytest.raises(error, match=message):
        BatchSizeScheduler(loader, doubling)


def test_scheduler_fn_must_be_callable():
    with pytest.raises(TypeError, match="scheduler_fn must be callable, got 3"):
        BatchSizeScheduler(plain(), 3)
