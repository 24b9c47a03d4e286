"""A running average of an output, and ``attach_metrics``, which is defined in :mod:`camshaft.engine.metrics`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from camshaft.arguments import check_callable, identity, number, scalar
from camshaft.base import Serializable
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import Events, Order
from camshaft.engine.metrics import AttachedMetrics, attach_metrics
from camshaft.engine.state import LazyNumber, Results, check_has_output, peek

__all__ = ["AttachedMetrics", "RunningAverage", "attach_metrics"]


class RunningAverage(Serializable):
    """Exponential moving average of an output: ``average = alpha * average + (1 - alpha) * value``.

    The first value is the first average. A value on a GPU is averaged there without synchronizing: the number is
    fetched when a progress bar, a log record or your own code reads ``engine.state.metrics``. Each rank has its own
    average, of its own samples, and along ``cp`` of its own part of the sequences; a checkpoint holds that of the rank
    that saves. If the value is a DTensor, it is first reduced over its mesh, so attach this on all ranks.

    Args:
        output_transform: called with the output of an iteration, returns a number or a tensor with one element. The
            loss of a trainer is a :class:`LazyNumber <camshaft.engine.state.LazyNumber>`: return it as it is.
        alpha: the weight of the previous average, in [0, 1).

    Raises:
        TypeError: ``output_transform`` is not callable, or ``alpha`` is not a number.
        ValueError: ``alpha`` is out of range.

    >>> trainer = Engine(lambda engine, batch: torch.tensor(batch))
    >>> RunningAverage(alpha=0.5).attach(trainer, "loss")
    >>> _ = trainer.add_event_handler(
    ...     Events.ITERATION_COMPLETED, lambda: print(trainer.state.metrics["loss"])
    ... )
    >>> state = trainer.run([4.0, 2.0, 2.0])
    4.0
    3.0
    2.5
    """

    _state_dict_all_req_keys = ("average",)

    def __init__(self, output_transform: Callable[[Any], Any] = identity, alpha: float = 0.98) -> None:
        if callable(getattr(output_transform, "compute", None)):
            raise TypeError(
                f"output_transform must be a function of the output, got the metric {output_transform!r}: for a metric "
                "of PyTorch-Ignite use ignite.metrics.RunningAverage, which attaches to engines of camshaft too"
            )
        check_callable("output_transform", output_transform)
        number("alpha", alpha, least=0, below=1)
        self._output_transform: Callable[[Any], Any] = identity if output_transform is None else output_transform
        self._weight: float = 1 - float(alpha)
        self._average: float | Tensor | None = None

    def attach(self, engine: Engine[Any, Any], name: str) -> None:
        """Keep ``engine.state.metrics[name]`` up to date; the average continues across epochs.

        It restarts when a run does, and when one resumes without the state of this handler.

        Args:
            engine: the trainer.
            name: the name of the average.
        """
        check_engine("engine", engine)
        engine.add_event_handler(Events.STARTED, self._begin)
        # before bars and loggers, even if they were attached earlier
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._update, name, order=Order.RESULTS)

    def _begin(self, engine: Engine[Any, Any]) -> None:
        if engine.state.iteration == 0:
            self._average = None
        if not isinstance(engine.state.metrics, Results):  # assigned by the user, or loaded
            engine.state.metrics = Results(engine.state.metrics)

    def _update(self, engine: Engine[Any, Any], name: str) -> None:
        try:
            value = scalar("output_transform", peek(self._output_transform(engine.state._output)))  # no synchronization
        except Exception as error:
            check_has_output(f"RunningAverage {name!r}", engine.state, error)
            raise
        if isinstance(value, Tensor) and value.dtype is not torch.float64:
            value = value.float()
        before, average = self._average, value
        if isinstance(before, Tensor) and isinstance(value, Tensor):
            # a new tensor each time: a reader may still hold the previous one
            average = before.lerp(value.to(before), self._weight)
        elif before is not None:
            average = before + self._weight * (value - before)
        self._average = average
        engine.state.metrics[name] = LazyNumber(average) if isinstance(average, Tensor) else average

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the average as a number, which synchronizes with the device."""
        return OrderedDict(average=None if self._average is None else float(self._average))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: ``state_dict`` is not a mapping.
            ValueError: the average is missing.
        """
        super().load_state_dict(state_dict)
        self._average = state_dict["average"]
