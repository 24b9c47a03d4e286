"""Stop training when a score no longer improves."""

from __future__ import annotations

import logging
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from camshaft.base import ResettableHandler, Serializable
from camshaft.engine.engine import Engine
from camshaft.engine.events import EventLike, Events
from camshaft.engine.lazy import LazyNumber
from camshaft.handlers.stopping import StopTogether
from camshaft.handlers.utils import check_engine

__all__ = ["EarlyStopping"]


class EarlyStopping(Serializable, ResettableHandler):
    """Ends training when a score has not improved for some evaluations; on all ranks at the same iteration.

    Register it on an evaluator, mostly on ``COMPLETED``. NaN is no improvement, also where it comes first. Saved after
    it has ended a run, and loaded, it ends the next one as it starts, so that a job may be started again and again.

    Args:
        patience: how many evaluations without improvement there may be, the last of which ends training.
        score_function: called with the evaluator, gives a number.
        trainer: the engine that ends.
        threshold: by how much a score must be better than the best one to be an improvement.
        cumulative: measure against the last improvement, so that small steps add up; otherwise against the best
            score so far, so that a long climb by steps below the threshold counts as none.
        threshold_mode: ``"abs"``, or ``"rel"`` for a threshold that is a fraction of the best score.
        mode: ``"max"`` if larger scores are better, or ``"min"``.
        min_delta, min_delta_mode, cumulative_delta: old names of ``threshold``, ``threshold_mode`` and
            ``cumulative``.

    Raises:
        TypeError: ``score_function`` cannot be called, or ``trainer`` is no engine.
        ValueError: ``patience`` is not an integer of at least 1, ``threshold`` no number of at least 0, or a mode is
            unknown.

    >>> from camshaft.engine import Events
    >>> trainer = Engine(lambda engine, batch: None)
    >>> evaluator = Engine(lambda engine, batch: batch)
    >>> stopping = EarlyStopping(2, lambda engine: engine.state.output, trainer)
    >>> stopping.attach(evaluator)
    >>> scores = iter([0.5, 0.7, 0.6, 0.7, 0.9])
    >>> handle = trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([next(scores)]))
    >>> trainer.run(range(10), max_epochs=5).epoch
    4
    """

    _state_dict_all_req_keys = ("counter", "best_score")

    def __init__(
        self,
        patience: int,
        score_function: Callable[[Engine[Any, Any]], Any],
        trainer: Engine[Any, Any],
        threshold: float = 0.0,
        cumulative: bool = False,
        threshold_mode: str = "abs",
        mode: str = "max",
        min_delta: float | None = None,
        min_delta_mode: str | None = None,
        cumulative_delta: bool | None = None,
    ) -> None:
        if not callable(score_function):
            raise TypeError(f"score_function must be callable, got {score_function!r}")
        check_engine("trainer", trainer)
        for old, value in (("min_delta", min_delta), ("min_delta_mode", min_delta_mode)):
            if value is not None:
                _warn_of(old)
        if cumulative_delta is not None:
            _warn_of("cumulative_delta")
        self.patience = patience
        self.score_function = score_function
        self.trainer = trainer
        self.threshold = threshold if min_delta is None else min_delta
        self.threshold_mode = threshold_mode if min_delta_mode is None else min_delta_mode
        self.cumulative = cumulative if cumulative_delta is None else cumulative_delta
        self.mode = mode
        _check_numbers(patience, self.threshold)
        _check_mode("threshold_mode", self.threshold_mode, ("abs", "rel"))
        _check_mode("mode", mode, ("max", "min"))
        self.counter = 0
        self.best_score: float | None = None
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self._has_ended = False
        self._together = StopTogether()
        self._together.attach(trainer)
        trainer.add_event_handler(Events.STARTED, self._end_again)

    def __call__(self, engine: Engine[Any, Any]) -> None:
        """Look at the score of an evaluation."""
        score = self.score_function(engine)
        if isinstance(score, LazyNumber):
            score = score.read()
        try:
            is_number = not math.isnan(score)
        except TypeError as error:
            kind = type(score).__name__
            raise TypeError(f"score_function must give a number, got {score!r} of type {kind}") from error
        best = self.best_score
        if is_number and (best is None or math.isnan(best) or self._improves(score, best)):
            self.best_score = score
            self.counter = 0
            return
        if best is not None and not self.cumulative and self._is_better(score, best):
            self.best_score = score
        self.counter += 1
        self.logger.debug("EarlyStopping: %i / %i", self.counter, self.patience)
        if self.counter >= self.patience:
            self.logger.info("EarlyStopping: Stop training")
            self._together.stop(self.trainer)

    def reset(self) -> None:
        """Forget the scores."""
        self.counter = 0
        self.best_score = None
        self._has_ended = False

    def attach(
        self,
        engine: Engine[Any, Any],
        event: EventLike = Events.COMPLETED,
        reset_engine: Engine[Any, Any] | None = None,
        reset_event: EventLike = Events.STARTED,
    ) -> None:
        """Look at the score of an evaluator, and begin anew with each run of the trainer.

        Args:
            engine: the evaluator.
            event: when its score is there.
            reset_engine: with whose event the scores are forgotten; by default the trainer's, unless its run is
                resumed.
            reset_event: the event.
        """
        check_engine("engine", engine)
        if reset_engine is not None:
            check_engine("reset_engine", reset_engine)
        engine.add_event_handler(event, self)
        if reset_engine is None:
            self.trainer.add_event_handler(reset_event, self._reset_if_new)
        else:
            reset_engine.add_event_handler(reset_event, self.reset)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Give what is to be remembered when training goes on."""
        return OrderedDict(counter=self.counter, best_score=self.best_score, threshold_mode=self.threshold_mode)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what was remembered; states of older versions hold no ``threshold_mode``.

        Raises:
            TypeError: it is not a mapping, or ``counter`` is not an integer.
            ValueError: ``counter`` or ``best_score`` is missing, or the mode is unknown.
        """
        super().load_state_dict(state_dict)
        mode = state_dict.get("threshold_mode", self.threshold_mode)
        _check_mode("threshold_mode", mode, ("abs", "rel"))
        if not isinstance(state_dict["counter"], int):
            raise TypeError(f"counter must be an integer, got {state_dict['counter']!r}")
        self.counter, self.best_score, self.threshold_mode = state_dict["counter"], state_dict["best_score"], mode
        self._has_ended = self.counter >= self.patience

    def _end_again(self, engine: Engine[Any, Any]) -> None:
        has_ended, self._has_ended = self._has_ended, False
        if has_ended and engine.state.iteration:
            self.logger.warning("EarlyStopping: the patience had been used up already; to train on, call reset()")
            engine.terminate()  # on each rank, as all have loaded the same count

    def _reset_if_new(self, engine: Engine[Any, Any]) -> None:
        if engine.state.iteration == 0 or engine.last_event_name != Events.STARTED:
            self.reset()

    def _improves(self, score: float, best: float) -> bool:
        """Whether a score is better by the threshold; false if either is NaN."""
        margin = self.threshold * (abs(best) if self.threshold_mode == "rel" else 1)
        return score > best + margin if self.mode == "max" else score < best - margin

    def _is_better(self, score: float, best: float) -> bool:
        return score > best if self.mode == "max" else score < best

    # --- old names -----------------------------------------------------------------------------------------

    min_delta: property
    min_delta_mode: property
    cumulative_delta: property


_NEW_NAMES = {"min_delta": "threshold", "min_delta_mode": "threshold_mode", "cumulative_delta": "cumulative"}


def _warn_of(old: str, stacklevel: int = 3) -> None:
    warnings.warn(f"{old} is now called {_NEW_NAMES[old]}", DeprecationWarning, stacklevel=stacklevel)


def _check_numbers(patience: Any, threshold: Any) -> None:
    if not isinstance(patience, Integral) or patience < 1:
        raise ValueError(f"patience must be an integer of at least 1, got {patience!r}")
    if not isinstance(threshold, (int, float, Real)) or not threshold >= 0:  # type: ignore[operator]  # reals compare
        raise ValueError(f"threshold must be a number of at least 0, got {threshold!r}")


def _check_mode(name: str, mode: Any, allowed: tuple[str, str]) -> None:
    if mode not in allowed:
        raise ValueError(f"{name} must be {allowed[0]!r} or {allowed[1]!r}, got {mode!r}")


def _old(old: str) -> property:
    def get(self: EarlyStopping) -> Any:
        _warn_of(old)
        return getattr(self, _NEW_NAMES[old])

    def set_(self: EarlyStopping, value: Any) -> None:
        _warn_of(old)
        setattr(self, _NEW_NAMES[old], value)

    return property(get, set_, doc=f"Old name of ``{_NEW_NAMES[old]}``.")


for _name in _NEW_NAMES:
    setattr(EarlyStopping, _name, _old(_name))
