"""Schedulers of attributes of an engine's state."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.engine import Engine, Events
from camshaft.handlers import (
    ExpStateScheduler,
    LambdaStateScheduler,
    MultiStepStateScheduler,
    PiecewiseLinearStateScheduler,
    StateParamScheduler,
    StepStateScheduler,
)
from tests.handlers.schedules import lr, piecewise, reread, run_with, sgd


class Counting:
    """A callable with a state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, index):
        self.calls += 1
        return index * 10 + self.calls


class Parity(StateParamScheduler):
    def get_param(self):
        return self.event_index % 2


PAIRS = [(2, 1.0), (5, 0.5), (5, 0.1), (9, 0.7)]
COURSE = {"initial_value": 2, "gamma": 0.5}
CASES = {
    "function": (LambdaStateScheduler, lambda: {"lambda_obj": lambda index: 3 * index}, lambda index: 3 * index),
    "object": (LambdaStateScheduler, lambda: {"lambda_obj": Counting()}, lambda index: 11 * index),
    "piecewise": (PiecewiseLinearStateScheduler, lambda: {"milestones_values": PAIRS}, None),
    "exponential": (ExpStateScheduler, lambda: COURSE, lambda index: 2 * 0.5**index),
    "step": (StepStateScheduler, lambda: {**COURSE, "step_size": 3}, lambda index: 2 * 0.5 ** (index // 3)),
    "multistep": (
        MultiStepStateScheduler,
        lambda: {**COURSE, "milestones": [7, 2, 2]},
        lambda index: 2 * 0.5 ** (2 * (index >= 2) + (index >= 7)),
    ),
    "custom": (Parity, dict, lambda index: index % 2),
}
each = pytest.mark.parametrize(("kind", "options", "value"), CASES.values(), ids=CASES)


def run(scheduler, count):
    """Return the values after each iteration."""
    trainer, rows = Engine(lambda engine, batch: None), []
    scheduler.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: rows.append(trainer.state.noise))
    trainer.run(range(count))
    return rows, trainer


@each
def test_runs_and_simulations_and_histories_have_the_values_of_the_formula(kind, options, value):
    """[H34] The first index is 1, so equal milestones act one event earlier than on an optimizer."""
    if value is None:
        optimizer = sgd()
        expected = [rate for (rate,) in run_with(piecewise(PAIRS)[0](optimizer), optimizer, 13, read=lr)][1:]
    else:
        expected = [value(index) for index in range(1, 13)]
    arguments = {**options(), "param_name": "noise"}
    rows = kind.simulate_values(12, **arguments, save_history=True)
    assert rows == [[index, one] for index, one in enumerate(expected)]
    values, trainer = run(kind(**arguments, create_new=True, save_history=True), 12)
    assert (values, trainer.state.param_history) == (expected, {"noise": expected})


@each
@settings(max_examples=20)
@given(before=st.integers(0, 10), after=st.integers(1, 10))
def test_a_state_saved_at_any_call_continues(kind, options, value, before, after):
    """[H26] It loads with weights_only=True, also if the values come from a function."""

    def calls(scheduler, count):
        engine = Engine(lambda engine, batch: None)
        return [engine.state.noise for _ in range(count) if not scheduler(engine)]

    scheduler, fresh = (kind(**options(), param_name="noise") for _ in range(2))
    calls(scheduler, before)
    fresh.load_state_dict(reread(scheduler.state_dict()))
    assert calls(fresh, after) == calls(scheduler, after)


def decorated(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


@pytest.mark.parametrize(
    "function",
    [len, float, decorated(float), functools.partial(max, 3), functools.lru_cache(abs), Counting().__call__],
)
def test_functions_are_not_saved(function):
    scheduler = LambdaStateScheduler(function, "noise")
    state = reread(scheduler.state_dict())
    assert not state["lambda_obj"]
    scheduler.load_state_dict(state)
    assert scheduler.lambda_obj is function


def test_the_attribute_is_none_until_the_first_call_and_stays_when_the_scheduler_is_detached():
    trainer = Engine(lambda engine, batch: None)
    with ExpStateScheduler(8.0, 0.5, "noise", create_new=True).attach(trainer, Events.EPOCH_COMPLETED):
        assert trainer.state.noise is None
        trainer.run([0, 0], max_epochs=2)
    trainer.run([0])
    assert trainer.state.noise == 2.0


def test_an_existing_attribute_is_set_unless_it_must_be_new():
    trainer = Engine(lambda engine, batch: None)
    trainer.state.noise = 5.0
    with pytest.raises(ValueError, match="already has an attribute 'noise'"):
        ExpStateScheduler(8.0, 0.5, "noise", create_new=True).attach(trainer)
    trainer.run([0])
    assert trainer.state.noise == 5.0
    ExpStateScheduler(8.0, 0.5, "noise").attach(trainer)
    assert trainer.state.noise == 5.0
    trainer.run([0])
    assert trainer.state.noise == 4.0


def test_a_missing_attribute_is_created_with_a_warning():
    trainer = Engine(lambda engine, batch: None)
    with pytest.warns(UserWarning, match="no attribute 'noise'"):
        ExpStateScheduler(8.0, 0.5, "noise").attach(trainer)
    assert trainer.state.noise is None


def test_a_state_that_does_not_fit_is_rejected_and_changes_nothing():
    scheduler = LambdaStateScheduler(Counting(), "noise")
    with pytest.raises(ValueError, match="must hold 'lambda_obj'"):
        scheduler.load_state_dict({"event_index": 3, "param_name": "noise"})
    with pytest.raises(ValueError, match="with the same arguments"):
        scheduler.load_state_dict({"event_index": 3, "param_name": "noise", "lambda_obj": 3})
    assert scheduler.event_index == 0
