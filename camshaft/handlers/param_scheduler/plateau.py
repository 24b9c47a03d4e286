"""Lower learning rates when a metric gets no better."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from camshaft.engine.engine import Engine
from camshaft.engine.events import EventLike, Events, RemovableEventHandle
from camshaft.handlers.param_scheduler.arguments import real
from camshaft.handlers.param_scheduler.param import ParamScheduler
from camshaft.handlers.param_scheduler.simulation import rows_of, spare_optimizer


class ReduceLROnPlateauScheduler(ParamScheduler):
    """Lets ``torch.optim.lr_scheduler.ReduceLROnPlateau`` lower the learning rate after an evaluation.

    Args:
        optimizer: of torch.
        metric_name: in ``engine.state.metrics`` of the engine that it is attached to, usually an evaluator.
        trainer: the engine whose state keeps the history; by default the one that it is attached to.
        save_history: keep the rates, a list with one for each group, in ``state.param_history["lr"]``.
        param_group_index: the one group to change, instead of all.
        scheduler_kwargs: for ``ReduceLROnPlateau``. With ``param_group_index``, ``min_lr`` is a number.

    Raises:
        TypeError: ``metric_name`` is not a string, ``optimizer`` none of torch, or ``min_lr`` a list where it should
            be a number.
        ValueError: there is no group of this index.

    >>> import torch
    >>> from camshaft.engine import Engine
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> evaluator = Engine(lambda engine, batch: None)
    >>> scheduler = ReduceLROnPlateauScheduler(optimizer, "loss", patience=0, factor=0.5)
    >>> handle = scheduler.attach(evaluator)
    >>> for loss in (0.3, 0.2, 0.4):
    ...     evaluator.state.metrics["loss"] = loss
    ...     state = evaluator.run([0])
    ...     print(optimizer.param_groups[0]["lr"])
    1.0
    1.0
    0.5
    """

    _state_dict_all_req_keys = (*ParamScheduler._state_dict_all_req_keys, "metric_name", "scheduler")

    def __init__(
        self,
        optimizer: Any,
        metric_name: str,
        trainer: Engine[Any, Any] | None = None,
        save_history: bool = False,
        param_group_index: int | None = None,
        **scheduler_kwargs: Any,
    ) -> None:
        super().__init__(optimizer, "lr", save_history, param_group_index)
        if not isinstance(metric_name, str):
            raise TypeError(f"metric_name must be a string, got {metric_name!r} of type {type(metric_name).__name__}")
        if "verbose" in scheduler_kwargs:
            warnings.warn("verbose is ignored: torch has given it up; use save_history=True", stacklevel=2)
            del scheduler_kwargs["verbose"]
        if param_group_index is not None:
            # Torch lowers no rate to a bound above it, so the other groups keep theirs.
            bounds = [math.inf] * len(optimizer.param_groups)
            bounds[param_group_index] = real("min_lr", scheduler_kwargs.get("min_lr", 0.0))
            scheduler_kwargs["min_lr"] = bounds
        self.metric_name = metric_name
        self.trainer = trainer
        self.scheduler = ReduceLROnPlateau(optimizer, **scheduler_kwargs)

    def attach(self, engine: Engine[Any, Any], event: EventLike = Events.COMPLETED) -> RemovableEventHandle:
        """Step whenever an event of ``engine`` fires, which has the metric."""
        return super().attach(engine, event)

    def __call__(self, engine: Engine[Any, Any] | None, name: str | None = None) -> None:
        """Step with the metric.

        Args:
            engine: which has the metric.
            name: the name in the history, instead of ``lr``.

        Raises:
            ValueError: there is no such metric.
        """
        metrics = {} if engine is None else engine.state.metrics
        if self.metric_name not in metrics:
            raise ValueError(
                f"metric_name must be that of a metric of the engine, {list(metrics)}, got {self.metric_name!r}"
            )
        self.scheduler.step(metrics[self.metric_name])
        super().__call__(self.trainer or engine, name)

    def get_param(self) -> Any:
        """Give the rates now, a list if there are several groups."""
        rates = [group["lr"] for group in self.optimizer_param_groups]
        return rates[0] if len(rates) == 1 else rates

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        # There the lower bounds are zero whatever was passed, and a method of the handler is part of the state.
        own = ("min_lrs", "default_min_lr", "_reduce_lr")
        saved = {name: value for name, value in state_dict["scheduler"].items() if name not in own}
        return {**state_dict, "scheduler": saved}

    @classmethod
    def simulate_values(  # type: ignore[override]  # it needs metrics
        cls, num_events: int, metric_values: Sequence[float], init_lr: float, **scheduler_kwargs: Any
    ) -> list[list[Any]]:
        """List the rates that follow from a sequence of metrics.

        Args:
            num_events: how many.
            metric_values: as many values.
            init_lr: the rate before the first.
            scheduler_kwargs: for ``ReduceLROnPlateau``.

        Raises:
            ValueError: there are more or fewer values than events.

        >>> ReduceLROnPlateauScheduler.simulate_values(3, [0.3, 0.2, 0.4], init_lr=1.0, patience=0, factor=0.5)
        [[0, 1.0], [1, 1.0], [2, 0.5]]
        """
        if len(metric_values) != num_events:
            raise ValueError(f"metric_values must hold num_events={num_events} values, got {len(metric_values)}")
        given = {key: value for key, value in scheduler_kwargs.items() if key not in _NOT_SIMULATED}
        scheduler = cls(spare_optimizer("lr", real("init_lr", init_lr)), "metric", **given)
        evaluator: Engine[Any, Any] = Engine(lambda engine, batch: None)
        values = iter(metric_values)

        def step(_: None) -> None:
            evaluator.state.metrics["metric"] = next(values)
            scheduler(evaluator)

        return rows_of(step, num_events, scheduler._columns)


_NOT_SIMULATED = frozenset({"optimizer", "metric_name", "trainer", "param_group_index", "save_history"})
