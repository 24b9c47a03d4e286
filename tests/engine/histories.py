"""Engines that went through something: what a call of `run` finds."""

from __future__ import annotations

import pytest

from camshaft.engine import Events
from tests.engine.traces import at, traced

DATA = [1, 2]


def progress(engine):
    state = engine.state
    return state.epoch, state.iteration, state.max_epochs, state.max_iters


def done(engine, **arguments):
    engine.run(DATA, **(arguments or {"max_epochs": 5}))


def loaded(engine, iteration=5, max_epochs=4):
    engine.load_state_dict({"iteration": iteration, "epoch_length": 2, "max_epochs": max_epochs})


def terminated(engine):
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.terminate(), firing=3)
    engine.run(DATA, max_epochs=5)


def suspended(engine):
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt(), firing=3)
    engine.run(DATA, max_epochs=5)


def failed(engine):
    at(engine, Events.ITERATION_COMPLETED, fail, firing=3)
    with pytest.raises(KeyError):
        engine.run(DATA, max_epochs=5)


def fail(engine):
    raise KeyError("no")


def fresh(engine):
    pass


BEFORE = [fresh, done, loaded, terminated, suspended, failed]


def after(before):
    """Make an engine that went through something, and a trace of what comes next."""
    engine, trace = traced(counters=True)
    before(engine)
    trace.take()
    trace.batches.clear()
    return engine, trace
