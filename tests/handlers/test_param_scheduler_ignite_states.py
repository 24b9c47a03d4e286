"""States of PyTorch-Ignite's schedulers: a job that changes libraries continues with the same rates."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest

import camshaft.handlers
from tests.handlers.schedules import NATIVE, calls, run_with, seen, sgd

NUM_EVENTS = 16
PIECES = [(0, 0.1), (3, 1.0), (8, 0.2), (12, 0.6)]


@functools.cache
def ignite():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports deprecated parts of torch
        import ignite.engine
        import ignite.handlers

        return ignite


def piecewise(handlers, optimizer, **options):
    return handlers.PiecewiseLinear(optimizer, "lr", PIECES, **options)


def linear(handlers, optimizer, **options):
    return handlers.LinearCyclicalScheduler(optimizer, "lr", 0.1, 1.0, 5, **options)


def cosine(handlers, optimizer, **options):
    return handlers.CosineAnnealingScheduler(optimizer, "lr", 0.1, 1.0, 4, **options)


CYCLES = {"cycle_mult": 1.5, "start_value_mult": 0.5, "end_value_mult": 0.8}
MAKES = {
    "linear": linear,
    "linear, longer cycles": functools.partial(linear, **CYCLES),
    "linear, monotonic": functools.partial(linear, **CYCLES, monotonic=True, warmup_duration=3),
    "cosine": cosine,
    "cosine, longer cycles": functools.partial(cosine, **CYCLES, warmup_duration=2),
    "piecewise": piecewise,
    "in one group": lambda handlers, optimizer: linear(handlers, optimizer, param_group_index=0),
    "groups": lambda handlers, optimizer: handlers.param_scheduler.ParamGroupScheduler(
        [linear(handlers, optimizer, param_group_index=0), piecewise(handlers, optimizer, param_group_index=-1)],
        ["first", "second"],
    ),
}


def plateau(handlers, optimizer):
    return handlers.ReduceLROnPlateauScheduler(optimizer, "loss", patience=1, factor=0.5)


# which count calls differently
REJECTED = {
    "chain": lambda handlers, optimizer: handlers.ConcatScheduler(
        [linear(handlers, optimizer), cosine(handlers, optimizer), piecewise(handlers, optimizer)], [3, 4]
    ),
    "warm-up": lambda handlers, optimizer: handlers.create_lr_scheduler_with_warmup(
        piecewise(handlers, optimizer), 0.0, 4, 0.1
    ),
    "torch": lambda handlers, optimizer: handlers.LRScheduler(NATIVE["Step"](optimizer)),
    "plateau": plateau,
}


@functools.cache
def job(make, rates=(0.5, 0.1)):
    """Run Ignite; return the rates of each step, and the states of scheduler and optimizer after each iteration."""
    optimizer, rows, states = sgd(*rates), [], []

    def step(engine, batch):
        rows.append(seen(optimizer))
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        scheduler = make(ignite().handlers, optimizer)
    trainer = ignite().engine.Engine(step)

    def save():
        kept = {id(optimizer): optimizer}  # some schedulers have it in their state
        states.append((copy.deepcopy(scheduler.state_dict(), kept), copy.deepcopy(optimizer.state_dict())))

    save()
    trainer.add_event_handler(ignite().engine.Events.ITERATION_STARTED, scheduler)
    trainer.add_event_handler(ignite().engine.Events.ITERATION_COMPLETED, save)
    trainer.run(range(NUM_EVENTS))
    return rows, states


def continued(make, states, at, rates=(0.5, 0.1), repeats_calls=False):
    """Load states into camshaft, in either order, or repeat the calls; return the rates of the remaining steps."""
    optimizer = sgd(*rates)
    scheduler = make(camshaft.handlers, optimizer)
    saved, saved_optimizer = copy.deepcopy(states)
    loads = [lambda: optimizer.load_state_dict(saved_optimizer), lambda: scheduler.load_state_dict(saved)]
    if repeats_calls:
        loads[1] = lambda: calls(scheduler, at, lambda: None)
    for load in loads if at % 2 or repeats_calls else reversed(loads):
        load()
    scheduler.load_state_dict(scheduler.state_dict())  # like a job that is killed before its first iteration
    return run_with(scheduler, optimizer, NUM_EVENTS - at)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("rates", [(0.5,), (0.5, 0.1)], ids=["one group", "two groups"])
def test_a_job_continues_with_the_rates_of_ignite(make, rates):
    rows, states = job(make, rates)
    for at in range(NUM_EVENTS):
        got = continued(make, states[at], at, rates)
        assert [pytest.approx(pair) for row in got for pair in row] == [pair for row in rows[at:] for pair in row], at


@pytest.mark.parametrize("make", REJECTED.values(), ids=REJECTED)
def test_a_state_with_another_meaning_is_rejected_and_changes_nothing(make):
    scheduler = make(camshaft.handlers, sgd())
    before = copy.deepcopy(scheduler.state_dict())
    with pytest.raises(ValueError, match="got that of PyTorch-Ignite, which counts calls differently: (leave|finish)"):
        scheduler.load_state_dict(make(ignite().handlers, sgd()).state_dict())
    assert scheduler.state_dict() == before


@pytest.mark.parametrize("make", [REJECTED[name] for name in REJECTED if name != "plateau"])
@pytest.mark.parametrize("at", [3, 4, 9])
def test_a_schedule_whose_state_is_rejected_continues_with_the_rates_of_ignite_if_its_calls_are_repeated(make, at):
    rows, states = job(make)
    got = continued(make, states[at], at, repeats_calls=True)
    assert [pytest.approx(pair) for row in got for pair in row] == [pair for row in rows[at:] for pair in row]
