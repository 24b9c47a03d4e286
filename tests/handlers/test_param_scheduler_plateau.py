"""Learning rates that follow a metric."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ReduceLROnPlateau

from camshaft.engine import Engine, Events
from camshaft.handlers import ReduceLROnPlateauScheduler
from tests.handlers.parts import at
from tests.handlers.schedules import entries, reread, sgd

LOSSES = [0.5, 0.6, 0.4, 0.4, 0.4, 0.45, 0.3, 0.3, 0.3, 0.3]
OPTIONS = {"patience": 1, "factor": 0.5, "cooldown": 1}


def lr(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def after_each(scheduler, losses):
    """List the rates after each call with a metric."""
    rows = []
    for loss in losses:
        scheduler(at(loss=loss))
        rows.append(lr(scheduler.optimizer))
    return rows


def natively(optimizer, losses, **options):
    scheduler, rows = ReduceLROnPlateau(optimizer, **options), []
    for loss in losses:
        scheduler.step(loss)
        rows.append(lr(optimizer))
    return rows


metrics = st.lists(st.floats(0, 1), min_size=1, max_size=20)


@given(metrics, st.sampled_from([{}, {"min_lr": 0.1}, {"min_lr": [0.2, 0.01]}, {"mode": "max", "min_lr": 0}]))
def test_rates_are_those_of_torch(losses, options):
    """[H24] with ``min_lr`` as it was given."""
    found = after_each(ReduceLROnPlateauScheduler(sgd(0.5, 0.1), "loss", **OPTIONS, **options), losses)
    assert found == natively(sgd(0.5, 0.1), losses, **OPTIONS, **options)


@given(metrics, st.sampled_from([0, 1, -1]), st.sampled_from([0, 0.1, 0.01]))
def test_one_group_alone_with_its_own_bound(losses, index, bound):
    """[H24] also for groups after the first, and for an integer."""
    found = after_each(
        ReduceLROnPlateauScheduler(sgd(0.5, 0.3), "loss", param_group_index=index, min_lr=bound, **OPTIONS), losses
    )
    expected = natively(sgd([0.5, 0.3][index]), losses, min_lr=bound, **OPTIONS)
    assert [row[index] for row in found] == [rate for (rate,) in expected]
    other = 1 - index % 2
    assert {row[other] for row in found} == {[0.5, 0.3][other]}


def test_it_follows_an_evaluator_and_its_history_is_with_the_trainer():
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
    expected = natively(sgd(0.5), torch.tensor(LOSSES), **OPTIONS)
    assert trainer.state.param_history == {"lr": expected}
    assert not hasattr(evaluator.state, "param_history")
    assert lr(optimizer) == [expected[-1][0], 0.3]


def test_history_is_with_the_engine_where_there_is_no_trainer():
    engine = at(loss=1.0)
    ReduceLROnPlateauScheduler(sgd(0.5, 0.3), "loss", save_history=True)(engine)
    assert engine.state.param_history == {"lr": [[0.5, 0.3]]}


def test_a_metric_that_is_not_there_is_named():
    scheduler = ReduceLROnPlateauScheduler(sgd(), "loss", **OPTIONS)
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match=r"must be that of a metric of the engine, \['accuracy'\], got 'loss'"):
        scheduler(at(accuracy=1.0))
    assert scheduler.state_dict() == before


@given(before=st.integers(0, 9), index=st.sampled_from([None, 1]))
def test_a_state_saved_at_any_call_goes_on(before, index):
    """The rate itself is in the state of the optimizer: this scheduler only lowers what it finds."""
    optimizer, other = sgd(0.5, 0.1), sgd(0.5, 0.1)
    scheduler, fresh = (
        ReduceLROnPlateauScheduler(one, "loss", param_group_index=index, **OPTIONS) for one in (optimizer, other)
    )
    after_each(scheduler, LOSSES[:before])
    other.load_state_dict(optimizer.state_dict())
    fresh.load_state_dict(reread(scheduler.state_dict()))
    assert after_each(fresh, LOSSES[before:]) == after_each(scheduler, LOSSES[before:])


def test_simulated_values_are_those_of_a_run():
    expected = natively(sgd(0.5), LOSSES, **OPTIONS)
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
        ({"param_group_index": 2}, ValueError, "one of the 2 groups"),
        ({"metric_name": 1}, TypeError, "metric_name must be a string"),
        ({"optimizer": type("Odd", (), {"param_groups": []})()}, TypeError, "Odd is not an Optimizer"),
    ],
)
def test_bad_input_is_refused(options, error, message):
    optimizer = sgd(0.5, 0.3)
    before = entries(optimizer)
    with pytest.raises(error, match=message):
        ReduceLROnPlateauScheduler(**{"optimizer": optimizer, "metric_name": "loss", **options})
    assert entries(optimizer) == before
