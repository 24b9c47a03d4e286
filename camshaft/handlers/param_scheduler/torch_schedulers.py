"""Schedulers of torch as handlers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.optim import lr_scheduler as native

from camshaft.engine.engine import Engine
from camshaft.engine.events import EventLike, Events, RemovableEventHandle
from camshaft.handlers.param_scheduler.base import (
    ParamScheduler,
    no_step_warnings,
    rows_of,
    spare_optimizer,
    unchanged,
    write,
)
from camshaft.handlers.utils import check_text, check_type, number


class LRScheduler(ParamScheduler):
    """Set the learning rates with a scheduler of torch.

    Attach it to ``ITERATION_STARTED``, or call it in any other way *before* the optimizer's step: the first step uses
    the first value, and the steps see the same rates as if ``lr_scheduler.step()`` was called at the end of each
    iteration. Until the next call the optimizer keeps the rate of its last step. Do not call ``lr_scheduler.step()``
    yourself.

    Args:
        lr_scheduler: any scheduler of ``torch.optim.lr_scheduler`` except ``ReduceLROnPlateau``.
        save_history: whether to keep the rates, a list with one per group, in ``engine.state.param_history["lr"]``.
        use_legacy: step in every call, including the first; for ``ITERATION_COMPLETED``.

    Raises:
        TypeError: ``lr_scheduler`` is not a scheduler of torch, or is a ``ReduceLROnPlateau``.

    >>> import torch
    >>> from camshaft.engine import Engine, Events
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> halving = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    >>> trainer = Engine(lambda engine, batch: print(optimizer.param_groups[0]["lr"]))
    >>> handle = trainer.add_event_handler(Events.ITERATION_STARTED, LRScheduler(halving))
    >>> state = trainer.run([0, 0, 0])
    1.0
    0.5
    0.25
    """

    _state_dict_all_req_keys = (*ParamScheduler._state_dict_all_req_keys, "lr_scheduler")

    def __init__(self, lr_scheduler: Any, save_history: bool = False, use_legacy: bool = False) -> None:
        if isinstance(lr_scheduler, native.ReduceLROnPlateau):
            raise TypeError(
                "lr_scheduler must not be a ReduceLROnPlateau, which needs a metric to step: use "
                "ReduceLROnPlateauScheduler(optimizer, metric_name, ...)"
            )
        check_type("lr_scheduler", lr_scheduler, native.LRScheduler, "one of torch.optim.lr_scheduler")
        super().__init__(lr_scheduler.optimizer, "lr", save_history)
        self.lr_scheduler = lr_scheduler
        self._steps_from = 0 if use_legacy else 1
        self._has_stepped = False
        self._has_own_step = type(lr_scheduler).step is not native.LRScheduler.step or "step" in vars(lr_scheduler)
        if use_legacy:
            warnings.warn(
                "a scheduler with use_legacy=True must be attached to Events.ITERATION_COMPLETED: it also steps in its "
                "first call, so on ITERATION_STARTED the first value would be lost",
                stacklevel=2,
            )

    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        # Many schedulers compute the next rates from those in the groups, which a warm-up may have overwritten.
        scheduler, groups = self.lr_scheduler, self.optimizer.param_groups
        first, rates = groups[0], scheduler.get_last_lr()
        if rates is not None and (len(groups) > 1 or first["lr"] is not rates[0]):
            for group, rate in zip(groups, rates):  # noqa: B905  # the step checks the lengths
                if group["lr"] is not rate:
                    write(group, "lr", rate)
        if self.event_index < self._steps_from:
            return
        if self._has_own_step:
            with nullcontext() if self._has_stepped else no_step_warnings():
                scheduler.step()
            self._has_stepped = True
            return
        # torch's step() without its warnings and the deprecated argument, which take most of its time
        scheduler._step_count += 1
        scheduler._get_lr_called_within_step = True
        scheduler.last_epoch += 1
        try:
            rates = scheduler._last_lr = scheduler.get_lr()
        finally:
            scheduler._get_lr_called_within_step = False
        if len(rates) != len(groups):
            raise ValueError(f"lr_scheduler must be made for {len(groups)} parameter groups, got {len(rates)} rates")
        if len(groups) == 1 and (first["lr"] is rates[0] or type(first["lr"]) is type(rates[0]) is float):
            first["lr"] = rates[0]  # without a loop, whose start takes as long as all of this
            return
        self._write(rates)
        if not all(type(rate) is float for rate in rates):
            last = [group["lr"] for group in groups]  # tensors are copied, as they may be changed in place
            scheduler._last_lr = [one.clone() if isinstance(one, Tensor) else one for one in last]

    def get_param(self) -> Any:
        """Return the current rate, or a list of rates if there are several groups."""
        rates = self.lr_scheduler.get_last_lr()
        if rates is None:
            rates = self._written()
        return rates[0] if len(rates) == 1 else rates

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        saved, calls = state_dict["lr_scheduler"], state_dict["event_index"]
        steps = saved["last_epoch"] if isinstance(saved, Mapping) else calls  # a wrapped scheduler counts twice
        saved = ignite_torch_state(saved)
        if calls:
            # There the next call, not the previous one, makes the step to `last_epoch`, with a `_step_count` of 1. The
            # rates of the previous one are only in the optimizer, which may be loaded later: None stands for them.
            saved = {**saved, "last_epoch": steps - 1, "_step_count": 0, "_last_lr": None}
        elif self._steps_from == 0:
            saved = {**saved, "last_epoch": 0}
        return {**state_dict, "lr_scheduler": saved}

    def _restore(self, state_dict: Mapping[str, Any]) -> None:
        super()._restore(state_dict)
        self._has_stepped = False

    @classmethod
    def simulate_values(  # type: ignore[override]  # takes a scheduler instead of arguments
        cls, num_events: int, lr_scheduler: Any, **kwargs: Any
    ) -> list[list[Any]]:
        """Return the rates that a run would apply, without changing the scheduler or the optimizer.

        Args:
            num_events: number of rows.
            lr_scheduler, kwargs: arguments of the class.

        Returns:
            For each call its index and the rate of each group.
        """
        scheduler = cls(lr_scheduler, **{**kwargs, "save_history": False})
        with unchanged([scheduler]):
            return rows_of(scheduler, num_events, scheduler._columns)


def ignite_torch_state(saved: Any) -> Mapping[str, Any]:
    """Return the state of torch's scheduler in a state of PyTorch-Ignite, which stores an object for warm restarts."""
    return saved if isinstance(saved, Mapping) else saved._lr_scheduler.state_dict()


class ReduceLROnPlateauScheduler(ParamScheduler):
    """Reduce the learning rate with ``torch.optim.lr_scheduler.ReduceLROnPlateau`` after evaluations.

    Args:
        optimizer: an optimizer of torch.
        metric_name: key in ``engine.state.metrics`` of the engine that the scheduler is attached to, usually an
            evaluator.
        trainer: the engine whose state keeps the history; by default the one that the scheduler is attached to.
        save_history: whether to keep the rates, a list with one per group, in ``state.param_history["lr"]``.
        param_group_index: index of the only group to change; all by default.
        scheduler_kwargs: arguments of ``ReduceLROnPlateau``. With ``param_group_index``, ``min_lr`` is a number.

    Raises:
        TypeError: ``metric_name`` is not a string, ``optimizer`` not an optimizer of torch, or ``min_lr`` a list where
            it must be a number.
        ValueError: the index is out of range.

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
        check_text("metric_name", metric_name)
        if "verbose" in scheduler_kwargs:
            warnings.warn("verbose is ignored, since torch has removed it; use save_history=True", stacklevel=2)
            del scheduler_kwargs["verbose"]
        if param_group_index is not None:
            # Torch never reduces a rate that is at its lower bound, so the other groups keep theirs.
            bounds = [math.inf] * len(optimizer.param_groups)
            bounds[param_group_index] = number("min_lr", scheduler_kwargs.get("min_lr", 0.0))
            scheduler_kwargs["min_lr"] = bounds
        self.metric_name = metric_name
        self.trainer = trainer
        self.scheduler = native.ReduceLROnPlateau(optimizer, **scheduler_kwargs)

    def attach(self, engine: Engine[Any, Any], event: EventLike = Events.COMPLETED) -> RemovableEventHandle:
        """Step whenever an event of ``engine`` fires, which must have the metric by then."""
        return super().attach(engine, event)

    def __call__(self, engine: Engine[Any, Any] | None, name: str | None = None) -> None:
        """Step with the metric.

        Args:
            engine: the engine that has the metric.
            name: key in the history, ``"lr"`` by default.

        Raises:
            ValueError: the engine does not have the metric.
        """
        metrics = {} if engine is None else engine.state.metrics
        if self.metric_name not in metrics:
            raise ValueError(f"metric_name must be a metric of the engine, {list(metrics)}, got {self.metric_name!r}")
        self.scheduler.step(metrics[self.metric_name])
        super().__call__(self.trainer or engine, name)

    def get_param(self) -> Any:
        """Return the current rate, or a list of rates if there are several groups."""
        rates = [group["lr"] for group in self.optimizer_param_groups]
        return rates[0] if len(rates) == 1 else rates

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        # There the lower bounds are zero whatever was passed, and a method of the handler is part of the state.
        own = ("min_lrs", "default_min_lr", "_reduce_lr")
        saved = {name: value for name, value in state_dict["scheduler"].items() if name not in own}
        return {**state_dict, "scheduler": saved}

    @classmethod
    def simulate_values(  # type: ignore[override]  # needs metrics
        cls, num_events: int, metric_values: Sequence[float], init_lr: float, **scheduler_kwargs: Any
    ) -> list[list[Any]]:
        """Return the rates that result from a sequence of metrics.

        Args:
            num_events: number of rows.
            metric_values: one metric for each row.
            init_lr: the initial rate.
            scheduler_kwargs: arguments of ``ReduceLROnPlateau``.

        Raises:
            ValueError: the number of metrics is not ``num_events``.

        >>> ReduceLROnPlateauScheduler.simulate_values(3, [0.3, 0.2, 0.4], init_lr=1.0, patience=0, factor=0.5)
        [[0, 1.0], [1, 1.0], [2, 0.5]]
        """
        if len(metric_values) != num_events:
            raise ValueError(f"metric_values must hold num_events={num_events} values, got {len(metric_values)}")
        ignored = ("optimizer", "metric_name", "trainer", "param_group_index", "save_history")
        given = {key: value for key, value in scheduler_kwargs.items() if key not in ignored}
        scheduler = cls(spare_optimizer("lr", number("init_lr", init_lr)), "metric", **given)
        evaluator: Engine[Any, Any] = Engine(lambda engine, batch: None)
        values = iter(metric_values)

        def step(_: None) -> None:
            evaluator.state.metrics["metric"] = next(values)
            scheduler(evaluator)

        return rows_of(step, num_events, scheduler._columns)
