"""Windows of micro-batches: where they begin and end, and what a step is made of."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from camshaft.engine import Engine, Events
from tests.engine.traces import Sizeless, at, unsized
from tests.engine.windows import Weighted, batches_of, check, expected, squared, trainer_of, weights_of

DATA = batches_of(4, 4, 4, 4, 4, 4, 4)
ENDLESS = 10**6


def train(data, size, *, prepare=lambda trainer: None, **arguments):
    model = Weighted()
    trainer, steps = trainer_of(model, size)
    prepare(trainer)
    trainer.run(data, **arguments)
    return model, steps, trainer


# --- windows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "size", "arguments", "windows"),
    [
        (DATA[:4], 1, {}, [[0], [1], [2], [3]]),
        (DATA[:4], 2, {"max_epochs": 2}, [[0, 1], [2, 3]] * 2),
        # the last window of an epoch may be shorter, and the next epoch begins one
        (DATA[:5], 2, {"max_epochs": 2}, [[0, 1], [2, 3], [4]] * 2),
        (DATA[:5], 3, {"max_epochs": 2}, [[0, 1, 2], [3, 4]] * 2),
        (DATA[:3], 5, {"max_epochs": 2}, [[0, 1, 2]] * 2),
        # epochs that are not passes
        (DATA[:5], 2, {"max_epochs": 2, "epoch_length": 3}, [[0, 1], [2], [3, 4], [0]]),
        (DATA[:2], 3, {"max_epochs": 2, "epoch_length": 4}, [[0, 1, 0], [1]] * 2),
        # the number of iterations ends in a window
        (DATA[:4], 3, {"max_iters": 5}, [[0, 1, 2], [3], [0]]),
        (DATA[:6], 4, {"max_iters": 2}, [[0, 1]]),
        (DATA[:6], 4, {"max_iters": 6}, [[0, 1, 2, 3], [4, 5]]),
        # the length of an epoch is not known before its end
        (unsized(DATA[:5]), 2, {}, [[0, 1], [2, 3], [4]]),
        (unsized(DATA[:5]), 7, {}, [[0, 1, 2, 3, 4]]),
        (Sizeless(*DATA[:5]), 3, {"max_epochs": 2}, [[0, 1, 2], [3, 4]] * 2),
        (Sizeless(*DATA[:3]), 2, {"max_iters": 5}, [[0, 1], [2], [0, 1]]),
        (Sizeless(*DATA[:4]), 3, {"max_iters": 2}, [[0, 1]]),
    ],
)
def test_a_window_is_one_step_with_the_mean_over_it(data, size, arguments, windows):
    model, steps, _ = train(data, size, **arguments)
    check(model, DATA, windows)
    assert len(steps) == len(windows)


@pytest.mark.filterwarnings("ignore:the data ran out:UserWarning")
def test_data_that_run_dry_in_a_window_are_stepped():
    model, _, _ = train(unsized(DATA[:5]), 2, max_epochs=3, epoch_length=4)
    check(model, DATA, [[0, 1], [2, 3], [4]])


@pytest.mark.parametrize("skipping", [False, True])
def test_an_epoch_that_is_cut_short_steps_what_it_has(skipping):
    def prepare(trainer):
        at(trainer, Events.ITERATION_COMPLETED, lambda engine: engine.terminate_epoch(skipping), 4)

    model, steps, _ = train(DATA[:6], 3, prepare=prepare, max_epochs=2)
    check(model, DATA, [[0, 1, 2], [3], [0, 1, 2], [3, 4, 5]])
    assert steps == [3, 4, 7, 10]


def test_handlers_of_the_end_of_an_epoch_find_the_step_done():
    def prepare(trainer):
        at(trainer, Events.ITERATION_COMPLETED, lambda engine: engine.terminate_epoch(), 1)
        for event in (Events.TERMINATE_SINGLE_EPOCH, Events.EPOCH_COMPLETED):
            trainer.add_event_handler(event, lambda engine: found.append(len(steps)))

    found, model = [], Weighted()
    trainer, steps = trainer_of(model, 3)
    prepare(trainer)
    trainer.run(DATA)
    assert found == [1, 1]


@pytest.mark.parametrize(("data", "arguments"), [(DATA[:4], {"max_epochs": 1}), (DATA[:6], {"max_iters": 4})])
def test_handlers_of_the_last_iteration_find_the_step_done(data, arguments):
    found = []
    trainer, steps = trainer_of(Weighted(), 3)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda engine: found.append(list(steps)))
    trainer.run(data, **arguments)
    assert found == [steps] == [[3, 4]]


def test_a_run_whose_target_was_brought_nearer_steps_what_it_has():
    def prepare(trainer):
        at(trainer, Events.ITERATION_COMPLETED, lambda engine: setattr(engine.state, "max_iters", 4), 4)

    model, steps, _ = train(DATA[:6], 3, prepare=prepare, max_iters=6)
    check(model, DATA, [[0, 1, 2], [3]])
    assert steps == [3, 4]


def test_parameters_without_a_gradient_do_not_matter():
    model = Weighted()
    model.unused = nn.Parameter(torch.ones(1))
    trainer, _ = trainer_of(model, 3)
    trainer.run(unsized(DATA[:2]))
    assert model.unused.item() == 1.0
    del model.unused
    check(model, DATA, [[0, 1]])


@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.GET_BATCH_STARTED])
@pytest.mark.parametrize("arguments", [{"max_epochs": 1}, {"max_epochs": 2}, {"max_iters": 6}], ids=str)
def test_a_run_that_somebody_ends_steps_no_more(event, arguments):
    """Perhaps it is ended because these gradients are bad."""
    model, steps, _ = train(
        DATA[:6], 3, prepare=lambda trainer: at(trainer, event, lambda e: e.terminate(), 5), **arguments
    )
    check(model, DATA, [[0, 1, 2]])
    assert steps == [3]


def test_after_a_run_that_somebody_ended_the_next_begins_a_window():
    model, _, trainer = train(
        DATA[:6], 2, prepare=lambda t: at(t, Events.ITERATION_COMPLETED, lambda e: e.terminate(), 3), max_epochs=3
    )
    trainer.run(DATA[:6])
    check(model, DATA, [[0, 1], *[[0, 1], [2, 3], [4, 5]] * 2])


@pytest.mark.parametrize("pause_at", range(1, 11))
def test_a_pause_changes_nothing(pause_at):
    def prepare(trainer):
        at(trainer, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt(), pause_at)

    model, _, trainer = train(DATA[:5], 3, prepare=prepare, max_epochs=2)
    trainer.run(DATA[:5], max_epochs=2)
    check(model, DATA, [[0, 1, 2], [3, 4]] * 2)


def test_a_pause_in_which_the_target_grows_leaves_the_mean_a_mean():
    def prepare(trainer):
        at(trainer, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt(), 4)

    model, steps, trainer = train(DATA[:6], 3, prepare=prepare, max_iters=5)
    trainer.run(max_iters=6)
    check(model, DATA, [[0, 1, 2], [3, 4, 5]])
    assert steps == [3, 6]


# --- errors --------------------------------------------------------------------------------------------------------


def failing_at(number):
    """Give a loss function that raises at its n-th call."""
    calls = iter(range(1, ENDLESS))

    def loss_fn(y_pred, y):
        if next(calls) == number:
            raise ArithmeticError("no loss")
        return squared(y_pred, y)

    return loss_fn


def test_an_error_that_is_swallowed_ends_the_epoch_and_what_it_has_is_stepped():
    model = Weighted()
    trainer, steps = trainer_of(model, 3, failing_at(5))
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    trainer.run(DATA[:6], max_epochs=2)
    check(model, DATA, [[0, 1, 2], [3], [5, 0, 1], [2, 3, 4]])
    assert steps == [3, 5, 8, 11]


def test_an_error_in_the_first_batch_of_a_window_leaves_nothing_to_step():
    model = Weighted()
    trainer, steps = trainer_of(model, 3, failing_at(4))
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    trainer.run(DATA[:6])
    check(model, DATA, [[0, 1, 2]])
    assert steps == [3]


def test_a_run_that_goes_on_after_an_error_steps_means():
    model = Weighted()
    trainer, _ = trainer_of(model, 3, failing_at(5))
    with pytest.raises(ArithmeticError):
        trainer.run(DATA[:6], max_epochs=2)
    trainer.run(DATA[:6])  # the whole window again, from the beginning of the data
    windows = [0, 1, 2], [0, 1, 2], [3, 4, 5], [0, 1, 2]
    assert torch.allclose(weights_of(model), expected([[DATA[index] for index in window] for window in windows]))


# --- resuming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iteration", range(6))
def test_a_window_that_is_resumed_in_its_middle_holds_the_rest(iteration):
    model = Weighted()
    trainer, steps = trainer_of(model, 3)
    trainer.load_state_dict({"iteration": iteration, "epoch_length": 6, "max_epochs": 1})
    trainer.run(DATA[iteration:6])
    windows = [[index for index in window if index >= iteration] for window in ([0, 1, 2], [3, 4, 5])]
    check(model, DATA, [window for window in windows if window])
    assert steps == [3, 6] if iteration < 3 else [6]


@pytest.mark.parametrize(("how", "stops_at"), [("pause", 4), ("pause", 5), ("error", 5), ("error", 6)])
def test_loading_a_state_gives_up_the_window_that_was_begun(how, stops_at):
    model = Weighted()
    trainer, _ = trainer_of(model, 3, failing_at(stops_at) if how == "error" else squared)
    if how == "pause":
        at(trainer, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt(), stops_at)
    with pytest.raises(ArithmeticError) if how == "error" else nullcontext():
        trainer.run(DATA[:6])
    model.load_state_dict(Weighted().state_dict())
    trainer.load_state_dict({"iteration": 4, "epoch_length": 6, "max_epochs": 1})
    trainer.run(DATA[4:6])
    check(model, DATA, [[4, 5]])


def test_a_step_that_two_engines_share_keeps_their_windows_apart():
    model = Weighted()
    first, steps = trainer_of(model, 2)
    second = Engine(first._process_function)
    for _ in range(2):
        first.run(Sizeless(*DATA[:3]))
        second.run(Sizeless(*DATA[3:6]))
    check(model, DATA, [[0, 1], [2], [3, 4], [5]] * 2)
    assert len(steps) == 8
