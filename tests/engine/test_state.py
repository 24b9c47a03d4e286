"""The state: a plain container whose counters belong to one engine, kept from run to run."""

from __future__ import annotations

import pytest

from camshaft.engine import CallableEventWithFilter, Engine, EventEnum, Events, OptimizerEvents, State
from tests.engine.traces import echo


class Steps(EventEnum):
    STEPPED = "stepped"


COUNTED = {
    Events.GET_BATCH_STARTED: "iteration",
    Events.GET_BATCH_COMPLETED: "iteration",
    Events.ITERATION_STARTED: "iteration",
    Events.ITERATION_COMPLETED: "iteration",
    Events.EPOCH_STARTED: "epoch",
    Events.EPOCH_COMPLETED: "epoch",
    Events.STARTED: "epoch",
    Events.COMPLETED: "epoch",
    OptimizerEvents.STEP_COMPLETED: "optimizer_steps",
}


def test_a_new_state_holds_the_defaults():
    assert {name: getattr(State(), name) for name in (*vars(State()), "output") if not name.startswith("_")} == {
        "iteration": 0,
        "epoch": 0,
        "optimizer_steps": 0,
        "epoch_length": None,
        "max_epochs": None,
        "max_iters": None,
        "output": None,
        "batch": None,
        "metrics": {},
        "dataloader": None,
        "seed": None,
        "times": {"EPOCH_COMPLETED": None, "COMPLETED": None},
    }


def test_two_states_share_nothing():
    first, second = State(), State()
    first.metrics["loss"] = first.times["COMPLETED"] = 1.0
    assert second.metrics == {}
    assert second.times["COMPLETED"] is None


def test_keywords_become_attributes_and_win_over_the_defaults():
    state = State(iteration=3, output="out", rate=0.1, metrics={"loss": 1})
    assert (state.iteration, state.output, state.rate, state.metrics, state.epoch) == (3, "out", 0.1, {"loss": 1}, 0)


def test_the_counters_of_the_built_in_events_are_those_of_the_table():
    assert dict(State.event_to_attr) == COUNTED


@pytest.mark.parametrize("form", [lambda event: event, lambda event: event(every=2), lambda event: event.name])
def test_the_count_of_an_event_is_found_in_each_form(form):
    state = State(iteration=7, epoch=2)
    assert {event: state.get_event_attrib_value(form(event)) for event in COUNTED} == {
        event: getattr(state, name) for event, name in COUNTED.items()
    }


@pytest.mark.parametrize("event", [Events.TERMINATE, Steps.STEPPED, "epoch_started", CallableEventWithFilter("FOO")])
def test_the_count_of_an_event_that_nothing_counts_is_rejected(event):
    with pytest.raises(RuntimeError, match="count"):
        State().get_event_attrib_value(event)


def test_the_state_is_shown_line_by_line_with_numbers_and_strings_by_value():
    lines = repr(State(iteration=3, name="run", output=[1, 2])).splitlines()
    assert lines[0] == "State:"
    shown = dict(line.strip().split(": ", 1) for line in lines[1:])
    assert (shown["iteration"], shown["name"]) == ("3", "run")
    assert (shown["output"], shown["metrics"]) == ("<class 'list'>", "<class 'dict'>")
    assert "event_to_attr" not in shown


def test_counters_of_the_user_belong_to_one_engine():
    engine, other = Engine(echo), Engine(echo)
    engine.register_events(Steps.STEPPED, event_to_attr={Steps.STEPPED: "steps"})
    assert engine.state.steps == 0
    assert engine.state.event_to_attr[Steps.STEPPED] == "steps"
    assert dict(engine.state.event_to_attr) == {**COUNTED, Steps.STEPPED: "steps"}
    assert not hasattr(State(), "steps")
    assert not hasattr(other.state, "steps")
    assert dict(State.event_to_attr) == dict(other.state.event_to_attr) == COUNTED


def test_a_fresh_state_given_to_an_engine_gets_the_counters_of_the_engine():
    engine = Engine(echo)
    engine.register_events(Steps.STEPPED, event_to_attr={Steps.STEPPED: "steps"})
    engine.state = State(rate=0.1)
    assert (engine.state.steps, engine.state.rate) == (0, 0.1)
    assert engine.state.get_event_attrib_value(Steps.STEPPED(every=2)) == 0
    engine.state = State(steps=5)
    assert engine.state.steps == 5


def test_a_counter_that_exists_already_keeps_its_value():
    engine = Engine(echo)
    engine.state.steps = 4
    engine.register_events(Steps.STEPPED, event_to_attr={Steps.STEPPED: "steps"})
    assert engine.state.steps == 4


def test_a_run_returns_the_state_of_the_engine_and_keeps_what_is_not_its_own():
    engine = Engine(echo)
    state = engine.state
    state.rate, state.seed, state.metrics["loss"] = 0.1, 7, 1.0
    assert engine.run([1, 2], max_epochs=2) is state
    assert engine.run([1, 2, 3]) is engine.state is state
    assert (state.rate, state.seed, state.metrics) == (0.1, 7, {"loss": 1.0})
    assert (state.iteration, state.epoch, state.epoch_length, state.max_epochs, state.max_iters) == (3, 1, 3, 1, None)


def test_a_state_of_the_user_takes_over_between_runs():
    engine = Engine(echo)
    engine.run([1, 2], max_epochs=2)
    engine.state = state = State(iteration=2, epoch=1, epoch_length=2, max_epochs=3)
    assert engine.run([1, 2]) is state
    assert (state.iteration, state.epoch) == (6, 3)
