"""Schedulers of learning rates, other parameters of optimizers, and batch sizes."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Integral
from types import NoneType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import lr_scheduler as native

from camshaft.arguments import check_sequence, check_text, check_type, described, integer, number
from camshaft.base import Serializable
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import EventLike, Events, RemovableEventHandle
from camshaft.engine.state import missing_metric
from camshaft.handlers.base_scheduler import (
    Attachable,
    BaseParamScheduler,
    SteppedScheduler,
    check_entries,
    interpolate,
    no_step_warnings,
    rows_of,
    split_milestones,
    whole,
)
from camshaft.handlers.batch_size_scheduler import BatchSizeScheduler
from camshaft.text import counted

__all__ = [
    "BaseParamScheduler",
    "BatchSizeScheduler",
    "ConcatScheduler",
    "CosineAnnealingScheduler",
    "CyclicalScheduler",
    "LRScheduler",
    "LinearCyclicalScheduler",
    "ParamGroupScheduler",
    "ParamScheduler",
    "PiecewiseLinear",
    "ReduceLROnPlateauScheduler",
    "create_lr_scheduler_with_warmup",
]

_REPEAT_CALLS = (
    "leave it out and, after loading the rest, repeat its calls: "
    "for _ in range(trainer.state.iteration): scheduler(None)"
)


class ParamScheduler(SteppedScheduler):
    """Base class of schedulers of an optimizer's parameter, such as the learning rate.

    Attached to ``ITERATION_STARTED``, iteration ``k`` uses the value of index ``k - 1``. Each call overwrites what is
    in the optimizer; tensors are written in place. Subclasses define :meth:`get_param`.

    Attached to ``EPOCH_STARTED``, a scheduler does nothing when a resumed run continues an epoch; attached to
    ``ITERATION_STARTED``, nothing when it repeats an iteration that was interrupted after the scheduler was called.

    Args:
        optimizer: an optimizer, or any object whose ``param_groups`` is a list of dicts.
        param_name: key of the parameter groups.
        save_history: whether to keep the values, a list with one per group, in
            ``engine.state.param_history[param_name]``.
        param_group_index: index of the only group to schedule; all by default.

    Raises:
        TypeError: ``optimizer`` has no ``param_groups``, or the index is not an integer.
        ValueError: the index is out of range, or a group to schedule lacks the key.

    >>> import torch
    >>> from camshaft.engine import Engine, Events
    >>> class Halving(ParamScheduler):
    ...     def get_param(self) -> float:
    ...         return 0.5**self.event_index
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> trainer = Engine(lambda engine, batch: optimizer.param_groups[0]["lr"])
    >>> handle = Halving(optimizer, "lr").attach(trainer)
    >>> handle = trainer.add_event_handler(
    ...     Events.ITERATION_COMPLETED, lambda: print(trainer.state.output)
    ... )
    >>> state = trainer.run([0, 0, 0])
    1.0
    0.5
    0.25
    """

    def __init__(
        self, optimizer: Any, param_name: str, save_history: bool = False, param_group_index: int | None = None
    ) -> None:
        super().__init__(param_name, save_history)
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, Sequence) or isinstance(groups, str):
            raise TypeError(f"optimizer must be one of torch, or have a list param_groups, got {described(optimizer)}")
        if param_group_index is not None:
            integer("param_group_index", param_group_index, least=-len(groups), below=len(groups))
        self.optimizer = optimizer
        self.param_group_index = param_group_index
        self._check_entries()

    @property
    def optimizer_param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups that are scheduled."""
        groups = self.optimizer.param_groups  # an optimizer replaces them when it loads a state
        index = self.param_group_index
        return cast("list[dict[str, Any]]", groups if index is None else [groups[index]])

    def _check_entries(self) -> None:
        """Check that the parameter exists: writing it would add it, without any effect."""
        check_entries(self.param_name, self.optimizer_param_groups)

    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        self._write(self.get_param())

    def _write(self, value: Any) -> None:
        """Write one value into all groups, or one value of a list into each."""
        groups = self.optimizer.param_groups if self.param_group_index is None else self.optimizer_param_groups
        name = self.param_name
        if not isinstance(value, list):
            for group in groups:
                write(group, name, value)
            return
        if len(value) != len(groups):
            raise ValueError(f"get_param must return {counted(len(groups), 'value')}, one for each group, got {value}")
        for group, one in zip(groups, value, strict=True):
            write(group, name, one)

    def _written(self) -> list[Any]:
        return [plain(group[self.param_name]) for group in self.optimizer_param_groups]

    def _columns(self) -> list[Any]:
        """Return what a row of simulated values holds: one value, or one per group where they differ."""
        written = self._written()
        return written if isinstance(self.get_param(), list) else written[:1]

    @classmethod
    def simulate_values(cls, num_events: int, **scheduler_kwargs: Any) -> list[list[Any]]:
        """Return the values that a run would apply, as a list of ``[index, value]``.

        Args:
            num_events: number of values.
            scheduler_kwargs: arguments of the scheduler. ``optimizer`` and ``param_group_index`` are ignored.

        >>> from camshaft.handlers import LinearCyclicalScheduler
        >>> LinearCyclicalScheduler.simulate_values(
        ...     num_events=4, param_name="lr", start_value=0.0, end_value=1.0, cycle_size=4
        ... )
        [[0, 0.0], [1, 0.5], [2, 1.0], [3, 0.5]]
        """
        ignored = ("optimizer", "param_group_index")
        given = {key: value for key, value in scheduler_kwargs.items() if key not in ignored}
        scheduler = cls(optimizer=spare_optimizer(scheduler_kwargs.get("param_name", "lr")), **given)
        return rows_of(scheduler, num_events, scheduler._columns)


# --- formulas: cycles, and lines between milestones ------------------------------------------------------------------


class CyclicalScheduler(ParamScheduler):
    """Base class of schedulers that repeat a cycle. Subclasses define the values of a cycle in :meth:`get_param`.

    There, ``event_index`` counts the calls of the current cycle, and ``start_value``, ``end_value`` and
    ``cycle_size`` are those of the current cycle.

    Args:
        optimizer, param_name: see ``ParamScheduler``.
        start_value: value at the start of the first cycle.
        end_value: value at its end or in its middle, depending on the subclass.
        cycle_size: number of calls in the first cycle, at least 2.
        cycle_mult: factor by which the size changes from cycle to cycle; a cycle has at least one call.
        start_value_mult: factor by which the start value changes from cycle to cycle.
        end_value_mult: factor by which the end value changes from cycle to cycle.
        warmup_duration: number of calls after each cycle in which the value moves linearly to the next start value.
        save_history, param_group_index: see ``ParamScheduler``.

    Raises:
        TypeError: a value is not a number, or the size or the duration is not an integer.
        ValueError: ``cycle_size`` is below 2, or ``warmup_duration`` is negative.

    Attributes:
        cycle: index of the current cycle.
    """

    _state_dict_all_req_keys: ClassVar[tuple[str, ...]] = (
        *ParamScheduler._state_dict_all_req_keys,
        *("cycle", "start_value", "end_value", "cycle_size", "warmup_duration"),
        *("cycle_mult", "start_value_mult", "end_value_mult"),
    )

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        start_value: float,
        end_value: float,
        cycle_size: int,
        cycle_mult: float = 1.0,
        start_value_mult: float = 1.0,
        end_value_mult: float = 1.0,
        warmup_duration: int = 0,
        save_history: bool = False,
        param_group_index: int | None = None,
    ) -> None:
        super().__init__(optimizer, param_name, save_history, param_group_index)
        self.start_value = number("start_value", start_value)
        self.end_value = number("end_value", end_value)
        self.cycle_size = whole("cycle_size", cycle_size, least=2)
        self.cycle_mult = number("cycle_mult", cycle_mult)
        self.start_value_mult = number("start_value_mult", start_value_mult)
        self.end_value_mult = number("end_value_mult", end_value_mult)
        self.warmup_duration = whole("warmup_duration", warmup_duration, least=0)
        self.cycle = 0

    @property
    def total_cycle_size(self) -> int:
        """Number of calls in the current cycle and its warm-up."""
        return self.cycle_size + self.warmup_duration

    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        warmed = self.event_index - self.cycle_size  # calls since the end of the cycle
        if warmed == 0:
            self.start_value *= self.start_value_mult
        if warmed == self.warmup_duration:
            self.event_index = 0
            self.cycle_size = max(1, int(self.cycle_size * self.cycle_mult))
            self.warmup_duration = max(0, int(self.warmup_duration * self.cycle_mult))
            self.cycle += 1
            self.end_value *= self.end_value_mult
        elif warmed > 0:
            share = warmed / self.warmup_duration
            self._write(self.end_value + (self.start_value - self.end_value) * share)
            return
        self._write(self.get_param())


class LinearCyclicalScheduler(CyclicalScheduler):
    """Move linearly from the start value to the end value and back in each cycle.

    Args:
        optimizer, param_name, start_value, end_value, cycle_size, cycle_mult: see ``CyclicalScheduler``.
        start_value_mult, end_value_mult, warmup_duration, save_history, param_group_index: likewise.
        monotonic: whether to move to the end value over the whole cycle, and then to the next start value at once, or
            in ``warmup_duration`` calls.

    Raises:
        TypeError: see ``CyclicalScheduler``.
        ValueError: see there; also if ``warmup_duration`` is given without ``monotonic=True``.

    >>> values = LinearCyclicalScheduler.simulate_values(
    ...     8,
    ...     param_name="lr",
    ...     start_value=1.0,
    ...     end_value=0.0,
    ...     cycle_size=4,
    ...     warmup_duration=2,
    ...     monotonic=True,
    ... )
    >>> [value for index, value in values]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.5, 1.0, 0.75]
    """

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        start_value: float,
        end_value: float,
        cycle_size: int,
        cycle_mult: float = 1.0,
        start_value_mult: float = 1.0,
        end_value_mult: float = 1.0,
        warmup_duration: int = 0,
        save_history: bool = False,
        param_group_index: int | None = None,
        *,
        monotonic: bool = False,
    ) -> None:
        cycle = (start_value, end_value, cycle_size, cycle_mult, start_value_mult, end_value_mult, warmup_duration)
        super().__init__(optimizer, param_name, *cycle, save_history, param_group_index)
        if self.warmup_duration and not monotonic:
            raise ValueError(f"warmup_duration must be 0 unless monotonic=True, got {warmup_duration}")
        self.monotonic = monotonic

    def get_param(self) -> float:
        """Return the value for ``event_index``."""
        progress = self.event_index / self.cycle_size
        left = 1 - progress if self.monotonic else abs(1 - 2 * progress)
        return self.end_value + (self.start_value - self.end_value) * left


class CosineAnnealingScheduler(CyclicalScheduler):
    """Move along half a cosine from the start value to the end value, and then to the next start value at once.

    Args:
        optimizer, param_name, start_value, end_value, cycle_size, cycle_mult: see ``CyclicalScheduler``.
        start_value_mult, end_value_mult, warmup_duration, save_history, param_group_index: likewise.

    >>> values = CosineAnnealingScheduler.simulate_values(
    ...     5, param_name="lr", start_value=0.0, end_value=1.0, cycle_size=4
    ... )
    >>> [round(value, 4) for index, value in values]
    [0.0, 0.1464, 0.5, 0.8536, 0.0]
    """

    def get_param(self) -> float:
        """Return the value for ``event_index``."""
        progress = self.event_index / self.cycle_size
        return self.start_value + (self.end_value - self.start_value) / 2 * (1 - math.cos(math.pi * progress))


class PiecewiseLinear(ParamScheduler):
    """Interpolate linearly between milestones; the value is constant before the first and after the last.

    Args:
        optimizer, param_name: see ``ParamScheduler``.
        milestones_values: tuples of an index and its value, sorted by index. Of two with the same index the second
            one holds from there on, which makes a jump.
        save_history, param_group_index: see ``ParamScheduler``.

    Raises:
        TypeError: ``milestones_values`` is not a sequence, a milestone is not an integer, or a value not a number.
        ValueError: ``milestones_values`` is empty, is not made of pairs, or is not sorted.

    >>> values = PiecewiseLinear.simulate_values(
    ...     7, param_name="lr", milestones_values=[(1, 1.0), (3, 0.8), (5, 0.2)]
    ... )
    >>> [value for index, value in values]
    [1.0, 1.0, 0.9, 0.8, 0.5, 0.2, 0.2]
    """

    _state_dict_all_req_keys = (*ParamScheduler._state_dict_all_req_keys, "milestones", "values")

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        milestones_values: Sequence[tuple[int, float]],
        save_history: bool = False,
        param_group_index: int | None = None,
    ) -> None:
        super().__init__(optimizer, param_name, save_history, param_group_index)
        self.milestones, self.values = split_milestones(milestones_values)

    def get_param(self) -> float:
        """Return the value for ``event_index``."""
        return interpolate(self.event_index, self.milestones, self.values)


# --- schedulers of torch ---------------------------------------------------------------------------------------------


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
    _instead_of_ignite = _REPEAT_CALLS

    def __init__(self, lr_scheduler: Any, save_history: bool = False, use_legacy: bool = False) -> None:
        if isinstance(lr_scheduler, native.ReduceLROnPlateau):
            raise TypeError("lr_scheduler must not be a ReduceLROnPlateau: use ReduceLROnPlateauScheduler instead")
        check_type("lr_scheduler", lr_scheduler, native.LRScheduler, "a scheduler of torch.optim.lr_scheduler")
        super().__init__(lr_scheduler.optimizer, "lr", save_history)
        self.lr_scheduler = lr_scheduler
        self._steps_from = 0 if use_legacy else 1
        self._has_stepped = False
        if use_legacy:
            text = "a scheduler with use_legacy=True must be attached to Events.ITERATION_COMPLETED"
            warnings.warn(text, stacklevel=2)

    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        # Many schedulers compute the next rates from those in the groups, which a warm-up may have overwritten.
        scheduler, groups = self.lr_scheduler, self.optimizer.param_groups
        for group, rate in zip(groups, scheduler.get_last_lr()):  # noqa: B905  # a group that was added has none yet
            if group["lr"] is not rate:
                write(group, "lr", rate)
        if self.event_index >= self._steps_from:
            with nullcontext() if self._has_stepped else no_step_warnings():
                scheduler.step()
            self._has_stepped = True

    def get_param(self) -> Any:
        """Return the current rate, or a list of rates if there are several groups."""
        rates = self.lr_scheduler.get_last_lr()
        return rates[0] if len(rates) == 1 else rates

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
        scheduler = cls(lr_scheduler, **kwargs)
        with unchanged([scheduler]):
            return rows_of(scheduler, num_events, scheduler._columns)


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
    _instead_of_ignite = (
        "finish the job with PyTorch-Ignite, or leave it out and restart from the rate of the optimizer"
    )

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
        check_engine("engine", engine)
        return engine.add_event_handler(event, self)

    def _check_first(self, engine: Engine[Any, Any]) -> None:
        """The first value is that of the optimizer."""

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
            raise ValueError(missing_metric("metric_name", self.metric_name, metrics))
        self.scheduler.step(metrics[self.metric_name])
        super().__call__(self.trainer or engine, name)

    def get_param(self) -> Any:
        """Return the current rate, or a list of rates if there are several groups."""
        rates = [group["lr"] for group in self.optimizer_param_groups]
        return rates[0] if len(rates) == 1 else rates

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

        >>> ReduceLROnPlateauScheduler.simulate_values(
        ...     3, [0.3, 0.2, 0.4], init_lr=1.0, patience=0, factor=0.5
        ... )
        [[0, 1.0], [1, 1.0], [2, 0.5]]
        """
        if len(metric_values) != num_events:
            raise ValueError(f"metric_values must hold num_events={num_events} values, got {len(metric_values)}")
        ignored = ("optimizer", "metric_name", "param_group_index")
        given = {key: value for key, value in scheduler_kwargs.items() if key not in ignored}
        scheduler = cls(spare_optimizer("lr", number("init_lr", init_lr)), "metric", **given)
        rows = []
        for index, value in enumerate(metric_values):
            scheduler.scheduler.step(value)
            rows.append([index, *scheduler._columns()])
        return rows


# --- combinations: together, one after another, after a warm-up ------------------------------------------------------


class _Combination:
    """What schedulers of schedulers share."""

    schedulers: list[Any]

    @property
    def save_history(self) -> bool:
        """Whether the schedulers keep their values."""
        return bool(self.schedulers[0].save_history)

    @save_history.setter
    def save_history(self, value: bool) -> None:
        for scheduler in self.schedulers:
            scheduler.save_history = value


class ParamGroupScheduler(_Combination, Attachable, Serializable):
    """Call several schedulers together, for several parameters, parameter groups or optimizers.

    Args:
        schedulers: instances of ``ParamScheduler``.
        names: keys of their values in the history; the names of their parameters by default.
        save_history: whether to keep the values; applies to all schedulers.

    Raises:
        TypeError: ``schedulers`` is not a sequence, or ``names`` is neither a list nor a tuple.
        ValueError: an element is not a ``ParamScheduler``, a name is not a string, or the lengths differ.

    >>> import torch
    >>> from camshaft.engine import Engine, Events
    >>> from camshaft.handlers import PiecewiseLinear
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.0)
    >>> scheduler = ParamGroupScheduler(
    ...     [
    ...         PiecewiseLinear(optimizer, "lr", [(0, 1.0), (2, 0.0)]),
    ...         PiecewiseLinear(optimizer, "momentum", [(0, 0.5), (2, 0.9)]),
    ...     ]
    ... )
    >>> trainer = Engine(
    ...     lambda engine, batch: print(
    ...         [optimizer.param_groups[0][name] for name in ("lr", "momentum")]
    ...     )
    ... )
    >>> handle = trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
    >>> state = trainer.run([0, 0, 0])
    [1.0, 0.5]
    [0.5, 0.7]
    [0.0, 0.9]
    """

    _state_dict_all_req_keys = ("schedulers",)

    def __init__(
        self, schedulers: Sequence[ParamScheduler], names: Sequence[str] | None = None, save_history: bool = False
    ) -> None:
        _check_members(schedulers, (ParamScheduler,), ValueError)
        self.schedulers = list(schedulers)
        self.names = self.param_name if names is None else _checked_names("names", names)
        if len(self.names) != len(schedulers):
            raise ValueError(f"names must hold one for each of {len(schedulers)} schedulers, got {names!r}")
        self.save_history = save_history

    @property
    def optimizer(self) -> list[Any]:
        """The optimizers of the schedulers."""
        return [scheduler.optimizer for scheduler in self.schedulers]

    @property
    def optimizer_param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups that the schedulers write to, scheduler by scheduler."""
        return [group for scheduler in self.schedulers for group in scheduler.optimizer_param_groups]

    @property
    def param_name(self) -> list[str]:
        """The parameters of the schedulers."""
        return [scheduler.param_name for scheduler in self.schedulers]

    @property
    def event_index(self) -> int:  # type: ignore[override]  # it is that of each scheduler
        """Number of calls so far."""
        index: int = self.schedulers[0].event_index
        return index

    def _written(self) -> list[Any]:
        return [scheduler._written() for scheduler in self.schedulers]

    def __call__(self, engine: Engine[Any, Any] | None, name: str | None = None) -> None:
        """Call each scheduler.

        Args:
            engine: the engine whose state keeps the history.
            name: key in the history, instead of ``names``.
        """
        if engine is not None:
            self._check_first(engine)
        for scheduler, own in zip(self.schedulers, self.names, strict=True):
            scheduler(engine, name or own)

    def get_param(self) -> list[Any]:
        """Return the next value of each scheduler."""
        return [scheduler.get_param() for scheduler in self.schedulers]

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the states of the schedulers with their names."""
        pairs = zip(self.names, self.schedulers, strict=True)
        return OrderedDict(schedulers=[(name, scheduler.state_dict()) for name, scheduler in pairs])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: it is not a mapping.
            ValueError: the names or the states do not fit; nothing is changed.
        """
        super().load_state_dict(state_dict)
        names = [name for name, _ in state_dict["schedulers"]]
        if names != self.names:
            raise ValueError(f"state_dict must be of schedulers with the names {self.names}, got {names}")
        before = self.state_dict()
        try:
            self._restore(state_dict)
        except BaseException:
            self._restore(before)
            raise

    def _restore(self, state_dict: Mapping[str, Any]) -> None:
        for scheduler, (_, state) in zip(self.schedulers, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    @classmethod
    def simulate_values(cls, num_events: int, schedulers: Sequence[ParamScheduler], **kwargs: Any) -> list[list[Any]]:
        """Return the values that a run would apply, without changing schedulers or optimizers.

        Args:
            num_events: number of rows.
            schedulers, kwargs: arguments of the class.

        Returns:
            For each call its index and the value of each scheduler, or several where its groups differ.
        """
        _check_members(schedulers, (ParamScheduler,), ValueError)
        with unchanged(schedulers):
            scheduler = cls(schedulers, **kwargs)
            return rows_of(scheduler, num_events, lambda: [value for one in schedulers for value in one._columns()])


class ConcatScheduler(_Combination, ParamScheduler):
    """Call one scheduler for a number of events, then the next one, and the last one for the rest of the run.

    Each scheduler counts its own calls.

    Args:
        schedulers: at least two, with one optimizer and one parameter in common (or the same ones, if they are groups).
        durations: number of events for each scheduler except the last.
        save_history: whether to keep the values; applies to all schedulers.

    Raises:
        TypeError: ``schedulers`` is not a sequence of schedulers, or ``durations`` neither a list nor a tuple.
        ValueError: the lengths do not fit, a duration is not a positive integer, or there are several optimizers or
            parameters.

    >>> import torch
    >>> from camshaft.handlers import LinearCyclicalScheduler, PiecewiseLinear
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> up = PiecewiseLinear(optimizer, "lr", [(0, 0.0), (2, 1.0)])
    >>> cycles = LinearCyclicalScheduler(
    ...     optimizer, "lr", start_value=1.0, end_value=0.5, cycle_size=2
    ... )
    >>> values = ConcatScheduler.simulate_values(6, schedulers=[up, cycles], durations=[2])
    >>> [value for index, value in values]
    [0.0, 0.5, 1.0, 0.5, 1.0, 0.5]
    """

    _state_dict_all_req_keys = (
        *ParamScheduler._state_dict_all_req_keys,
        *("durations", "_current_duration", "_scheduler_index", "schedulers"),
    )
    _instead_of_ignite = _REPEAT_CALLS

    def __init__(
        self,
        schedulers: Sequence[ParamScheduler | ParamGroupScheduler],
        durations: Sequence[int],
        save_history: bool = False,
    ) -> None:
        self.durations = _checked_durations(schedulers, durations)
        self.schedulers = list(schedulers)
        self._scheduler_index = 0
        self._current_duration = self.durations[0]
        first = self.schedulers[0]
        indices = [getattr(one, "param_group_index", None) for one in self.schedulers]
        common = indices[0] if all(index == indices[0] for index in indices) else None
        super().__init__(as_list(first.optimizer)[0], as_list(first.param_name)[0], save_history, common)

    def __call__(self, engine: Engine[Any, Any] | None, name: str | None = None) -> None:
        """Call the current scheduler.

        Args:
            engine: the engine whose state keeps the history.
            name: key in the history, instead of those of the schedulers.
        """
        if engine is not None:
            if self._was_counted(engine):
                return
            self._check_first(engine)
        if self._current_duration == 0:
            self._scheduler_index += 1
            is_last = self._scheduler_index == len(self.durations)
            self._current_duration = -1 if is_last else self.durations[self._scheduler_index]
        self.schedulers[self._scheduler_index](engine, name)
        if self._current_duration > 0:
            self._current_duration -= 1
        self.event_index += 1
        if engine is not None:
            self._remember_call(engine)

    def _check_entries(self) -> None:
        """Leave the check to the schedulers, which may have other parameters in other groups."""

    def get_param(self) -> Any:
        """Return the next value of the scheduler that was called last."""
        return self.schedulers[self._scheduler_index].get_param()

    def _columns(self) -> list[Any]:
        return self._written()

    @classmethod
    def simulate_values(  # type: ignore[override]  # takes schedulers instead of arguments
        cls,
        num_events: int,
        schedulers: Sequence[ParamScheduler | ParamGroupScheduler],
        durations: Sequence[int],
        param_names: list[str] | tuple[str, ...] | None = None,
    ) -> list[list[Any]]:
        """Return the values that a run would apply, without changing schedulers or optimizer.

        Args:
            num_events: number of rows.
            schedulers, durations: arguments of the class.
            param_names: the parameters to list; by default that of the schedulers.

        Returns:
            For each call its index and the value of each parameter in each scheduled group.

        Raises:
            TypeError: ``param_names`` is neither a list nor a tuple.
            ValueError: it holds something other than strings, or a parameter that a group does not have.
        """
        _checked_durations(schedulers, durations)
        with unchanged(schedulers):
            scheduler = cls(schedulers, durations)
            names = [scheduler.param_name] if param_names is None else _checked_names("param_names", param_names)
            groups = scheduler.optimizer_param_groups
            for name in names:
                check_entries(name, groups)
            return rows_of(scheduler, num_events, lambda: [plain(group[name]) for name in names for group in groups])


def create_lr_scheduler_with_warmup(
    lr_scheduler: Any,
    warmup_start_value: float,
    warmup_duration: int,
    warmup_end_value: float | None = None,
    save_history: bool = False,
    output_simulated_values: list[Any] | None = None,
) -> ConcatScheduler:
    """Return a scheduler with a linear warm-up before ``lr_scheduler``.

    The first event has the start value, and event number ``warmup_duration`` the end value. Then ``lr_scheduler``
    starts with its first value; if that is the end value in all groups, with its second one, so that none is repeated.

    Args:
        lr_scheduler: a ``ParamScheduler``, or a scheduler of ``torch.optim.lr_scheduler``.
        warmup_start_value: start value in all groups.
        warmup_duration: number of events, at least 2.
        warmup_end_value: end value in all groups; by default the current value of each group.
        save_history: see ``ParamScheduler``.
        output_simulated_values: a list to fill with the values to come, as many as it has entries, in the format of
            ``ConcatScheduler.simulate_values``.

    Returns:
        A scheduler to attach to ``ITERATION_STARTED``. It counts its calls, so warm-up and main phase may also be
        attached to different events, for instance the warm-up per iteration and the rest per epoch.

    Raises:
        TypeError: ``lr_scheduler`` is not a scheduler, ``warmup_duration`` not an integer, a value not a number, or
            ``output_simulated_values`` not a list.
        ValueError: ``warmup_duration`` is below 2.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> halving = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    >>> values = [None] * 5
    >>> scheduler = create_lr_scheduler_with_warmup(
    ...     halving, 0.0, warmup_duration=3, output_simulated_values=values
    ... )
    >>> values
    [[0, 0.0], [1, 0.5], [2, 1.0], [3, 0.5], [4, 0.25]]
    """
    kinds = (ParamScheduler, native.LRScheduler)
    check_type("lr_scheduler", lr_scheduler, kinds, "a ParamScheduler, or a scheduler of torch.optim.lr_scheduler")
    duration = integer("warmup_duration", warmup_duration, least=2)
    check_type("output_simulated_values", output_simulated_values, (list, NoneType), "a list")
    start = number("warmup_start_value", warmup_start_value)
    main = lr_scheduler if isinstance(lr_scheduler, ParamScheduler) else LRScheduler(lr_scheduler)
    ends = main._written()
    if warmup_end_value is not None:
        ends = [number("warmup_end_value", warmup_end_value)] * len(ends)
    with unchanged([main]):
        main(None)
        first_values = main._written()
    repeats_first = all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(ends, first_values, strict=True))
    schedulers = [LinearWarmup(main, start, ends, duration), main]
    durations = [duration - 1 if repeats_first else duration]
    if output_simulated_values is not None:
        rows = ConcatScheduler.simulate_values(len(output_simulated_values), schedulers, durations)
        output_simulated_values[:] = rows
    return ConcatScheduler(schedulers, durations, save_history)


class LinearWarmup(ParamScheduler):
    """Move what ``main`` schedules linearly from one value to one per group within ``duration`` calls."""

    _state_dict_all_req_keys = (*ParamScheduler._state_dict_all_req_keys, "start_value", "end_values", "duration")

    def __init__(self, main: ParamScheduler, start_value: float, end_values: list[float], duration: int) -> None:
        super().__init__(main.optimizer, main.param_name, param_group_index=main.param_group_index)
        self.start_value, self.end_values, self.duration = start_value, end_values, duration

    def get_param(self) -> list[float]:
        """Return the values for ``event_index``."""
        last = self.duration - 1
        if self.event_index >= last:
            return self.end_values
        start, progress = self.start_value, self.event_index / last
        return [start + (end - start) * progress for end in self.end_values]


def _checked_names(argument: str, names: Any) -> list[str]:
    check_type(argument, names, (list, tuple), "a list or a tuple")
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{argument} must hold strings, got {names!r}")
    return list(names)


def _check_members(schedulers: Any, kinds: tuple[type[Any], ...], error: type[Exception]) -> None:
    check_sequence("schedulers", schedulers)
    for one in schedulers:
        if not isinstance(one, kinds):
            expected = " and ".join(kind.__name__ for kind in kinds)
            hint = "; wrap it in LRScheduler" if isinstance(one, native.LRScheduler) else ""
            raise error(f"schedulers must hold instances of {expected}, got {described(one)}{hint}")
    if not schedulers:
        raise ValueError("schedulers must hold at least one, got none")


def _checked_durations(schedulers: Any, durations: Any) -> list[int]:
    """Check the arguments of a ``ConcatScheduler``, and return the durations."""
    _check_members(schedulers, (ParamScheduler, ParamGroupScheduler), TypeError)
    if len(schedulers) < 2:
        raise ValueError(
            f"schedulers must hold at least two schedulers, got {len(schedulers)}: attach a single one itself"
        )
    check_type("durations", durations, (list, tuple), "a list or a tuple")
    if len(durations) != len(schedulers) - 1:
        raise ValueError(f"durations must hold one for each scheduler but the last, got {durations!r}")
    if not all(isinstance(duration, Integral) and int(duration) > 0 for duration in durations):
        raise ValueError(f"durations must hold integers of at least 1, got {durations!r}")
    if len({id(one) for scheduler in schedulers for one in as_list(scheduler.optimizer)}) > 1:
        raise ValueError("schedulers must have one optimizer in common")
    names = [sorted(set(as_list(scheduler.param_name))) for scheduler in schedulers]
    if any(one != names[0] for one in names):
        raise ValueError(f"schedulers must have one param_name in common, got {names}")
    return [int(duration) for duration in durations]


# --- parameter groups ------------------------------------------------------------------------------------------------


def write(group: dict[str, Any], name: str, value: Any) -> None:
    """Set an entry of a parameter group. A tensor is written in place, since compiled steps refer to it."""
    current = group.get(name)
    if type(current) is float or not isinstance(current, Tensor):  # the second test takes several times as long
        group[name] = value
    elif isinstance(value, Tensor):
        current.copy_(value)
    else:
        current.fill_(value)


def plain(value: Any) -> Any:
    """Return the number in a tensor, and any other value as it is."""
    return value.item() if isinstance(value, Tensor) else value


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and any other value in a list."""
    return value if isinstance(value, list) else [value]


def spare_optimizer(param_name: str = "lr", value: float = 0.1) -> torch.optim.Optimizer:
    """Return an optimizer with one group that has this parameter."""
    return torch.optim.SGD([{"params": [torch.zeros(1, device="cpu")], param_name: value}], lr=0.1)


@contextmanager
def unchanged(schedulers: Sequence[Any]) -> Iterator[None]:
    """Restore schedulers and the parameter groups of their optimizers on exit."""
    states = [(scheduler, scheduler.save_history, scheduler.state_dict()) for scheduler in schedulers]
    optimizers = {id(one): one for scheduler in schedulers for one in as_list(scheduler.optimizer)}
    groups = [(group, dict(group)) for optimizer in optimizers.values() for group in optimizer.param_groups]
    tensors = [(one, one.clone()) for _, entries in groups for one in entries.values() if isinstance(one, Tensor)]
    try:
        yield
    finally:
        for scheduler, save_history, state in states:
            scheduler.load_state_dict(state)
            scheduler.save_history = save_history
        for group, entries in groups:
            group.update(entries)
        for tensor, value in tensors:
            tensor.copy_(value)
