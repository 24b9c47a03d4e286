"""What is particular to schedulers of torch: their own steps and parts, and ReduceLROnPlateau."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as native

from camshaft.engine import Engine, Events
from camshaft.handlers import ConcatScheduler, LRScheduler, ReduceLROnPlateauScheduler
from tests.handlers.parts import at
from tests.handlers.schedules import DECAY, NATIVE, calls, chain, lr, natively, reread, run_with, sgd


@pytest.mark.parametrize("make", NATIVE.values(), ids=NATIVE)
def test_legacy_steps_use_the_rates_of_torch(make):
    optimizer = sgd()
    with pytest.warns(UserWarning, match="must be attached to Events.ITERATION_COMPLETED"):
        scheduler = LRScheduler(make(optimizer), use_legacy=True)
    assert run_with(scheduler, optimizer, 20, Events.ITERATION_COMPLETED) == natively(make)[1]((0.5,), 20)


def test_a_scheduler_that_has_stepped_continues_and_leaves_the_rate_of_the_last_step():
    optimizer = sgd()
    scheduler = native.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    assert run_with(LRScheduler(scheduler), optimizer, 3, read=lr) == [[0.25], [0.125], [0.0625]]
    assert lr(optimizer) == [0.0625]


def test_accumulating_gradients_before_the_first_step_does_not_warn():
    """Torch would warn that the optimizer has not stepped, which is intended here, also after a simulation."""
    optimizer = sgd()
    trainer = Engine(lambda engine, batch: optimizer.step() if engine.state.iteration % 4 == 0 else None)
    scheduler = chain((DECAY, 1), (DECAY, 0))[0](optimizer)
    ConcatScheduler.simulate_values(9, scheduler.schedulers, scheduler.durations)
    scheduler.attach(trainer)
    trainer.run(range(8))


def test_a_custom_step_method_is_called():
    class Own(native.ExponentialLR):
        def step(self):
            super().step()
            self.optimizer.param_groups[0]["lr"] += 1
            self._last_lr = lr(self.optimizer)

    make, reference = natively(lambda optimizer: Own(optimizer, 0.5))
    optimizer = sgd()
    assert run_with(make(optimizer), optimizer, 3) == reference((0.5,), 3)


def test_a_group_that_is_added_later_takes_part_from_the_next_step():
    optimizer = sgd()
    scheduler = LRScheduler(native.ExponentialLR(optimizer, 0.5))
    scheduler(None)
    assert scheduler.get_param() == 0.5
    optimizer.add_param_group({"params": [torch.zeros(1)], "lr": 1.0})
    assert calls(scheduler, 2, lambda: lr(optimizer)) == [[0.25, 0.5], [0.125, 0.25]]
    assert scheduler.get_param() == [0.125, 0.25]


class Wrapped(native.LRScheduler):
    """A custom scheduler that holds another one, and thereby the optimizer."""

    def __init__(self, optimizer, after):
        self.after = after
        super().__init__(optimizer)

    def get_lr(self):
        return [rate / 2 for rate in self.base_lrs]

    def step(self, epoch=None):
        super().step()
        if self.last_epoch > 2:
            self.after.step()


def test_a_nested_scheduler_keeps_its_optimizer():
    optimizer = sgd()
    scheduler = Wrapped(optimizer, native.ExponentialLR(optimizer, 0.5))
    rows = LRScheduler.simulate_values(6, scheduler)
    assert scheduler.after.optimizer is optimizer
    assert [row[1:] for row in rows] == run_with(LRScheduler(scheduler), optimizer, 6, read=lr)


# --- ReduceLROnPlateauScheduler -------------------------------------------------------------------------------------

LOSSES = [0.5, 0.6, 0.4, 0.4, 0.4, 0.45, 0.3, 0.3, 0.3, 0.3]
OPTIONS = {"patience": 1, "factor": 0.5, "cooldown": 1}


def after_each(scheduler, losses):
    """Return the rates after each call with a metric."""
    return [lr(scheduler.optimizer) for loss in losses if not scheduler(at(loss=loss))]


def plateau_natively(rates, losses, **options):
    optimizer = sgd(*rates)
    scheduler = native.ReduceLROnPlateau(optimizer, **OPTIONS, **options)
    return [lr(optimizer) for loss in losses if not scheduler.step(loss)]


metrics = st.lists(st.floats(0, 1), min_size=1, max_size=20)


@given(metrics, st.sampled_from([{}, {"min_lr": 0.1}, {"min_lr": [0.2, 0.01]}, {"mode": "max", "min_lr": 0}]))
def test_plateau_rates_are_those_of_torch(losses, options):
    """[H24] with ``min_lr`` as it was given."""
    scheduler = ReduceLROnPlateauScheduler(sgd(0.5, 0.1), "loss", **OPTIONS, **options)
    assert after_each(scheduler, losses) == plateau_natively((0.5, 0.1), losses, **options)


@given(metrics, st.sampled_from([0, 1, -1]), st.sampled_from([0, 0.1, 0.01]))
def test_a_single_group_with_its_own_bound(losses, index, bound):
    """[H24] also for groups after the first, and for an integer."""
    rates = [0.5, 0.3]
    scheduler = ReduceLROnPlateauScheduler(sgd(*rates), "loss", param_group_index=index, min_lr=bound, **OPTIONS)
    expected = [rates.copy() for _ in losses]
    for row, (rate,) in zip(expected, plateau_natively([rates[index]], losses, min_lr=bound), strict=True):
        row[index] = rate
    assert after_each(scheduler, losses) == expected


@pytest.mark.parametrize("is_given", [True, False])
def test_history_is_kept_by_the_trainer_or_else_by_the_engine(is_given):
    optimizer, losses = sgd(0.5, 0.3), iter(LOSSES)
    trainer, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None)
    ReduceLROnPlateauScheduler(
        optimizer, "loss", trainer=trainer if is_given else None, save_history=True, param_group_index=0, **OPTIONS
    ).attach(evaluator)

    @evaluator.on(Events.EPOCH_COMPLETED)
    def measure():
        evaluator.state.metrics["loss"] = torch.tensor(next(losses))

    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    trainer.run([0], max_epochs=len(LOSSES))
    expected = plateau_natively([0.5], LOSSES)
    keeper, other = (trainer, evaluator) if is_given else (evaluator, trainer)
    assert keeper.state.param_history == {"lr": expected}
    assert not hasattr(other.state, "param_history")
    assert lr(optimizer) == [expected[-1][0], 0.3]


def test_a_missing_metric_is_reported_by_name():
    scheduler = ReduceLROnPlateauScheduler(sgd(), "loss")
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match="'loss'"):
        scheduler(at(accuracy=1.0))
    assert scheduler.state_dict() == before


@given(before=st.integers(0, 9), index=st.sampled_from([None, 1]))
def test_the_state_of_a_plateau_resumes(before, index):
    """The rate itself is in the state of the optimizer: this scheduler only reduces it."""
    optimizer, other = sgd(0.5, 0.1), sgd(0.5, 0.1)
    scheduler, fresh = (
        ReduceLROnPlateauScheduler(one, "loss", param_group_index=index, **OPTIONS) for one in (optimizer, other)
    )
    after_each(scheduler, LOSSES[:before])
    other.load_state_dict(optimizer.state_dict())
    fresh.load_state_dict(reread(scheduler.state_dict()))
    assert after_each(fresh, LOSSES[before:]) == after_each(scheduler, LOSSES[before:])


def test_simulated_values_of_a_plateau_are_those_of_a_run():
    rows = ReduceLROnPlateauScheduler.simulate_values(len(LOSSES), LOSSES, init_lr=0.5, **OPTIONS)
    assert rows == [[index, *row] for index, row in enumerate(plateau_natively([0.5], LOSSES))]
