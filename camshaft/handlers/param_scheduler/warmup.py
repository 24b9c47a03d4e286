"""A linear warm-up before another scheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.optim import lr_scheduler as native

from camshaft.errors import described
from camshaft.handlers.param_scheduler.arguments import real
from camshaft.handlers.param_scheduler.concat import ConcatScheduler
from camshaft.handlers.param_scheduler.lr_scheduler import LRScheduler, wrapped_state
from camshaft.handlers.param_scheduler.param import ParamScheduler
from camshaft.handlers.param_scheduler.simulation import unchanged
from camshaft.types import is_integer


class LinearWarmup(ParamScheduler):
    """Goes linearly from one value to an end value for each group, and stays there.

    Args:
        optimizer: as in ``ParamScheduler``.
        param_name: likewise.
        start_value: the first value.
        end_values: the last values, one for each group that is scheduled.
        duration: calls from the first to the last value, both included.
        param_group_index: as in ``ParamScheduler``.
    """

    _state_dict_all_req_keys = (*ParamScheduler._state_dict_all_req_keys, "start_value", "end_values", "duration")

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        start_value: float,
        end_values: list[float],
        duration: int,
        param_group_index: int | None = None,
    ) -> None:
        super().__init__(optimizer, param_name, param_group_index=param_group_index)
        self.start_value = start_value
        self.end_values = end_values
        self.duration = duration

    def get_param(self) -> list[float]:
        """Compute the values for ``event_index``."""
        last = self.duration - 1
        if self.event_index >= last:
            return self.end_values
        start, progress = self.start_value, self.event_index / last
        return [start + (end - start) * progress for end in self.end_values]


def create_lr_scheduler_with_warmup(
    lr_scheduler: Any,
    warmup_start_value: float,
    warmup_duration: int,
    warmup_end_value: float | None = None,
    save_history: bool = False,
    output_simulated_values: list[Any] | None = None,
) -> ConcatScheduler:
    """Put a linear warm-up before a scheduler.

    The first event has the start value, and event number ``warmup_duration`` the end value. Then the scheduler begins
    with its first value; if that is the end value in all groups, with its second one, so that none comes twice.

    Args:
        lr_scheduler: a ``ParamScheduler``, or one of ``torch.optim.lr_scheduler``.
        warmup_start_value: in all groups.
        warmup_duration: in events, at least 2.
        warmup_end_value: in all groups; by default what each has now.
        save_history: as in ``ParamScheduler``.
        output_simulated_values: a list to fill with the values to come: as many as it has entries, in the form of
            ``ConcatScheduler.simulate_values``.

    Returns:
        A scheduler to attach to ``ITERATION_STARTED``. It counts its calls, so warm-up and main phase may also come
        with other events, for instance the warm-up per iteration and the rest per epoch.

    Raises:
        TypeError: ``lr_scheduler`` is neither of both, ``warmup_duration`` no integer, a value no number, or
            ``output_simulated_values`` no list.
        ValueError: ``warmup_duration`` is below 2.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> halving = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    >>> values = [None] * 5
    >>> scheduler = create_lr_scheduler_with_warmup(halving, 0.0, warmup_duration=3, output_simulated_values=values)
    >>> values
    [[0, 0.0], [1, 0.5], [2, 1.0], [3, 0.5], [4, 0.25]]
    """
    if not isinstance(lr_scheduler, (ParamScheduler, native.LRScheduler)):
        raise TypeError(
            f"lr_scheduler must be a ParamScheduler or one of torch.optim.lr_scheduler, got {described(lr_scheduler)}"
        )
    if not is_integer(warmup_duration):
        raise TypeError(f"warmup_duration must be an integer, got {warmup_duration!r}")
    if warmup_duration < 2:
        raise ValueError(f"warmup_duration must be at least 2, got {warmup_duration}")
    if output_simulated_values is not None and not isinstance(output_simulated_values, list):
        raise TypeError(f"output_simulated_values must be a list, got {output_simulated_values!r}")
    start = real("warmup_start_value", warmup_start_value)
    main = lr_scheduler if isinstance(lr_scheduler, ParamScheduler) else LRScheduler(lr_scheduler)
    ends = main._written()
    if warmup_end_value is not None:
        ends = [real("warmup_end_value", warmup_end_value)] * len(ends)
    warmup = LinearWarmup(main.optimizer, main.param_name, start, ends, int(warmup_duration), main.param_group_index)
    parts, durations = [warmup, main], [int(warmup_duration) - _are_close(ends, _first_values(main))]
    if output_simulated_values is not None:
        rows = ConcatScheduler.simulate_values(len(output_simulated_values), parts, durations)
        output_simulated_values[:] = rows
    return ChainWithWarmup(parts, durations, save_history)


class ChainWithWarmup(ConcatScheduler):
    """A warm-up and a scheduler."""

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        warmup, main = (state_dict["schedulers"][index] for index in (0, 1))
        groups = [state for _, state in warmup["schedulers"]]  # piecewise linear, one for each parameter group
        ends = [state["values"][1] for state in groups]
        lasts = {state["milestones"][1] for state in groups}
        duration = durations = max(lasts) + 1
        if "lr_scheduler" in main:  # whose first rate belongs to the warm-up there
            durations -= _are_close(ends, wrapped_state(main["lr_scheduler"])["_last_lr"])
        calls = groups[0]["event_index"]
        is_over = state_dict["_scheduler_index"] > 0 or calls > durations
        if not is_over and len(lasts) > 1:
            raise ValueError(
                "state_dict must not be of a warm-up whose length differs between parameter groups, as PyTorch-Ignite "
                f"makes it, got the milestones {[state['milestones'] for state in groups]}: load the state from after "
                "the warm-up"
            )
        if "lr_scheduler" in main and not main["event_index"]:
            first = {**wrapped_state(main["lr_scheduler"]), "last_epoch": 0}
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


def _first_values(scheduler: ParamScheduler) -> list[Any]:
    """Look at what a scheduler would write into each group in its next call."""
    with unchanged([scheduler]):
        scheduler(None)
        return scheduler._written()
