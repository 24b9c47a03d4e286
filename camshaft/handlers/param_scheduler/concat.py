"""Schedulers one after another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import lr_scheduler as native

from camshaft.engine.engine import Engine
from camshaft.engine.filters import is_integer
from camshaft.errors import described
from camshaft.handlers.param_scheduler.arguments import check_sequence
from camshaft.handlers.param_scheduler.group import ParamGroupScheduler, load_all
from camshaft.handlers.param_scheduler.param import ParamScheduler, plain
from camshaft.handlers.param_scheduler.simulation import as_list, rows_of, unchanged
from camshaft.handlers.utils import check_entries


class ConcatScheduler(ParamScheduler):
    """Calls a scheduler for a number of events, then the next one, and the last one for ever.

    Each of them counts its own calls.

    Args:
        schedulers: at least two, of one optimizer and for one parameter (or the same ones, if they are groups).
        durations: for how many events each is called, but for the last.
        save_history: whether the values are kept; holds for all the schedulers.

    Raises:
        TypeError: ``schedulers`` is not a sequence of schedulers, or ``durations`` neither a list nor a tuple.
        ValueError: fewer than two schedulers, another number of durations than needed, a duration that is no positive
            integer, or several optimizers or parameters.

    >>> import torch
    >>> from camshaft.handlers import LinearCyclicalScheduler, PiecewiseLinear
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> up = PiecewiseLinear(optimizer, "lr", [(0, 0.0), (2, 1.0)])
    >>> round_and_round = LinearCyclicalScheduler(optimizer, "lr", start_value=1.0, end_value=0.5, cycle_size=2)
    >>> values = ConcatScheduler.simulate_values(6, schedulers=[up, round_and_round], durations=[2])
    >>> [value for index, value in values]
    [0.0, 0.5, 1.0, 0.5, 1.0, 0.5]
    """

    _state_dict_all_req_keys = (
        *ParamScheduler._state_dict_all_req_keys,
        "durations",
        "_current_duration",
        "_scheduler_index",
        "schedulers",
    )

    def __init__(
        self,
        schedulers: Sequence[ParamScheduler | ParamGroupScheduler],
        durations: Sequence[int],
        save_history: bool = False,
    ) -> None:
        self.durations = _checked(schedulers, durations)
        self.schedulers = list(schedulers)
        self._scheduler_index = 0
        self._current_duration = self.durations[0]
        first = self.schedulers[0]
        indices = [getattr(one, "param_group_index", None) for one in self.schedulers]
        common = indices[0] if all(index == indices[0] for index in indices) else None
        super().__init__(as_list(first.optimizer)[0], as_list(first.param_name)[0], save_history, common)
        self.save_history = save_history

    @property
    def save_history(self) -> bool:
        """Whether the values are kept."""
        return self._save_history

    @save_history.setter
    def save_history(self, value: bool) -> None:
        self._save_history = value
        for scheduler in self.schedulers:
            scheduler.save_history = value

    def __call__(self, engine: Engine[Any, Any] | None, name: str | None = None) -> None:
        """Call the scheduler whose turn it is.

        Args:
            engine: whose state keeps the history.
            name: the name in the history, instead of those of the schedulers.
        """
        if engine is not None and self._continues(engine):
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
        """Leave it to the schedulers, which may have other parameters in other groups."""

    def get_param(self) -> Any:
        """Compute the next value of the scheduler that was called last."""
        return self.schedulers[self._scheduler_index].get_param()

    def _columns(self) -> list[Any]:
        return self._written()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Give copies of what the next values depend on, with the states of the schedulers."""
        saved = OrderedDict(
            (name, getattr(self, name)) for name in self._state_dict_all_req_keys if name != "schedulers"
        )
        saved["durations"] = list(self.durations)
        saved["schedulers"] = [scheduler.state_dict() for scheduler in self.schedulers]
        return saved

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        index, left = state_dict["_scheduler_index"], state_dict["_current_duration"]
        durations = state_dict["durations"]
        is_last = index == len(durations)  # whose calls are counted down from -1 there
        calls = sum(durations[:index]) + (-1 - left if is_last else durations[index] - left)
        return {**state_dict, "event_index": calls, "_current_duration": -1 if is_last else left}

    def _restore(self, state_dict: Mapping[str, Any]) -> None:
        load_all(self.schedulers, state_dict["schedulers"])
        for name in self._state_dict_all_req_keys:
            if name != "schedulers":
                setattr(self, name, state_dict[name])
        self.durations = list(self.durations)

    @classmethod
    def simulate_values(  # type: ignore[override]  # it needs other schedulers
        cls,
        num_events: int,
        schedulers: Sequence[ParamScheduler | ParamGroupScheduler],
        durations: Sequence[int],
        param_names: list[str] | tuple[str, ...] | None = None,
    ) -> list[list[Any]]:
        """List the values that a run would apply, and leave schedulers and optimizer as they are.

        Args:
            num_events: how many.
            schedulers: as for the class.
            durations: likewise.
            param_names: the parameters to list, in a list or a tuple; by default that of the schedulers.

        Returns:
            For each call its index and the value of each parameter in each group that is scheduled.

        Raises:
            TypeError: ``param_names`` is neither a list nor a tuple.
            ValueError: it holds something else than strings, or a parameter that a group does not have.
        """
        if param_names is not None:
            check_sequence("param_names", param_names)
            if not all(isinstance(name, str) for name in param_names):
                raise ValueError(f"param_names must hold strings, got {param_names!r}")
        _checked(schedulers, durations)
        with unchanged(schedulers):
            scheduler = cls(schedulers, durations)
            names = as_list(scheduler.param_name) if param_names is None else param_names
            groups = scheduler.optimizer_param_groups
            for name in names:
                check_entries(name, groups)
            return rows_of(scheduler, num_events, lambda: [plain(group[name]) for name in names for group in groups])


def _checked(schedulers: Any, durations: Any) -> list[int]:
    """Check what a ``ConcatScheduler`` is made of, and give the durations."""
    check_sequence("schedulers", schedulers)
    for scheduler in schedulers:
        if not isinstance(scheduler, (ParamScheduler, ParamGroupScheduler)):
            hint = "; wrap it in LRScheduler" if isinstance(scheduler, native.LRScheduler) else ""
            raise TypeError(
                "schedulers must hold objects of the classes ParamScheduler and ParamGroupScheduler, got "
                f"{described(scheduler)}{hint}"
            )
    if len(schedulers) < 2:
        raise ValueError(f"schedulers must hold at least two, got {len(schedulers)}")
    if not isinstance(durations, (list, tuple)):
        raise TypeError(f"durations must be a list or a tuple, got {durations!r} of type {type(durations).__name__}")
    if len(durations) != len(schedulers) - 1:
        raise ValueError(
            f"durations must hold one for each scheduler but the last, {len(schedulers) - 1}, got {len(durations)}"
        )
    if not all(is_integer(duration) and duration > 0 for duration in durations):
        raise ValueError(f"durations must hold integers of at least 1, got {durations!r}")
    optimizers = {id(one): one for scheduler in schedulers for one in as_list(scheduler.optimizer)}
    if len(optimizers) > 1:
        raise ValueError(f"schedulers must have one optimizer in common, got {len(optimizers)} of them")
    names = [sorted(set(as_list(scheduler.param_name))) for scheduler in schedulers]
    if any(one != names[0] for one in names):
        raise ValueError(f"schedulers must have one param_name in common, got {names}")
    return [int(duration) for duration in durations]
