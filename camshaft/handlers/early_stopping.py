"""Early stopping: terminate training when a score no longer improves."""

from __future__ import annotations

import logging
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from camshaft.arguments import check_choice, check_text, check_type, integer, number, scalar
from camshaft.base import ResettableHandler, Serializable
from camshaft.distributed import get_rank
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import EventLike, Events, events_in
from camshaft.handlers.checkpoint.handler import check_score_function, score_of_metric
from camshaft.handlers.stopping import StopTogether

__all__ = ["EarlyStopping"]


_NEW_NAMES = {"min_delta": "threshold", "min_delta_mode": "threshold_mode", "cumulative_delta": "cumulative"}


def _renamed(old: str) -> Any:
    """Return a property that reads and writes an attribute under its old name."""

    def read(self: EarlyStopping) -> Any:
        return getattr(self, _new_name(old))

    def write(self: EarlyStopping, value: Any) -> None:
        setattr(self, _new_name(old), value)

    return property(read, write)


def _new_name(old: str) -> str:
    """Return the new name, with a warning on behalf of the caller's caller."""
    warnings.warn(f"{old} is now called {_NEW_NAMES[old]}", DeprecationWarning, stacklevel=3)
    return _NEW_NAMES[old]


class EarlyStopping(Serializable, ResettableHandler):
    """Terminate training when a score has stopped improving, on all ranks after the same iteration.

    Attach it to an evaluator. NaN is never an improvement. If the state of a handler that has terminated a run is
    loaded, it terminates the next run when that starts, so that the job can safely be restarted.

    Args:
        patience: number of evaluations without improvement before stopping.
        score_function: called with the evaluator; returns a number. By default it is the metric ``score_name``.
        trainer: the engine to terminate.
        threshold: minimum difference from the best score that counts as an improvement.
        cumulative: whether the difference is measured from the last improvement, so that small steps add up. By
            default it is measured from the best score so far, so that many small steps are no improvement.
        threshold_mode: ``"abs"``, or ``"rel"`` for a threshold that is a fraction of the best score.
        mode: ``"max"`` if larger scores are better, or ``"min"``.
        min_delta, min_delta_mode, cumulative_delta: old names of ``threshold``, ``threshold_mode`` and
            ``cumulative``.
        score_name: key in ``evaluator.state.metrics``, instead of ``score_function``.

    Raises:
        TypeError: ``score_function`` is not callable, ``trainer`` is not an Engine, ``patience`` is not an integer, or
            ``threshold`` is not a number.
        ValueError: ``patience`` is below 1, ``threshold`` is below 0, a mode is unknown, or ``score_function`` and
            ``score_name`` are both given or both missing.

    >>> from camshaft.engine import Events
    >>> trainer = Engine(lambda engine, batch: None)
    >>> evaluator = Engine(lambda engine, batch: batch)
    >>> stopping = EarlyStopping(2, lambda engine: engine.state.output, trainer)
    >>> stopping.attach(evaluator)
    >>> scores = iter([0.5, 0.7, 0.6, 0.7, 0.9])
    >>> handle = trainer.add_event_handler(
    ...     Events.EPOCH_COMPLETED, lambda: evaluator.run([next(scores)])
    ... )
    >>> trainer.run(range(10), max_epochs=5).epoch
    4
    """

    _state_dict_all_req_keys = ("counter", "best_score")

    min_delta = _renamed("min_delta")
    min_delta_mode = _renamed("min_delta_mode")
    cumulative_delta = _renamed("cumulative_delta")

    def __init__(
        self,
        patience: int,
        score_function: Callable[[Engine[Any, Any]], Any] | None = None,
        trainer: Engine[Any, Any] | None = None,
        threshold: float = 0.0,
        cumulative: bool = False,
        threshold_mode: str = "abs",
        mode: str = "max",
        min_delta: float | None = None,
        min_delta_mode: str | None = None,
        cumulative_delta: bool | None = None,
        *,
        score_name: str | None = None,
    ) -> None:
        if (score_function is None) == (score_name is None):
            got = f"got {score_function!r} and {score_name!r}"
            raise ValueError(f"pass either score_function or score_name, the name of a metric, {got}")
        if score_name is not None:
            check_text("score_name", score_name)
            score_function = score_of_metric(score_name)
        assert score_function is not None, "checked"
        check_score_function(score_function)
        check_engine("trainer", trainer)
        assert trainer is not None, "checked"
        self.patience = patience
        self.score_function = score_function
        self.trainer = trainer
        self.threshold, self.threshold_mode, self.cumulative, self.mode = threshold, threshold_mode, cumulative, mode
        given = {"min_delta": min_delta, "min_delta_mode": min_delta_mode, "cumulative_delta": cumulative_delta}
        for name, value in given.items():
            if value is not None:
                setattr(self, _new_name(name), value)
        integer("patience", patience, least=1)
        if self.threshold != math.inf:
            number("threshold", self.threshold, least=0)
        check_choice("threshold_mode", self.threshold_mode, ("abs", "rel"))
        check_choice("mode", mode, ("max", "min"))
        self.counter = 0
        self.best_score: float | None = None
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self._had_stopped = False
        self._together = StopTogether()
        self._together.attach(trainer)
        trainer.add_event_handler(Events.STARTED, self._stop_again)

    def __call__(self, engine: Engine[Any, Any]) -> None:
        """Compare the score of an evaluation with the best one, and terminate training if the patience is used up."""
        score = float(scalar("score_function", self.score_function(engine)))
        best = self.best_score
        is_number = not math.isnan(score)
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
        if engine is self.trainer and Events.COMPLETED in events_in(event):
            warnings.warn(
                "EarlyStopping on COMPLETED of the trainer cannot stop it, as its run is over then: attach it to the "
                "evaluator, or to another event of the trainer",
                stacklevel=2,
            )
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
        check_choice("threshold_mode", mode, ("abs", "rel"))
        check_type("counter", state_dict["counter"], int, "an integer")
        self.counter, self.best_score, self.threshold_mode = state_dict["counter"], state_dict["best_score"], mode
        self._had_stopped = self.counter >= self.patience

    def _stop_again(self, engine: Engine[Any, Any]) -> None:
        had_stopped, self._had_stopped = self._had_stopped, False
        if had_stopped and engine.state.iteration:
            if get_rank() == 0:
                self.logger.warning(
                    "EarlyStopping stops the run at once, because it had already stopped the run that is resumed (%d "
                    "evaluations without improvement); to continue, call reset() after loading",
                    self.counter,
                )
            engine.terminate(on_all_ranks=True)  # on each rank, since all have loaded the same counter

    def _reset_if_new(self, engine: Engine[Any, Any]) -> None:
        if engine.state.iteration == 0 or engine.last_event_name != Events.STARTED:
            self.reset()

    def _exceeds(self, score: float, best: float, threshold: float) -> bool:
        """Return whether a score is better by more than the threshold, which is false if either is NaN."""
        is_relative = self.threshold_mode == "rel" and math.isfinite(best)  # any finite score differs from infinity
        margin = threshold * (abs(best) if is_relative else 1)
        return score > best + margin if self.mode == "max" else score < best - margin
