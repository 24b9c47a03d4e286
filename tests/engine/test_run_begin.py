"""Where a call of `run` begins: the table of new runs and resumptions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.engine import Engine, Events, State
from tests.engine.histories import BEFORE, DATA, after, done, failed, fresh, loaded, progress, suspended, terminated
from tests.engine.traces import IT, at, echo, flat, traced, unsized


def test_a_first_run_is_one_epoch():
    engine, _ = after(fresh)
    assert engine.run(DATA) is engine.state
    assert progress(engine) == (1, 2, 1, None)


def test_after_a_finished_run_the_next_is_one_epoch_again():
    engine, _ = after(done)
    engine.run(DATA)
    assert progress(engine) == (1, 2, 1, None)


def test_after_a_finished_run_the_same_target_begins_anew():
    engine, trace = after(done)
    engine.run(DATA, max_epochs=5)
    assert progress(engine) == (5, 10, 5, None)
    assert trace.words[:2] == ["S 0/0", "ES 1/0"]


def test_after_a_finished_run_a_farther_target_goes_on():
    engine, trace = after(done)
    engine.run(DATA, max_epochs=7)
    assert trace.take() == flat(
        "S 5/10 · ES 6/10 GS 6/10 GC 6/10 IS 6/11 IC 6/11 GS 6/11 GC 6/11 IS 6/12 IC 6/12 EC 6/12",
        "ES 7/12 GS 7/12 STOP 7/12 GC 7/12 IS 7/13 IC 7/13 GS 7/13 GC 7/13 IS 7/14 IC 7/14 EC 7/14 · C 7/14",
    )


@pytest.mark.parametrize("farther", [6, 7])
def test_after_a_finished_run_a_farther_number_of_iterations_goes_on(farther):
    engine, trace = after(lambda engine: done(engine, max_iters=5))  # in the middle of epoch 3
    engine.run(DATA, max_iters=farther)
    assert trace.words[:2] == ["S 3/5", "ES 4/5"]
    assert progress(engine) == (4, farther, None, farther)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("target", [{}, {"max_epochs": 2}, {"max_iters": 4}], ids=str)
def test_without_a_target_in_the_state_any_run_is_new(before, target):
    engine, trace = after(before)
    engine.state.max_epochs = engine.state.max_iters = None
    engine.run([7, 8, 9], **target)
    expected = {"max_epochs": (2, 6, 2, None), "max_iters": (2, 4, None, 4)}
    assert progress(engine) == expected.get(next(iter(target), ""), (1, 3, 1, None))
    assert trace.words[:2] == ["S 0/0", "ES 1/0"]
    assert trace.batches[:3] == [7, 8, 9]


def test_a_loaded_state_is_resumed_from_the_beginning_of_the_data():
    engine, trace = after(loaded)
    engine.run(DATA)
    assert trace.take() == flat(
        "S 2/5 · ES 3/5 GS 3/5 GC 3/5 IS 3/6 IC 3/6 EC 3/6",
        "ES 4/6 GS 4/6 GC 4/6 IS 4/7 IC 4/7 GS 4/7 STOP 4/7 GC 4/7 IS 4/8 IC 4/8 EC 4/8 · C 4/8",
    )
    assert trace.batches == [1, 2, 1]


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 14), st.integers(1, 3))
def test_a_state_is_resumed_in_the_epoch_of_its_next_iteration(length, iteration, more):
    epochs = iteration // length + more
    engine, trace = traced(counters=True)
    engine.load_state_dict({"iteration": iteration, "epoch_length": length, "max_epochs": epochs})
    engine.run(epoch_length=length)
    first = [word for word in trace.words if word.startswith(("IC", "ES", "EC"))]
    epoch = iteration // length + 1
    assert first[0] == f"ES {epoch}/{iteration}"
    assert first[length - iteration % length + 1] == f"EC {epoch}/{epoch * length}"
    assert progress(engine) == (epochs, epochs * length, epochs, None)


@pytest.mark.parametrize("target", [{}, {"max_epochs": 4}], ids=str)
def test_a_loaded_state_that_is_done_begins_anew_with_a_warning(target):
    engine, trace = after(lambda engine: loaded(engine, iteration=8))
    with pytest.warns(UserWarning, match="loaded state .* target of 4 epochs"):
        engine.run(DATA, **target)
    epochs = target.get("max_epochs", 1)
    assert progress(engine) == (epochs, 2 * epochs, epochs, None)
    assert trace.words[0] == "S 0/0"
    engine.run(DATA, **target)  # no warning: this engine has reached the target by itself


def test_a_loaded_state_that_is_done_goes_on_to_a_farther_target_without_warning():
    engine, trace = after(lambda engine: loaded(engine, iteration=8))
    engine.run(DATA, max_epochs=5)
    assert trace.words[:2] == ["S 4/8", "ES 5/8"]


def test_a_warning_is_kept_for_the_run_after_a_refused_one():
    engine, _ = after(lambda engine: loaded(engine, iteration=8))
    with pytest.raises(ValueError, match="epoch_length"):
        engine.run(DATA, epoch_length=0)
    with pytest.warns(UserWarning, match="loaded state"):
        engine.run(DATA)


def test_after_terminate_the_next_epoch_is_whole_and_begins_a_pass():
    engine, trace = after(terminated)
    assert progress(engine) == (2, 3, 5, None)
    engine.run(DATA)
    assert trace.words[:2] == ["S 2/3", "ES 3/3"]
    assert trace.batches == [1, 2] * 3
    assert progress(engine) == (5, 9, 5, None)


def test_after_a_suspension_any_call_goes_on_exactly_there():
    engine, trace = after(suspended)
    engine.run([7, 8, 9])
    assert trace.words[:2] == ["GS 2/3", "GC 2/3"]
    assert trace.batches == [2] + [1, 2] * 3
    assert progress(engine) == (5, 10, 5, None)


def test_after_a_failure_the_rest_of_the_epoch_comes_first():
    engine, trace = after(failed)
    assert engine.run([7, 8]) is engine.state
    assert trace.words[:2] == ["S 1/3", "ES 2/3"]
    assert trace.words[6] == "EC 2/4"
    assert trace.batches[:3] == [7, 8, 7]
    assert progress(engine) == (5, 10, 5, None)


def test_an_epoch_that_was_cut_short_is_followed_by_a_whole_one_also_in_the_next_run():
    engine, trace = traced()
    at(engine, Events.ITERATION_COMPLETED, lambda engine: engine.terminate_epoch(), firing=3)
    engine.run([1, 2], max_epochs=2)
    trace.take()
    engine.run([1, 2], max_epochs=3)
    assert trace.take() == flat(f"S ES {IT} {IT} EC C")
    assert progress(engine) == (3, 5, 3, None)


def test_a_new_run_takes_the_length_of_its_own_data():
    engine, _ = after(done)
    for data, arguments, length in (([1, 2, 3], {}, 3), (range(4), {"epoch_length": 2}, 2), (range(4), {}, 4)):
        engine.run(data, **arguments)
        assert progress(engine) == (1, length, 1, None)
        assert engine.state.epoch_length == length


def test_a_resumed_run_keeps_its_length_whatever_the_data_is():
    engine, trace = after(loaded)
    engine.run([1, 2, 3, 4, 5])
    assert progress(engine) == (4, 8, 4, None)
    assert trace.batches == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:the run resumes after 2 iterations of an epoch, but a list_iterator")
@pytest.mark.parametrize(
    "arguments", [{"data": range(4)}, {"data": unsized(range(9)), "epoch_length": 4}, {"epoch_length": 4}]
)
def test_a_state_that_does_not_know_its_length_learns_it_when_resumed(arguments):
    engine = Engine(echo)
    engine.load_state_dict({"iteration": 6, "epoch_length": None, "max_epochs": 3})
    engine.run(**arguments)
    assert progress(engine) == (3, 12, 3, None)
    assert engine.state.epoch_length == 4


def test_a_state_that_does_not_know_its_length_is_not_resumed_without_one():
    engine = Engine(echo)
    engine.load_state_dict({"iteration": 6, "epoch_length": None, "max_epochs": 3})
    with pytest.raises(ValueError, match="epoch_length"):
        engine.run()


def test_a_state_given_by_hand_after_a_failure_counts_as_it_is():
    engine, trace = after(failed)
    engine.state = State(iteration=2, epoch=1, epoch_length=2, max_epochs=2)
    engine.run(DATA)
    assert trace.words[:2] == ["S 1/2", "ES 2/2"]
    assert progress(engine) == (2, 4, 2, None)


@pytest.mark.parametrize("before", [fresh, done, loaded, terminated])
def test_a_state_given_by_hand_is_resumed_in_the_middle_of_its_epoch(before):
    engine, trace = after(before)
    engine.state = State(iteration=3, epoch=1, epoch_length=2, max_epochs=3)
    engine.run(DATA)
    assert trace.words[6] == "EC 2/4"
    assert progress(engine) == (3, 6, 3, None)


def test_a_state_loaded_when_the_run_has_started_is_where_it_goes_on():
    engine, trace = traced(counters=True)
    at(engine, Events.STARTED, lambda engine: loaded(engine))
    engine.run(DATA, max_epochs=4)
    assert trace.words[:2] == ["S 0/0", "ES 3/5"]
    assert progress(engine) == (4, 8, 4, None)


def test_counting_epochs_can_be_changed_to_counting_iterations_and_back():
    engine, _ = after(done)
    engine.state.max_epochs = None
    engine.run(DATA, max_iters=3)
    assert progress(engine) == (2, 3, None, 3)
    engine.state.max_iters = None
    engine.run(DATA, max_epochs=2)
    assert progress(engine) == (2, 4, 2, None)
