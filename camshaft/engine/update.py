"""Updates of the weights: precision, scaling, clipping, the step of the optimizer, and accumulated gradients."""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from camshaft.arguments import check_type, described, integer
from camshaft.dtensors import (
    any_dtensor,
    discard_gradients,
    groups_of_gradients,
    groups_of_parts,
    is_dtensor,
    local,
    outermost_sharded,
    without_reduction,
)
from camshaft.engine.engine import Engine
from camshaft.engine.events import Events, OptimizerEvents, Order
from camshaft.engine.sources import length_of
from camshaft.text import counted
from camshaft.types import DeviceLike


def autocast(
    device: DeviceLike | None, model: Any, dtype: torch.dtype | None = None
) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that returns the autocast context of a device.

    Args:
        device: device of the batches; ``None`` for that of the model, which is looked up on first use.
        model: the model.
        dtype: the lower precision; by default that of torch for the device (float16 on CUDA, bfloat16 on CPU).

    >>> model = torch.nn.Linear(2, 2)
    >>> with autocast(None, model)():
    ...     model(torch.ones(1, 2)).dtype
    torch.bfloat16
    """

    @functools.cache
    def context() -> AbstractContextManager[Any]:
        kind = device_type_of(device, model)
        if not torch.amp.is_autocast_available(kind):
            raise ValueError(f"amp needs a device type that torch has autocast for, got {kind!r}")
        return torch.autocast(kind, dtype=dtype)

    if device is not None:
        context()
    return context


def device_type_of(device: DeviceLike | None, model: Any) -> str:
    """Return the type of a device, or of the device of a model's parameters.

    >>> device_type_of("cuda:1", None), device_type_of(None, torch.nn.Linear(1, 1))
    ('cuda', 'cpu')
    """
    if device is not None:
        return torch.device(device).type
    parameter = next(iter(model.parameters()), None) if hasattr(model, "parameters") else None
    return "cpu" if parameter is None else str(parameter.device.type)


class Update:
    """Computes gradients and steps the optimizer: precision, scaling, clipping, stepping.

    Optimizers of Horovod exchange gradients during ``backward``; ``synchronize`` waits for them.

    Parameters may be DTensors, on different meshes. Gradients are clipped by their norm over all ranks, and if a scaler
    skips a step, all ranks skip it. Each of these takes one collective per mesh dimension that shards parameters.

    Args:
        optimizer: the optimizer.
        clip_grad_norm: maximum norm of all gradients together.
        clip_grad_value: maximum absolute value of any element of a gradient.
        context: returns the context of the forward pass, such as autocast.
        scaler: scales the loss, against underflow in float16.
        step: called instead of ``optimizer.step``, unless there is a scaler, which calls that itself.
        backward: called instead of ``loss.backward``.

    Attributes:
        optimizer: as passed.
        context: as passed.
        is_plain: whether ``loss.backward()`` and ``optimizer.step()`` are all that is needed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        context: Callable[[], AbstractContextManager[Any]] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        step: Callable[[], Any] | None = None,
        backward: Callable[[Tensor], Any] | None = None,
    ) -> None:
        if not callable(getattr(optimizer, "zero_grad", None)) or not callable(getattr(optimizer, "step", None)):
            raise TypeError(f"optimizer must have zero_grad() and step(), got {described(optimizer)}")
        for name, limit in (("clip_grad_norm", clip_grad_norm), ("clip_grad_value", clip_grad_value)):
            if limit is not None and not isinstance(limit, Real):
                raise TypeError(f"{name} must be a number or None, got {limit!r}")
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} must be above 0 or None, got {limit!r}")
        self.optimizer = optimizer
        self.context = context
        self._scaler = scaler
        self._clip_grad_norm = clip_grad_norm
        self._clip_grad_value = clip_grad_value
        self._step = step
        self._backward = backward
        self.is_plain = (scaler, clip_grad_norm, clip_grad_value, step, backward) == (None,) * 5

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss."""
        if self._backward is not None:
            self._backward(loss)
        else:
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def apply(self, factor: float | Tensor | None = None) -> None:
        """Step the optimizer with the gradients, multiplied by ``factor``."""
        optimizer, scaler = self.optimizer, self._scaler
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        if factor is not None:
            for parameter in self.parameters():
                assert parameter.grad is not None, "parameters() yields those with a gradient"
                local(parameter.grad).mul_(factor)
        clips = self._clip_grad_norm is not None or self._clip_grad_value is not None
        parts = _Parts(optimizer) if (clips or scaler is not None) and any_dtensor(_all_parameters(optimizer)) else None
        target: Any = optimizer if parts is None else parts
        if scaler is not None and (clips or parts is not None):
            scaler.unscale_(target)
            if parts is not None and scaler.is_enabled():  # torch would reduce over the mesh of the first gradient only
                parts.reduce_found_inf(scaler._found_inf_per_device(target))
        if clips:
            parameters = list(self.parameters()) if parts is None else parts.tensors
            if self._clip_grad_norm is not None:
                if parts is None:
                    nn.utils.clip_grad_norm_(parameters, self._clip_grad_norm)
                else:
                    nn.utils.clip_grads_with_norm_(parameters, self._clip_grad_norm, parts.norm())
            if self._clip_grad_value is not None:
                nn.utils.clip_grad_value_(parameters, self._clip_grad_value)
        with getattr(optimizer, "skip_synchronize", nullcontext)():
            if scaler is not None:
                scaler.step(target)
                scaler.update()
            elif self._step is not None:
                self._step()
            else:
                optimizer.step()  # looked up here, as schedulers replace the method

    def parameters(self) -> Iterable[Tensor]:
        """Yield the parameters that have a gradient."""
        for group in self.optimizer.param_groups:
            yield from (parameter for parameter in group["params"] if parameter.grad is not None)


class _Parts:
    """The local parts of DTensor gradients, which share their memory, and gradients that are plain tensors.

    To a scaler, this looks like an optimizer with these gradients; its ``step`` is that of the original optimizer.

    Attributes:
        tensors: one tensor for each gradient, which has the gradient as its ``grad``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.step = optimizer.step
        # Parameters without a gradient count too: all ranks make the same collectives, whatever gradients they have.
        self._by_groups: dict[tuple[Any, ...], list[Tensor]] = {}
        parameters = _all_parameters(optimizer)
        for parameter in parameters:
            same_groups = self._by_groups.setdefault(groups_of_parts(parameter), [])
            gradient: Any = parameter.grad
            if is_dtensor(gradient) and gradient.placements != parameter.placements:  # a sum over tensor-parallel ranks
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
            if gradient is not None:
                part = local(gradient)
                same_groups.append(part.detach())
                same_groups[-1].grad = part
        self.tensors = [tensor for tensors in self._by_groups.values() for tensor in tensors]
        self.param_groups = [{"params": self.tensors}]
        self._groups = list(dict.fromkeys(group for groups in self._by_groups for group in groups))
        # that of the mesh, where its groups work: CPUOffloadPolicy keeps the parts in host memory
        self._device = torch.device(next(filter(is_dtensor, parameters)).device_mesh.device_type)
        self._dtype = torch.float64 if any(one.dtype is torch.float64 for one in parameters) else torch.float32

    def norm(self) -> Tensor:
        """Return the norm over all gradients of all ranks, without synchronizing with the device."""
        squares = [self._sum_of_squares(tensors) for tensors in self._by_groups.values()]
        for group in self._groups:
            places = [place for place, groups in enumerate(self._by_groups) if group in groups]
            together = torch.stack([squares[place] for place in places])
            torch.distributed.all_reduce(together, group=group)
            for place, total in zip(places, together, strict=True):
                squares[place] = total
        return torch.stack(squares).sum().sqrt()

    def _sum_of_squares(self, tensors: list[Tensor]) -> Tensor:
        if not tensors:
            return torch.zeros((), dtype=self._dtype, device=self._device)
        norms = torch._foreach_norm(tensors, 2.0, self._dtype)
        return torch.stack([norm.to(self._device) for norm in norms]).square().sum()

    def reduce_found_inf(self, found: Mapping[Any, Tensor]) -> None:
        """Make a scaler see the infinite and NaN gradients that any rank has found."""
        for tensor in found.values():
            reduced = tensor.to(self._device)
            for group in self._groups:
                torch.distributed.all_reduce(reduced, torch.distributed.ReduceOp.MAX, group)
            tensor.copy_(reduced)


def _all_parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_STEP_COMPLETED = OptimizerEvents.STEP_COMPLETED


def complete_step(engine: Any) -> None:
    """Fire the event of a step of the optimizer. A training step may also be called without an engine."""
    if isinstance(engine, Engine):
        engine.fire_event(_STEP_COMPLETED)


# --- accumulated gradients --------------------------------------------------------------------------------------------


class Accumulation:
    """Collects the gradients of a window of micro-batches, and steps at its end or at the end of the epoch.

    Windows start with the epoch, so the last one of an epoch may be shorter; it is stepped too, with the mean over its
    micro-batches. If the epoch ends earlier, the gradients of an open window are dropped. Ranks exchange gradients only
    in the last micro-batch of a window, if the model supports that (``no_sync``, or modules of ``fully_shard``, which
    then keep full gradients until the end of the window) and the length of the epoch is known.

    Args:
        model: the model, possibly wrapped for several ranks.
        update: steps the optimizer.
        size: micro-batches in a window.
        weigh: ``weigh(x, y)`` returns the weight of a micro-batch, a number or a tensor on its device: the number of
            samples or tokens that the loss is a mean over. The gradient of the window is then the weighted mean over
            its micro-batches on all ranks. By default all weights are equal.
    """

    def __init__(
        self, model: Any, update: Update, size: int, weigh: Callable[[Any, Any], float | Tensor] | None = None
    ) -> None:
        check_type("gradient_accumulation_steps", size, int, "an int")
        if size <= 0:
            raise ValueError(f"gradient_accumulation_steps must be strictly positive, got {size}")
        self._update = update
        self._model = getattr(model, "_orig_mod", model)  # that torch.compile wrapped
        self._size = size
        self._weigh = weigh
        self._pending = 0  # micro-batches in the gradients
        self._next: int | None = None  # the iteration that continues the window
        self._groups: list[Any] | None = None  # found in the first step
        self._latest: float | Tensor = 0.0
        self._weight: float | Tensor = 0.0
        self._shards = list(outermost_sharded(self._model)) if isinstance(self._model, nn.Module) else []
        self._is_whole = self._has_length = True
        self._engines: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, engine: Any) -> bool:
        """Reset the gradients if a window starts; return whether the micro-batch is the last of its window."""
        if engine not in self._engines:
            self._engines.add(engine)
            engine.add_event_handler(
                Events.EPOCH_COMPLETED | Events.TERMINATE_SINGLE_EPOCH, self._end_early, order=Order.STEP
            )
            engine.add_event_handler(Events.STARTED, self._reset, order=Order.STEP)
        iteration, state = _iteration(engine), engine.state
        place = (iteration - 1) % self._size
        if place == 0 or iteration != self._next:  # the latter after an error or a jump of the counter
            self._update.optimizer.zero_grad()
            if iteration != self._next or self._pending:
                discard_gradients(self._shards)
            self._pending, self._weight = 0, 0.0
        self._next, self._is_whole, self._has_length = None, True, state.epoch_length is not None
        ends_epoch = state.epoch_length is not None and iteration >= state.epoch_length
        ends_run = state.max_iters is not None and state.iteration >= state.max_iters
        return place == self._size - 1 or ends_epoch or ends_run

    def synchronization(self, engine: Any, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context for a micro-batch, in which ranks exchange gradients only if it is the last."""
        exchanges = is_last or engine.state.epoch_length is None
        # torch does not support no_sync with a static graph; exchanged or not, the gradients of the window are the same
        can_wait = self._shards or (hasattr(self._model, "no_sync") and not getattr(self._model, "static_graph", False))
        if exchanges or not can_wait:
            return nullcontext()
        return without_reduction(self._shards) if self._shards else self._model.no_sync()

    def scaled(self, engine: Any, x: Any, y: Any, loss: Tensor) -> Tensor:
        """Scale the loss of a micro-batch to its share of the window."""
        self._is_whole = False  # if backward fails, some gradients lack this micro-batch
        if self._weigh is not None:
            self._latest = self._weigh(x, y)
            return loss * self._latest
        return scaled_to_all_ranks(engine, loss / self._size if self._size > 1 else loss)

    def end(self, engine: Any, is_last: bool) -> None:
        """Count a micro-batch whose gradients were added, and step if it is the last of its window."""
        self._next, self._is_whole = _iteration(engine) + 1, True
        self._pending += 1
        self._weight = self._weight + self._latest
        if is_last:
            self._step(engine)
        else:
            engine.is_accumulating = True

    def _step(self, engine: Any) -> None:
        """Step with the gradients; correct the mean if the window is shorter than the others."""
        if self._weigh is not None:
            self._update.apply(self._inverse_weight())
        else:
            self._update.apply(self._size / self._pending if self._pending < self._size else None)
        self._pending = 0
        engine.is_accumulating = False
        complete_step(engine)

    # --- handlers ------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Start a new window in a new or resumed run. A run that was paused fires no ``STARTED`` and continues."""
        self._next, self._pending = None, 0

    def _end_early(self, engine: Any) -> None:
        """Step if the length of the epoch was unknown; otherwise, ranks may not have exchanged the gradients."""
        if not self._pending or not self._is_whole:
            return
        if not self._has_length:
            self._step(engine)
            return
        self._is_whole = False
        warnings.warn(
            f"the epoch ended inside a window of {counted(self._size, 'batch')}, before its last iteration: the "
            f"gradients of {counted(self._pending, 'batch')} are dropped",
            stacklevel=2,
        )

    # --- ranks ---------------------------------------------------------------------------------------------

    def _inverse_weight(self) -> float | Tensor:
        """Return one over the weight of the window, averaged over ranks as the gradients are."""
        groups = self._groups_of_gradients()
        reduce = getattr(self._update.optimizer, "reduce_as_gradients", None)
        if not groups and reduce is None:
            return 1 / self._weight
        parameter = next(iter(self._update.parameters()))
        mesh = getattr(parameter, "device_mesh", None)  # CPUOffloadPolicy keeps parameters in host memory
        device = parameter.device if mesh is None else mesh.device_type
        total = torch.as_tensor(self._weight, dtype=torch.float64).to(device, non_blocking=True).reshape(())
        if not groups:
            assert reduce is not None, "returned above"
            mean: Tensor = reduce(total)
        else:
            for group in groups:
                torch.distributed.all_reduce(total, group=group)
            mean = total / math.prod(group.size() for group in groups)  # gradients were averaged, not summed
        return 1 / mean.to(parameter.device)

    def _groups_of_gradients(self) -> list[Any]:
        """Return the process groups that gradients are averaged over, one after the other."""
        if self._groups is None:
            modules = self._model.modules() if isinstance(self._model, torch.nn.Module) else [self._model]
            wrappers = (one for one in modules if hasattr(one, "no_sync"))  # synchronized batch norm has a group too
            wrapper = next((one for one in wrappers if getattr(one, "process_group", None) is not None), None)
            if wrapper is not None:  # DistributedDataParallel, or FullyShardedDataParallel, perhaps also over nodes
                groups = [wrapper.process_group, getattr(wrapper, "_inter_node_pg", None)]
                self._groups = [group for group in groups if group is not None]
            else:
                self._groups = groups_of_gradients(_all_parameters(self._update.optimizer))
        return self._groups


def count_optimizer_steps(
    data: Any = None,
    max_epochs: int | None = None,
    max_iters: int | None = None,
    epoch_length: int | None = None,
    *,
    gradient_accumulation_steps: int = 1,
) -> int:
    """Return how often the optimizer of a supervised trainer steps in a run, such as for the length of a schedule.

    Args:
        data, max_epochs, max_iters, epoch_length: those of ``run``. Only the length of ``data`` is read.
        gradient_accumulation_steps: that of the trainer. A shorter window at the end of an epoch is a step, too.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is below 1, there are two targets, or the length of an epoch is not known.

    >>> count_optimizer_steps(range(5), max_epochs=3, gradient_accumulation_steps=2)
    9
    """
    if max_epochs is not None and max_iters is not None:
        raise ValueError(f"pass max_epochs or max_iters, got max_epochs={max_epochs!r} and max_iters={max_iters!r}")
    size = integer("gradient_accumulation_steps", gradient_accumulation_steps, least=1)
    length = length_of(data) if epoch_length is None else integer("epoch_length", epoch_length, least=1)
    if not length:
        raise ValueError(f"data must have batches and a length, or epoch_length must be given, got {described(data)}")
    if max_iters is None:
        return integer("max_epochs", 1 if max_epochs is None else max_epochs, least=1) * math.ceil(length / size)
    epochs, rest = divmod(integer("max_iters", max_iters, least=1), length)
    return epochs * math.ceil(length / size) + math.ceil(rest / size)


def scaled_to_all_ranks(engine: Any, loss: Tensor) -> Tensor:
    """Scale the mean over this rank's batch so that its average over ranks is the mean over the batches of all."""
    share = getattr(engine, "batch_share", 1.0)
    return loss if share == 1.0 else loss * share


def _iteration(engine: Any) -> int:
    """Return the iteration of the epoch, or that of the state if a step is called outside of a run."""
    number: int = engine.iteration_in_epoch or engine.state.iteration
    return number
