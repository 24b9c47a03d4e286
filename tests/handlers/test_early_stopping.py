"""Early stopping: after which evaluation training stops, what a resumed run does, and old names of arguments."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.engine import Engine, Events
from camshaft.engine.state import LazyNumber
from camshaft.handlers import EarlyStopping
from tests.threads import run_on_threads


def engine():
    return Engine(lambda engine, batch: None)


def make(scores=(), patience=1, **options):
    """Return a handler that gets one score per evaluation, its trainer, and the evaluator, which runs each epoch."""
    trainer, evaluator, given_scores = engine(), engine(), iter(scores)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    return EarlyStopping(patience, lambda engine: next(given_scores), trainer, **options), trainer, evaluator


def stops_after(scores, **options):
    """Return the number of the evaluation after which training stops, or None."""
    stopping, trainer, _ = make(scores, **options)
    for number, _ in enumerate(scores, 1):
        stopping(trainer)
        if trainer.should_terminate:
            return number
    return None


@pytest.mark.parametrize(
    ("scores", "options", "expected"),
    [
        ([1.0, 1.0], {}, 2),  # strictly better
        ([1.0, 1.05, 1.1, 1.15], {"threshold": 0.1, "patience": 3}, 4),  # small steps never add up
        ([1.0, 1.05, 1.11, 1.16], {"threshold": 0.1, "patience": 3, "cumulative": True}, None),
        ([1.0, 1.15], {"threshold": 0.2, "threshold_mode": "rel"}, 2),
        ([5.0, 5.5], {"threshold": 0.2, "threshold_mode": "rel"}, 2),
        ([1.0, 1.25], {"threshold": 0.2, "threshold_mode": "rel"}, None),
        ([-1.0, -1.05], {"threshold": 0.1, "threshold_mode": "rel"}, 2),  # [H12]
        ([-1.0, -0.8], {"threshold": 0.1, "threshold_mode": "rel"}, None),
        ([1.0, math.nan, math.nan], {"patience": 2}, 3),
        ([math.nan, 1.0, 2.0], {"patience": 2}, None),
        ([math.nan, math.nan], {"patience": 2}, 2),
        ([1.0, 2.0, 3.0], {"threshold": math.inf, "patience": 2}, 3),
        ([-math.inf, -5.0, 2.0], {"threshold": 0.1, "threshold_mode": "rel"}, None),
        ([math.inf, 5.0], {"threshold": 0.1, "threshold_mode": "rel"}, 2),
        ([torch.tensor(-math.inf, dtype=torch.float16), torch.tensor([2.0])], {"threshold": 0.1}, None),
        ([LazyNumber(torch.tensor(1.0)), LazyNumber(torch.tensor(0.5))], {}, 2),
    ],
)
def test_when_it_stops(scores, options, expected):
    assert stops_after(scores, **options) == expected


SCORES = st.lists(st.floats(-10, 10) | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=12)


@given(SCORES, st.integers(1, 4), st.sampled_from([0.0, 0.5]), st.sampled_from(["abs", "rel"]))
def test_min_is_max_of_the_negative_scores(scores, patience, threshold, kind):
    options = {"patience": patience, "threshold": threshold, "threshold_mode": kind}
    negative = [-score for score in scores]
    assert stops_after(scores, **options) == stops_after(negative, mode="min", **options)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.integers(1, 4))
def test_without_a_threshold_it_stops_patience_scores_after_the_best(scores, patience):
    expected, since = None, 0
    for number, score in enumerate(scores, 1):
        since = 0 if number == 1 or score > max(scores[: number - 1]) else since + 1
        if since >= patience:
            expected = number
            break
    assert stops_after(scores, patience=patience) == expected


def test_a_new_run_resets_the_counter_and_a_resumed_run_does_not():
    stopping, trainer, evaluator = make([5.0, 4.0, 3.0, 2.0, 1.0, 0.0], patience=2)
    stopping.attach(evaluator)
    assert trainer.run(range(5), max_epochs=9).epoch == 3
    assert not evaluator.should_terminate
    assert trainer.run(range(5), max_epochs=9).epoch == 4  # resumed: one more without improvement
    assert stopping.counter == 3
    trainer.state.max_epochs = None
    trainer.state.epoch = trainer.state.iteration = 0
    trainer.run(range(5), max_epochs=1)
    assert stopping.counter == 0


def test_attached_to_the_end_of_its_own_trainer_it_warns_that_it_cannot_stop_it():
    stopping, trainer, _ = make([1.0, 0.9])
    with pytest.warns(UserWarning, match="on COMPLETED of the trainer cannot stop it"):
        stopping.attach(trainer)
    stopping, trainer, _ = make([1.0, 0.9])
    stopping.attach(trainer, Events.EPOCH_COMPLETED)
    assert trainer.run([0], max_epochs=5).epoch == 2


def test_a_metric_is_given_by_its_name():
    trainer, evaluator = engine(), engine()
    EarlyStopping(patience=2, score_name="accuracy", trainer=trainer).attach(evaluator)
    scores = iter([0.5, 0.7, 0.6, 0.7, 0.9])

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        evaluator.state.metrics["accuracy"] = next(scores)
        evaluator.run([0])

    assert trainer.run([0], max_epochs=5).epoch == 4


# --- the state -----------------------------------------------------------------------------------------------------


def test_the_state_is_saved_and_loaded_also_without_a_mode_and_an_invalid_one_changes_nothing(tmp_path):
    stopping, trainer, _ = make([1.0, 0.5, 0.5], patience=5)
    for _ in range(3):
        stopping(trainer)
    torch.save(stopping.state_dict(), tmp_path / "state.pt")
    other, _, _ = make(patience=5)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (other.counter, other.best_score, other.threshold_mode) == (2, 1.0, "abs")
    other.load_state_dict({"counter": 1, "best_score": 0.5})
    for change, error in (
        ({"threshold_mode": "x"}, ValueError),
        ({"best_score": None}, ValueError),
        ({"counter": "2"}, TypeError),
    ):
        state = {"counter": 7, "best_score": 7.0} | change
        if state["best_score"] is None:
            del state["best_score"]
        with pytest.raises(error, match=next(iter(change))):
            other.load_state_dict(state)
        assert (other.counter, other.best_score, other.threshold_mode) == (1, 0.5, "abs")


def test_a_stopped_job_stops_at_once_when_it_is_restarted_and_one_rank_says_so(caplog):
    def job(states=None):
        trainer, evaluator = engine(), engine()
        stopping = EarlyStopping(2, lambda engine: 0.5, trainer)
        stopping.attach(evaluator)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
        if states:
            trainer.load_state_dict(states[0])
            stopping.load_state_dict(states[1])
        trainer.run(range(2), max_epochs=10)
        return trainer, stopping

    def restarted():
        first, stopping = job()
        assert first.state.epoch == 3
        second, again = job((first.state_dict(), stopping.state_dict()))
        assert (second.state.epoch, second.state.iteration) == (3, 6)
        again.reset()
        assert second.run(max_epochs=5).epoch == 5

    run_on_threads(2, restarted)
    assert caplog.text.count("because it had already stopped the run that is resumed") == 1


def test_a_loaded_state_stops_no_later_run():
    stopping, trainer, evaluator = make(iter(range(9)), patience=2)
    evaluator.add_event_handler(Events.COMPLETED, stopping)
    stopping.load_state_dict({"counter": 2, "best_score": -1.0})
    assert trainer.run(range(2), max_epochs=3).epoch == 3
    assert trainer.run(max_epochs=6).epoch == 6


# --- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("min_delta", "threshold", 0.5),
        ("min_delta_mode", "threshold_mode", "rel"),
        ("cumulative_delta", "cumulative", True),
    ],
)
def test_old_names_work_and_warn(old, new, value):
    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}") as told:
        stopping = EarlyStopping(1, lambda engine: 0.0, engine(), **{old: value})
    assert told[0].filename == __file__
    assert getattr(stopping, new) == value
    setattr(stopping, new, None)
    with pytest.warns(DeprecationWarning, match=new):
        setattr(stopping, old, value)
    assert getattr(stopping, new) == value
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(stopping, old) == value


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"patience": 0}, ValueError),
        ({"patience": math.nan}, TypeError),
        ({"threshold": -1.0}, ValueError),
        ({"threshold": math.nan}, ValueError),
        ({"threshold": "x"}, TypeError),
        ({"min_delta": -1.0}, ValueError),
        ({"mode": "best"}, ValueError),
        ({"threshold_mode": "x"}, ValueError),
        ({"score_function": 3}, TypeError),
        ({"score_function": None}, ValueError),
        ({"score_name": "accuracy"}, ValueError),  # a score is given once
        ({"trainer": None}, TypeError),
    ],
)
@pytest.mark.filterwarnings("ignore:min_delta is now called")
def test_invalid_arguments_are_rejected(options, error):
    name = next(iter(options)).replace("min_delta", "threshold")
    with pytest.raises(error, match=name):
        EarlyStopping(**{"patience": 1, "score_function": len, "trainer": engine(), **options})


def test_a_score_that_is_not_a_number_is_reported():
    stopping, trainer, _ = make([None])
    with pytest.raises(TypeError, match="score_function must return a number"):
        stopping(trainer)
