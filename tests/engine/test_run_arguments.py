"""Arguments of `run` that are refused, before anything changes."""

from __future__ import annotations

import copy

import pytest

from camshaft.engine import Engine, Events
from tests.engine.histories import BEFORE, DATA, after, done, fresh, loaded, progress, suspended, terminated
from tests.engine.traces import IT, IT_AGAIN, Sizeless, at_position, echo, flat, traced

NUMBERS = ("max_epochs", "max_iters", "epoch_length")
ALWAYS_WRONG = [
    ({"data": 3}, TypeError, "data.*3"),
    ({"data": object()}, TypeError, "data"),
    ({"max_epochs": 2, "max_iters": 2}, ValueError, "max_epochs or max_iters"),
    *[({name: bad}, ValueError, f"{name}.*{bad}") for name in NUMBERS for bad in (0, -3)],
    *[({name: 1.5}, TypeError, f"{name}.*1.5") for name in NUMBERS],
]


def snapshot(engine):
    flags = engine.should_terminate, engine.should_terminate_single_epoch, engine.should_interrupt
    return copy.copy(vars(engine.state)), copy.copy(engine.state.times), flags, engine.last_event_name


def refused(engine, arguments, error, named):
    before = snapshot(engine)
    with pytest.raises(error, match=named):
        engine.run(**{"data": DATA, **arguments})
    assert snapshot(engine) == before


def goes_on(before, spoil=None):
    """What an engine does after something, and after wrong calls where there are any."""
    engine, trace = after(before)
    if spoil is not None:
        spoil(engine)
    engine.run(DATA, max_epochs=6)
    return trace.take(), trace.batches, progress(engine)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize(("arguments", "error", "named"), ALWAYS_WRONG)
def test_wrong_arguments_are_refused_and_change_nothing(before, arguments, error, named):
    assert goes_on(before, lambda engine: refused(engine, arguments, error, named)) == goes_on(before)


@pytest.mark.parametrize(
    ("before", "arguments", "named"),
    [
        *[(before, {"max_iters": 20}, "max_iters=20.*max_epochs") for before in BEFORE[1:]],
        (done, {"max_epochs": 4}, "max_epochs.*5.*4"),
        (suspended, {"max_epochs": 1}, "max_epochs.*2.*1"),
        (terminated, {"max_epochs": 1}, "max_epochs.*2.*1"),
        (loaded, {"max_epochs": 1}, "max_epochs.*2.*1"),
        *[(before, {"max_epochs": 9, "epoch_length": 3}, "epoch_length.*2.*3") for before in BEFORE[1:]],
        (fresh, {"data": []}, "data"),
        (fresh, {"data": None}, "epoch_length"),
        (fresh, {"data": None, "max_epochs": 3}, "epoch_length"),
        (done, {"data": []}, "data"),
    ],
)
def test_arguments_against_the_state_are_refused_and_change_nothing(before, arguments, named):
    assert goes_on(before, lambda engine: refused(engine, arguments, ValueError, named)) == goes_on(before)


@pytest.mark.parametrize("arguments", [{"max_epochs": 2}, {"max_iters": 4}], ids=str)
def test_a_number_of_iterations_is_not_changed_to_epochs_nor_made_smaller(arguments):
    engine, _ = after(lambda engine: done(engine, max_iters=5))
    refused(engine, arguments, ValueError, f"{next(iter(arguments))}")


@pytest.mark.parametrize("position", range(13))
@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_inside_its_own_run_is_refused_and_the_outer_goes_on(position, enabled):
    engine, trace = traced()
    engine.interrupt_resume_enabled = enabled

    def again(engine):
        before = snapshot(engine)
        with pytest.raises(RuntimeError, match="running"):
            engine.run([7])
        assert snapshot(engine) == before

    at_position(engine, position, again)
    engine.run(DATA)
    assert trace.take() == flat(f"S ES {IT} {IT} EC C")


def test_a_run_inside_the_process_function_is_refused():
    def step(engine, batch):
        with pytest.raises(RuntimeError, match="running"):
            engine.run([7])
        return batch

    assert Engine(step).run(DATA).iteration == 2


def test_another_engine_may_run_inside_a_run():
    trainer, evaluator = Engine(echo), Engine(echo)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([1, 2, 3]))
    trainer.run(DATA, max_epochs=3)
    assert (trainer.state.iteration, evaluator.state.iteration) == (6, 3)


def test_a_loader_without_length_that_raises_type_error_is_data_of_unknown_length():
    class Odd(Sizeless):
        def __len__(self):
            raise TypeError("no length")

    engine, trace = traced()
    engine.run(Odd(1, 2), max_epochs=2)
    assert trace.take() == flat(f"S ES {IT} {IT} GS EC · ES {IT_AGAIN} {IT} EC · C")
