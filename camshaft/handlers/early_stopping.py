"""Early stopping: terminate training when a score no longer improves."""

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
from camshaft.engine.state import LazyNumber
from camshaft.errors import described
from camshaft.handlers.stopping import StopTogether
from camshaft.handlers.utils import check_engine

__all__ = ["EarlyStopping"]


class _Renamed:
    """An attribute under its old name."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def warn(self) -> None:
        """Warn on behalf of the caller's caller."""
        warnings.warn(f"{self.old} is now called {self.new}", DeprecationWarning, stacklevel=3)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        self.warn()
        return getattr(instance, self.new)

    def __set__(self, instance: Any, value: Any) -> None:
        self.warn()
        setattr(instance, self.new, value)


class EarlyStopping(Serializable, ResettableHandler):
    """Terminate training when a score has not improved for some evaluations, on all ranks after the same iteration.

    Attach it to an evaluator. NaN is never an improvement. If the state of a handler that has terminated a run is
    loaded, it terminates the next run when that starts, so that the job can safely be restarted.

    Args:
        patience: number of evaluations without improvement before stopping.
        score_function: called with the evaluator; returns a number.
        trainer: the engine to terminate.
        threshold: minimum difference from the best score that counts as an improvement.
        cumulative: whether the difference is measured from the last improvement, so that small steps add up. By
            default it is measured from the best score so far, so that many small steps are no improvement.
        threshold_mode: ``"abs"``, or ``"rel"`` for a threshold that is a fraction of the best score.
        mode: ``"max"`` if larger scores are better, or ``"min"``.
        min_delta, min_delta_mode, cumulative_delta: old names of ``threshold``, ``threshold_mode`` and
            ``cumulative``.

    Raises:
        TypeError: ``score_function`` is not callable, or ``trainer`` is not an Engine.
        ValueError: ``patience`` is not an integer of at least 1, ``threshold`` is not a number of at least 0, or a
            mode is unknown.

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

    min_delta = _Renamed("min_delta", "threshold")
    min_delta_mode = _Renamed("min_delta_mode", "threshold_mode")
    cumulative_delta = _Renamed("cumulative_delta", "cumulative")

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
        self.patience = patience
        self.score_function = score_function
        self.trainer = trainer
        self.threshold, self.threshold_mode, self.cumulative, self.mode = threshold, threshold_mode, cumulative, mode
        given = {"min_delta": min_delta, "min_delta_mode": min_delta_mode, "cumulative_delta": cumulative_delta}
        for name, value in given.items():
            if value is not None:
                renamed: _Renamed = getattr(EarlyStopping, name)
                renamed.warn()
                setattr(self, renamed.new, value)
        _check_least("patience", patience, Integral, "an integer", 1)
        _check_least("threshold", self.threshold, Real, "a number", 0)
        _check_mode("threshold_mode", self.threshold_mode, ("abs", "rel"))
        _check_mode("mode", mode, ("max", "min"))
        self.counter = 0
        self.best_score: float | None = None
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self._had_stopped = False
        self._together = StopTogether()
        self._together.attach(trainer)
        trainer.add_event_handler(Events.STARTED, self._stop_again)

    def __call__(self, engine: Engine[Any, Any]) -> None:
        """Compare the score of an evaluation with the best one, and terminate training if the patience is used up."""
        score = self.score_function(engine)
        if isinstance(score, LazyNumber):
            score = score.read()
        try:
            is_number = not math.isnan(score)
        except TypeError as error:
            raise TypeError(f"score_function must return a number, got {described(score)}") from error
        best = self.best_score
        if is_number and (best is None or math.isnan(best) or self._exceeds(score, best, self.threshold)):
            self.best_score = score
            self.counter = 0
            return
        if best is not None and not self.cumulative and self._exceeds(score, best, 0.0):
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
        self._had_stopped = False

    def attach(
        self,
        engine: Engine[Any, Any],
        event: EventLike = Events.COMPLETED,
        reset_engine: Engine[Any, Any] | None = None,
        reset_event: EventLike = Events.STARTED,
    ) -> None:
        """Evaluate the score of an evaluator, and reset for each new run of the trainer.

        Args:
            engine: the evaluator.
            event: when its score is available.
            reset_engine: engine whose event resets the handler; by default the trainer, except when its run is resumed.
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
        """Return the number of evaluations without improvement, and the best score."""
        return OrderedDict(counter=self.counter, best_score=self.best_score, threshold_mode=self.threshold_mode)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; ``threshold_mode`` is missing in those of older versions.

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
        self._had_stopped = self.counter >= self.patience

    def _stop_again(self, engine: Engine[Any, Any]) -> None:
        had_stopped, self._had_stopped = self._had_stopped, False
        if had_stopped and engine.state.iteration:
            self.logger.warning("EarlyStopping: the patience is already used up; call reset() to continue training")
            engine.terminate()  # on each rank, since all have loaded the same counter

    def _reset_if_new(self, engine: Engine[Any, Any]) -> None:
        if engine.state.iteration == 0 or engine.last_event_name != Events.STARTED:
            self.reset()

    def _exceeds(self, score: float, best: float, threshold: float) -> bool:
        """Return whether a score is better by more than the threshold, which is false if either is NaN."""
        margin = threshold * (abs(best) if self.threshold_mode == "rel" else 1)
        return score > best + margin if self.mode == "max" else score < best - margin


def _check_least(name: str, value: Any, kind: type[Any], kind_name: str, least: int) -> None:
    if not isinstance(value, kind) or not value >= least:
        raise ValueError(f"{name} must be {kind_name} of at least {least}, got {value!r}")


def _check_mode(name: str, mode: Any, allowed: tuple[str, str]) -> None:
    if mode not in allowed:
        raise ValueError(f"{name} must be {allowed[0]!r} or {allowed[1]!r}, got {mode!r}")
