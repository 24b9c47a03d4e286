"""Schedulers of torch: the rates equal those of ``scheduler.step()`` at the end of each iteration."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as native
from torch.optim.lr_scheduler import ReduceLROnPlateau

from camshaft.engine import Engine, Events
from camshaft.handlers import LRScheduler, ReduceLROnPlateauScheduler
from tests.handlers.parts import at
from tests.handlers.schedules import NATIVE, calls, entries, natively, reread, run_with, seen, sgd

each = pytest.mark.parametrize("make", NATIVE.values(), ids=NATIVE)


def test_every_scheduler_of_torch_is_tested():
    kinds = {
        kind
        for kind in vars(native).values()
        if inspect.isclass(kind) and issubclass(kind, native.LRScheduler) and kind.__module__ == native.__name__
    }
    kinds -= {native.LRScheduler, native._LRScheduler, native.ReduceLROnPlateau}
    assert kinds == {type(make(sgd())) for make in NATIVE.values()}


@each
@pytest.mark.parametrize("rates", [(0.5,), (0.5, 0.1)], ids=["one group", "two groups"])
def test_steps_use_the_rates_of_torch(make, rates):
    optimizer = sgd(*rates)
    expected = natively(make, sgd(*rates), 20)
    assert run_with(LRScheduler(make(optimizer)), optimizer, 20) == expected


@each
def test_legacy_steps_use_the_rates_of_torch(make):
    optimizer = sgd()
    with pytest.warns(UserWarning, match="must be attached to Events.ITERATION_COMPLETED"):
        scheduler = LRScheduler(make(optimizer), use_legacy=True)
    assert run_with(scheduler, optimizer, 20, Events.ITERATION_COMPLETED) == natively(make, sgd(), 20)


@each
@settings(max_examples=10)
@given(before=st.integers(0, 15), after=st.integers(1, 15))
def test_a_state_saved_at_any_call_continues(make, before, after):
    """Also where the state of the optimizer is not loaded."""
    optimizer, other = sgd(), sgd()
    scheduler, fresh = LRScheduler(make(optimizer)), LRScheduler(make(other))
    calls(scheduler, before, optimizer.step)
    fresh.load_state_dict(reread(scheduler.state_dict()))
    rows = [
        calls(one, after, lambda one=one: (seen(one.optimizer), one.optimizer.step())) for one in (fresh, scheduler)
    ]
    assert rows[0] == rows[1]


@each
def test_simulated_values_are_those_of_a_run_and_change_nothing(make):
    optimizer = sgd(0.5, 0.1)
    scheduler = make(optimizer)
    before, groups = copy.deepcopy(scheduler.state_dict()), entries(optimizer)
    rows = LRScheduler.simulate_values(20, scheduler)
    assert (scheduler.state_dict(), entries(optimizer)) == (before, groups)
    run = run_with(LRScheduler(scheduler), optimizer, 20)
    assert rows == [[index, *(rate for rate, _ in row)] for index, row in enumerate(run)]
    assert run == natively(make, sgd(0.5, 0.1), 20)


def test_simulating_beyond_the_end_of_a_scheduler_changes_nothing():
    optimizer = sgd()
    scheduler = native.OneCycleLR(optimizer, 0.5, total_steps=5)
    before, groups = copy.deepcopy(scheduler.state_dict()), entries(optimizer)
    with pytest.raises(ValueError, match="total steps"):
        LRScheduler.simulate_values(20, scheduler)
    assert (scheduler.state_dict(), entries(optimizer)) == (before, groups)


def test_one_cycle_can_use_all_of_its_steps():
    optimizer = sgd()
    scheduler = LRScheduler(native.OneCycleLR(optimizer, 0.5, total_steps=5))
    assert len(run_with(scheduler, optimizer, 5)) == 5


def test_the_rate_in_the_optimizer_is_that_of_the_last_step():
    optimizer = sgd(0.5)
    scheduler = LRScheduler(native.ExponentialLR(optimizer, 0.5))
    assert run_with(scheduler, optimizer, 3) == [[(0.5, 0.9)], [(0.25, 0.9)], [(0.125, 0.9)]]
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_rates_written_by_others_are_overwritten():
    optimizer = sgd(0.5)
    scheduler = LRScheduler(native.ExponentialLR(optimizer, 0.5))
    found = []
    for _ in range(3):
        scheduler(None)
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.param_groups[0]["lr"] = 7.0
    assert found == [0.5, 0.25, 0.125]


def test_a_scheduler_that_has_already_stepped_continues():
    optimizer = sgd(0.5)
    scheduler = native.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    assert [row[1] for row in LRScheduler.simulate_values(2, scheduler)] == [0.25, 0.125]


def test_accumulating_gradients_before_the_first_step_does_not_warn():
    """Torch would warn that the optimizer has not stepped, which is intended here."""
    optimizer = sgd()
    trainer = Engine(lambda engine, batch: optimizer.step() if engine.state.iteration % 4 == 0 else None)
    LRScheduler(native.ExponentialLR(optimizer, 0.5)).attach(trainer)
    trainer.run(range(8))


@each
def test_the_state_equals_that_of_torch_after_each_step(make):
    optimizer, other = sgd(0.5, 0.1), sgd(0.5, 0.1)
    scheduler, plain = LRScheduler(make(optimizer)), make(other)
    scheduler(None)
    for _ in range(8):
        optimizer.step()
        other.step()
        scheduler(None)
        plain.step()
        assert reread_state(scheduler.lr_scheduler) == reread_state(plain)
        assert scheduler.lr_scheduler.get_last_lr() == plain.get_last_lr()


def reread_state(scheduler):
    return {name: value for name, value in scheduler.state_dict().items() if name not in ("_schedulers", "lr_lambdas")}


def test_a_custom_step_method_is_called():
    class Own(native.ExponentialLR):
        def step(self):
            super().step()
            self.optimizer.param_groups[0]["lr"] += 1
            self._last_lr = [self.optimizer.param_groups[0]["lr"]]

    scheduler = LRScheduler(Own(sgd(0.5), 0.5))
    assert run_with(scheduler, scheduler.optimizer, 3) == natively(lambda optimizer: Own(optimizer, 0.5), sgd(0.5), 3)


def test_a_group_that_is_added_later_takes_part_from_the_next_step():
    optimizer = sgd(0.5)
    scheduler = LRScheduler(native.ExponentialLR(optimizer, 0.5))
    scheduler(None)
    optimizer.add_param_group({"params": [torch.zeros(1)], "lr": 1.0})
    rates = []
    for _ in range(2):
        scheduler(None)
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates == [[0.25, 0.5], [0.125, 0.25]]


def test_history_has_one_rate_per_group():
    optimizer = sgd(0.5, 0.1)
    scheduler = LRScheduler(native.ExponentialLR(optimizer, 0.5), save_history=True)
    trainer = Engine(lambda engine, batch: optimizer.step())
    scheduler.attach(trainer)
    trainer.run(range(2))
    assert trainer.state.param_history == {"lr": [[0.5, 0.1], [0.25, 0.05]]}
    assert scheduler.get_param() == [0.25, 0.05]


def test_tensor_rates_are_updated_in_place():
    def make(rate):
        return torch.optim.SGD([torch.zeros(1)], lr=rate)

    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = make(rate)
    scheduler = LRScheduler(native.ExponentialLR(optimizer, 0.5), save_history=True)
    trainer = Engine(lambda engine, batch: optimizer.step())
    scheduler.attach(trainer)
    trainer.run(range(2))
    assert optimizer.param_groups[0]["lr"] is rate
    assert trainer.state.param_history == {"lr": [[0.5], [0.25]]}
    assert LRScheduler.simulate_values(2, scheduler.lr_scheduler) == [[0, 0.25], [1, 0.125]]
    assert rate.item() == 0.25
    fresh = LRScheduler(native.ExponentialLR(make(torch.tensor(0.5, dtype=torch.float64)), 0.5))
    fresh.load_state_dict(reread(scheduler.state_dict()))
    fresh(None)
    assert fresh.optimizer.param_groups[0]["lr"].item() == 0.125


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
    optimizer = sgd(0.5)
    scheduler = Wrapped(optimizer, native.ExponentialLR(optimizer, 0.5))
    rows = LRScheduler.simulate_values(6, scheduler)
    assert scheduler.after.optimizer is optimizer
    assert rows == [[index, row[0][0]] for index, row in enumerate(run_with(LRScheduler(scheduler), optimizer, 6))]


def test_a_state_that_does_not_fit_changes_nothing():
    optimizer = sgd()
    scheduler = LRScheduler(NATIVE["Sequential"](optimizer))
    calls(scheduler, 3, lambda: None)
    before = scheduler.state_dict()
    other = LRScheduler(NATIVE["Exponential"](sgd())).state_dict()
    with pytest.raises(ValueError, match="must be that of a LRScheduler with the same arguments"):
        scheduler.load_state_dict(other)
    assert scheduler.state_dict() == before


def test_reduce_lr_on_plateau_is_rejected_with_a_hint():
    with pytest.raises(TypeError, match=ReduceLROnPlateauScheduler.__name__):
        LRScheduler(native.ReduceLROnPlateau(sgd()))


@pytest.mark.parametrize("wrong", [None, 1, "lr", sgd(), native.ExponentialLR])
def test_anything_but_a_torch_scheduler_is_rejected(wrong):
    with pytest.raises(TypeError, match="must be a scheduler of torch.optim.lr_scheduler"):
        LRScheduler(wrong)


# --- ReduceLROnPlateauScheduler ------------------------------------------------------------------------------------

LOSSES = [0.5, 0.6, 0.4, 0.4, 0.4, 0.45, 0.3, 0.3, 0.3, 0.3]
OPTIONS = {"patience": 1, "factor": 0.5, "cooldown": 1}


def lr(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def after_each(scheduler, losses):
    """Return the rates after each call with a metric."""
    rows = []
    for loss in losses:
        scheduler(at(loss=loss))
        rows.append(lr(scheduler.optimizer))
    return rows


def plateau_natively(optimizer, losses, **options):
    scheduler, rows = ReduceLROnPlateau(optimizer, **options), []
    for loss in losses:
        scheduler.step(loss)
        rows.append(lr(optimizer))
    return rows


metrics = st.lists(st.floats(0, 1), min_size=1, max_size=20)


@given(metrics, st.sampled_from([{}, {"min_lr": 0.1}, {"min_lr": [0.2, 0.01]}, {"mode": "max", "min_lr": 0}]))
def test_plateau_rates_are_those_of_torch(losses, options):
    """[H24] with ``min_lr`` as it was given."""
    found = after_each(ReduceLROnPlateauScheduler(sgd(0.5, 0.1), "loss", **OPTIONS, **options), losses)
    assert found == plateau_natively(sgd(0.5, 0.1), losses, **OPTIONS, **options)


@given(metrics, st.sampled_from([0, 1, -1]), st.sampled_from([0, 0.1, 0.01]))
def test_a_single_group_with_its_own_bound(losses, index, bound):
    """[H24] also for groups after the first, and for an integer."""
    found = after_each(
        ReduceLROnPlateauScheduler(sgd(0.5, 0.3), "loss", param_group_index=index, min_lr=bound, **OPTIONS), losses
    )
    expected = plateau_natively(sgd([0.5, 0.3][index]), losses, min_lr=bound, **OPTIONS)
    assert [row[index] for row in found] == [rate for (rate,) in expected]
    other = 1 - index % 2
    assert {row[other] for row in found} == {[0.5, 0.3][other]}


def test_history_is_kept_by_the_trainer():
    optimizer, losses = sgd(0.5, 0.3), iter(LOSSES)
    trainer = Engine(lambda engine, batch: None)
    evaluator = Engine(lambda engine, batch: None)
    scheduler = ReduceLROnPlateauScheduler(
        optimizer, "loss", trainer=trainer, save_history=True, param_group_index=0, **OPTIONS
    )
    scheduler.attach(evaluator)

    @evaluator.on(Events.EPOCH_COMPLETED)
    def measure():
        evaluator.state.metrics["loss"] = torch.tensor(next(losses))

    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    trainer.run([0], max_epochs=len(LOSSES))
    expected = plateau_natively(sgd(0.5), torch.tensor(LOSSES), **OPTIONS)
    assert trainer.state.param_history == {"lr": expected}
    assert not hasattr(evaluator.state, "param_history")
    assert lr(optimizer) == [expected[-1][0], 0.3]


def test_history_is_kept_by_the_engine_without_a_trainer():
    engine = at(loss=1.0)
    ReduceLROnPlateauScheduler(sgd(0.5, 0.3), "loss", save_history=True)(engine)
    assert engine.state.param_history == {"lr": [[0.5, 0.3]]}


def test_a_missing_metric_is_reported_by_name():
    scheduler = ReduceLROnPlateauScheduler(sgd(), "loss", **OPTIONS)
    before = scheduler.state_dict()
    with pytest.raises(
        ValueError, match=r"metric_name needs the metric 'loss', but engine.state.metrics has \['accuracy'\]"
    ):
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
    expected = plateau_natively(sgd(0.5), LOSSES, **OPTIONS)
    rows = ReduceLROnPlateauScheduler.simulate_values(len(LOSSES), LOSSES, init_lr=0.5, **OPTIONS)
    assert rows == [[index, rate] for index, (rate,) in enumerate(expected)]
    with pytest.raises(ValueError, match="metric_values must hold num_events=3 values, got 10"):
        ReduceLROnPlateauScheduler.simulate_values(3, LOSSES, init_lr=0.5)


@pytest.mark.parametrize("verbose", [True, False])
def test_verbose_is_ignored_with_a_warning(verbose):
    with pytest.warns(UserWarning, match="verbose is ignored"):
        ReduceLROnPlateauScheduler(sgd(), "loss", verbose=verbose)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_lr": [0.1, 0.2], "param_group_index": 0}, TypeError, "min_lr must be a number"),
        ({"min_lr": "0", "param_group_index": 0}, TypeError, "min_lr must be a number"),
        ({"param_group_index": 2}, ValueError, "below 2, got 2"),
        ({"metric_name": 1}, TypeError, "metric_name must be a str"),
        ({"optimizer": type("Odd", (), {"param_groups": []})()}, TypeError, "Odd is not an Optimizer"),
    ],
)
def test_bad_arguments_of_a_plateau_are_rejected(options, error, message):
    optimizer = sgd(0.5, 0.3)
    before = entries(optimizer)
    with pytest.raises(error, match=message):
        ReduceLROnPlateauScheduler(**{"optimizer": optimizer, "metric_name": "loss", **options})
    assert entries(optimizer) == before
