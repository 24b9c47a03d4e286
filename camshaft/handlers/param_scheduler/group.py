"""Several schedulers that are called together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import lr_scheduler as native

from camshaft.base import Serializable
from camshaft.engine.engine import Engine
from camshaft.errors import described
from camshaft.handlers.param_scheduler.arguments import check_sequence
from camshaft.handlers.param_scheduler.param import ParamScheduler
from camshaft.handlers.param_scheduler.simulation import rows_of, unchanged


class ParamGroupScheduler(Serializable):
    """Calls several schedulers, for several parameters, parameter groups or optimizers.

    Args:
        schedulers: of the class ``ParamScheduler``.
        names: under which their values are kept in the history; by default the names of their parameters.
        save_history: whether they are kept; holds for all the schedulers.

    Raises:
        TypeError: ``schedulers`` is not a sequence, or ``names`` neither a list nor a tuple.
        ValueError: something is no ``ParamScheduler``, a name is no string, or there are not as many of one as of the
            other.

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
        self,
        schedulers: Sequence[ParamScheduler],
        names: Sequence[str] | None = None,
        save_history: bool = False,
    ) -> None:
        _check_schedulers(schedulers)
        self.schedulers = list(schedulers)
        self.names = _checked_names([one.param_name for one in schedulers] if names is None else names, len(schedulers))
        self.save_history = save_history

    @property
    def optimizer(self) -> list[Any]:
        """The optimizers of the schedulers."""
        return [scheduler.optimizer for scheduler in self.schedulers]

    @property
    def optimizer_param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups that the schedulers write to, one scheduler after the other."""
        return [group for scheduler in self.schedulers for group in scheduler.optimizer_param_groups]

    @property
    def param_name(self) -> list[str]:
        """What the schedulers schedule."""
        return [scheduler.param_name for scheduler in self.schedulers]

    @property
    def save_history(self) -> bool:
        """Whether the values are kept."""
        return self.schedulers[0].save_history

    @save_history.setter
    def save_history(self, value: bool) -> None:
        for scheduler in self.schedulers:
            scheduler.save_history = value

    def __call__(self, engine: Engine[Any, Any] | None, name: str | None = None) -> None:
        """Call each scheduler.

        Args:
            engine: whose state keeps the history.
            name: the name in the history, instead of ``names``.
        """
        for scheduler, own in zip(self.schedulers, self.names, strict=True):
            scheduler(engine, name or own)

    def get_param(self) -> list[Any]:
        """Compute the next value of each scheduler."""
        return [scheduler.get_param() for scheduler in self.schedulers]

    def state_dict(self) -> OrderedDict[str, Any]:
        """Give the states of the schedulers, with their names."""
        pairs = zip(self.names, self.schedulers, strict=True)
        return OrderedDict(schedulers=[(name, scheduler.state_dict()) for name, scheduler in pairs])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state_dict: what :meth:`state_dict` gave.

        Raises:
            TypeError: it is not a mapping.
            ValueError: it is of schedulers with other names, or does not fit; nothing has changed.
        """
        super().load_state_dict(state_dict)
        saved = state_dict["schedulers"]
        names = [name for name, _ in saved]
        if names != self.names:
            raise ValueError(f"state_dict must be of schedulers with the names {self.names}, got {names}")
        load_all(self.schedulers, [state for _, state in saved])

    @classmethod
    def simulate_values(cls, num_events: int, schedulers: Sequence[ParamScheduler], **kwargs: Any) -> list[list[Any]]:
        """List the values that a run would apply, and leave schedulers and optimizers as they are.

        Args:
            num_events: how many.
            schedulers: as for the class.
            kwargs: likewise.

        Returns:
            For each call its index and the value of each scheduler; several where it has one for each group.
        """
        _check_schedulers(schedulers)
        with unchanged(schedulers):
            scheduler = cls(schedulers, **kwargs)
            scheduler.save_history = False
            return rows_of(scheduler, num_events, lambda: [value for one in schedulers for value in one._columns()])


def load_all(schedulers: Sequence[Any], states: Sequence[Any]) -> None:
    """Load states into schedulers: all of them, or none.

    Raises:
        ValueError: one does not fit.
    """
    if len(schedulers) != len(states):
        raise ValueError(f"state_dict must be of {len(schedulers)} schedulers, got {len(states)}")
    before = [scheduler.state_dict() for scheduler in schedulers]
    try:
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)
    except BaseException:
        for scheduler, state in zip(schedulers, before, strict=True):
            scheduler.load_state_dict(state)
        raise


def _check_schedulers(schedulers: Any) -> None:
    check_sequence("schedulers", schedulers)
    if not schedulers:
        raise ValueError("schedulers must hold at least one, got none")
    for scheduler in schedulers:
        if not isinstance(scheduler, ParamScheduler):
            hint = "; wrap it in LRScheduler" if isinstance(scheduler, native.LRScheduler) else ""
            raise ValueError(
                f"schedulers must hold objects of the class ParamScheduler, got {described(scheduler)}{hint}"
            )


def _checked_names(names: Any, count: int) -> list[str]:
    if not isinstance(names, (list, tuple)):
        raise TypeError(f"names must be a list or a tuple, got {names!r} of type {type(names).__name__}")
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"names must hold strings, got {names!r}")
    if len(names) != count:
        raise ValueError(f"names must hold one for each of {count} schedulers, got {len(names)}: {names!r}")
    return list(names)
