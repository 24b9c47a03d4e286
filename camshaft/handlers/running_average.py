"""An average of the recent outputs that stays on the device until somebody looks at it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from camshaft.base import Serializable
from camshaft.engine.engine import Engine
from camshaft.engine.event import Events
from camshaft.engine.lazy import LazyNumber, Results
from camshaft.engine.order import Order
from camshaft.handlers.utils import check_callable, check_engine

__all__ = ["RunningAverage"]


def _same(output: Any) -> Any:
    return output


class RunningAverage(Serializable):
    """Averages an output exponentially: ``average = alpha * average + (1 - alpha) * value``, from the first value on.

    A value on a GPU is averaged there, and nothing waits: the number is fetched when a progress bar, a log line or your
    own code reads ``engine.state.metrics``. It is the average of this rank.

    Args:
        output_transform: called with the output of an iteration, gives a number or a tensor with one element. The loss
            of a trainer comes as a :class:`LazyNumber <camshaft.engine.lazy.LazyNumber>`: hand it on as it is.
        alpha: the weight of what was, from 0 to 1, 1 excluded.

    Raises:
        TypeError: ``output_transform`` cannot be called.
        ValueError: ``alpha`` is out of range.

    >>> trainer = Engine(lambda engine, batch: torch.tensor(batch))
    >>> RunningAverage(alpha=0.5).attach(trainer, "loss")
    >>> _ = trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: print(trainer.state.metrics["loss"]))
    >>> state = trainer.run([4.0, 2.0, 2.0])
    4.0
    3.0
    2.5
    """

    _state_dict_all_req_keys = ("average",)

    def __init__(self, output_transform: Callable[[Any], Any] = _same, alpha: float = 0.98) -> None:
        if callable(getattr(output_transform, "compute", None)):
            raise TypeError(
                f"output_transform must be a function of the output, got the metric {output_transform!r}: for a metric "
                "of PyTorch-Ignite use ignite.metrics.RunningAverage, which attaches to engines of camshaft too"
            )
        check_callable("output_transform", output_transform)
        if not isinstance(alpha, Real) or not 0 <= alpha < 1:
            raise ValueError(f"alpha must be a number from 0 to 1, 1 excluded, got {alpha!r}")
        self._output_transform: Callable[[Any], Any] = _same if output_transform is None else output_transform
        self._weight: float = 1 - float(alpha)
        self._average: float | Tensor | None = None

    def attach(self, engine: Engine[Any, Any], name: str) -> None:
        """Keep ``engine.state.metrics[name]`` up to date; it begins anew with each run, not with each epoch.

        Args:
            engine: the trainer.
            name: what the average is called.
        """
        check_engine("engine", engine)
        engine.add_event_handler(Events.STARTED, self._begin)
        # before bars and loggers, also those that were attached earlier
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._update, name, order=Order.RESULTS)

    def _begin(self, engine: Engine[Any, Any]) -> None:
        if engine.state.iteration == 0:
            self._average = None
        if not isinstance(engine.state.metrics, Results):  # as a user, or a loaded state, has set it
            engine.state.metrics = Results(engine.state.metrics)

    def _update(self, engine: Engine[Any, Any], name: str) -> None:
        # not `state.output`, which waits for the device
        value = self._output_transform(engine.state._output)
        if isinstance(value, LazyNumber):
            value = value.peek()
        average = self._add(value)
        engine.state.metrics[name] = LazyNumber(average) if isinstance(average, Tensor) else average

    def _add(self, value: Any) -> float | Tensor:
        value = _one_element(value) if isinstance(value, Tensor) else _number(value)
        before = self._average
        if before is None:
            average = value
        elif isinstance(before, Tensor) and isinstance(value, Tensor):
            # a new tensor each time, since whoever holds the number of now may read it later
            average = before.lerp(value.to(before), self._weight)
        else:
            average = before + self._weight * (value - before)
        self._average = average
        return average  # type: ignore[no-any-return]  # a number and a tensor mix

    def state_dict(self) -> OrderedDict[str, Any]:
        """Give the average as a number, which waits for the device."""
        return OrderedDict(average=None if self._average is None else float(self._average))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state_dict: what :meth:`state_dict` gave.

        Raises:
            TypeError: it is not a mapping.
            ValueError: it lacks the average.
        """
        super().load_state_dict(state_dict)
        self._average = state_dict["average"]


def _one_element(tensor: Tensor) -> Tensor:
    if tensor.numel() != 1:
        raise ValueError(f"output_transform must give a number or one element, got a shape of {tuple(tensor.shape)}")
    tensor = tensor.detach().reshape(())
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _number(value: Any) -> float:
    if not isinstance(value, Real):
        kind = type(value).__name__
        raise TypeError(f"output_transform must give a number or a tensor, got {value!r} of type {kind}")
    return float(value)
