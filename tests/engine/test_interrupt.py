"""Pausing a run after any event, and going on as if nothing had been."""

from __future__ import annotations

import itertools
import warnings

import pytest

from camshaft.engine import Engine, Events
from tests.engine.traces import IT, SHORT, Sizeless, Trace, at, at_position, echo, flat, traced, unsized

DATA, EPOCHS = [1, 2], 3

# name: what makes the arguments of the first call of run
RUNS = {
    "sized": lambda: {"data": [1, 2], "max_epochs": 3},
    "short epochs": lambda: {"data": [1, 2, 3], "max_epochs": 3, "epoch_length": 2},
    "long epochs": lambda: {"data": [1, 2, 3], "max_epochs": 2, "epoch_length": 5},
    "no data": lambda: {"max_epochs": 2, "epoch_length": 2},
    "iterations": lambda: {"data": [1, 2, 3], "max_iters": 5},
    "unsized": lambda: {"data": Sizeless(1, 2, 3), "max_epochs": 3},
    "unsized iterations": lambda: {"data": Sizeless(1, 2, 3), "max_iters": 7},
    "dry": lambda: {"data": unsized("ab"), "max_epochs": 2},
    "empty": lambda: {"data": unsized(""), "max_epochs": 1},
}


def interrupt(engine):
    engine.interrupt()


def outcome(engine, trace):
    state = engine.state
    return trace.take(), trace.batches, state.iteration, state.epoch, state.epoch_length, state.output


def uninterrupted(arguments):
    engine, trace = traced(counters=True)
    engine.run(**arguments)
    return outcome(engine, trace)


@pytest.fixture(autouse=True)
def dry_data_is_no_matter_here():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the data ran out")
        yield


def without_interrupts(found):
    words = found[0].split()
    kept = [pair for pair in zip(words[::2], words[1::2], strict=True) if pair[0] != "INT"]
    return (" ".join(" ".join(pair) for pair in kept), *found[1:])


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS.keys())
def test_a_run_goes_on_after_any_event_as_if_nothing_had_been(arguments):
    expected = uninterrupted(arguments())
    positions = [number for number, name in enumerate(expected[0].split()[::2]) if name not in ("T", "C")]
    for position in positions:
        engine, trace = traced(counters=True)
        at_position(engine, position, interrupt)
        state = engine.run(**arguments())
        assert state is engine.state
        assert trace.words[-1].startswith("INT")
        assert len(trace.words) == position + 2
        assert engine.should_interrupt is False
        assert engine.run() is state
        assert without_interrupts(outcome(engine, trace)) == expected
        assert trace.words == []


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS.keys())
def test_a_run_can_be_interrupted_at_every_event(arguments):
    expected = uninterrupted(arguments())
    engine, trace = traced(counters=True)
    for event in SHORT:
        if event not in (Events.INTERRUPT, Events.COMPLETED, Events.TERMINATE):
            engine.add_event_handler(event, interrupt)
    engine.run(**arguments())
    calls = 1
    while engine.last_event_name != Events.COMPLETED:
        engine.run()
        calls += 1
    assert trace.words.count("INT") == 0
    assert sum(word.startswith("INT") for word in trace.words) == calls - 1
    assert calls > 2
    assert without_interrupts(outcome(engine, trace)) == expected


def test_asked_by_the_process_function_the_iteration_is_finished_first():
    def step(engine, batch):
        if engine.state.iteration == 1:
            engine.interrupt()

    engine, trace = traced(step)
    engine.run(DATA)
    assert trace.take() == flat(f"S ES {IT} INT")
    engine.run()
    assert trace.take() == flat(f"{IT} EC C")


@pytest.mark.parametrize("event", [Events.COMPLETED, Events.TERMINATE, Events.TERMINATE_SINGLE_EPOCH, Events.INTERRUPT])
def test_asked_where_nothing_is_left_to_pause_it_has_no_effect(event):
    engine, trace = traced()
    wishes = {
        Events.TERMINATE: (lambda engine: engine.terminate(), "T C"),
        Events.TERMINATE_SINGLE_EPOCH: (lambda engine: engine.terminate_epoch(), "TSE:1 EC INT"),
        Events.INTERRUPT: (interrupt, "INT"),
        Events.COMPLETED: (lambda engine: None, f"{IT} EC C"),
    }
    wish, rest = wishes[event]
    at(engine, Events.ITERATION_COMPLETED, wish)
    at(engine, event, interrupt)
    engine.run(DATA)
    assert trace.take() == flat(f"S ES {IT}", rest)


def test_asked_in_interrupt_it_is_not_asked_again_after_resumption():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, interrupt)
    at(engine, Events.INTERRUPT, interrupt)
    engine.run(DATA)
    trace.take()
    engine.run()
    assert trace.take() == flat(f"{IT} EC C")


def test_a_paused_run_is_seen_as_unfinished():
    engine, _ = traced()
    at(engine, Events.ITERATION_COMPLETED, interrupt, firing=3)
    state = engine.run(DATA, max_epochs=EPOCHS)
    assert (state.iteration, state.epoch, state.batch, state.output) == (3, 2, 1, 1)
    assert engine.last_event_name == Events.INTERRUPT
    counts = {"epochs_completed": 1, "iterations_in_epoch": 1}
    assert engine.state_dict() == {"epoch_length": 2, "iteration": 3, "max_epochs": EPOCHS, **counts}


@pytest.mark.parametrize(
    ("first", "then", "iterations"),
    [
        ({"max_epochs": 2}, {"max_epochs": 5}, 10),
        ({"max_epochs": 3}, {"max_epochs": 2}, 4),
        ({"max_epochs": 3}, {"epoch_length": 2}, 6),
        ({"max_iters": 4}, {"max_iters": 7}, 7),
        ({"max_iters": 7}, {"max_iters": 3}, 3),
    ],
    ids=str,
)
def test_the_target_may_change_while_paused(first, then, iterations):
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, interrupt, firing=2)
    engine.run(DATA, **first)
    assert engine.run(**then).iteration == iterations
    assert trace.take().split().count("S") == 1


@pytest.mark.parametrize("position", range(2, 12))
def test_data_given_while_paused_is_ignored_once_the_pass_has_begun(position):
    engine, trace = traced()
    at_position(engine, position, interrupt)
    engine.run(DATA, max_epochs=EPOCHS)
    engine.run([7, 8, 9])
    assert trace.batches == DATA * EPOCHS


@pytest.mark.parametrize("position", [0, 1])
def test_data_given_before_the_pass_has_begun_is_used(position):
    engine, trace = traced()
    at_position(engine, position, interrupt)
    engine.run(DATA, max_epochs=2)
    engine.run([7, 8, 9])
    assert trace.batches == [7, 8, 9, 7]
    assert engine.state.dataloader == [7, 8, 9]


def test_no_batch_is_lost():
    engine, trace = traced()
    engine.add_event_handler(Events.GET_BATCH_COMPLETED(every=3) | Events.ITERATION_STARTED(every=2), interrupt)
    engine.run(unsized(range(20)), epoch_length=20)
    while engine.last_event_name != Events.COMPLETED:
        engine.run()
    assert trace.batches == list(range(20))


def test_a_pause_where_the_data_ran_out_does_not_repeat_the_fetch():
    engine, trace = traced()
    at(engine, Events.DATALOADER_STOP_ITERATION, interrupt)
    engine.run(DATA, max_epochs=2)
    assert trace.take() == flat(f"S ES {IT} {IT} EC ES GS STOP INT")
    engine.run()
    assert trace.take() == flat(f"GC IS IC {IT} EC C")


def test_an_event_of_the_users_own_where_the_data_ran_out_does_not_repeat_the_fetch():
    engine, trace = traced()
    engine.register_events("foo")
    engine.add_event_handler(Events.DATALOADER_STOP_ITERATION, lambda: engine.fire_event("foo"))
    engine.run(DATA, max_epochs=2)
    assert trace.take() == flat(f"S ES {IT} {IT} EC ES GS STOP GC IS IC {IT} EC C")


# --- switched off -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["class", "instance"])
def test_interrupting_can_be_switched_off(owner):
    class Steady(Engine):
        interrupt_resume_enabled = owner == "instance"

    engine = Steady(echo)
    engine.interrupt_resume_enabled = False
    trace, refused = Trace(engine), []

    @engine.on(Events.ITERATION_STARTED(once=2))
    def ask(engine):
        with pytest.raises(RuntimeError, match="interrupt_resume_enabled"):
            engine.interrupt()
        refused.append(engine.should_interrupt)

    engine.run(DATA)
    assert refused == [False]
    assert trace.take() == flat(f"S ES {IT} {IT} EC C")


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS.keys())
def test_switching_it_off_changes_nothing_else(arguments):
    engine, trace = traced(counters=True)
    engine.interrupt_resume_enabled = False
    engine.run(**arguments())
    assert outcome(engine, trace) == uninterrupted(arguments())


def test_two_engines_may_be_paused_at_once():
    engines = [traced() for _ in range(2)]
    for engine, _ in engines:
        engine.add_event_handler(Events.ITERATION_COMPLETED, interrupt)
    engines[0][0].run(DATA)
    engines[1][0].run([7, 8])
    for (engine, _), _ in itertools.product(engines, range(2)):
        engine.run()
    assert [trace.batches for _, trace in engines] == [[1, 2], [7, 8]]
