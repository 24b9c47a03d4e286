"""What is not used any more is freed at once, by reference counting alone."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest

from camshaft.engine import Engine, Events
from tests.engine.traces import Trace, echo


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Thing:
    """Something that can be watched."""


def with_handlers(step):
    engine = Engine(step)
    engine.logger = logging.getLogger("silent")
    engine.logger.setLevel(logging.CRITICAL)  # pytest keeps records, and so errors
    Trace(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda engine: None)
    engine.add_event_handler(Events.ITERATION_COMPLETED(event_filter=lambda engine, count: True), lambda: None)
    engine.register_events("foo")
    engine.add_event_handler("foo", lambda engine, thing: None, Thing())
    return engine


def fail(engine, batch):
    if engine.state.iteration == 2:
        raise KeyError("no")


def unrun(engine):
    pass


def run(engine):
    engine.run([1, 2, 3], max_epochs=2)


def run_twice(engine):
    engine.run([1, 2, 3], max_epochs=2)
    engine.run(iter([1, 2, 3]), max_epochs=3, epoch_length=3)


def terminated(engine):
    with engine.add_event_handler(Events.ITERATION_STARTED(once=2), lambda engine: engine.terminate()):
        engine.run([1, 2, 3], max_epochs=2)


def cut(engine):
    with engine.add_event_handler(Events.ITERATION_STARTED(once=2), lambda engine: engine.terminate_epoch()):
        engine.run([1, 2, 3], max_epochs=2)


def suspended_and_resumed(engine):
    with engine.add_event_handler(Events.ITERATION_STARTED(once=2), lambda engine: engine.interrupt()):
        engine.run([1, 2, 3], max_epochs=2)
        engine.run()


@pytest.mark.parametrize("use", [unrun, run, run_twice, terminated, cut, suspended_and_resumed])
def test_an_engine_with_handlers_is_freed_at_once(use):
    engine = with_handlers(echo)
    use(engine)
    watched = weakref.ref(engine), weakref.ref(engine.state)
    del engine
    assert [reference() for reference in watched] == [None, None]


def failed_step(engine):
    engine._process_function = fail
    engine.run([1, 2, 3])


def failed_at(event):
    def use(engine):
        engine.add_event_handler(event, lambda: fail_now())
        engine.run([1, 2, 3])

    return use


def fail_now():
    raise KeyError("no")


@pytest.mark.parametrize(
    "use",
    [
        failed_step,
        failed_at(Events.STARTED),
        failed_at(Events.EPOCH_STARTED),
        failed_at(Events.ITERATION_COMPLETED),
        failed_at(Events.COMPLETED),
    ],
    ids=["step", "STARTED", "EPOCH_STARTED", "ITERATION_COMPLETED", "COMPLETED"],
)
def test_an_engine_whose_run_failed_is_freed_with_the_exception(use):
    engine = with_handlers(echo)
    watched = weakref.ref(engine)
    try:
        use(engine)
    except KeyError:
        pass
    else:
        pytest.fail("the run was to fail")
    del engine
    assert watched() is None


def test_an_engine_whose_error_was_swallowed_is_freed_at_once():
    engine = with_handlers(fail)
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: None)
    engine.run([1, 2, 3])
    watched = weakref.ref(engine)
    del engine
    assert watched() is None


def test_handlers_and_their_arguments_are_kept_until_they_are_removed():
    class Handler:
        def __call__(self, engine, thing):
            seen.append(thing)

    engine, seen = Engine(echo), []
    handler, thing = Handler(), Thing()
    watched = weakref.ref(handler), weakref.ref(thing)
    handle = engine.add_event_handler(Events.ITERATION_COMPLETED, handler, thing)
    del handler, thing
    engine.run([1])
    assert len(seen) == 1
    seen.clear()
    handle.remove()
    assert [reference() for reference in watched] == [None, None]


def test_a_batch_and_an_output_are_freed_before_the_next_is_fetched():
    alive = []

    def batches():
        watched = []
        for _ in range(3):
            alive.append([reference() is not None for reference in watched])
            thing = Thing()
            watched.append(weakref.ref(thing))
            yield thing
            del thing

    Engine(lambda engine, batch: None).run(batches(), epoch_length=3)
    assert alive == [[], [False], [False, False]]


def test_an_output_is_freed_before_the_next_one_is_computed():
    watched, alive = [], []

    def step(engine, batch):
        alive.append([reference() is not None for reference in watched])
        thing = Thing()
        watched.append(weakref.ref(thing))
        return thing

    Engine(step).run([1, 2, 3])
    assert alive == [[], [False], [False, False]]


@pytest.mark.parametrize(
    "event",
    [
        Events.EXCEPTION_RAISED,
        Events.TERMINATE_SINGLE_EPOCH,
        Events.ITERATION_COMPLETED(event_filter=lambda engine, count: True),
        Events.ITERATION_COMPLETED(every=2),
    ],
    ids=["exception", "terminate", "filter", "every"],
)
def test_handlers_are_freed_with_their_engine(event):
    class Handler:
        def __call__(self, *arguments, **keywords):
            pass

    handler = Handler()
    watched = weakref.ref(handler)
    engine = Engine(lambda engine, batch: batch)
    engine.add_event_handler(event, handler)
    engine.run([1, 2])
    del engine, handler
    assert watched() is None
