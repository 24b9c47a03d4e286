"""States of PyTorch-Ignite's schedulers: a job that changes libraries continues with the same rates."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest

import camshaft.handlers
from camshaft.engine import Engine, Events
from tests.handlers.schedules import NATIVE, natively, seen, sgd

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
    "chain": lambda handlers, optimizer: handlers.ConcatScheduler(
        [linear(handlers, optimizer), cosine(handlers, optimizer), piecewise(handlers, optimizer)], [3, 4]
    ),
    "groups": lambda handlers, optimizer: handlers.param_scheduler.ParamGroupScheduler(
        [linear(handlers, optimizer, param_group_index=0), piecewise(handlers, optimizer, param_group_index=-1)],
        ["first", "second"],
    ),
    "warm-up of a piecewise": lambda handlers, optimizer: handlers.create_lr_scheduler_with_warmup(
        piecewise(handlers, optimizer), 0.0, 4, 0.1
    ),
    "warm-up of a cosine": lambda handlers, optimizer: handlers.create_lr_scheduler_with_warmup(
        cosine(handlers, optimizer), 0.0, 4, 0.5
    ),
    **{
        f"warm-up of a {name}, {end}": lambda handlers, optimizer, make=NATIVE[name], end=end: (
            handlers.create_lr_scheduler_with_warmup(make(optimizer), 0.0, 4, end)
        )
        for name in ("Step", "Exponential", "CosineAnnealing", "OneCycle", "Lambda")
        for end in (None, 0.7)
    },
}
WRAPPED = {name: make for name, make in NATIVE.items() if not name.startswith(("Sequential", "Chained"))}


def wrap(make, **options):
    return lambda handlers, optimizer: handlers.LRScheduler(make(optimizer), **options)


@functools.cache
def job(make, rates=(0.5, 0.1), event="ITERATION_STARTED"):
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
    trainer.add_event_handler(getattr(ignite().engine.Events, event), scheduler)
    trainer.add_event_handler(ignite().engine.Events.ITERATION_COMPLETED, save)
    trainer.run(range(NUM_EVENTS))
    return rows, states


def continued(make, states, at, rates=(0.5, 0.1), event=Events.ITERATION_STARTED, optimizer_first=True):
    """Load the states after ``at`` iterations into camshaft, and return the rates of the remaining steps."""
    optimizer, rows = sgd(*rates), []
    scheduler = make(camshaft.handlers, optimizer)

    def step(engine, batch):
        rows.append(seen(optimizer))
        optimizer.step()

    trainer = Engine(step)
    trainer.add_event_handler(event, scheduler)
    saved, saved_optimizer = copy.deepcopy(states[at][0]), copy.deepcopy(states[at][1])
    loads = [lambda: optimizer.load_state_dict(saved_optimizer), lambda: scheduler.load_state_dict(saved)]
    for load in loads if optimizer_first else reversed(loads):
        load()
    scheduler.load_state_dict(scheduler.state_dict())  # like a job that is killed before its first iteration
    trainer.run(range(NUM_EVENTS - at))
    return rows


def check(make, first, **options):
    rows, states = job(make, **{key: value for key, value in options.items() if key == "rates"})
    for at in range(first, NUM_EVENTS):
        got = continued(make, states, at, optimizer_first=bool(at % 2), **options)
        assert [pytest.approx(pair) for row in got for pair in row] == [pair for row in rows[at:] for pair in row], at


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_job_continues_with_the_rates_of_ignite(make):
    check(make, 0, rates=(0.5,))


@pytest.mark.parametrize("name", MAKES)
def test_a_job_with_several_groups_continues_with_the_rates_of_ignite(name):
    """A warm-up of Ignite to another value than the first one treats the groups differently."""
    check(MAKES[name], 6 if name.endswith("0.7") else 0)


@pytest.mark.parametrize("name", WRAPPED)
def test_a_scheduler_of_torch_continues_with_the_rates_of_ignite(name):
    check(wrap(WRAPPED[name]), 1)


@pytest.mark.parametrize("name", WRAPPED)
def test_a_state_from_before_the_first_call_has_the_rates_of_torch(name):
    _, states = job(wrap(WRAPPED[name]))
    assert continued(wrap(WRAPPED[name]), states, 0) == natively(WRAPPED[name], sgd(0.5, 0.1), NUM_EVENTS)


@pytest.mark.filterwarnings("ignore:a scheduler with use_legacy=True must be attached")
@pytest.mark.parametrize("name", ["Step", "OneCycle", "Lambda"])
def test_legacy_schedulers_continue_with_the_rates_of_ignite(name):
    make = wrap(WRAPPED[name], use_legacy=True)
    rows, states = job(make, event="ITERATION_COMPLETED")
    for at in range(NUM_EVENTS):
        assert continued(make, states, at, event=Events.ITERATION_COMPLETED) == rows[at:]


def plateau(handlers, optimizer):
    return handlers.ReduceLROnPlateauScheduler(optimizer, "loss", patience=1, factor=0.5)


def test_the_state_of_a_plateau_continues():
    """It holds a method of Ignite's handler, and lower bounds of zero whatever was passed."""
    theirs = plateau(ignite().handlers, sgd())
    ours = camshaft.handlers.ReduceLROnPlateauScheduler(sgd(), "loss", patience=1, factor=0.5, min_lr=0.1)
    engine = Engine(lambda engine, batch: None)
    engine.state.metrics["loss"] = 1.0
    for _ in range(3):
        theirs(engine)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    ours.optimizer.load_state_dict(theirs.optimizer.state_dict())
    rates = []
    for _ in range(6):
        ours(engine)
        rates.append(ours.optimizer.param_groups[0]["lr"])
    assert rates == [0.25, 0.125, 0.125, 0.1, 0.1, 0.1]


def test_a_warm_up_with_different_lengths_is_rejected_until_it_is_over():
    def make(handlers, optimizer):
        return handlers.create_lr_scheduler_with_warmup(cosine_from(0.5, handlers, optimizer), 0.0, 4)

    def cosine_from(start, handlers, optimizer):
        return handlers.CosineAnnealingScheduler(optimizer, "lr", start, 1.0, 4)

    rows, states = job(make)
    with pytest.raises(ValueError, match="must not be of a warm-up whose length differs between parameter groups"):
        continued(make, states, 2)
    assert continued(make, states, 6) == rows[6:]


@pytest.mark.parametrize(
    "make",
    [
        wrap(WRAPPED["Step"]),
        MAKES["warm-up of a Step, None"],
        MAKES["chain"],
        MAKES["linear"],
        plateau,
    ],
)
def test_an_unrelated_state_is_rejected_and_changes_nothing(make):
    scheduler = make(camshaft.handlers, sgd())
    before = copy.deepcopy(scheduler.state_dict())
    wrong = {"event_index": 3, "param_name": "lr", "save_history": False, "param_group_index": None}
    with pytest.raises(ValueError, match="state_dict must"):
        scheduler.load_state_dict(wrong)
    with pytest.raises(ValueError, match="state_dict must"):
        scheduler.load_state_dict({**wrong, "lr_scheduler": 3, "scheduler": 3, "schedulers": [1, 2, 3]})
    assert scheduler.state_dict() == before
