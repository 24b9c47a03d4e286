"""Looking ahead: calling schedulers to see their values, with nothing changed afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def spare_optimizer(param_name: str = "lr", value: float = 0.1) -> torch.optim.Optimizer:
    """Make an optimizer with one group to write into, which has this parameter."""
    return torch.optim.SGD([{"params": [torch.zeros(1, device="cpu")], param_name: value}], lr=0.1)


def rows_of(scheduler: Any, num_events: int, columns: Callable[[], list[Any]]) -> list[list[Any]]:
    """Call a scheduler, and list what ``columns`` gives after each call, behind the index of the call."""
    rows = []
    with unwarned():
        for index in range(num_events):
            scheduler(None)
            rows.append([index, *columns()])
    return rows


@contextmanager
def unwarned() -> Iterator[None]:
    """Keep torch from telling that the optimizer should step first.

    The optimizer of a run has made its step by then, or left it out on purpose, to collect gradients, or because they
    overflowed.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of|Seems like", UserWarning)
        yield


@contextmanager
def unchanged(schedulers: Sequence[Any]) -> Iterator[None]:
    """Put schedulers and the groups of their optimizers back as they were."""
    states = [(scheduler, scheduler.save_history, scheduler.state_dict()) for scheduler in schedulers]
    optimizers = {id(one): one for scheduler in schedulers for one in as_list(scheduler.optimizer)}
    groups = [_Group(group) for optimizer in optimizers.values() for group in optimizer.param_groups]
    try:
        yield
    finally:
        for scheduler, save_history, state in states:
            scheduler.load_state_dict(state)
            scheduler.save_history = save_history
        for group in groups:
            group.restore()


def as_list(value: Any) -> list[Any]:
    """Give several things as they are, and one as a list."""
    return value if isinstance(value, list) else [value]


class _Group:
    """The entries of a parameter group as they are now."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group, self._entries = group, dict(group)
        self._tensors = {name: value.clone() for name, value in group.items() if isinstance(value, Tensor)}

    def restore(self) -> None:
        self._group.clear()
        self._group.update(self._entries)
        for name, value in self._tensors.items():
            self._entries[name].copy_(value)
