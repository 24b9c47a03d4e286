"""Schedulers of a parameter of an optimizer, such as its learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from camshaft.engine.engine import Engine
from camshaft.engine.filters import is_integer
from camshaft.handlers.param_scheduler.base import SteppedScheduler
from camshaft.handlers.param_scheduler.simulation import rows_of, spare_optimizer
from camshaft.handlers.utils import check_entries


class ParamScheduler(SteppedScheduler):
    """Writes a value into the parameter groups of an optimizer each time it is called.

    Attached to ``ITERATION_STARTED``, iteration ``k`` uses the value of index ``k - 1``. Whatever is in the optimizer
    is overwritten, by a number, or in place where it is a tensor. A subclass defines :meth:`get_param`.

    Attached to ``EPOCH_STARTED``, it does nothing when a resumed run takes up an epoch again in its middle.

    Args:
        optimizer: or any object whose ``param_groups`` is a list of dicts.
        param_name: the entry of the groups that is scheduled.
        save_history: keep the values, a list with one for each group, in ``engine.state.param_history[param_name]``.
        param_group_index: the one group to schedule, instead of all.

    Raises:
        TypeError: ``optimizer`` has no ``param_groups``, or the index is not an integer.
        ValueError: there is no group of this index, or one to schedule has no such entry.

    >>> import torch
    >>> from camshaft.engine import Engine, Events
    >>> class Halving(ParamScheduler):
    ...     def get_param(self) -> float:
    ...         return 0.5**self.event_index
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> trainer = Engine(lambda engine, batch: optimizer.param_groups[0]["lr"])
    >>> handle = Halving(optimizer, "lr").attach(trainer)
    >>> handle = trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: print(trainer.state.output))
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
            raise TypeError(
                "optimizer must be an optimizer of torch, or an object with a list param_groups, got "
                f"{optimizer!r} of type {type(optimizer).__name__}"
            )
        _check_group(param_group_index, len(groups))
        self.optimizer = optimizer
        self.param_group_index = param_group_index
        self._check_entries()

    @property
    def optimizer_param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups that are scheduled."""
        # Looked up each time: an optimizer that loads a state makes new ones.
        groups = self.optimizer.param_groups
        return cast(
            "list[dict[str, Any]]", groups if self.param_group_index is None else [groups[self.param_group_index]]
        )

    def _check_entries(self) -> None:
        """Refuse a parameter that is not there: to write it would add it, and change nothing."""
        check_entries(self.param_name, self.optimizer_param_groups)

    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        self._write(self.get_param())

    def _write(self, value: Any) -> None:
        """Write a value into all groups, or one of a list into each."""
        groups = self.optimizer.param_groups if self.param_group_index is None else self.optimizer_param_groups
        name = self.param_name
        if not isinstance(value, list):
            for group in groups:
                write(group, name, value)
            return
        if len(value) != len(groups):
            raise ValueError(
                f"get_param of {type(self).__name__} must give one value for each of {len(groups)} parameter groups, "
                f"got {len(value)}: {value}"
            )
        for group, one in zip(groups, value, strict=True):
            write(group, name, one)

    def _written(self) -> list[Any]:
        return [plain(group[self.param_name]) for group in self.optimizer_param_groups]

    def _columns(self) -> list[Any]:
        """Read what a table of values shows: one value, or one for each group where groups have their own."""
        written = self._written()
        return written if isinstance(self.get_param(), list) else written[:1]

    @classmethod
    def simulate_values(cls, num_events: int, **scheduler_kwargs: Any) -> list[list[Any]]:
        """List the values that a run would apply: ``[index, value]`` for each call.

        Args:
            num_events: how many.
            scheduler_kwargs: arguments of the scheduler; those for its optimizer, group and history do not matter.

        >>> from camshaft.handlers import LinearCyclicalScheduler
        >>> LinearCyclicalScheduler.simulate_values(
        ...     num_events=4, param_name="lr", start_value=0.0, end_value=1.0, cycle_size=4
        ... )
        [[0, 0.0], [1, 0.5], [2, 1.0], [3, 0.5]]
        """
        given = {key: value for key, value in scheduler_kwargs.items() if key not in _NOT_SIMULATED}
        scheduler = cls(optimizer=spare_optimizer(scheduler_kwargs.get("param_name", "lr")), **given)
        return rows_of(scheduler, num_events, scheduler._columns)


_NOT_SIMULATED = frozenset({"optimizer", "param_group_index", "save_history"})


def write(group: dict[str, Any], name: str, value: Any) -> None:
    """Set an entry of a parameter group; a tensor stays the same tensor, as compiled steps hold on to it."""
    current = group.get(name)
    if type(current) is float or not isinstance(current, Tensor):  # the second question takes several times as long
        group[name] = value
    elif isinstance(value, Tensor):
        current.copy_(value)
    else:
        current.fill_(value)


def plain(value: Any) -> Any:
    """Give a number for a tensor that holds one."""
    return value.item() if isinstance(value, Tensor) else value


def _check_group(index: Any, count: int) -> None:
    if index is None:
        return
    if not is_integer(index):
        raise TypeError(f"param_group_index must be an integer, got {index!r} of type {type(index).__name__}")
    if not -count <= index < count:
        raise ValueError(f"param_group_index must be that of one of the {count} groups of the optimizer, got {index}")
