"""The order of the events of a run to its end, over sized data or none, with either target."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.engine import Engine, Events
from tests.engine.traces import IT, IT_AGAIN, IT_BARE, Sizeless, at, echo, flat, traced, unsized


def counts(engine):
    state = engine.state
    return state.epoch, state.iteration, state.epoch_length


def modelled(size, length, epochs, iterations=None):
    """The events over sized data, written down a second time as naively as possible."""
    words, given, total = ["S"], 0, 0
    for _ in range(epochs):
        words.append("ES")
        for done in range(1, length + 1):
            words.append("GS")
            if given == size:
                words.append("STOP")
                given = 0
            given, total = given + 1, total + 1
            words.append("GC IS IC")
            if total == iterations and done < length:
                return flat(*words, "T C")
        words.append("EC")
        if total == iterations:
            break
    return flat(*words, "C")


# --- sized data -------------------------------------------------------------------------------------------------


def test_two_epochs_over_a_list_of_two():
    engine, trace = traced(counters=True)
    engine.run([10, 20], max_epochs=2)
    assert trace.take() == flat(
        "S 0/0 · ES 1/0 · GS 1/0 GC 1/0 IS 1/1 IC 1/1 · GS 1/1 GC 1/1 IS 1/2 IC 1/2 · EC 1/2",
        "ES 2/2 · GS 2/2 STOP 2/2 GC 2/2 IS 2/3 IC 2/3 · GS 2/3 GC 2/3 IS 2/4 IC 2/4 · EC 2/4 · C 2/4",
    )
    assert trace.batches == [10, 20, 10, 20]


@pytest.mark.parametrize(
    ("data", "arguments", "events", "batches"),
    [
        ([1, 2, 3], {}, f"S ES {IT} {IT} {IT} EC C", [1, 2, 3]),
        ([1, 2], {"epoch_length": 1}, f"S ES {IT} EC C", [1]),
        ([1, 2], {"epoch_length": 1, "max_epochs": 2}, f"S ES {IT} EC ES {IT} EC C", [1, 2]),
        (
            [1, 2, 3],
            {"epoch_length": 2, "max_epochs": 3},
            f"S ES {IT} {IT} EC ES {IT} {IT_AGAIN} EC ES {IT} {IT} EC C",
            [1, 2, 3, 1, 2, 3],
        ),
        ([1, 2], {"epoch_length": 3}, f"S ES {IT} {IT} {IT_AGAIN} EC C", [1, 2, 1]),
        (
            [1, 2],
            {"epoch_length": 3, "max_epochs": 2},
            f"S ES {IT} {IT} {IT_AGAIN} EC ES {IT} {IT_AGAIN} {IT} EC C",
            [1, 2, 1, 2, 1, 2],
        ),
        ([1], {"epoch_length": 2}, f"S ES {IT} {IT_AGAIN} EC C", [1, 1]),
        (None, {"epoch_length": 1, "max_epochs": 2}, f"S ES {IT_BARE} EC ES {IT_BARE} EC C", [None] * 2),
        (None, {"epoch_length": 2, "max_iters": 3}, f"S ES {IT_BARE} {IT_BARE} EC ES {IT_BARE} T C", [None] * 3),
        # data of unknown length, whose epochs are given one
        (unsized("ab"), {"epoch_length": 2}, f"S ES {IT} {IT} EC C", ["a", "b"]),
        (Sizeless(1, 2), {"epoch_length": 3}, f"S ES {IT} {IT} {IT_AGAIN} EC C", [1, 2, 1]),
    ],
)  # fmt: skip
def test_the_events_of_a_run(data, arguments, events, batches):
    engine, trace = traced()
    engine.run(data, **arguments)
    assert trace.take() == flat(events)
    assert trace.batches == batches


sizes = st.integers(1, 6)


@settings(deadline=None)
@given(sizes, sizes, sizes)
def test_any_run_over_sized_data_has_the_events_of_the_model(size, length, epochs):
    engine, trace = traced()
    engine.run(range(size), max_epochs=epochs, epoch_length=length)
    words = trace.take()
    assert words == modelled(size, length, epochs)
    assert words.split().count("STOP") == (epochs * length - 1) // size
    assert trace.batches == [number % size for number in range(epochs * length)]
    assert counts(engine) == (epochs, epochs * length, length)


@pytest.mark.parametrize("switch", [True, False])
def test_a_pass_is_begun_once_and_only_when_the_last_one_is_over(switch, monkeypatch):
    class Passes(list):
        begun = 0

        def __iter__(self):
            Passes.begun += 1
            return super().__iter__()

    monkeypatch.setattr(Engine, "interrupt_resume_enabled", switch)
    Engine(echo).run(Passes([1, 2, 3]), max_epochs=3, epoch_length=2)
    assert Passes.begun == 2


def test_a_pass_begins_after_epoch_started():
    engine, seen = Engine(echo), []

    class Data(list):
        def __iter__(self):
            seen.append(engine.last_event_name.name)
            return super().__iter__()

    engine.run(Data([1, 2]), max_epochs=2, epoch_length=3)
    assert seen == ["EPOCH_STARTED", "DATALOADER_STOP_ITERATION", "DATALOADER_STOP_ITERATION"]


def test_a_handler_may_replace_the_data_where_it_ran_out():
    engine, trace = traced()
    new = iter([[30, 40], [50, 60]])
    engine.add_event_handler(Events.DATALOADER_STOP_ITERATION, lambda: setattr(engine.state, "dataloader", next(new)))
    engine.run([1, 2], max_epochs=3)
    assert trace.batches == [1, 2, 30, 40, 50, 60]


# --- iterations as the target -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_iters", "events", "terminated"),
    [
        (2, f"S ES {IT} {IT} T C", True),
        (3, f"S ES {IT} {IT} {IT} EC C", False),
        (4, f"S ES {IT} {IT} {IT} EC ES {IT_AGAIN} T C", True),
        (6, f"S ES {IT} {IT} {IT} EC ES {IT_AGAIN} {IT} {IT} EC C", False),
    ],
)
def test_a_number_of_iterations_is_reached_on_and_off_the_end_of_an_epoch(max_iters, events, terminated):
    engine, trace = traced()
    engine.run([1, 2, 3], max_iters=max_iters)
    assert trace.take() == flat(events)
    assert engine.should_terminate is terminated
    assert (engine.state.iteration, engine.state.max_iters, engine.state.max_epochs) == (max_iters, max_iters, None)


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 20))
def test_any_number_of_iterations_has_the_events_of_the_model(size, length, iterations):
    engine, trace = traced()
    engine.run(range(size), max_iters=iterations, epoch_length=length)
    assert trace.take() == modelled(size, length, iterations, iterations)
    assert engine.state.iteration == iterations
    assert engine.should_terminate is (iterations % length != 0)


@pytest.mark.parametrize("target", ["max_epochs", "max_iters"])
def test_only_the_target_asked_for_is_set(target):
    state = Engine(echo).run([1, 2], **{target: 4})
    assert {"max_epochs": state.max_epochs, "max_iters": state.max_iters} == {
        "max_epochs": None, "max_iters": None, target: 4
    }  # fmt: skip


def test_the_end_of_the_run_is_reached_with_and_without_interruption_support():
    texts = []
    for enabled in (True, False):
        engine, trace = traced(counters=True)
        engine.interrupt_resume_enabled = enabled
        at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.terminate_epoch(), firing=2)
        at(engine, Events.ITERATION_STARTED, lambda engine: engine.terminate(), firing=7)
        engine.run([1, 2, 3], max_epochs=5)
        texts.append(trace.take())
    assert texts[0] == texts[1]
