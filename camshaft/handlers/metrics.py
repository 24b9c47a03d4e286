"""Metrics of torchmetrics, and others of that form, over the epochs of an engine."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from camshaft.base import Serializable
from camshaft.distributed import get_rank, get_world_size
from camshaft.engine.engine import Engine
from camshaft.engine.event import Events
from camshaft.engine.handle import RemovableEventHandle
from camshaft.engine.lazy import LazyNumber
from camshaft.engine.order import Order
from camshaft.errors import annotate, check_is_no_class, ignite_class
from camshaft.handlers.metric_exchange import members, over_all_ranks
from camshaft.handlers.utils import check_callable, check_engine, resumes_epoch
from camshaft.handlers.values import fetch

__all__ = ["AttachedMetrics", "attach_metrics"]

_METHODS = ("reset", "update", "compute")


def attach_metrics(
    engine: Engine[Any, Any],
    metrics: Mapping[str, Any],
    output_transform: Callable[[Any], Any] | None = None,
) -> AttachedMetrics:
    """Compute metrics over each epoch of an engine, and put the results into ``engine.state.metrics``.

    They are reset when an epoch starts, updated with each output, and computed before the other handlers of
    ``EPOCH_COMPLETED``. Then the ranks exchange the states of all of them, once and together, so that the results are
    those of all samples, however these were dealt out. Metrics are moved to the device of what they are given. Those
    of torchmetrics check their arguments by waiting for the device, unless made with ``validate_args=False``.

    Args:
        engine: usually an evaluator.
        metrics: by name, objects of torchmetrics: metrics, collections of them, sums and the like; or others with
            ``reset()``, ``update(...)`` and ``compute()``, which must themselves see to other ranks. A metric that was
            made with a ``process_group`` or a ``dist_sync_fn`` keeps its own way too.
        output_transform: called with the output of an iteration, gives the arguments of ``update``: a tuple or a list
            of them, a mapping of their names, or a single one. By default this is the output itself, such as the
            ``(y_pred, y)`` of an evaluator.

    Returns:
        What was attached: to be removed again, or saved where the epochs of a trainer may be resumed in their middle.

    Raises:
        TypeError: an argument is none of these.

    >>> class Largest:
    ...     def reset(self):
    ...         self.value = 0
    ...     def update(self, y_pred, y):
    ...         self.value = max(self.value, abs(y_pred - y))
    ...     def compute(self):
    ...         return self.value
    >>> evaluator = Engine(lambda engine, batch: batch)
    >>> attached = attach_metrics(evaluator, {"largest error": Largest()})
    >>> evaluator.run([(1, 2), (5, 2), (3, 3)]).metrics
    {'largest error': 3}
    """
    check_engine("engine", engine)
    check_callable("output_transform", output_transform)
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a mapping of names to metrics, got {metrics!r} of {type(metrics).__name__}")
    for name, metric in metrics.items():
        check_is_no_class(f"metrics[{name!r}]", metric)
        if ignite_class(metric) is not None:
            raise TypeError(
                f"metrics[{name!r}] must be a metric of torchmetrics or of that form, got {metric!r}, which comes from "
                f"PyTorch-Ignite: attach it by its own method, metric.attach(engine, {name!r})"
            )
        if not all(callable(getattr(metric, method, None)) for method in _METHODS):
            raise TypeError(
                f"metrics[{name!r}] must have reset(), update() and compute(), as those of torchmetrics, got "
                f"{metric!r}; an object with attach(engine, name) attaches itself"
            )
    return AttachedMetrics(engine, dict(metrics), output_transform)


class AttachedMetrics(Serializable):
    """Metrics that follow an engine; made by :func:`attach_metrics`.

    Save it with the engine if that may be resumed in the middle of an epoch: the results are then those of the whole
    epoch. Else, and in a job of several ranks, they are those of the rest of it, and a warning says so.

    Attributes:
        metrics: by name.
    """

    _state_dict_all_req_keys = ("epoch", "iteration", "metrics")

    def __init__(
        self, engine: Engine[Any, Any], metrics: dict[str, Any], output_transform: Callable[[Any], Any] | None
    ) -> None:
        self.metrics = metrics
        self._output_transform = output_transform
        self._updates = [metric.update for metric in metrics.values()]
        self._epoch: int | None = None
        self._iteration = 0
        self._is_placed = False
        for member in (member for metric in metrics.values() for member in members(metric)):
            if callable(getattr(member, "persistent", None)):
                member.persistent(True)  # what torchmetrics calls a state that state_dict() holds
        add = engine.add_event_handler
        self._handles: list[RemovableEventHandle] = [
            add(Events.EPOCH_STARTED, self._begin, order=Order.RESULTS),
            add(Events.ITERATION_COMPLETED, self._update, order=Order.RESULTS),
            add(Events.EPOCH_COMPLETED, self._finish, order=Order.RESULTS),
        ]

    def remove(self) -> None:
        """Leave the engine alone from now on."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, engine: Engine[Any, Any]) -> None:
        state = engine.state
        self._is_placed = False
        if resumes_epoch(engine):
            if self._epoch == state.epoch and 0 <= state.iteration - self._iteration <= 1:
                return
            warnings.warn(
                f"the metrics {list(self.metrics)} begin in the middle of epoch {state.epoch}, where the run was taken "
                "up again, and leave out what was before; in a single process, save and load what attach_metrics gives",
                stacklevel=2,
            )
        self._epoch, self._iteration = state.epoch, state.iteration
        for metric in self.metrics.values():
            metric.reset()

    def _update(self, engine: Engine[Any, Any]) -> None:
        output = engine.state._output  # `state.output` waits for the device
        if self._output_transform is not None:
            output = self._output_transform(output)
        positional, named = _arguments(output)
        if not self._is_placed:
            self._place((*positional, *named.values()))
        try:
            for update in self._updates:
                update(*positional, **named)
        except TypeError as error:
            annotate(error, f"in update() of the metrics {list(self.metrics)}; output_transform makes its arguments")
            raise
        self._iteration = engine.state.iteration

    def _place(self, arguments: tuple[Any, ...]) -> None:
        """Move the metrics to where the first arguments of an epoch are."""
        self._is_placed = True
        device = next((one.device for one in arguments if isinstance(one, Tensor)), None)
        for metric in self.metrics.values():
            if device is not None and callable(getattr(metric, "to", None)):
                metric.to(device)

    def _finish(self, engine: Engine[Any, Any]) -> None:
        with over_all_ranks(self.metrics):
            results = {name: metric.compute() for name, metric in self.metrics.items()}
        engine.state.metrics.update(_as_numbers(results))

    def state_dict(self) -> OrderedDict[str, Any]:
        """Give what the metrics know of the epoch; that is nothing in a job of several ranks."""
        complete = get_world_size() == 1 and all(hasattr(metric, "state_dict") for metric in self.metrics.values())
        states = {name: metric.state_dict() for name, metric in self.metrics.items()} if complete else {}
        return OrderedDict(epoch=self._epoch, iteration=self._iteration, metrics=states)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on in the middle of an epoch.

        Args:
            state_dict: what :meth:`state_dict` gave.

        Raises:
            TypeError: it is not a mapping.
            ValueError: it lacks a key, or is not that of these metrics.
        """
        super().load_state_dict(state_dict)
        states = state_dict["metrics"]
        if states and set(states) != set(self.metrics):
            raise ValueError(f"state_dict must be that of the metrics {list(self.metrics)}, got {list(states)}")
        self._epoch, self._iteration = (state_dict["epoch"] if states else None), state_dict["iteration"]
        for name, metric in self.metrics.items():
            metric.reset()
            if states and get_rank() == 0:  # the others begin with nothing, so that the whole is right
                metric.load_state_dict(states[name])


def _arguments(output: Any) -> tuple[list[Any], dict[str, Any]]:
    """Take an output for the arguments of ``update``; a loss still on its way is handed on as the tensor that it is."""
    if isinstance(output, Mapping):
        return [], {name: _peek(one) for name, one in output.items()}
    return [_peek(one) for one in (output if isinstance(output, (tuple, list)) else (output,))], {}


def _peek(value: Any) -> Any:
    return value.peek() if isinstance(value, LazyNumber) else value


def _as_numbers(results: dict[str, Any]) -> dict[str, Any]:
    """Put numbers in the place of tensors without dimensions, also in the results of collections."""
    scalars: dict[Any, Any] = {}
    for name, result in results.items():
        for key, value in result.items() if isinstance(result, Mapping) else [(None, result)]:
            if isinstance(value, Tensor) and value.ndim == 0:
                scalars[name, key] = value.detach()
    fetch(scalars)
    return {
        name: {key: scalars.get((name, key), value) for key, value in result.items()}
        if isinstance(result, Mapping)
        else scalars.get((name, None), result)
        for name, result in results.items()
    }
