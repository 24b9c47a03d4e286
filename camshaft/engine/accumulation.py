"""Gradients of several micro-batches in one step of the optimizer."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from camshaft.engine.events import Events
from camshaft.engine.order import Order
from camshaft.engine.precision import Update


class Accumulation:
    """Collects the gradients of a window of micro-batches, and steps at its end or the end of the epoch.

    Windows begin anew with each epoch, so the last one of an epoch may be shorter; it is stepped too, with the
    mean over what it holds. A state of the engine that is saved inside of a window goes back to its start, as the
    gradients so far are not saved. Ranks exchange gradients in the last micro-batch of a window only, where the model
    offers that (``no_sync``) and the length of the epoch is known.

    Args:
        model: the model that is trained, perhaps wrapped for several ranks.
        update: what steps.
        size: micro-batches in a window.
        weigh: ``weigh(x, y)`` gives the weight of a micro-batch, a number or a tensor on its device: its samples
            or tokens, whatever the loss is a mean over. The window's gradient is then the weighted mean over
            all its micro-batches on all ranks. ``None`` weighs them alike.
    """

    def __init__(
        self, model: Any, update: Update, size: int, weigh: Callable[[Any, Any], float | Tensor] | None = None
    ) -> None:
        if not isinstance(size, int):
            raise TypeError(f"gradient_accumulation_steps must be an int, got {size!r}")
        if size <= 0:
            raise ValueError(f"gradient_accumulation_steps must be strictly positive, got {size}")
        self.update = update
        self._model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
        self._size = size
        self._weigh = weigh
        self._pending = 0
        self._next: int | None = None
        self._groups: list[Any] | None = None  # found in the first step
        self._latest: float | Tensor = 0.0
        self._weight: float | Tensor = 0.0
        self._synchronized = self._whole = True
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, engine: Any) -> bool:
        """Make room for the gradients of a micro-batch; say whether it is the last of its window."""
        if engine not in self._followed:
            self._follow(engine)
        iteration = _iteration(engine)
        place = (iteration - 1) % self._size
        if place == 0 or iteration != self._next:  # the latter after a failure or a jump
            self.update.optimizer.zero_grad()
            self._pending, self._weight, self._synchronized = 0, 0.0, True
            if self._size > 1:
                engine.hold_position()
        self._next, self._whole = None, True
        return place == self._size - 1 or self._ends_early(engine)

    def exchange(self, engine: Any, last: bool) -> AbstractContextManager[Any]:
        """Give the context for a micro-batch: in it, ranks keep their gradients to themselves until the last."""
        if last or engine.state.epoch_length is None or not hasattr(self._model, "no_sync"):
            self._synchronized = True
            return nullcontext()
        self._synchronized = False
        context: AbstractContextManager[Any] = self._model.no_sync()
        return context

    def share(self, engine: Any, x: Any, y: Any, loss: Tensor) -> Tensor:
        """Give the part of a micro-batch's loss in that of the window."""
        self._whole = False  # a backward that fails leaves a part of its gradients
        if self._weigh is not None:
            self._latest = self._weigh(x, y)
            return loss * self._latest
        return shared(engine, loss / self._size if self._size > 1 else loss)

    def end(self, engine: Any, last: bool) -> None:
        """Count a micro-batch whose gradients are in, and step if it was the last of its window."""
        self._next, self._whole = _iteration(engine) + 1, True
        self._pending += 1
        self._weight = self._weight + self._latest
        if last:
            self.finish()
            engine.release_position()

    def finish(self) -> None:
        """Step with what was collected; if the window is shorter than the others, mend the mean first."""
        if not self._synchronized and not self._average_over_ranks():
            return
        if self._weigh is not None:
            self.update.apply(self._share_of_weight())
        else:
            self.update.apply(self._size / self._pending if self._pending < self._size else None)
        self._pending = 0

    # --- the end of an epoch -------------------------------------------------------------------------------

    def _ends_early(self, engine: Any) -> bool:
        state = engine.state
        over = state.epoch_length is not None and _iteration(engine) >= state.epoch_length
        return over or (state.max_iters is not None and state.iteration >= state.max_iters)

    def _follow(self, engine: Any) -> None:
        """Listen for the ends of epochs that could not be foreseen."""
        self._followed.add(engine)
        engine.add_event_handler(Events.EPOCH_COMPLETED | Events.TERMINATE_SINGLE_EPOCH, self._flush, order=Order.STEP)
        engine.add_event_handler(Events.STARTED, self._give_up, order=Order.STEP)
        engine.add_event_handler(Events.TERMINATE, self._flush_if_reached, order=Order.STEP)

    def _give_up(self) -> None:
        """Begin a new window in a new or resumed run; one that was paused fires no ``STARTED`` and goes on."""
        self._next, self._pending = None, 0

    def _flush_if_reached(self, engine: Any) -> None:
        if engine.state.max_iters is not None and engine.state.iteration >= engine.state.max_iters:
            self._flush(engine)  # else somebody ended the run, perhaps because these gradients are bad

    def _flush(self, engine: Any) -> None:
        if self._pending and self._whole:
            self.finish()
        engine.release_position()

    # --- ranks ---------------------------------------------------------------------------------------------

    def _share_of_weight(self) -> float | Tensor:
        groups = self._groups_of_gradients()
        reduce = getattr(self.update.optimizer, "reduce_as_gradients", None)
        if not groups and reduce is None:
            return 1 / self._weight
        parameter = next(iter(self.update.parameters()))
        total = torch.as_tensor(self._weight, dtype=torch.float64).to(parameter.device, non_blocking=True).reshape(())
        if not groups:
            assert reduce is not None, "there is one of them"
            mean: Tensor = reduce(total)
        else:
            for group in groups:
                torch.distributed.all_reduce(total, group=group)
            mean = total / math.prod(group.size() for group in groups)  # gradients were averaged, not summed
        return 1 / mean

    def _groups_of_gradients(self) -> list[Any]:
        """Return the process groups that gradients are averaged over, one after the other.

        ``fully_shard`` leaves the class of parameters as the only trace: they are distributed tensors on a mesh. Ranks
        of a mesh that do not divide the data, as in tensor parallelism, have the same batches and the same weights, so
        a mean over all of the mesh is the mean over those that do.
        """
        if self._groups is None:
            modules = self._model.modules() if isinstance(self._model, torch.nn.Module) else [self._model]
            wrappers = (one for one in modules if hasattr(one, "no_sync"))  # synchronized batch norm has a group too
            wrapper = next((one for one in wrappers if getattr(one, "process_group", None) is not None), None)
            parameters = (one for group in self.update.optimizer.param_groups for one in group["params"])
            meshes = [one.device_mesh for one in parameters if hasattr(one, "device_mesh")]
            if wrapper is not None:  # DistributedDataParallel, or FullyShardedDataParallel, perhaps over nodes too
                groups = [wrapper.process_group, getattr(wrapper, "_inter_node_pg", None)]
                self._groups = [group for group in groups if group is not None]
            elif meshes:
                self._groups = max(meshes, key=lambda mesh: mesh.size()).get_all_groups()
            else:
                self._groups = []
        return self._groups

    def _average_over_ranks(self) -> bool:
        group = getattr(self._model, "process_group", None)
        if not isinstance(self._model, torch.nn.parallel.DistributedDataParallel) or group is None:
            warnings.warn(
                f"the epoch ended inside a window of {self._size} batches, and {type(self._model).__name__} cannot "
                f"average the gradients of its ranks afterwards: those of the last {self._pending} batches are dropped",
                stacklevel=2,
            )
            self._pending = 0
            return False
        parameters = [one for param_group in self.update.optimizer.param_groups for one in param_group["params"]]
        # A rank may lack gradients that others have: all exchange the same, those that any of them has.
        found = torch.tensor([float(one.grad is not None) for one in parameters], device=parameters[0].device)
        torch.distributed.all_reduce(found, group=group)
        for parameter, ranks in zip(parameters, found.tolist(), strict=True):
            if ranks:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.distributed.all_reduce(parameter.grad, group=group)
        self.update.multiply(1 / group.size())
        return True


def shared(engine: Any, loss: Tensor) -> Tensor:
    """Scale a mean over this rank's batch, so that its average over ranks is the mean over the batches of all."""
    share = getattr(engine, "batch_share", 1.0)
    return loss if share == 1.0 else loss * share


def _iteration(engine: Any) -> int:
    """Count the iteration in its epoch; outside of a run, where a step is called by hand, by the state alone."""
    number: int = engine.iteration_in_epoch or engine.state.iteration
    return number
