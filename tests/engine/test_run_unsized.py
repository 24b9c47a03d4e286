"""Runs over data of unknown length, and over data that runs dry."""

from __future__ import annotations

import pytest

from camshaft.engine import Engine, Events
from tests.engine.traces import IT, IT_AGAIN, Sizeless, echo, flat, traced, unsized

RAN_OUT = "the data ran out"


def counts(engine):
    state = engine.state
    return state.epoch, state.iteration, state.epoch_length


def test_the_first_pass_over_unsized_data_tells_the_length():
    engine, trace = traced(counters=True)
    seen = []
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(engine.state.epoch_length))
    engine.run(unsized("ab"))
    assert trace.take() == flat(
        "S 0/0 · ES 1/0 · GS 1/0 GC 1/0 IS 1/1 IC 1/1 · GS 1/1 GC 1/1 IS 1/2 IC 1/2 · GS 1/2 · EC 1/2 · C 1/2"
    )
    assert seen == [2]
    assert counts(engine) == (1, 2, 2)


@pytest.mark.parametrize(
    ("epochs", "events"),
    [
        (2, f"S ES {IT} {IT} GS EC · ES GS STOP EC · C"),
        (3, f"S ES {IT} {IT} GS EC · ES GS STOP EC · ES GS STOP EC · C"),
    ],
)
def test_an_iterator_that_ran_dry_warns_once_also_for_a_last_epoch(epochs, events):
    engine, trace = traced()
    with pytest.warns(UserWarning, match=RAN_OUT) as caught:
        engine.run(unsized("ab"), max_epochs=epochs)
    assert len(caught) == 1
    assert trace.take() == flat(events)
    assert counts(engine) == (epochs, 2, 2)


def test_an_iterator_shorter_than_its_epoch_warns_also_in_the_only_one():
    engine, trace = traced()
    with pytest.warns(UserWarning, match=RAN_OUT):
        engine.run(unsized("ab"), epoch_length=3)
    assert trace.take() == flat(f"S ES {IT} {IT} GS STOP EC C")


def test_each_run_warns_for_itself():
    engine = Engine(echo)
    for _ in range(2):
        with pytest.warns(UserWarning, match=RAN_OUT):
            engine.run(unsized("ab"), epoch_length=3, max_epochs=2)


@pytest.mark.parametrize("more", [1, 3])
def test_an_iterator_that_is_long_enough_warns_nobody(more):
    engine = Engine(echo)
    engine.run(unsized(range(4 + more)), max_epochs=2, epoch_length=2)
    assert counts(engine) == (2, 4, 2)


def test_data_without_length_that_begins_again_has_epochs_like_sized_data():
    engine, trace = traced()
    engine.run(Sizeless(1, 2), max_epochs=3)
    assert trace.take() == flat(f"S ES {IT} {IT} GS EC · ES {IT_AGAIN} {IT} EC · ES {IT_AGAIN} {IT} EC · C")
    assert trace.batches == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("event", [Events.DATALOADER_STOP_ITERATION, Events.ITERATION_COMPLETED(every=2)])
def test_an_iterator_is_begun_anew_by_hand(event):
    engine, trace = traced()
    engine.add_event_handler(event, lambda: setattr(engine.state, "dataloader", unsized("ab")))
    engine.run(unsized("ab"), max_epochs=3)
    assert trace.batches == list("ababab")


@pytest.mark.parametrize("epochs", [1, 3])
def test_an_empty_iterator_makes_one_epoch_of_no_iterations(epochs):
    engine, trace = traced()
    engine.run(iter([]), max_epochs=epochs)
    assert trace.take() == "S ES GS EC C"
    assert counts(engine) == (1, 0, 0)


def test_iterations_over_unsized_data_derive_the_epochs():
    engine, trace = traced()
    engine.run(Sizeless(1, 2, 3), max_iters=7)
    assert trace.take() == flat(f"S ES {IT} {IT} {IT} GS EC · ES {IT_AGAIN} {IT} {IT} EC · ES {IT_AGAIN} T C")
    assert (engine.state.max_iters, engine.state.max_epochs) == (7, 3)
    engine.run(Sizeless(1, 2, 3), max_iters=9)  # what is derived is no change of the kind of target
    assert (engine.state.iteration, engine.state.max_iters, engine.state.max_epochs) == (9, 9, 3)


def test_a_derived_number_of_epochs_does_not_outlive_its_target():
    engine = Engine(echo)
    engine.run(Sizeless(1, 2, 3), max_iters=7)
    engine.state.max_iters = None
    engine.run([1, 2], max_epochs=2)
    assert counts(engine) == (2, 4, 2)


@pytest.mark.parametrize(
    ("arguments", "events"),
    [
        ({}, f"S ES {IT} {IT} {IT} GS EC · ES GS STOP EC · ES GS STOP EC · C"),
        ({"epoch_length": 2}, f"S ES {IT} {IT} EC · ES {IT} GS STOP EC · ES GS STOP EC · C"),
        ({"epoch_length": 9}, f"S ES {IT} {IT} {IT} GS STOP EC · ES GS STOP EC · C"),
    ],
)
def test_iterations_that_a_dry_iterator_cannot_reach_end_the_run(arguments, events):
    engine, trace = traced()
    with pytest.warns(UserWarning, match=RAN_OUT) as caught:
        engine.run(unsized("abc"), max_iters=7, **arguments)
    assert len(caught) == 1
    assert trace.take() == flat(events)
    assert engine.state.iteration == 3


def test_an_empty_iterator_cannot_reach_any_iterations():
    engine, trace = traced()
    with pytest.warns(UserWarning, match=RAN_OUT):
        engine.run(iter([]), max_iters=7)
    assert trace.take() == "S ES GS EC C"


def test_a_length_that_was_found_says_nothing_about_other_data():
    engine, _ = traced()
    for size in (11, 20, 3):
        engine.run(unsized(range(size)))
        assert counts(engine) == (1, size, size)


def test_the_length_of_sized_data_says_nothing_about_unsized_data():
    engine = Engine(echo)
    engine.run([1, 2, 3])
    engine.run(unsized("abcde"))
    assert counts(engine) == (1, 5, 5)


def test_a_length_that_the_user_gave_is_kept():
    engine = Engine(echo)
    engine.run(unsized(range(5)), epoch_length=3)
    engine.run(unsized(range(5)))
    assert counts(engine) == (1, 3, 3)
    engine.run()
    assert counts(engine) == (1, 3, 3)
