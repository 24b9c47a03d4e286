"""Optimizers that average gradients over Horovod, with the behaviour that Horovod's own lacks.

``horovod.torch.DistributedOptimizer`` makes a class for each optimizer, so its methods can be replaced.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

AwaitEnd = Callable[[Any, str], None]


def distributed_optimizer(
    hvd: Any, optimizer: Optimizer, prefix: str, await_end: AwaitEnd, **options: Any
) -> Optimizer:
    """Wrap an optimizer; all ranks call this, and get the state of rank 0.

    Args:
        hvd: ``horovod.torch``, initialized.
        optimizer: shares its groups and its state with the new one, so a scheduler of the old one stays valid.
        prefix: begins the names of the gradients, as several optimizers may be under way at once.
        await_end: waits for an operation, of which it gets the handle and the name.
        options: for ``DistributedOptimizer``.

    Raises:
        TypeError: an option is not known.
        NotImplementedError: Adasum is requested, and Horovod runs over gloo.
    """
    known = frozenset(inspect.signature(hvd.DistributedOptimizer).parameters) - {"optimizer"}
    if unknown := sorted(set(options) - known):
        raise TypeError(f"{unknown} are not known to Horovod's DistributedOptimizer, but {sorted(known)} are")
    if hasattr(optimizer, "skip_synchronize"):
        return optimizer  # it is wrapped already
    if options.get("op") == hvd.Adasum and hvd.size() > 1 and not hvd.mpi_enabled():
        raise NotImplementedError("Horovod has no Adasum over gloo: build it with MPI, or take another op")
    if hvd.size() > 1:
        _take_state_of_rank_0(hvd, optimizer, prefix)
    named = options.pop("named_parameters", None) or _numbered(optimizer)
    options.setdefault("compression", hvd.Compression.none)
    options["compression"] = _compatible(options["compression"])
    names = [(f"{prefix}.{name}", parameter) for name, parameter in named]
    wrapped: Optimizer = hvd.DistributedOptimizer(optimizer, names, **options)
    wrapped.state = optimizer.state  # Horovod's begins without
    if options.get("op") != hvd.Adasum or hvd.size() == 1:
        _adapt(hvd, wrapped, prefix, await_end)
    return wrapped


def _take_state_of_rank_0(hvd: Any, optimizer: Optimizer, prefix: str) -> None:
    """Load the state of rank 0; Horovod's own function steps if there is no state yet, which changes the weights."""
    buffer = io.BytesIO()
    if hvd.rank() == 0:
        torch.save(optimizer.state_dict(), buffer)
    buffer = io.BytesIO(hvd.broadcast_object(buffer.getvalue(), 0, name=f"{prefix}.state"))
    if hvd.rank() > 0:  # the state goes to the devices of the parameters, whatever device it had on rank 0
        optimizer.load_state_dict(torch.load(buffer, map_location="cpu", weights_only=False))


def _numbered(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    return [
        (f"{i}.{j}", parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    ]


def _compatible(compression: Any) -> Any:
    """Accept gradients of any dtype and layout, which Horovod would refuse during ``backward``."""

    class Compatible:
        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, Any]:
            compressed, context = compression.compress(tensor)
            dtype = compressed.dtype
            if dtype == torch.bfloat16:
                compressed = compressed.float()
            return compressed.contiguous(), (context, dtype)

        @staticmethod
        def decompress(tensor: Tensor, context: Any) -> Tensor:
            inner, dtype = context
            decompressed: Tensor = compression.decompress(tensor.to(dtype), inner)
            return decompressed

    return Compatible


def _adapt(hvd: Any, optimizer: Any, prefix: str, await_end: AwaitEnd) -> None:
    """Support gradients that are read before the step, closures, and accumulated gradients that are discarded.

    Horovod reduces while ``backward`` runs. Code that clips or unscales calls ``synchronize()`` first; the step then
    does not synchronize again.
    """
    kind: Any = type(optimizer)
    horovod_synchronize, horovod_step = kind.synchronize, kind.step

    def synchronize(self: Any) -> None:
        """Wait until the gradients are those of all ranks."""
        if self._handles or not self._synchronized:
            for handle, _ in self._handles.values():
                if isinstance(handle, int):
                    await_end(handle, "the exchange of gradients")
            horovod_synchronize(self)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the gradients of all ranks."""

        def reduced() -> Any:
            assert closure is not None, "used only then"
            loss = closure()
            synchronize(self)
            return loss

        if self._should_synchronize and closure is None:
            synchronize(self)
        with self.skip_synchronize():
            return horovod_step(self, None if closure is None else reduced)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Reset the gradients, also those that no step has used."""
        for handle, _ in self._handles.values():
            if handle is not None:
                handle() if callable(handle) else hvd.synchronize(handle)
        if self._handles:
            self._handles.clear()
            self._group_counts = dict.fromkeys(self._group_counts, 0)
            self.set_backward_passes_per_step(self.backward_passes_per_step)
        self._synchronized = False
        super(kind, self).zero_grad(set_to_none)

    def reduce_as_gradients(self: Any, tensor: Tensor) -> Tensor:
        """Reduce another tensor over the same ranks in the same way."""
        reduced: Tensor = hvd.allreduce(tensor, name=f"{prefix}.other", op=self.op, process_set=self.process_set)
        return reduced

    kind.synchronize, kind.step, kind.zero_grad = synchronize, step, zero_grad
    kind.reduce_as_gradients = reduce_as_gradients
