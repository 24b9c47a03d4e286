"""A state saved in the middle of a window goes back to its start: no batch is lost with the gradients so far."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import camshaft.distributed as idist
from camshaft.engine import Engine, Events
from camshaft.utils import manual_seed
from tests.engine.traces import at
from tests.engine.windows import Weighted, batches_of, squared, trainer_of, weights_of

(WHOLE,) = batches_of(23)
SAMPLES = list(zip(*WHOLE, strict=True))
EPOCHS = 3


def loader(batch_size=3):
    return idist.auto_dataloader(SAMPLES, batch_size=batch_size, shuffle=True, seed=5)


class Training:
    """A model, and what is saved of it after each iteration."""

    def __init__(self, size=3, saved=None, loss_fn=squared, **options):
        self.model, self.saved, self.given = Weighted(), {}, []
        self.trainer, self.steps = trainer_of(self.model, size, loss_fn, **options)
        step = self.trainer._process_function
        self.trainer._process_function = lambda engine, batch: (self.given.append(batch[1]), step(engine, batch))[1]
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, self.save)
        if saved is not None:
            self.model.load_state_dict(saved[0])
            self.trainer.load_state_dict(saved[1])

    def save(self, engine):
        self.saved[engine.state.iteration] = copy.deepcopy((self.model.state_dict(), engine.state_dict()))


@pytest.mark.parametrize(("size", "epoch_length"), [(3, None), (5, None), (50, None), (2, 4)])
def test_every_iteration_can_be_gone_on_from_and_the_weights_are_the_same(size, epoch_length):
    whole = Training(size)
    whole.trainer.run(loader(), max_epochs=EPOCHS, epoch_length=epoch_length)
    for iteration, saved in list(whole.saved.items())[:-1]:
        again = Training(size, saved)
        again.trainer.run(loader(), max_epochs=EPOCHS)
        assert torch.equal(weights_of(again.model), weights_of(whole.model)), iteration


def test_the_state_counts_the_iterations_up_to_the_start_of_the_window():
    whole = Training()
    whole.trainer.run(loader())
    assert [state["iteration"] for _, state in whole.saved.values()] == [0, 0, 3, 3, 3, 6, 6, 8]
    again = Training(saved=whole.saved[5])
    assert again.trainer.state_dict() == whole.saved[5][1]
    begun = []
    again.trainer.add_event_handler(Events.STARTED, lambda engine: begun.append(engine.state_dict()))
    again.trainer.run(loader())
    assert begun == [whole.saved[3][1]]


def test_deterministic_engines_go_back_too():
    def trained(saved=None):
        training = Training(saved=saved, deterministic=True)
        manual_seed(7)
        training.trainer.run(DataLoader(SAMPLES, batch_size=3, shuffle=True), max_epochs=2)
        return training

    whole = trained()
    for iteration in (4, 5, 10):
        assert torch.equal(weights_of(trained(whole.saved[iteration]).model), weights_of(whole.model))


def test_an_ended_run_is_gone_on_with_from_the_start_of_its_window():
    whole, ended = Training(), Training()
    whole.trainer.run(loader(), max_epochs=2)
    at(ended.trainer, Events.ITERATION_COMPLETED, lambda engine: engine.terminate(), 5)
    ended.trainer.run(loader(), max_epochs=2)
    again = Training(saved=(ended.model.state_dict(), ended.trainer.state_dict()))
    again.trainer.run(loader())
    assert torch.equal(weights_of(again.model), weights_of(whole.model))


@pytest.mark.parametrize("fails_at", [1, 4, 5, 6, 7, 13, 15])
def test_a_run_that_failed_does_its_window_again(fails_at):
    def loss_fn(y_pred, y):
        calls.append(1)
        if len(calls) == fails_at:
            raise ArithmeticError("no loss")
        return squared(y_pred, y)

    calls, whole, failed = [], Training(), Training(loss_fn=loss_fn)
    whole.trainer.run(loader(), max_epochs=2)
    with pytest.raises(ArithmeticError):
        failed.trainer.run(loader(), max_epochs=2)
    failed.trainer.run(loader(), max_epochs=2)
    assert failed.trainer.state.iteration == 16
    assert torch.equal(weights_of(failed.model), weights_of(whole.model))


def test_with_another_batch_size_no_sample_is_lost():
    whole = Training()
    whole.trainer.run(loader(), max_epochs=2)
    again = Training(saved=whole.saved[13])
    again.trainer.run(loader(batch_size=2))
    seen = torch.cat([*whole.given[8:11], *again.given])
    assert torch.equal(seen.sort(0).values, WHOLE[1].sort(0).values)
    assert (again.trainer.state.iteration, again.trainer.state.epoch) == (24, 2)


def test_a_step_of_ones_own_can_hold_its_position():
    def collect(engine, number):
        if engine.iteration_in_epoch % 3 == 1:
            engine.hold_position()
        given.append(number.item())
        if engine.iteration_in_epoch % 3 == 0:
            engine.release_position()

    given, states = [], {}
    engine = Engine(collect)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: states.update({e.state.iteration: e.state_dict()}))
    engine.run(idist.auto_dataloader(range(6)))
    engine.load_state_dict(states[5])
    engine.run(idist.auto_dataloader(range(6)))
    assert given == [0, 1, 2, 3, 4, 5, 3, 4, 5]
    engine.hold_position()  # without a run there is nothing to hold
    engine.release_position()


# --- other data --------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SAMPLES[:15])


class Stateful(list):
    """Data with a state of their own, which knows the present place only."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def resumed_on(data, iteration, **arguments):
    whole = Training()
    whole.trainer.run(data(), **arguments)
    again = Training(saved=whole.saved[iteration])
    again.trainer.run(data())
    return whole, again


@pytest.mark.filterwarnings("ignore:the data cannot seek")
@pytest.mark.parametrize("iteration", [1, 4])
def test_streams_are_skipped_to_the_start_of_the_window(iteration):
    whole, again = resumed_on(lambda: idist.auto_dataloader(Stream(), batch_size=3), iteration)
    assert torch.equal(weights_of(again.model), weights_of(whole.model))


def test_of_lists_which_are_read_from_their_beginning_a_whole_window_is_made():
    data = batches_of(3, 3, 3, 3, 3, 3)
    _, again = resumed_on(lambda: data, 4)
    assert again.steps == [6]
    assert len(again.given) == 3


@pytest.mark.parametrize("data", [lambda: Stateful(batches_of(3, 3, 3)), lambda: loader(batch_size=16)])
def test_data_that_cannot_go_back_so_far_say_what_is_lost(data):
    with pytest.warns(UserWarning, match="2 batches are lost"):
        resumed_on(data, 5, epoch_length=6)
