"""Schedulers in runs: the calls that count, and runs that are interrupted and resumed."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.engine import Engine, Events, create_supervised_trainer
from camshaft.handlers import LambdaStateScheduler, PiecewiseLinear, PiecewiseLinearStateScheduler, StepStateScheduler
from tests.handlers.schedules import DECAY, RAMP, TEETH, chain, lr, reread, sgd

MAKES = {
    "torch": DECAY[0],
    "piecewise": RAMP[0],
    "cycles": TEETH[0],
    "chain": chain((RAMP, 2), (DECAY, 0))[0],
    "state, function": lambda _: LambdaStateScheduler(lambda index: 3 * index, "noise"),
    "state, steps": lambda _: StepStateScheduler(2, 0.5, 3, "noise"),
    "state, piecewise": lambda _: PiecewiseLinearStateScheduler([(2, 1.0), (9, 0.1)], "noise"),
}


def fail():
    raise ZeroDivisionError


INTERRUPTIONS = {
    "terminated": (Events.ITERATION_COMPLETED, Engine.terminate, 0),
    "failed before the call": (Events.ITERATION_STARTED, fail, -1),
    "failed after the call": (Events.ITERATION_STARTED, fail, 1),
}


def train(make, event, interruption=None, iteration=None, reloads=True):
    """Run, if interrupted twice; return the values of the steps, the index of the next value, and the history."""
    rows = {}

    def create():
        optimizer = sgd()
        scheduler = make(optimizer)

        def step(engine, batch):
            rows[engine.state.iteration] = lr(optimizer), engine.state.noise
            optimizer.step()

        trainer = Engine(step)
        trainer.state.noise, trainer.state.param_history = None, {}
        trainer.state_dict_user_keys.extend(["noise", "param_history"])
        scheduler.save_history = True
        scheduler.attach(trainer, event)
        return trainer, scheduler, optimizer

    parts = create()
    if interruption is not None:
        where, handler, order = INTERRUPTIONS[interruption]
        handle = parts[0].add_event_handler(where(once=iteration), handler, order=order)
        with contextlib.suppress(ZeroDivisionError):
            parts[0].run(range(4), max_epochs=5)
        handle.remove()
        if reloads or interruption == "terminated":
            states = reread([one.state_dict() for one in parts])
            parts = create()
            for one, state in zip(parts, states, strict=True):
                one.load_state_dict(state)
    parts[0].run(range(4), max_epochs=5)
    return rows, parts[1].event_index, parts[0].state.param_history


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@settings(max_examples=40)
@given(
    event=st.sampled_from([Events.EPOCH_STARTED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED]),
    interruption=st.sampled_from(sorted(INTERRUPTIONS)),
    iteration=st.integers(1, 19),
    reloads=st.booleans(),
)
def test_no_epoch_or_iteration_of_a_resumed_run_is_counted_twice(make, event, interruption, iteration, reloads):
    assert train(make, event, interruption, iteration, reloads) == train(make, event)


@pytest.mark.parametrize(
    "event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.ITERATION_STARTED(every=2)]
)
@pytest.mark.parametrize("make", [MAKES[name] for name in ("torch", "cycles", "chain")])
def test_a_schedule_saved_at_the_end_of_a_window_resumes_exactly(make, event):
    def run(save_at=None, states=()):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        trainer = create_supervised_trainer(
            model, optimizer, torch.nn.functional.mse_loss, gradient_accumulation_steps=3
        )
        parts = [trainer, make(optimizer), optimizer]
        rates, saved = [], []
        optimizer.register_step_pre_hook(lambda *_: rates.append((trainer.state.iteration, lr(optimizer))))
        parts[1].attach(trainer, event)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=save_at or 99),
            lambda: trainer.defer(lambda _: saved.extend(reread([one.state_dict() for one in parts]))),
        )
        for one, state in zip(parts, states, strict=False):
            one.load_state_dict(state)
        trainer.run([(torch.ones(1, 1), torch.ones(1, 1))] * 7, max_epochs=2)
        return rates, saved

    expected, _ = run()
    for save_at in range(1, 14):
        _, states = run(save_at)
        done = [row for row in expected if row[0] <= states[0]["iteration"]]
        assert done + run(states=states)[0] == expected, save_at


@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.EPOCH_STARTED, Events.COMPLETED])
def test_each_event_of_a_new_run_is_counted_until_the_scheduler_is_detached(event):
    scheduler, trainer = RAMP[0](sgd()), Engine(lambda engine, batch: None)
    with scheduler.attach(trainer, event):
        for count in (1, 2, 3):
            trainer.run([0])
            assert scheduler.event_index == count
    trainer.run([0])
    assert scheduler.event_index == 3


def test_an_iteration_in_which_the_scheduler_failed_is_counted_when_it_is_repeated():
    class Failing(PiecewiseLinear):
        fails = True

        def get_param(self):
            if self.event_index == 1 and self.fails:
                fail()
            return super().get_param()

    scheduler = Failing(sgd(), "lr", [(0, 0.0), (6, 1.0)])
    trainer = Engine(lambda engine, batch: None)
    scheduler.attach(trainer)
    with pytest.raises(ZeroDivisionError):
        trainer.run(range(4))
    scheduler.fails = False
    trainer.run(range(4))
    assert scheduler.event_index == 4


def test_a_state_without_an_iteration_is_loaded():
    trainer, scheduler = Engine(lambda engine, batch: None), PiecewiseLinear(sgd(), "lr", [(0, 0.0), (6, 1.0)])
    scheduler.attach(trainer)
    trainer.run([0, 0])
    scheduler.load_state_dict({"event_index": 5, "param_name": "lr", "milestones": [0, 6], "values": [0.0, 1.0]})
    trainer.load_state_dict({"iteration": 1, "epoch_length": 2, "max_epochs": 1})
    trainer.run([0, 0])
    assert scheduler.event_index == 6
