"""Gradient accumulation: the gradients of several micro-batches in one step of the optimizer."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camshaft.engine.events import Events, Order

if TYPE_CHECKING:
    from camshaft.engine.step import Update


class Accumulation:
    """Collects the gradients of a window of micro-batches, and steps at its end or at the end of the epoch.

    Windows start with the epoch, so the last one of an epoch may be shorter; it is stepped too, with the mean over its
    micro-batches. As gradients are not saved, a state that is saved inside of a window resumes from its start. Ranks
    exchange gradients only in the last micro-batch of a window, if the model supports that (``no_sync``) and the length
    of the epoch is known.

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
        if not isinstance(size, int):
            raise TypeError(f"gradient_accumulation_steps must be an int, got {size!r}")
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
        self._is_synchronized = self._is_whole = True
        self._engines: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, engine: Any) -> bool:
        """Reset the gradients if a window starts; return whether the micro-batch is the last of its window."""
        if engine not in self._engines:
            self._engines.add(engine)
            engine.add_event_handler(
                Events.EPOCH_COMPLETED | Events.TERMINATE_SINGLE_EPOCH, self._flush, order=Order.STEP
            )
            engine.add_event_handler(Events.STARTED, self._reset, order=Order.STEP)
            engine.add_event_handler(Events.TERMINATE, self._flush_if_reached, order=Order.STEP)
        iteration, state = _iteration(engine), engine.state
        place = (iteration - 1) % self._size
        if place == 0 or iteration != self._next:  # the latter after an error or a jump of the counter
            self._update.optimizer.zero_grad()
            self._pending, self._weight, self._is_synchronized = 0, 0.0, True
        self._next, self._is_whole = None, True
        ends_epoch = state.epoch_length is not None and iteration >= state.epoch_length
        ends_run = state.max_iters is not None and state.iteration >= state.max_iters
        return place == self._size - 1 or ends_epoch or ends_run

    def synchronization(self, engine: Any, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context for a micro-batch, in which ranks exchange gradients only if it is the last."""
        if is_last or engine.state.epoch_length is None or not hasattr(self._model, "no_sync"):
            self._is_synchronized = True
            return nullcontext()
        self._is_synchronized = False
        context: AbstractContextManager[Any] = self._model.no_sync()
        return context

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
        elif self._pending == 1:
            engine.hold_position()

    def _step(self, engine: Any) -> None:
        """Step with the gradients; correct the mean if the window is shorter than the others."""
        if self._is_synchronized or self._average_over_ranks():
            if self._weigh is not None:
                self._update.apply(self._inverse_weight())
            else:
                self._update.apply(self._size / self._pending if self._pending < self._size else None)
        self._pending = 0
        engine.release_position()

    # --- handlers for ends that cannot be foreseen ---------------------------------------------------------

    def _reset(self) -> None:
        """Start a new window in a new or resumed run. A run that was paused fires no ``STARTED`` and continues."""
        self._next, self._pending = None, 0

    def _flush(self, engine: Any) -> None:
        if self._pending and self._is_whole:
            self._step(engine)

    def _flush_if_reached(self, engine: Any) -> None:
        if engine.state.max_iters is not None and engine.state.iteration >= engine.state.max_iters:
            self._flush(engine)  # otherwise the run was terminated, perhaps because these gradients are bad

    # --- ranks ---------------------------------------------------------------------------------------------

    def _inverse_weight(self) -> float | Tensor:
        """Return one over the weight of the window, averaged over ranks as the gradients are."""
        groups = self._groups_of_gradients()
        reduce = getattr(self._update.optimizer, "reduce_as_gradients", None)
        if not groups and reduce is None:
            return 1 / self._weight
        parameter = next(iter(self._update.parameters()))
        total = torch.as_tensor(self._weight, dtype=torch.float64).to(parameter.device, non_blocking=True).reshape(())
        if not groups:
            assert reduce is not None, "returned above"
            mean: Tensor = reduce(total)
        else:
            for group in groups:
                torch.distributed.all_reduce(total, group=group)
            mean = total / math.prod(group.size() for group in groups)  # gradients were averaged, not summed
        return 1 / mean

    def _groups_of_gradients(self) -> list[Any]:
        """Return the process groups that gradients are averaged over, one after the other.

        ``fully_shard`` is recognized by the class of the parameters: they are distributed tensors on a mesh. Ranks of a
        mesh that do not divide the data, as in tensor parallelism, have the same batches and the same weights, so the
        mean over the whole mesh is the mean over those that do.
        """
        if self._groups is None:
            modules = self._model.modules() if isinstance(self._model, torch.nn.Module) else [self._model]
            wrappers = (one for one in modules if hasattr(one, "no_sync"))  # synchronized batch norm has a group too
            wrapper = next((one for one in wrappers if getattr(one, "process_group", None) is not None), None)
            parameters = (one for group in self._update.optimizer.param_groups for one in group["params"])
            meshes = [one.device_mesh for one in parameters if hasattr(one, "device_mesh")]
            self._groups = []
            if wrapper is not None:  # DistributedDataParallel, or FullyShardedDataParallel, perhaps also over nodes
                groups = [wrapper.process_group, getattr(wrapper, "_inter_node_pg", None)]
                self._groups = [group for group in groups if group is not None]
            elif meshes:
                self._groups = max(meshes, key=lambda mesh: mesh.size()).get_all_groups()
        return self._groups

    def _average_over_ranks(self) -> bool:
        """Average gradients that the ranks have not exchanged; warn and return False if the model cannot."""
        group = getattr(self._model, "process_group", None)
        if not isinstance(self._model, torch.nn.parallel.DistributedDataParallel) or group is None:
            warnings.warn(
                f"the epoch ended inside a window of {self._size} batches, and {type(self._model).__name__} cannot "
                f"average the gradients of its ranks afterwards: those of the last {self._pending} batches are dropped",
                stacklevel=2,
            )
            return False
        parameters = [one for param_group in self._update.optimizer.param_groups for one in param_group["params"]]
        # A rank may lack gradients that others have, so all exchange those that any of them has.
        found = torch.tensor([float(one.grad is not None) for one in parameters], device=parameters[0].device)
        torch.distributed.all_reduce(found, group=group)
        for parameter, ranks in zip(parameters, found.tolist(), strict=True):
            if ranks:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.distributed.all_reduce(parameter.grad, group=group)
        self._update.multiply(1 / group.size())
        return True


def scaled_to_all_ranks(engine: Any, loss: Tensor) -> Tensor:
    """Scale the mean over this rank's batch so that its average over ranks is the mean over the batches of all."""
    share = getattr(engine, "batch_share", 1.0)
    return loss if share == 1.0 else loss * share


def _iteration(engine: Any) -> int:
    """Return the iteration of the epoch, or that of the state if a step is called outside of a run."""
    number: int = engine.iteration_in_epoch or engine.state.iteration
    return number
