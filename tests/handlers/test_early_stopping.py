"""Early stopping: when training stops, state, and old names of arguments."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft import distributed as idist
from camshaft.engine import Engine, Events
from camshaft.engine.state import LazyNumber
from camshaft.handlers import EarlyStopping
from tests.ranks import on_ranks


def make(scores, patience=1, **options):
    """Return a handler that gets one score per call, and its trainer."""
    trainer, given_scores = Engine(lambda engine, batch: None), iter(scores)
    return EarlyStopping(patience, lambda engine: next(given_scores), trainer, **options), trainer


def stops_after(scores, **options):
    """Return the number of the evaluation after which training stops, or None."""
    handler, trainer = make(scores, **options)
    for number, _ in enumerate(scores, 1):
        handler(trainer)
        if trainer.should_terminate:
            return number
    return None


@pytest.mark.parametrize(
    ("scores", "options", "expected"),
    [
        ([1.0, 0.9], {}, 2),
        ([1.0, 1.0], {}, 2),  # strictly better
        ([1.0, 1.1, 1.2], {}, None),
        ([1.0, 0.9, 1.1, 1.0, 1.0], {"patience": 2}, 5),
        ([1.0, 1.1], {"mode": "min"}, 2),
        ([1.0, 0.9, 0.9], {"mode": "min"}, 3),
        ([1.0, 1.05, 1.1, 1.15], {"threshold": 0.1, "patience": 3}, 4),  # small steps never add up
        ([1.0, 1.05, 1.11, 1.16], {"threshold": 0.1, "patience": 3, "cumulative": True}, None),
        ([1.0, 1.15], {"threshold": 0.2, "threshold_mode": "rel"}, 2),
        ([1.0, 1.25], {"threshold": 0.2, "threshold_mode": "rel"}, None),
        ([1.0, 0.9], {"threshold": 0.2, "threshold_mode": "rel", "mode": "min"}, 2),
        ([-1.0, -1.05], {"threshold": 0.1, "threshold_mode": "rel"}, 2),  # [H12]
        ([-1.0, -0.8], {"threshold": 0.1, "threshold_mode": "rel"}, None),
        ([-1.0, -1.2], {"threshold": 0.1, "threshold_mode": "rel", "mode": "min"}, None),
        ([1.0, math.nan, math.nan], {"patience": 2}, 3),
        ([math.nan, 1.0, 2.0], {"patience": 2}, None),
        ([math.nan, math.nan], {"patience": 2}, 2),
        ([math.nan, 0.5, 0.4], {"patience": 2}, None),
        ([1.0, 2.0, 3.0], {"threshold": math.inf, "patience": 2}, 3),
        *(
            (scores, {"threshold": threshold, "threshold_mode": kind, "mode": mode}, expected)
            for threshold in (0.0, 0.1)
            for kind in ("abs", "rel")
            for mode, scores, expected in (
                ("min", [math.inf, 5.0, 2.0], None),
                ("min", [math.inf, math.inf], 2),
                ("min", [-math.inf, 5.0], 2),
                ("max", [-math.inf, -5.0, 2.0], None),
                ("max", [math.inf, 5.0], 2),
                ("max", [torch.tensor(-math.inf, dtype=torch.float16), torch.tensor([2.0])], None),
            )
        ),
    ],
)
def test_when_it_stops(scores, options, expected):
    assert stops_after(scores, **options) == expected


@given(
    scores=st.lists(st.floats(-10, 10) | st.just(math.nan), min_size=1, max_size=12),
    patience=st.integers(1, 4),
    threshold=st.sampled_from([0.0, 0.5]),
)
def test_min_is_max_of_the_negative_scores(scores, patience, threshold):
    options = {"patience": patience, "threshold": threshold}
    negative = [-score for score in scores]
    assert stops_after(scores, **options) == stops_after(negative, mode="min", **options)


@given(scores=st.lists(st.floats(-10, 10), min_size=1, max_size=12), patience=st.integers(1, 4))
def test_without_a_threshold_it_stops_patience_scores_after_the_best(scores, patience):
    expected, since = None, 0
    for number, score in enumerate(scores, 1):
        since = 0 if number == 1 or score > max(scores[: number - 1]) else since + 1
        if since >= patience:
            expected = number
            break
    assert stops_after(scores, patience=patience) == expected


def test_a_lazy_loss_is_a_score():
    assert stops_after([LazyNumber(torch.tensor(1.0)), LazyNumber(torch.tensor(0.5))]) == 2


def test_the_trainer_is_terminated_and_the_evaluator_is_not():
    handler, trainer = make([2.0, 1.0])
    evaluator = Engine(lambda engine, batch: None)
    handler.attach(evaluator)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(range(3)))
    trainer.run(range(5), max_epochs=4)
    assert trainer.state.epoch == 2
    assert evaluator.state.iteration == 3


def test_a_new_run_resets_the_counter_and_a_resumed_run_does_not():
    handler, trainer = make([5.0, 4.0, 3.0, 2.0, 1.0, 0.0], patience=2)
    evaluator = Engine(lambda engine, batch: None)
    handler.attach(evaluator)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(range(3)))
    assert trainer.run(range(5), max_epochs=9).epoch == 3
    assert trainer.run(range(5), max_epochs=9).epoch == 4  # resumed: one more without improvement
    assert handler.counter == 3
    trainer.state.max_epochs = None
    trainer.state.epoch = trainer.state.iteration = 0
    trainer.run(range(5), max_epochs=1)
    assert handler.counter == 0


def test_the_state_is_saved_and_loaded_also_without_a_mode(tmp_path):
    handler, trainer = make([1.0, 0.5, 0.5], patience=5)
    for _ in range(3):
        handler(trainer)
    torch.save(handler.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other, _ = make([], patience=5)
    other.load_state_dict(state)
    assert (other.counter, other.best_score, other.threshold_mode) == (2, 1.0, "abs")
    other.load_state_dict({"counter": 1, "best_score": 0.5})
    assert (other.counter, other.best_score, other.threshold_mode) == (1, 0.5, "abs")
    with pytest.raises(ValueError, match="threshold_mode must be 'abs' or 'rel', got 'x'"):
        other.load_state_dict({"counter": 7, "best_score": 7.0, "threshold_mode": "x"})
    assert other.counter == 1
    with pytest.raises(ValueError, match="best_score"):
        other.load_state_dict({"counter": 7})


@pytest.mark.parametrize("old", ["min_delta", "min_delta_mode", "cumulative_delta"])
def test_old_names_work_and_warn(old):
    new = {"min_delta": "threshold", "min_delta_mode": "threshold_mode", "cumulative_delta": "cumulative"}[old]
    value = {"min_delta": 0.5, "min_delta_mode": "rel", "cumulative_delta": True}[old]
    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}") as told:
        handler, _ = make([], **{old: value})
    assert told[0].filename == __file__ or "test_early_stopping" in told[0].filename
    assert getattr(handler, new) == value
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(handler, old) == value
    with pytest.warns(DeprecationWarning, match=new):
        setattr(handler, old, value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"patience": 0}, ValueError, "patience must be at least 1, got 0"),
        ({"threshold": -1.0}, ValueError, "threshold must be at least 0, got -1.0"),
        ({"threshold": math.nan}, ValueError, "threshold must be a finite number, got nan"),
        ({"mode": "best"}, ValueError, "mode must be 'max' or 'min', got 'best'"),
        ({"threshold_mode": "x"}, ValueError, "threshold_mode must be 'abs' or 'rel', got 'x'"),
        ({"score_function": 3}, TypeError, "score_function must be callable, got 3"),
        ({"trainer": None}, TypeError, "trainer must be an Engine, got None"),
    ],
)
def test_invalid_arguments_are_rejected(options, error, message):
    given_options = {"patience": 1, "score_function": min, "trainer": Engine(lambda engine, batch: None), **options}
    with pytest.raises(error, match=message):
        EarlyStopping(**given_options)


def test_a_score_that_is_not_a_number_is_reported():
    trainer = Engine(lambda engine, batch: None)
    with pytest.raises(TypeError, match="score_function must return a number, or a tensor with one element, got None$"):
        EarlyStopping(1, lambda engine: None, trainer)(trainer)


@pytest.mark.parametrize(("argument", "value"), [("patience", math.nan), ("patience", "3"), ("threshold", "x")])
def test_values_that_are_not_numbers_are_rejected(argument, value):
    with pytest.raises(TypeError, match=f"{argument} must be"):
        EarlyStopping(
            **{"patience": 2, "score_function": len, "trainer": Engine(lambda engine, batch: None), argument: value}
        )


def test_a_stopped_job_stops_at_once_when_it_is_restarted(caplog):
    def job(states):
        trainer = Engine(lambda engine, batch: None)
        evaluator = Engine(lambda engine, batch: None)
        stopping = EarlyStopping(2, lambda engine: 0.5, trainer)
        stopping.attach(evaluator)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
        if states:
            trainer.load_state_dict(states[0])
            stopping.load_state_dict(states[1])
        trainer.run(range(2), max_epochs=10)
        return trainer, stopping

    first, stopping = job(None)
    assert first.state.epoch == 3
    second, again = job((first.state_dict(), stopping.state_dict()))
    assert (second.state.epoch, second.state.iteration) == (3, 6)
    assert "as it had stopped the one that is resumed" in caplog.text
    again.reset()
    assert second.run(max_epochs=5).epoch == 5


@on_ranks(2)
def test_a_stopped_job_says_on_one_rank_that_it_stops_at_once(monkeypatch):
    trainer = Engine(lambda engine, batch: None)
    stopping = EarlyStopping(2, lambda engine: 0.5, trainer)
    trainer.load_state_dict({"iteration": 4, "epoch_length": 2, "max_epochs": 10})
    stopping.load_state_dict({"counter": 2, "best_score": 0.5})
    told = []
    monkeypatch.setattr(stopping.logger, "warning", lambda text, *args: told.append(text))
    assert trainer.run(range(2), max_epochs=10).iteration == 4
    assert len(told) == (idist.get_rank() == 0)


def test_attached_to_the_end_of_its_own_trainer_it_warns_that_it_cannot_stop_it():
    handler, trainer = make([1.0, 0.9])
    with pytest.warns(UserWarning, match="on COMPLETED of the trainer cannot stop it.*attach it to the evaluator"):
        handler.attach(trainer)
    handler, trainer = make([1.0, 0.9])
    handler.attach(trainer, Events.EPOCH_COMPLETED)
    assert trainer.run([0], max_epochs=5).epoch == 2


def test_a_loaded_state_stops_no_later_run():
    trainer, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None)
    stopping = EarlyStopping(2, lambda engine: trainer.state.epoch, trainer)
    evaluator.add_event_handler(Events.COMPLETED, stopping)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    stopping.load_state_dict({"counter": 2, "best_score": 0.5})
    assert trainer.run(range(2), max_epochs=3).epoch == 3
    assert trainer.run(max_epochs=6).epoch == 6


def test_an_invalid_counter_changes_nothing():
    stopping = EarlyStopping(2, len, Engine(lambda engine, batch: None))
    with pytest.raises(TypeError, match="counter must be an integer, got '2'"):
        stopping.load_state_dict({"counter": "2", "best_score": 0.5})
    assert (stopping.counter, stopping.best_score) == (0, None)


def test_a_metric_is_given_by_its_name():
    trainer, evaluator = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None)
    EarlyStopping(patience=2, score_name="accuracy", trainer=trainer).attach(evaluator)
    scores = iter([0.5, 0.7, 0.6, 0.7, 0.9])

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        evaluator.state.metrics["accuracy"] = next(scores)
        evaluator.run([0])

    assert trainer.run([0], max_epochs=5).epoch == 4


@pytest.mark.parametrize("options", [{}, {"score_function": len, "score_name": "accuracy"}])
def test_a_score_is_given_once(options):
    with pytest.raises(ValueError, match="score_function or score_name"):
        EarlyStopping(2, trainer=Engine(lambda engine, batch: None), **options)
