"""The learning-rate schedulers of torch as handlers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.optim import lr_scheduler as native

from camshaft.engine.engine import Engine
from camshaft.errors import described
from camshaft.handlers.param_scheduler.param import ParamScheduler, write
from camshaft.handlers.param_scheduler.simulation import rows_of, unchanged, unwarned


class LRScheduler(ParamScheduler):
    """Lets a scheduler of torch set the learning rates.

    Attach it to ``ITERATION_STARTED``, or call it in any other way *before* the optimizer's step: the first step has
    the first value, and the steps see the same rates as if ``lr_scheduler.step()`` came at the end of each iteration.
    Until the next call the optimizer keeps the rate that its last step had. In between nobody else should call
    ``lr_scheduler.step()``.

    Args:
        lr_scheduler: any of ``torch.optim.lr_scheduler`` but ``ReduceLROnPlateau``.
        save_history: keep the rates, a list with one for each group, in ``engine.state.param_history["lr"]``.
        use_legacy: step in every call, the first included; for ``ITERATION_COMPLETED``.

    Raises:
        TypeError: it is no scheduler of torch, or a ``ReduceLROnPlateau``.

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
                "lr_scheduler must not be a ReduceLROnPlateau, whose steps need a metric: use "
                "ReduceLROnPlateauScheduler(optimizer, metric_name, ...)"
            )
        if not isinstance(lr_scheduler, native.LRScheduler):
            raise TypeError(f"lr_scheduler must be one of torch.optim.lr_scheduler, got {described(lr_scheduler)}")
        super().__init__(lr_scheduler.optimizer, "lr", save_history)
        self.lr_scheduler = lr_scheduler
        self._steps_from = 0 if use_legacy else 1
        self._has_stepped = False
        self._has_own_step = type(lr_scheduler).step is not native.LRScheduler.step or "step" in vars(lr_scheduler)
        if use_legacy:
            warnings.warn(
                "a scheduler with use_legacy=True must be attached to Events.ITERATION_COMPLETED: it steps in its "
                "first call too, so on ITERATION_STARTED the first value would be lost",
                stacklevel=2,
            )

    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        # Many schedulers compute the next rates from those in the groups, where a warm-up may have written others.
        scheduler, groups = self.lr_scheduler, self.optimizer.param_groups
        rates = scheduler.get_last_lr()
        if rates is not None:
            for group, rate in zip(groups, rates):  # noqa: B905  # the step checks the lengths
                if group["lr"] is not rate:
                    write(group, "lr", rate)
        if self.event_index < self._steps_from:
            return
        if self._has_own_step:
            self._step_as_it_defines()
            return
        # what step() of torch does, without its warnings and its other ways to be called
        scheduler._step_count += 1
        scheduler._get_lr_called_within_step = True
        try:
            scheduler.last_epoch += 1
            rates = scheduler._last_lr = scheduler.get_lr()
        finally:
            scheduler._get_lr_called_within_step = False
        if len(rates) != len(groups):
            raise ValueError(f"lr_scheduler must be made for {len(groups)} parameter groups, got {len(rates)} rates")
        for group, rate in zip(groups, rates):  # noqa: B905  # checked
            if type(rate) is float and type(group["lr"]) is float:
                group["lr"] = rate
            else:
                self._write(list(rates))
                last = [group["lr"] for group in groups]  # of tensors copies, as others may change the rates in place
                scheduler._last_lr = [one.clone() if isinstance(one, Tensor) else one for one in last]
                break

    def _step_as_it_defines(self) -> None:
        with nullcontext() if self._has_stepped else unwarned():
            self.lr_scheduler.step()
        self._has_stepped = True

    def get_param(self) -> Any:
        """Return the current rate, or a list of them if there are several groups."""
        rates = self.lr_scheduler.get_last_lr()
        if rates is None:
            rates = self._written()
        return rates[0] if len(rates) == 1 else rates

    def _from_ignite(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        saved, calls = state_dict["lr_scheduler"], state_dict["event_index"]
        steps = saved["last_epoch"] if isinstance(saved, Mapping) else calls  # what is wrapped counts twice
        saved = wrapped_state(saved)
        if calls:
            # There the next call, not the previous one, makes the step to `last_epoch`, with a `_step_count` of 1. The
            # rates of the previous one are in the optimizer alone, which may be loaded later: None stands for them.
            saved = {**saved, "last_epoch": steps - 1, "_step_count": 0, "_last_lr": None}
        elif self._steps_from == 0:
            saved = {**saved, "last_epoch": 0}
        return {**state_dict, "lr_scheduler": saved}

    def _restore(self, state_dict: Mapping[str, Any]) -> None:
        super()._restore(state_dict)
        self._has_stepped = False

    @classmethod
    def simulate_values(  # type: ignore[override]  # the scheduler is made already
        cls, num_events: int, lr_scheduler: Any, **kwargs: Any
    ) -> list[list[Any]]:
        """List the rates that a run would apply, and leave scheduler and optimizer as they are.

        Args:
            num_events: how many.
            lr_scheduler: as for the class.
            kwargs: likewise.

        Returns:
            For each call its index and the rate of each group.
        """
        scheduler = cls(lr_scheduler, **{**kwargs, "save_history": False})
        with unchanged([scheduler]):
            return rows_of(scheduler, num_events, scheduler._columns)


def wrapped_state(saved: Any) -> Mapping[str, Any]:
    """Return the state of a scheduler of torch in one of PyTorch-Ignite, which has an object for warm restarts."""
    return saved if isinstance(saved, Mapping) else saved._lr_scheduler.state_dict()
