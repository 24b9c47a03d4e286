"""Exponential moving average (EMA) of a model's weights, updated in one operation."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from camshaft.arguments import check_choice, check_type, integer, number
from camshaft.base import Serializable
from camshaft.dtensors import is_dtensor, local, outermost_sharded, reshard
from camshaft.engine.engine import Engine, check_engine
from camshaft.engine.events import EventLike, Events
from camshaft.engine.state import check_is_no_counter
from camshaft.handlers.checkpoint.state import load_state, state_of, unwrap
from camshaft.handlers.state_param_scheduler import StateParamScheduler

__all__ = ["EMAHandler", "EMAWarmUp"]


class EMAWarmUp(StateParamScheduler):
    """Move the momentum linearly from one value to another, and keep it there.

    Args:
        momentum_warmup: momentum of the first call, from 0 to 1.
        warmup_iters: number of calls until it is ``momentum``.
        momentum: final momentum.
        param_name: attribute of ``engine.state``.
        save_history: whether to keep the values in ``engine.state.param_history[param_name]``.
        create_new: whether to create the attribute.

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
        self.warmup_iters = integer("warmup_iters", warmup_iters, least=1)
        self.momentum_warmup = number("momentum_warmup", momentum_warmup, least=0, most=1)
        self.momentum = number("momentum", momentum, above=0, below=1)

    def get_param(self) -> float:
        """Return the momentum for ``event_index``, which is 1 in the first call."""
        share = (self.event_index - 1) / max(1, self.warmup_iters - 1)
        return self.momentum if share >= 1 else self.momentum_warmup + (self.momentum - self.momentum_warmup) * share


@dataclass
class _Fine:
    """The average of a weight that is too coarse to hold it."""

    weight: Tensor
    average: Tensor  # in float32
    version: int = -1  # of the weight after the last update

    def follow(self) -> None:
        """Take over what others have written into the weight."""
        if self.weight._version != self.version:
            average, weight = local(self.average), local(self.weight)
            average.copy_(torch.where(average.to(weight.dtype) == weight, average, weight))
            self.version = self.weight._version


class EMAHandler(Serializable):
    """Keep a moving average of a model: ``ema = (1 - momentum) * ema + momentum * model``.

    With a small momentum, the average would stay close to the initial weights for long. So the momentum warms up: in
    update n it is at least ``9 / (10 + n)``, as in TensorFlow's ``ExponentialMovingAverage`` with ``num_updates``. An
    average that was loaded, and a momentum that a scheduler or the user sets in ``engine.state``, are used as they are.

    Its state is that of ``ema_model``, the number of updates, and with a linear warm-up that of ``momentum_scheduler``.
    The model and the scheduler can also be saved separately. Weights in bfloat16 or float16 are too coarse for small
    steps: they are averaged in float32, and the state holds these averages, while ``ema_model`` has the dtypes of
    ``model``.

    Args:
        model: the model that is trained, already on its device, and already sharded if it will be. The average is
            sharded in the same way. ``DistributedDataParallel`` is unwrapped.
        momentum: weight of the model in each update.
        momentum_warmup: momentum of the first update, from 0 to 1, if it should move linearly from there to
            ``momentum``.
        warmup_iters: number of updates after which it is ``momentum``; 0, without ``momentum_warmup``, for no warm-up.
        handle_buffers: ``"copy"`` copies the buffers of the model; ``"update"`` averages those that are not integers,
            and copies the others; ``"ema_train"`` leaves them to ``ema_model``, which is then in train mode.
        ema_model: a second model to hold the average, built and sharded like ``model``; it receives the weights of
            ``model``. By default a copy of ``model``, which is not possible after ``fully_shard``.

    Raises:
        TypeError: a momentum is not a number, or ``ema_model`` is not a module.
        ValueError: an argument is out of range; ``model`` is not a module, or was sharded by ``fully_shard`` and
            there is no ``ema_model``; or the parameters of ``ema_model`` do not match.

    Attributes:
        model: the model.
        ema_model: the average, in eval mode except with ``"ema_train"``.
        momentum: as given; that of the last update is in ``engine.state``.
        momentum_scheduler: with a linear warm-up, the handler that sets the momentum.
        handle_buffers: as given.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(model.weight, 1.0)
    >>> ema = EMAHandler(model, momentum=0.5, warmup_iters=0)
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
        *,
        ema_model: nn.Module | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, got {model!r} of type {type(model).__name__}")
        check_choice("handle_buffers", handle_buffers, ("copy", "update", "ema_train"))
        self._updates = 0 if momentum_warmup is None and warmup_iters is None else None  # None without a warm-up
        self._set_last: float | None = None  # the momentum in the state, if it is ours
        if momentum_warmup is None and warmup_iters == 0:
            warmup_iters = None
        if (momentum_warmup is None) != (warmup_iters is None):
            both = (momentum_warmup, warmup_iters)
            raise ValueError(f"momentum_warmup and warmup_iters must be given together, got {both}")
        self.momentum = number("momentum", momentum, above=0, below=1)
        self._scheduler: EMAWarmUp | None = None
        if momentum_warmup is not None and warmup_iters is not None:
            self.momentum_scheduler = self._scheduler = EMAWarmUp(momentum_warmup, warmup_iters, momentum)
        self.handle_buffers = handle_buffers
        self.model = _unwrapped(model)
        if ema_model is not None:
            check_type("ema_model", ema_model, nn.Module, "a torch.nn.Module")
            self.ema_model = _unwrapped(ema_model)
        elif any(outermost_sharded(self.model)):
            raise ValueError(
                "model was sharded by fully_shard, which does not allow copies: pass ema_model, another model that was "
                "built and sharded in the same way"
            )
        else:
            self.ema_model = deepcopy(self.model)
        self.ema_model.requires_grad_(False).train(handle_buffers == "ema_train")
        self._fine: dict[str, _Fine] = {}
        self._pair_tensors()
        if ema_model is not None:
            self.ema_model.load_state_dict(self.model.state_dict())
        self._versions = self._written()

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
            name: attribute of ``engine.state`` that holds the momentum, which is created if missing. Any scheduler of
                the state may set it.
            warn_if_exists: whether to warn if it exists, in which case its value is used.
            event: when to update; with accumulated gradients, ``OptimizerEvents.STEP_COMPLETED``.

        Raises:
            ValueError: ``name`` is a counter of the engine.
        """
        check_engine("engine", engine)
        check_is_no_counter("name", name, engine.state)
        if not hasattr(engine.state, name):
            setattr(engine.state, name, self.momentum)
            self._set_last = self.momentum
        elif warn_if_exists:
            text = f"the momentum is the existing state.{name}; pass warn_if_exists=False if this is intended"
            warnings.warn(text, stacklevel=2)
        if self._scheduler is not None:
            self._scheduler.param_name = name
            engine.add_event_handler(event, self._scheduler)
        engine.add_event_handler(event, self._update, name)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the state of ``ema_model``, that of ``momentum_scheduler`` or None, and the number of updates.

        The latter is None without a warm-up, and if others have set the momentum or loaded an average.
        """
        self._follow()
        average = unwrap(self.ema_model)
        state = state_of(average)
        names = dict(zip(average.state_dict(), state, strict=True))  # in the state, without wrappers
        state.update({names[name]: one.average for name, one in self._fine.items() if name in names})
        return OrderedDict(
            ema_model=state,
            momentum_scheduler=None if self._scheduler is None else self._scheduler.state_dict(),
            updates=self._updates,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: it is not a mapping.
            ValueError: a key is missing, or only one of the two handlers has a warm-up.
            RuntimeError: the state is that of another model.
        """
        super().load_state_dict(state_dict)
        warmup = state_dict["momentum_scheduler"]
        if (self._scheduler is None) != (warmup is None):
            kind = "without" if self._scheduler is None else "with"
            raise ValueError(f"state_dict must be that of an EMAHandler {kind} a warm-up; or load only its 'ema_model'")
        average, loaded = unwrap(self.ema_model), dict[str, Any]()
        # with the names and the sharding of ema_model, but not yet rounded to its dtypes
        hook = average.register_load_state_dict_pre_hook(lambda module, state, *rest: loaded.update(state))
        try:
            load_state(average, state_dict["ema_model"], {})
        finally:
            hook.remove()
        self._follow()
        for name, one in self._fine.items():
            if name in loaded:
                one.average.copy_(loaded[name])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(warmup)
        if self._updates is not None:
            self._updates = state_dict.get("updates")  # which older states lack
            self._versions, self._set_last = self._written(), self.momentum

    def _update(self, engine: Engine[Any, Any], name: str) -> None:
        if self._updates is not None:
            self._warm_up(engine, name, self._updates)
        self.update(getattr(engine.state, name))

    def _warm_up(self, engine: Engine[Any, Any], name: str, updates: int) -> None:
        """Set the momentum of the next update, unless others have set it or loaded an average."""
        was_loaded = updates == 0 and self._versions != self._written()
        is_ours = getattr(engine.state, name) in (self._set_last, self._momentum_of(updates))
        if was_loaded or not is_ours:
            self._updates = None
            return
        self._updates = updates + 1
        self._set_last = self._momentum_of(self._updates)
        setattr(engine.state, name, self._set_last)

    def _momentum_of(self, update: int) -> float:
        return max(self.momentum, 9 / (10 + update))

    def _written(self) -> list[int]:
        """Return how often the weights of the average were written."""
        reshard(self.ema_model)
        return [one._version for one in self.ema_model.parameters()]

    @torch.no_grad()
    def update(self, momentum: float) -> None:
        """Move the average towards the model, all weights in one operation.

        Args:
            momentum: how far, from 0 to 1.
        """
        self._follow()
        averages, values = map(self._local, self._mixed)
        if averages:
            converted = [torch.empty_like(one) for one in averages]
            torch._foreach_copy_(converted, values)
            torch._foreach_lerp_(averages, converted, momentum)
        averages, values = map(self._local, self._averaged)
        if averages:  # as torch.optim.swa_utils.get_ema_multi_avg_fn does, where the momentum is fixed
            torch._foreach_lerp_(averages, values, momentum)
        copies, values = map(self._local, self._copied)
        if copies:
            torch._foreach_copy_(copies, values)
        for one in self._fine.values():
            one.version = one.weight._version

    def _local(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the local parts of tensors, which are looked up each time because ``fully_shard`` may move them."""
        return [local(tensor) for tensor in tensors] if self._is_sharded else tensors

    def _follow(self) -> None:
        """Find tensors that were replaced since the last update, and values that others have written."""
        if not all(table.get(name) is member for table, name, member in self._members):
            self._pair_tensors()
        elif self._is_sharded:
            reshard(self.ema_model)  # the full weights of an evaluation are outdated now
        for one in self._fine.values():
            one.follow()

    def _pair_tensors(self) -> None:
        """Find the tensors of both models.

        Raises:
            ValueError: the models have different parameters.
        """
        if _layout(self.ema_model) != _layout(self.model):
            raise ValueError(
                "ema_model must have the parameters of model, sharded in the same way; if the model was changed, "
                "create a new EMAHandler"
            )
        average = unwrap(self.ema_model)  # which has the names of the state
        parameters = zip(average.named_parameters(), self.model.parameters(), strict=True)
        tensors: list[tuple[str, Tensor, Tensor, bool]]
        tensors = [(name, ours, theirs, True) for (name, ours), theirs in parameters]
        self._is_sharded = any(is_dtensor(parameter) for parameter in self.model.parameters())
        if self.handle_buffers != "ema_train":
            buffers = zip(average.named_buffers(), self.model.buffers(), strict=True)
            tensors += [(name, ours, theirs, self.handle_buffers == "update") for (name, ours), theirs in buffers]
        former, self._fine = self._fine, {}
        averaged: list[tuple[Tensor, Tensor]] = []
        mixed: list[tuple[Tensor, Tensor]] = []
        copied: list[tuple[Tensor, Tensor]] = []
        for name, ours, theirs, is_averaged in tensors:
            if not is_averaged or not (theirs.is_floating_point() or theirs.is_complex()):
                copied.append((ours, theirs))
                continue
            target = ours
            if ours.is_floating_point() and ours.itemsize < torch.float32.itemsize:
                target = (former[name].average if name in former else ours.detach()).to(ours.device, torch.float32)
                self._fine[name] = _Fine(ours, target)
                copied.append((ours, target))
            (averaged if target.dtype == theirs.dtype else mixed).append((target, theirs))
        self._averaged, self._mixed, self._copied = map(_transposed, (averaged, mixed, copied))
        self._members = [*_members(self.model), *_members(self.ema_model)]


def _unwrapped(model: nn.Module) -> nn.Module:
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def _transposed(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def _members(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the modules and tensors of a model, and where each is found."""
    for module in model.modules():
        for table in (module._modules, module._parameters, module._buffers):
            for name, member in table.items():
                yield table, name, member


def _layout(model: nn.Module) -> list[Any]:
    """Return the name and shape of each parameter, and how it is sharded."""
    reshard(model)
    named = model.named_parameters()
    return [
        (name, one.shape, getattr(one, "device_mesh", None), getattr(one, "placements", None)) for name, one in named
    ]
