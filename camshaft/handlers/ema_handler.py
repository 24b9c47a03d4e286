"""An exponential moving average of a model's weights, updated without a loop over them."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from camshaft.base import Serializable
from camshaft.engine.engine import Engine
from camshaft.engine.events import EventLike, Events
from camshaft.handlers.checkpoint.objects import unwrap
from camshaft.handlers.state_param_scheduler import StateParamScheduler
from camshaft.handlers.utils import check_engine, check_is_no_counter
from camshaft.types import is_integer

__all__ = ["EMAHandler", "EMAWarmUp"]

_BUFFERS = ("copy", "update", "ema_train")


class EMAWarmUp(StateParamScheduler):
    """Moves the momentum linearly from one value to another, and stays there.

    Args:
        momentum_warmup: the momentum of the first call, from 0 to 1.
        warmup_iters: calls until it is ``momentum``.
        momentum: where it ends.
        param_name: the attribute of ``engine.state``.
        save_history: keep the values in ``engine.state.param_history[param_name]``.
        create_new: whether the attribute is a new one.

    >>> EMAWarmUp.simulate_values(4, momentum_warmup=0.25, warmup_iters=3, momentum=0.75)
    [[0, 0.25], [1, 0.5], [2, 0.75], [3, 0.75]]
    """

    def __init__(
        self,
        momentum_warmup: float,
        warmup_iters: int,
        momentum: float,
        param_name: str = "ema_momentum",
        save_history: bool = False,
        create_new: bool = False,
    ) -> None:
        super().__init__(param_name, save_history, create_new)
        if not is_integer(warmup_iters) or warmup_iters < 1:
            raise ValueError(f"warmup_iters must be an integer of at least 1, got {warmup_iters!r}")
        self.momentum_warmup = _checked_momentum("momentum_warmup", momentum_warmup, with_ends=True)
        self.warmup_iters = warmup_iters
        self.momentum = _checked_momentum("momentum", momentum)

    def get_param(self) -> float:
        """Compute the momentum of call ``event_index``, which is 1 in the first."""
        part = (self.event_index - 1) / max(1, self.warmup_iters - 1)
        return self.momentum if part >= 1 else self.momentum_warmup + (self.momentum - self.momentum_warmup) * part


class EMAHandler(Serializable):
    """Keeps an average of a model that follows it slowly: ``ema = (1 - momentum) * ema + momentum * model``.

    Its state is that of ``ema_model``, and with a warm-up that of ``momentum_scheduler``. Each can also be saved alone.

    Args:
        model: the model that is trained, on its device already. From ``DistributedDataParallel`` it is taken out.
        momentum: the weight of the model in each update.
        momentum_warmup: the momentum of the first update, from 0 to 1, if it is to move from there to ``momentum``.
        warmup_iters: the number of updates after which it is ``momentum``.
        handle_buffers: ``"copy"`` takes the buffers of the model, ``"update"`` averages those that are not whole
            numbers, ``"ema_train"`` leaves them to ``ema_model``, which is in train mode then.

    Raises:
        ValueError: an argument is none of these, or out of range.

    Attributes:
        model: the model.
        ema_model: the average, in eval mode but for ``"ema_train"``.
        momentum: as given; the one in use is in ``engine.state``.
        momentum_scheduler: with a warm-up, what sets the momentum.
        handle_buffers: as given.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(model.weight, 1.0)
    >>> ema = EMAHandler(model, momentum=0.5)
    >>> trainer = Engine(lambda engine, batch: nn.init.constant_(model.weight, batch))
    >>> ema.attach(trainer)
    >>> state = trainer.run([3.0, 4.0])
    >>> ema.ema_model.weight.item(), state.ema_momentum
    (3.0, 0.5)
    """

    _state_dict_all_req_keys = ("ema_model", "momentum_scheduler")

    def __init__(
        self,
        model: nn.Module,
        momentum: float = 0.0002,
        momentum_warmup: float | None = None,
        warmup_iters: int | None = None,
        handle_buffers: str = "copy",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, got {model!r} of type {type(model).__name__}")
        if handle_buffers not in _BUFFERS:
            raise ValueError(f"handle_buffers must be one of {_BUFFERS}, got {handle_buffers!r}")
        if (momentum_warmup is None) != (warmup_iters is None):
            raise ValueError(
                "momentum_warmup and warmup_iters must be given together, got "
                f"momentum_warmup={momentum_warmup!r} and warmup_iters={warmup_iters!r}"
            )
        self.momentum = _checked_momentum("momentum", momentum)
        if momentum_warmup is not None and warmup_iters is not None:
            self.momentum_scheduler = EMAWarmUp(momentum_warmup, warmup_iters, momentum)
        self.handle_buffers = handle_buffers
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.ema_model = deepcopy(self.model).requires_grad_(False).train(handle_buffers == "ema_train")
        self._averaged: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._taken_over: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._pair_up()

    def attach(
        self,
        engine: Engine[Any, Any],
        name: str = "ema_momentum",
        warn_if_exists: bool = True,
        event: EventLike = Events.ITERATION_COMPLETED,
    ) -> None:
        """Update the average whenever an event fires, with the momentum in ``engine.state``.

        Args:
            engine: the trainer.
            name: the attribute of ``engine.state`` that holds the momentum. It is made if it is not there; any
                scheduler of the state may set it.
            warn_if_exists: whether to warn if it is there; then its value is used.
            event: when to update; ``Events.ITERATION_COMPLETED(every=n)`` where the optimizer steps so seldom.

        Raises:
            ValueError: the engine counts by the attribute ``name``.
        """
        check_engine("engine", engine)
        check_is_no_counter("name", name, engine.state)
        if not hasattr(engine.state, name):
            setattr(engine.state, name, self.momentum)
        elif warn_if_exists:
            warnings.warn(
                f"the state has an attribute {name!r} already, whose value is the momentum; if that is meant, give "
                "warn_if_exists=False",
                stacklevel=2,
            )
        scheduler: EMAWarmUp | None = getattr(self, "momentum_scheduler", None)
        if scheduler is not None:
            scheduler.param_name = name
            engine.add_event_handler(event, scheduler)
        engine.add_event_handler(Events.STARTED, self._pair_up)
        engine.add_event_handler(event, self._update, name)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the state of ``ema_model``, and that of ``momentum_scheduler`` or None."""
        scheduler: EMAWarmUp | None = getattr(self, "momentum_scheduler", None)
        return OrderedDict(
            ema_model=unwrap(self.ema_model).state_dict(),
            momentum_scheduler=None if scheduler is None else scheduler.state_dict(),
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: it is not a mapping.
            ValueError: a key is missing, or only one of the two handlers has a warm-up.
            RuntimeError: it is of another model.
        """
        super().load_state_dict(state_dict)
        scheduler: EMAWarmUp | None = getattr(self, "momentum_scheduler", None)
        warmup = state_dict["momentum_scheduler"]
        if (scheduler is None) != (warmup is None):
            raise ValueError(
                "state_dict must be that of an EMAHandler with the same warm-up, got "
                f"that of one {'without' if warmup is None else 'with'} a warm-up: pass the same momentum_warmup and "
                "warmup_iters, or load state_dict['ema_model'] into ema_model"
            )
        unwrap(self.ema_model).load_state_dict(state_dict["ema_model"])
        if scheduler is not None:
            scheduler.load_state_dict(warmup)

    def _update(self, engine: Engine[Any, Any], name: str) -> None:
        self.update(getattr(engine.state, name))

    @torch.no_grad()
    def update(self, momentum: float) -> None:
        """Move the average towards the model, all weights in one call.

        Args:
            momentum: how far, from 0 to 1.
        """
        averages, values = self._averaged
        if averages:
            torch._foreach_lerp_(averages, values, momentum)
        copies, values = self._taken_over
        if copies:
            torch._foreach_copy_(copies, values)

    def _pair_up(self) -> None:
        """Find the tensors of both models; again for each run, since they may have been replaced."""
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        copies: list[Tensor] = []
        values: list[Tensor] = []
        pairs = [(*pair, True) for pair in zip(self.ema_model.parameters(), self.model.parameters(), strict=True)]
        if self.handle_buffers != "ema_train":
            averages = self.handle_buffers == "update"
            buffers = zip(self.ema_model.buffers(), self.model.buffers(), strict=True)
            pairs += [(*pair, averages) for pair in buffers]
        for our, value, averages in pairs:
            averages = averages and _is_continuous(value)  # whole numbers have no average
            (ours if averages else copies).append(our)
            (theirs if averages else values).append(value)
        self._averaged, self._taken_over = (ours, theirs), (copies, values)


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _checked_momentum(name: str, value: Any, with_ends: bool = False) -> float:
    if not isinstance(value, Real) or not (0 < float(value) < 1 or (with_ends and value in (0, 1))):
        ends = "included" if with_ends else "excluded"
        raise ValueError(f"{name} must be a number between 0 and 1, both {ends}, got {value!r}")
    return float(value)
