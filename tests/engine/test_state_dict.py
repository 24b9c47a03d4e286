"""Saving and loading the progress of an engine."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.engine import Engine, Events
from tests.engine.traces import at, echo, traced, unsized

FULL = {"epoch_length": 4, "iteration": 6, "max_epochs": 3}


def without(*names, **more):
    return {**{name: value for name, value in FULL.items() if name not in names}, **more}


def counters(engine):
    state = engine.state
    return state.iteration, state.epoch, state.epoch_length, state.max_epochs, state.max_iters


# --- saving -----------------------------------------------------------------------------------------------------


def test_the_state_of_a_new_engine():
    found = Engine(echo).state_dict()
    assert type(found) is OrderedDict
    assert list(found.items()) == [("epoch_length", None), ("iteration", 0), ("max_epochs", None)]


@pytest.mark.parametrize(
    ("arguments", "saved"),
    [
        ({"max_epochs": 2}, {"epoch_length": 3, "iteration": 6, "max_epochs": 2}),
        ({"max_iters": 4}, {"epoch_length": 3, "iteration": 4, "max_iters": 4}),
    ],
)
def test_the_target_that_is_set_is_saved(arguments, saved):
    engine = Engine(echo)
    engine.run([1, 2, 3], **arguments)
    epoch, done = divmod(saved["iteration"], 3)
    assert engine.state_dict() == {**saved, "epochs_completed": epoch, "iterations_in_epoch": done}


def test_a_state_can_be_saved_at_any_event():
    engine, saved = Engine(echo), []
    engine.add_event_handler(
        Events.GET_BATCH_STARTED | Events.EPOCH_COMPLETED, lambda: saved.append(engine.state_dict())
    )
    engine.run(unsized("ab"))
    assert [(one["epoch_length"], one["iteration"]) for one in saved] == [(None, 0), (None, 1), (None, 2), (2, 2)]


def test_keys_of_the_users_own_are_saved_behind_the_others_and_loaded():
    engine, other = Engine(echo), Engine(echo)
    for one in (engine, other):
        one.state_dict_user_keys += ["alpha", "beta"]
    engine.state.alpha, engine.state.beta = 0.1, [1, 2]
    assert list(engine.state_dict()) == ["epoch_length", "iteration", "max_epochs", "alpha", "beta"]
    other.load_state_dict(engine.state_dict())
    assert (other.state.alpha, other.state.beta) == (0.1, [1, 2])


def test_a_key_of_the_users_own_that_the_state_lacks_is_an_error():
    engine = Engine(echo)
    engine.state_dict_user_keys.append("alpha")
    with pytest.raises(AttributeError, match="alpha"):
        engine.state_dict()


# --- loading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state_dict", "expected"),
    [
        (FULL, (6, 1, 4, 3, None)),
        (without("iteration", epoch=2), (8, 2, 4, 3, None)),
        (without("max_epochs", max_iters=9), (6, 1, 4, None, 9)),
        (without("iteration", "max_epochs", epoch=1, max_iters=4), (4, 1, 4, None, 4)),
        (without(max_epochs=1, iteration=4), (4, 1, 4, 1, None)),
        (without("max_epochs", max_iters=6), (6, 1, 4, None, 6)),
        (without(max_epochs=None), (6, 1, 4, None, None)),
        (without("max_epochs", max_iters=None), (6, 1, 4, None, None)),
        (without(iteration=0), (0, 0, 4, 3, None)),
        (without(iteration=0, epoch_length=None), (0, 0, None, 3, None)),
        (without("iteration", epoch=0, epoch_length=None), (0, 0, None, 3, None)),
        (without(epoch_length=None), (6, 0, None, 3, None)),  # from the first pass over data of unknown length
        (without(more=1), (6, 1, 4, 3, None)),
        (OrderedDict(FULL), (6, 1, 4, 3, None)),
        (UserDict(FULL), (6, 1, 4, 3, None)),
        (Engine(echo).state_dict(), (0, 0, None, None, None)),
    ],
    ids=str,
)
def test_counts_of_completed_work_are_taken_over(state_dict, expected):
    engine = Engine(echo)
    engine.run([1, 2], max_iters=3)
    engine.state.alpha = 0.1
    engine.load_state_dict(state_dict)
    assert counters(engine) == expected
    assert engine.state.alpha == 0.1
    assert not hasattr(engine.state, "more")


@pytest.mark.parametrize(
    ("state_dict", "error", "named"),
    [
        (3, TypeError, "state_dict.*3"),
        (None, TypeError, "state_dict"),
        ([("iteration", 6)], TypeError, "state_dict"),
        ({}, ValueError, "epoch_length"),
        (without("epoch_length"), ValueError, "epoch_length"),
        (without("iteration"), ValueError, "iteration.*epoch"),
        (without(epoch=1), ValueError, "iteration.*epoch"),
        (without("max_epochs"), ValueError, "max_epochs.*max_iters"),
        (without(max_iters=9), ValueError, "max_epochs.*max_iters"),
        (without("iteration", epoch=1, epoch_length=None), ValueError, "epoch_length.*None"),
        *[(without(epoch_length=bad), ValueError, f"epoch_length.*{bad}") for bad in (0, -4)],
        *[(without("iteration", epoch=1, epoch_length=bad), ValueError, f"epoch_length.*{bad}") for bad in (0, -4)],
        (without(iteration=-1), ValueError, "iteration.*-1"),
        (without("iteration", epoch=-1), ValueError, "epoch.*-1"),
        *[(without(max_epochs=bad), ValueError, f"max_epochs.*{bad}") for bad in (0, -3)],
        *[(without("max_epochs", max_iters=bad), ValueError, f"max_iters.*{bad}") for bad in (0, -3, 5)],
        (without(iteration=8, max_epochs=1), ValueError, "max_epochs.*2.*1"),
        *[({**FULL, name: "6"}, TypeError, f"{name}.*'6'") for name in FULL],
        *[({**FULL, name: 6.0}, TypeError, f"{name}.*6.0") for name in FULL],
    ],
    ids=str,
)
def test_a_wrong_state_is_refused_and_changes_nothing(state_dict, error, named):
    engine = Engine(echo)
    engine.run([1, 2, 3], max_epochs=2)
    before = copy.copy(vars(engine.state))
    with pytest.raises(error, match=named):
        engine.load_state_dict(state_dict)
    assert vars(engine.state) == before
    assert engine.run([1, 2, 3], max_epochs=4).iteration == 12


def test_missing_keys_of_the_users_own_are_named_and_nothing_changes():
    engine = Engine(echo)
    engine.state_dict_user_keys += ["alpha", "beta"]
    engine.state.alpha = engine.state.beta = 1
    with pytest.raises(ValueError, match="beta"):
        engine.load_state_dict({**FULL, "alpha": 2})
    assert engine.state.alpha == 1
    assert counters(engine) == (0, 0, None, None, None)


# --- there and back ---------------------------------------------------------------------------------------------

sizes = st.integers(1, 5)


@settings(deadline=None)
@given(st.data(), sizes, sizes, st.sampled_from(["max_epochs", "max_iters"]), st.integers(1, 12))
def test_a_run_stopped_anywhere_goes_on_in_another_engine_from_its_saved_state(data, size, length, name, target):
    total = target * length if name == "max_epochs" else target
    stop = data.draw(st.integers(1, total))
    first = Engine(echo)
    at(first, Events.ITERATION_COMPLETED, lambda engine: engine.interrupt(), firing=stop)
    first.run(range(size), epoch_length=length, **{name: target})
    saved = first.state_dict()
    second, trace = traced()
    second.load_state_dict(saved)
    assert second.state_dict() == saved
    if stop < total:
        second.run(range(size))
        assert len(trace.batches) == total - stop
        assert first.run().iteration == second.state.iteration == total
        assert first.state_dict() == second.state_dict()


@settings(deadline=None)
@given(
    st.integers(0, 30), st.one_of(st.none(), st.integers(1, 6)), st.one_of(st.none(), st.integers(0, 5)), st.booleans()
)
def test_what_was_loaded_is_saved_again(iteration, length, more, by_epochs):
    progress = (iteration // length if length else 0) if by_epochs else iteration
    target = None if more is None else max(1, progress + more)
    name = "max_epochs" if by_epochs or target is None else "max_iters"
    saved = {"epoch_length": length, "iteration": iteration, name: target}
    engine = Engine(echo)
    engine.load_state_dict(saved)
    again = engine.state_dict()
    assert saved.items() <= again.items()
    assert again["epochs_completed"] == (iteration // length if length else 0)


def test_loading_makes_the_next_run_take_data_from_the_beginning():
    engine, trace = traced()
    engine.run([1, 2, 3, 4], max_iters=2)
    engine.load_state_dict(FULL)
    engine.run([1, 2, 3, 4])
    assert trace.batches == [1, 2] + [1, 2, 3, 4, 1, 2]


def test_a_state_is_not_loaded_into_the_middle_of_an_epoch():
    engine = Engine(echo)
    engine.add_event_handler(
        Events.ITERATION_COMPLETED(once=1),
        lambda: engine.load_state_dict({"iteration": 4, "epoch_length": 2, "max_epochs": 4}),
    )
    with pytest.raises(RuntimeError, match="own run"):
        engine.run([1, 2], max_epochs=3)
    assert engine.state.iteration == 1
