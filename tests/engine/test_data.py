"""The data of a run, and samplers that follow the epochs."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset

import camshaft.distributed as idist
from camshaft.engine import DeterministicEngine, Engine, Events
from tests.engine.traces import IT, IT_AGAIN, IT_BARE, SHORT, at, at_position, echo, flat, traced, unsized

# === Lifetime of batch and output, and `set_data` ===


# --- batch and output -------------------------------------------------------------------------------------------


def test_batch_and_output_live_as_long_as_they_are_of_use():
    engine, seen = Engine(lambda engine, batch: batch * 10), []
    for event, name in SHORT.items():
        engine.add_event_handler(event, lambda name: seen.append((name, engine.state.batch, engine.state.output)), name)
    engine.run([1, 2], max_epochs=2)
    assert seen == [
        ("S", None, None), ("ES", None, None),
        ("GS", None, None), ("GC", 1, None), ("IS", 1, None), ("IC", 1, 10),
        ("GS", None, 10), ("GC", 2, None), ("IS", 2, None), ("IC", 2, 20),
        ("EC", 2, 20), ("ES", 2, 20),
        ("GS", None, 20), ("STOP", None, 20), ("GC", 1, None), ("IS", 1, None), ("IC", 1, 10),
        ("GS", None, 10), ("GC", 2, None), ("IS", 2, None), ("IC", 2, 20),
        ("EC", 2, 20), ("C", 2, 20),
    ]  # fmt: skip
    assert (engine.state.batch, engine.state.output) == (2, 20)


def test_where_the_data_ran_out_the_batch_is_gone_and_the_output_is_the_last():
    engine = Engine(lambda engine, batch: batch * 10)
    engine.run(unsized([1, 2]))
    assert (engine.state.batch, engine.state.output) == (None, 20)


def test_without_data_the_batch_is_none():
    seen = []
    engine = Engine(lambda engine, batch: seen.append(batch) or len(seen))
    engine.run(epoch_length=2)
    assert seen == [None, None]
    assert (engine.state.batch, engine.state.output, engine.state.dataloader) == (None, 2, None)


@pytest.mark.parametrize("event", [Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED])
def test_a_handler_may_change_the_batch(event):
    engine = Engine(echo)
    engine.add_event_handler(event, lambda: setattr(engine.state, "batch", engine.state.batch + 5))
    assert engine.run([1, 2]).output == 7


def test_a_batch_of_none_is_a_batch():
    engine, _ = traced()
    engine.run([None, None])
    assert engine.state.iteration == 2


# --- set_data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "batches"),
    [
        (Events.STARTED, [7, 8, 9, 7, 8, 9]),
        (Events.EPOCH_STARTED, [7, 8, 9, 7, 8, 9]),
        (Events.GET_BATCH_STARTED, [7, 8, 9, 7, 8, 9]),
        (Events.GET_BATCH_COMPLETED, [1, 7, 8, 9, 7, 8]),
        (Events.ITERATION_STARTED, [1, 7, 8, 9, 7, 8]),
        (Events.ITERATION_COMPLETED, [1, 7, 8, 9, 7, 8]),
        (Events.EPOCH_COMPLETED, [1, 2, 3, 7, 8, 9]),
        (Events.DATALOADER_STOP_ITERATION, [1, 2, 3, 7, 8, 9]),
    ],
    ids=str,
)
def test_data_set_in_a_run_is_taken_from_the_next_fetch_on(event, batches):
    engine, trace = traced()
    at(engine, event, lambda engine: engine.set_data([7, 8, 9]))
    engine.run([1, 2, 3], max_epochs=2)
    assert trace.batches == batches
    assert engine.state.dataloader == [7, 8, 9]


def test_data_of_another_length_does_not_change_that_of_the_epochs():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.set_data([7]))
    engine.run([1, 2, 3], max_epochs=2)
    assert trace.batches == [1, 7, 7, 7, 7, 7]
    assert engine.state.epoch_length == 3


def test_data_set_in_a_run_without_any_is_fetched_from_then_on():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.set_data([7, 8]))
    engine.run(max_epochs=2, epoch_length=2)
    assert trace.batches == [None, 7, 8, 7]
    assert trace.take() == flat(f"S ES {IT_BARE} {IT} EC ES {IT} {IT_AGAIN} EC C")


def test_data_set_while_paused_is_used():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt())
    engine.run([1, 2, 3])
    engine.set_data([7, 8])
    engine.run()
    assert trace.batches == [1, 7, 8]


def test_data_set_between_runs_waits_for_a_run_without_any():
    engine, trace = traced()
    engine.set_data([7, 8])
    assert engine.state.dataloader is None
    engine.run()
    assert trace.batches == [7, 8]
    assert (engine.state.epoch_length, engine.state.dataloader) == (2, [7, 8])


def test_data_given_to_run_wins_over_data_set_before():
    engine, trace = traced()
    engine.set_data([7, 8])
    engine.run([1, 2, 3])
    assert trace.batches == [1, 2, 3]
    engine.run(max_epochs=1, epoch_length=1)
    assert trace.batches == [1, 2, 3, None]  # it waited for one run only


def test_data_set_before_a_rejected_run_is_still_there_for_the_next():
    engine, trace = traced()
    engine.set_data([7, 8])
    with pytest.raises(ValueError, match="max_epochs"):
        engine.run(max_epochs=0)
    engine.run()
    assert trace.batches == [7, 8]


def test_data_that_cannot_be_opened_leave_the_previous_ones_in_place():
    class Closed:
        def __iter__(self):
            raise OSError("no such shard")

    def refuse(engine):
        with pytest.raises(OSError, match="no such shard"):
            engine.set_data(Closed())

    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, refuse)
    engine.run([1, 2, 3], max_epochs=2)
    assert trace.batches == [1, 2, 3, 1, 2, 3]
    assert engine.state.dataloader == [1, 2, 3]


@pytest.mark.parametrize("when", ["before", "inside"])
def test_data_that_cannot_be_iterated_over_is_rejected(when):
    engine, trace = traced()

    def refuse(engine):
        with pytest.raises(TypeError, match="data.*3"):
            engine.set_data(3)

    if when == "before":
        refuse(engine)
    else:
        at_position(engine, 3, refuse)
    engine.run([1, 2])
    assert trace.batches == [1, 2]


# === Samplers that follow the epochs ===


class Epochs(Sampler):
    """A sampler that wants to know the epoch, and writes down what it knew at the beginning of each pass."""

    def __init__(self, size):
        self.size, self.calls, self.passes = size, [], []
        self.epoch = None

    def set_epoch(self, epoch):
        self.calls.append(epoch)
        self.epoch = epoch

    def __iter__(self):
        self.passes.append(self.epoch)
        return iter(range(self.size))

    def __len__(self):
        return self.size


class EpochBatches(BatchSampler):
    """The same as a batch sampler."""

    def __init__(self, size):
        super().__init__(range(size), 1, False)
        self.calls, self.passes, self.epoch = [], [], None

    set_epoch = Epochs.set_epoch

    def __iter__(self):
        self.passes.append(self.epoch)
        return super().__iter__()


def loader_with(kind, size):
    sampler = kind(size)
    data = TensorDataset(torch.arange(size))
    name = "sampler" if kind is Epochs else "batch_sampler"
    return DataLoader(data, **{name: sampler}), sampler


@pytest.mark.parametrize("kind", [Epochs, EpochBatches])
@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ({"max_epochs": 1}, [0]),
        ({"max_epochs": 4}, [0, 1, 2, 3]),
        ({"max_epochs": 4, "epoch_length": 2}, [0, 1]),
        ({"max_epochs": 3, "epoch_length": 3}, [0, 1, 2]),
        ({"max_epochs": 2, "epoch_length": 6}, [0, 1, 2]),
        ({"max_iters": 9}, [0, 1, 2]),
    ],
    ids=str,
)
def test_a_sampler_gets_the_number_of_each_pass_once(kind, arguments, numbers):
    loader, sampler = loader_with(kind, 4)
    Engine(echo).run(loader, **arguments)
    assert sampler.calls == sampler.passes == numbers


class EpochData(IterableDataset):
    """The same as a dataset without a length; ``sizes`` are those of its passes if they differ."""

    def __init__(self, *sizes):
        self.sizes, self.calls, self.passes, self.epoch = sizes, [], [], None

    set_epoch = Epochs.set_epoch

    def __iter__(self):
        self.passes.append(self.epoch)
        return iter(range(self.sizes[self.epoch % len(self.sizes)]))


@pytest.mark.parametrize("make", [DataLoader, idist.auto_dataloader])
def test_a_dataset_gets_the_number_of_each_pass_once_before_its_epoch_starts(make):
    dataset, seen = EpochData(4), []
    engine = Engine(echo)
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: seen.append(dataset.epoch))
    engine.run(make(dataset, batch_size=2), max_epochs=4)
    assert dataset.calls == dataset.passes == seen == [0, 1, 2, 3]


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 5, 1)], ids=str)
def test_each_pass_of_a_dataset_gets_a_larger_number_also_if_their_lengths_differ(sizes):
    dataset = EpochData(*sizes)
    Engine(echo).run(DataLoader(dataset, batch_size=1), max_iters=12)
    assert dataset.passes == sorted({*dataset.passes})


def test_a_new_run_begins_at_0_again():
    loader, sampler = loader_with(Epochs, 2)
    engine = Engine(echo)
    engine.run(loader, max_epochs=2)
    engine.run(loader, max_epochs=2)
    engine.run(loader, max_epochs=4)
    assert sampler.passes == [0, 1, 0, 1, 2, 3]


def test_the_samplers_inside_a_batch_sampler_are_notified_too():
    sampler = Epochs(4)
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_sampler=BatchSampler(sampler, 2, False))
    Engine(echo).run(loader, max_epochs=3)
    assert sampler.calls == sampler.passes == [0, 1, 2]


def test_any_data_with_a_sampler_is_notified():
    class Data(list):
        sampler = Epochs(2)
        batch_sampler = sampler

    Engine(echo).run(Data([1, 2]), max_epochs=2)
    assert Data.sampler.calls == [0, 1]


@pytest.mark.filterwarnings("ignore:the run goes on after")
@pytest.mark.parametrize("iteration", [0, 4, 5, 11])
def test_the_number_is_right_after_a_resumption(iteration):
    loader, sampler = loader_with(Epochs, 4)
    engine = Engine(echo)
    engine.load_state_dict({"iteration": iteration, "epoch_length": 4, "max_epochs": 4})
    engine.run(loader)
    assert sampler.passes == list(range(iteration // 4, 4))


@pytest.mark.parametrize("position", range(2, 18))
def test_the_numbers_are_right_after_a_pause(position):
    loader, sampler = loader_with(Epochs, 2)
    engine, _ = traced()
    at_position(engine, position, lambda engine: engine.interrupt())
    engine.run(loader, max_epochs=3)
    engine.run(loader)
    assert sampler.passes == [0, 1, 2]


@pytest.mark.parametrize("has_length", [False, True])
def test_a_number_set_by_the_user_when_the_epoch_starts_wins(has_length):
    loader, part = loader_with(Epochs, 2)
    if not has_length:
        part = EpochData(2)
        loader = DataLoader(part)
    engine = Engine(echo)
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: part.set_epoch(100 + engine.state.epoch))
    engine.run(loader, max_epochs=4)
    assert part.passes == [101, 102, 103, 104]


def test_a_number_set_by_the_user_where_the_data_ran_out_wins():
    loader, sampler = loader_with(Epochs, 2)
    engine = Engine(echo)
    engine.add_event_handler(Events.DATALOADER_STOP_ITERATION, lambda: sampler.set_epoch(100 + engine.state.epoch))
    engine.run(loader, epoch_length=6)
    assert sampler.passes == [0, 101, 101]


@pytest.mark.parametrize("arguments", [{}, {"epoch_length": 2}, {"epoch_length": 6}], ids=str)
def test_each_pass_has_a_larger_number_also_after_an_epoch_was_cut(arguments):
    loader, sampler = loader_with(Epochs, 4)
    engine = Engine(echo)
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.terminate_epoch(), firing=1)
    engine.run(loader, max_epochs=4, **arguments)
    assert len(sampler.passes) > 1
    assert sampler.passes == sorted(set(sampler.passes))


def test_a_pass_over_new_data_gets_its_number():
    (first, one), (second, other) = loader_with(Epochs, 2), loader_with(Epochs, 2)
    engine = Engine(echo)
    at(engine, Events.EPOCH_COMPLETED, lambda engine: engine.set_data(second))
    engine.run(first, max_epochs=3)
    assert one.passes == [0]
    assert len(other.passes) == 2
    assert other.passes[-1] == 2


def test_a_loader_over_data_without_length_is_unsized():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    engine = Engine(echo)
    engine.run(DataLoader(Stream(), batch_size=2), max_epochs=2)
    assert (engine.state.epoch_length, engine.state.iteration) == (2, 4)


@pytest.mark.parametrize("kind", [Engine, DeterministicEngine])
def test_data_that_invent_attributes_have_no_endless_chain_of_samplers(kind):
    data = MagicMock()
    data.__iter__.side_effect = lambda: iter([1, 2])
    data.__len__.return_value = 2
    assert kind(echo).run(data, max_epochs=2).iteration == 4
