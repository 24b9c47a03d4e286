"""Schedulers of schedulers: called together, one after another, and after a warm-up."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from numbers import Integral
from types import NoneType
from typing import Any

from torch.optim import lr_scheduler as native

from camshaft.base import Serializable
from camshaft.engine.engine import Engine
from camshaft.errors import described
from camshaft.handlers.param_scheduler.base import ParamScheduler, as_list, plain, rows_of, unchanged
from camshaft.handlers.param_scheduler.torch_schedulers import LRScheduler, ignite_torch_state
from camshaft.handlers.utils import check_entries, check_sequence, check_type, integer, number


class ParamGroupScheduler(Serializable):
    """Call several schedulers together, for several parameters, parameter groups or optimizers.

    Args:
        schedulers: instances of ``ParamScheduler``.
        names: keys of their values in the history; the names of their parameters by default.
        save_history: whether to keep the values; applies to all schedulers.

    Raises:
        TypeError: ``schedulers`` is not a sequence, or ``names`` neither a list nor a tuple.
        ValueError: an element is not a ``ParamScheduler``, a name is not a string, or the lengths differ.

    >>> import torch
    >>> from camshaft.engine import Engine, Events
    >>> from camshaft.handlers import PiecewiseLinear
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.0)
    >>> scheduler = ParamGroupScheduler([
    ...     PiecewiseLinear(optimizer, "lr", [(0, 1.0), (2, 0.0)]),
    ...     PiecewiseLinear(optimizer, "momentum", [(0, 0.5), (2, 0.9)]),
    ... ])
    >>> trainer = Engine(lambda engine, batch: print([optimizer.param_groups[0][name] for name in ("lr", "momentum")]))
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
        check_type("names", names, (list, tuple, NoneType), "a list or a tuple")
        self.schedulers = list(schedulers)
        self.names = self.param_name if names is None else list(names)
        if not all(isinstance(name, str) for name in self.names):
            raise ValueError(f"names must hold strings, got {names!r}")
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
    def save_history(self) -> bool:
        """Whether the schedulers keep their values."""
        return self.schedulers[0].save_history

    @save_history.setter
    def save_history(self, value: bool) -> None:
        for scheduler in self.schedulers:
            scheduler.save_history = value

    def __call__(self, engine: Engine[Any, Any] | None, name: str | None = None) -> None:
        """Call each scheduler.

        Args:
            engine: the engine whose state keeps the history.
            name: key in the history, instead of ``names``.
        """
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
            scheduler = cls(schedulers, **{**kwargs, "save_history": False})
            return rows_of(scheduler, num_events, lambda: [value for one in schedulers for value in one._columns()])


class ConcatScheduler(ParamScheduler):
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
    >>> cycles = LinearCyclicalScheduler(optimizer, "lr", start_value=1.0, end_value=0.5, cycle_size=2)
    >>> values = ConcatScheduler.simulate_values(6, schedulers=[up, cycles], durations=[2])
    >>> [value for index, value in values]
    [0.0, 0.5, 1.0, 0.5, 1.0, 0.5]
    """

    _state_dict_all_req_keys = (
        *ParamScheduler._state_dict_all_req_keys,
        *("durations", "_current_duration", "_scheduler_index", "schedulers"),
    )

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

    @property
    def save_history(self) -> bool:
        """Whether the schedulers keep their values."""
        return self.schedulers[0].save_history

    @save_history.setter
    def save_history(self, value: bool) -> None:
        for scheduler in self.schedulers:
            scheduler.save_history = value

    def __call__(self, engine: Engine[Any, Any] | None, name: str | None = None) -> None:
        """Call the current scheduler.

        Args:
            engine: the engine whose state keeps the history.
            name: key in the history, instead of those of the schedulers.
        """
        if engine is not None and self._is_done_with_epoch(engine):
            return
        if self._current_duration == 0:
            self._scheduler_index += 1
            is_last = self._scheduler_index == len(self.durations)
            self._current_duration = -1 if is_last else self.durations[self._scheduler_index]
        self.schedulers[self._scheduler_index](engine, name)
        if self._current_duration > 0:
            self._current_duration -= 1
        self.event_index += 1

    def _check_entries(self) -> None:
        """Leave the check to the schedulers, which may have other parameters in other groups."""

    def get_param(self) -> Any:
        """Return the next value of the scheduler that was called last."""
        return self.schedulers[self._scheduler_index].get_param()

    def _columns(self) -> list[Any]:
        return self._written()

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        index, left = state_dict["_scheduler_index"], state_dict["_current_duration"]
        durations = state_dict["durations"]
        is_last = index == len(durations)  # whose calls are counted down from -1 there
        calls = sum(durations[:index]) + (-1 - left if is_last else durations[index] - left)
        return {**state_dict, "event_index": calls, "_current_duration": -1 if is_last else left}

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
        if param_names is not None:
            check_sequence("param_names", param_names)
            if not all(isinstance(name, str) for name in param_names):
                raise ValueError(f"param_names must hold strings, got {param_names!r}")
        _checked_durations(schedulers, durations)
        with unchanged(schedulers):
            scheduler = cls(schedulers, durations)
            names = as_list(scheduler.param_name) if param_names is None else param_names
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
    >>> scheduler = create_lr_scheduler_with_warmup(halving, 0.0, warmup_duration=3, output_simulated_values=values)
    >>> values
    [[0, 0.0], [1, 0.5], [2, 1.0], [3, 0.5], [4, 0.25]]
    """
    kinds = (ParamScheduler, native.LRScheduler)
    check_type("lr_scheduler", lr_scheduler, kinds, "a ParamScheduler or one of torch.optim.lr_scheduler")
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
    warmup = LinearWarmup(main.optimizer, main.param_name, start, ends, duration, main.param_group_index)
    schedulers, durations = [warmup, main], [duration - _are_close(ends, first_values)]
    if output_simulated_values is not None:
        rows = ConcatScheduler.simulate_values(len(output_simulated_values), schedulers, durations)
        output_simulated_values[:] = rows
    return WarmupScheduler(schedulers, durations, save_history)


class LinearWarmup(ParamScheduler):
    """Move linearly from one start value to an end value per group within ``duration`` calls, and stay there."""

    _state_dict_all_req_keys = (*ParamScheduler._state_dict_all_req_keys, "start_value", "end_values", "duration")

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        start_value: float,
        end_values: list[float],
        duration: int,
        param_group_index: int | None,
    ) -> None:
        super().__init__(optimizer, param_name, param_group_index=param_group_index)
        self.start_value, self.end_values, self.duration = start_value, end_values, duration

    def get_param(self) -> list[float]:
        """Return the values for ``event_index``."""
        last = self.duration - 1
        if self.event_index >= last:
            return self.end_values
        start, progress = self.start_value, self.event_index / last
        return [start + (end - start) * progress for end in self.end_values]


class WarmupScheduler(ConcatScheduler):
    """A :class:`LinearWarmup` followed by a scheduler."""

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        warmup, main = state_dict["schedulers"][0], state_dict["schedulers"][1]
        groups = [state for _, state in warmup["schedulers"]]  # there a PiecewiseLinear for each parameter group
        ends = [state["values"][1] for state in groups]
        lasts = {state["milestones"][1] for state in groups}
        duration = durations = max(lasts) + 1
        if "lr_scheduler" in main:  # whose first rate belongs to the warm-up there
            durations -= _are_close(ends, ignite_torch_state(main["lr_scheduler"])["_last_lr"])
        calls = groups[0]["event_index"]
        is_over = state_dict["_scheduler_index"] > 0 or calls > durations
        if not is_over and len(lasts) > 1:
            raise ValueError(
                "state_dict must not be of a warm-up whose length differs between parameter groups, as in "
                f"PyTorch-Ignite, got the milestones {[state['milestones'] for state in groups]}: load a state from "
                "after the warm-up"
            )
        if "lr_scheduler" in main and not main["event_index"]:
            first = {**ignite_torch_state(main["lr_scheduler"]), "last_epoch": 0}
            main = {"event_index": int(is_over), "param_name": main["param_name"], "lr_scheduler": first}
        warmed = {
            "event_index": durations if is_over else calls,
            "param_name": groups[0]["param_name"],
            "start_value": groups[0]["values"][0],
            "end_values": ends,
            "duration": duration,
        }
        return {
            **state_dict,
            "event_index": warmed["event_index"] + is_over * main["event_index"],
            "durations": [durations],
            "_current_duration": -1 if is_over else durations - calls,
            "_scheduler_index": int(is_over),
            "schedulers": [warmed, main],
        }


def _are_close(ends: list[Any], firsts: list[Any]) -> bool:
    return all(math.isclose(end, first, rel_tol=1e-6) for end, first in zip(ends, firsts, strict=True))


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
        raise ValueError(f"schedulers must hold at least two, got {len(schedulers)}")
    check_type("durations", durations, (list, tuple), "a list or a tuple")
    if len(durations) != len(schedulers) - 1:
        raise ValueError(
            f"durations must hold one for each scheduler but the last, {len(schedulers) - 1}, got {len(durations)}"
        )
    if not all(isinstance(duration, Integral) and int(duration) > 0 for duration in durations):
        raise ValueError(f"durations must hold integers of at least 1, got {durations!r}")
    if len({id(one) for scheduler in schedulers for one in as_list(scheduler.optimizer)}) > 1:
        raise ValueError("schedulers must have one optimizer in common")
    names = [sorted(set(as_list(scheduler.param_name))) for scheduler in schedulers]
    if any(one != names[0] for one in names):
        raise ValueError(f"schedulers must have one param_name in common, got {names}")
    return [int(duration) for duration in durations]
