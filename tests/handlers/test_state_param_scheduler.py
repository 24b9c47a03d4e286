"""Schedulers of attributes of an engine's state."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from camshaft.engine import Engine, Events
from camshaft.handlers import (
    ExpStateScheduler,
    LambdaStateScheduler,
    MultiStepStateScheduler,
    PiecewiseLinear,
    PiecewiseLinearStateScheduler,
    StateParamScheduler,
    StepStateScheduler,
)
from tests.handlers.schedules import reread


class Counting:
    """A callable with a state."""

    def __init__(self, start=0):
        self.calls = start

    def __call__(self, index):
        self.calls += 1
        return index * 10 + self.calls


KINDS = {
    "function": lambda: LambdaStateScheduler(lambda index: 3 * index, "noise", create_new=True),
    "object": lambda: LambdaStateScheduler(Counting(), "noise", create_new=True),
    "piecewise": lambda: PiecewiseLinearStateScheduler([(2, 1.0), (5, 0.5), (5, 0.1)], "noise", create_new=True),
    "exponential": lambda: ExpStateScheduler(2, 0.9, "noise", create_new=True),
    "step": lambda: StepStateScheduler(2, 0.5, 3, "noise", create_new=True),
    "multistep": lambda: MultiStepStateScheduler(2, 0.5, [7, 2, 2], "noise", create_new=True),
}


def run(scheduler, count):
    """Return the values after each iteration."""
    trainer, rows = Engine(lambda engine, batch: None), []
    scheduler.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: rows.append(trainer.state.noise))
    trainer.run(range(count))
    return rows


@given(
    initial=st.floats(-5, 5), gamma=st.floats(0.5, 1.5), size=st.integers(1, 6), milestones=st.lists(st.integers(0, 20))
)
def test_values_follow_their_formulas(initial, gamma, size, milestones):
    options, indices = {"initial_value": initial, "gamma": gamma, "param_name": "noise"}, range(1, 21)

    def values(kind, **more):
        return [value for _, value in kind.simulate_values(20, **options, **more)]

    assert values(ExpStateScheduler) == [initial * gamma**index for index in indices]
    assert values(StepStateScheduler, step_size=size) == [initial * gamma ** (index // size) for index in indices]
    reached = [sum(milestone <= index for milestone in milestones) for index in indices]
    assert values(MultiStepStateScheduler, milestones=milestones) == [initial * gamma**count for count in reached]


def test_the_first_index_is_one():
    """[H34] Equal milestones act one event apart on the state and on an optimizer."""
    milestones = [(1, 1.0), (3, 0.8), (5, 0.2)]
    state = PiecewiseLinearStateScheduler.simulate_values(6, milestones_values=milestones, param_name="noise")
    optimizer = PiecewiseLinear.simulate_values(7, milestones_values=milestones, param_name="lr")
    assert [value for _, value in state] == [value for _, value in optimizer][1:]
    assert [index for index, _ in state] == list(range(6))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_run_sets_what_was_simulated(make):
    scheduler = make()
    own = {name: value for name, value in vars(scheduler).items() if name in type(scheduler)._state_dict_all_req_keys}
    arguments = {key: value for key, value in own.items() if key not in ("event_index", "milestones", "values")}
    if "milestones" in own:
        pairs = zip(own["milestones"], own.get("values", own["milestones"]), strict=True)
        arguments |= {"milestones_values": list(pairs)} if "values" in own else {"milestones": own["milestones"]}
    rows = type(scheduler).simulate_values(10, **arguments, save_history=True)
    assert run(scheduler, 10) == [value for _, value in rows]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@given(before=st.integers(0, 10), after=st.integers(1, 10))
def test_a_state_saved_at_any_call_continues(make, before, after):
    """[H26] It loads with weights_only=True, also if the values come from a function."""

    def calls(scheduler, count):
        engine = Engine(lambda engine, batch: None)
        return [engine.state.noise for _ in range(count) if not scheduler(engine)]

    scheduler, fresh = make(), make()
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
    [
        lambda index: index,
        decorated(float),
        functools.partial(max, 3),
        functools.lru_cache(abs),
        abs,
        float,
        Counting().__call__,
    ],
)
def test_functions_are_not_saved(function):
    scheduler = LambdaStateScheduler(function, "noise", create_new=True)
    assert not reread(scheduler.state_dict())["lambda_obj"]
    run(scheduler, 2)
    scheduler.load_state_dict(reread(scheduler.state_dict()))
    assert scheduler.lambda_obj is function


def test_simulating_does_not_change_a_stateful_function():
    function = Counting()
    LambdaStateScheduler.simulate_values(5, lambda_obj=function, param_name="noise")
    assert function.calls == 0


def test_history():
    trainer = Engine(lambda engine, batch: None)
    ExpStateScheduler(8.0, 0.5, "noise", save_history=True, create_new=True).attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run([0], max_epochs=3)
    assert trainer.state.param_history == {"noise": [4.0, 2.0, 1.0]}


@given(st.integers(1, 19))
def test_a_resumed_epoch_is_not_counted_twice(stop_at):
    def run(stop_at=None, states=()):
        values, saved = [], []
        trainer = Engine(lambda engine, batch: values.append(engine.state.noise))
        scheduler = KINDS["step"]()
        scheduler.attach(trainer, Events.EPOCH_STARTED)

        @trainer.on(Events.ITERATION_COMPLETED)
        def save():
            if trainer.state.iteration == stop_at:
                saved.extend(reread([trainer.state_dict(), scheduler.state_dict()]))
                trainer.terminate()

        for one, state in zip((trainer, scheduler), states, strict=False):
            one.load_state_dict(state)
        trainer.run(range(4), max_epochs=5)
        return values, saved

    before, states = run(stop_at)
    assert before + run(states=states)[0] == run()[0]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"object"}))  # an object returns another value in each call
@pytest.mark.parametrize("saved", [False, True])
def test_a_repeated_iteration_is_not_counted_twice(kind, saved):
    def run(failing_at=None):
        values = []
        trainer = Engine(lambda engine, batch: values.append(engine.state.noise))
        scheduler = KINDS[kind]()
        scheduler.attach(trainer, Events.ITERATION_STARTED)
        if failing_at is not None:
            handle = trainer.add_event_handler(Events.ITERATION_STARTED(once=failing_at), lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                trainer.run(range(4), max_epochs=2)
            handle.remove()
        if saved:
            trainer.load_state_dict(trainer.state_dict())
            state, trainer.state.noise = reread(scheduler.state_dict()), None
            scheduler.load_state_dict(state)
        trainer.run(range(4), max_epochs=2)
        return values

    assert run(failing_at=6) == run()


def test_a_new_attribute_is_none_at_first():
    trainer = Engine(lambda engine, batch: None)
    handle = KINDS["step"]().attach(trainer)
    assert trainer.state.noise is None
    handle.remove()
    trainer.run([0])
    assert trainer.state.noise is None


def test_an_existing_attribute_is_set():
    trainer = Engine(lambda engine, batch: None)
    trainer.state.noise = 5.0
    ExpStateScheduler(8.0, 0.5, "noise").attach(trainer)
    assert trainer.state.noise == 5.0
    trainer.run([0])
    assert trainer.state.noise == 4.0


def test_create_new_rejects_an_existing_attribute():
    trainer = Engine(lambda engine, batch: None)
    trainer.state.noise = 5.0
    with pytest.raises(ValueError, match="already has an attribute 'noise'"):
        KINDS["step"]().attach(trainer)
    trainer.run([0])
    assert trainer.state.noise == 5.0


def test_a_missing_attribute_is_created_with_a_warning():
    trainer = Engine(lambda engine, batch: None)
    with pytest.warns(UserWarning, match="no attribute 'noise' and gets it"):
        ExpStateScheduler(8.0, 0.5, "noise").attach(trainer)
    assert trainer.state.noise is None


def test_a_custom_scheduler():
    class Parity(StateParamScheduler):
        def get_param(self):
            return self.event_index % 2

    assert Parity.simulate_values(3, param_name="noise") == [[0, 1], [1, 0], [2, 1]]


def test_a_state_that_does_not_fit_is_rejected():
    scheduler = KINDS["object"]()
    with pytest.raises(ValueError, match="must hold 'lambda_obj'"):
        scheduler.load_state_dict({"event_index": 3, "param_name": "noise"})
    with pytest.raises(TypeError, match="must be a mapping"):
        scheduler.load_state_dict(3)
    with pytest.raises(ValueError, match="with the same arguments"):
        scheduler.load_state_dict({"event_index": 3, "param_name": "noise", "lambda_obj": 3})
    assert scheduler.event_index == 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LambdaStateScheduler(3, "noise"), ValueError, "lambda_obj must be callable, got 3"),
        (lambda: LambdaStateScheduler(abs, 3), TypeError, "param_name must be a str"),
        (lambda: PiecewiseLinearStateScheduler([], "noise"), ValueError, "at least one pair"),
        (lambda: PiecewiseLinearStateScheduler([(0.5, 1)], "noise"), TypeError, "a milestone must be an integer"),
        (lambda: ExpStateScheduler("2", 0.5, "noise"), TypeError, "initial_value must be a number"),
        (lambda: ExpStateScheduler(2, None, "noise"), TypeError, "gamma must be a number"),
        (lambda: StepStateScheduler(2, 0.5, 0, "noise"), ValueError, "step_size must be at least 1"),
        (lambda: StepStateScheduler(2, 0.5, 1.5, "noise"), TypeError, "step_size must be an integer"),
        (lambda: MultiStepStateScheduler(2, 0.5, 3, "noise"), TypeError, "milestones must be a list"),
        (lambda: MultiStepStateScheduler(2, 0.5, [0.5], "noise"), TypeError, "a milestone must be an integer"),
    ],
)
def test_invalid_arguments_are_rejected(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("name", ["iteration", "epoch"])
def test_counters_of_the_engine_are_rejected(name):
    with pytest.raises(ValueError, match=f"param_name must not be '{name}', which is a counter of the engine"):
        ExpStateScheduler(1.0, 0.5, name).attach(Engine(lambda engine, batch: None))


def test_create_new_creates_the_attribute():
    engine = Engine(lambda engine, batch: None)
    ExpStateScheduler(1.0, 0.5, "noise", create_new=True).attach(engine)
    engine.run([0])
    assert engine.state.noise == 0.5
