"""Loaders and optimizers for XLA devices: torch_xla's, with the behaviour that they lack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten


def device_loader(loader: Iterable[Any], device: Any, **options: Any) -> Any:
    """Move the batches of a loader to the device while the one before is computed with.

    Args:
        loader: a loader of batches on the CPU; its ``dataset``, ``sampler`` and ``batch_sampler`` are kept.
        device: where the batches go.
        options: for ``torch_xla.distributed.parallel_loader.ParallelLoader``.
    """
    import torch_xla.core.xla_model as xla_model
    from torch_xla.distributed.parallel_loader import MpDeviceLoader, ParallelLoader

    class Mover(ParallelLoader):  # type: ignore[misc]  # torch_xla has no types
        """Keeps the types of tuples."""

        def send_cpu_data_to_device(self, batches: list[Any], device: Any) -> Any:
            leaves, structure = tree_flatten(batches)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            moved = iter(xla_model.send_cpu_data_to_device(tensors, device, self._input_sharding))
            return tree_unflatten([next(moved) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)

    class MovingLoader(MpDeviceLoader):  # type: ignore[misc]  # torch_xla has no types
        """Raises what the loader raises, and ends its threads when the iteration stops early."""

        def __iter__(self) -> Iterator[Any]:
            mover = Mover(_Guarded(self._loader), [self._device], **self._parallel_loader_kwargs)
            try:
                for batch in mover.per_device_loader(self._device):
                    if isinstance(batch, _Failure):
                        raise batch.error
                    yield batch
            finally:
                mover.close()

    made = MovingLoader(loader, device, **options)
    for name in ("dataset", "sampler", "batch_sampler", "is_skipped_forward"):
        if hasattr(loader, name):
            setattr(made, name, getattr(loader, name))
    return made


class _Failure:
    """An error of a loader, passed on in the place of a batch."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Guarded:
    """A loader whose error becomes its last batch: in the thread that reads it, an error would only end the epoch."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._loader
        except Exception as error:
            yield _Failure(error)


def distributed_optimizer(optimizer: Optimizer) -> Optimizer:
    """Make an object of the optimizer's class whose steps average the gradients of all devices, and start at once.

    Everything else is shared: what is read or changed in one of the two is read or changed in both.

    Args:
        optimizer: becomes the attribute ``wrapped_optimizer`` of the new one.
    """
    if hasattr(optimizer, "wrapped_optimizer"):
        return optimizer
    kind = type(optimizer)
    wrapping = type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    made: Optimizer = object.__new__(wrapping)
    vars(made)["wrapped_optimizer"] = optimizer
    return made


class _Distributed:
    """A base that precedes the class of the optimizer. Its objects have no state besides the optimizer they wrap."""

    wrapped_optimizer: Optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over all devices, step, and start the device.

        Args:
            closure: computes the loss and its gradients, perhaps several times.

        Returns:
            The loss that the closure returned.
        """
        import torch_xla
        import torch_xla.core.xla_model as xla_model

        def averaged() -> Any:
            assert closure is not None, "used only then"
            loss = closure()
            self.synchronize()
            return loss

        if closure is None and not vars(self).get("skips"):
            return xla_model.optimizer_step(self.wrapped_optimizer, barrier=True)
        loss = self.wrapped_optimizer.step(None if closure is None else averaged)
        torch_xla.sync()
        return loss

    def synchronize(self) -> None:
        """Average the gradients over all devices, for example to clip them; doing so twice does no harm."""
        import torch_xla.core.xla_model as xla_model

        xla_model.reduce_gradients(self.wrapped_optimizer)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Step with the gradients as they are in this block."""
        vars(self)["skips"] = True
        try:
            yield
        finally:
            del vars(self)["skips"]

    def reduce_as_gradients(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor over all devices."""
        import torch_xla.core.xla_model as xla_model
        import torch_xla.runtime as runtime

        mean: Tensor = xla_model.all_reduce("sum", tensor, scale=1 / runtime.world_size())
        return mean

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped_optimizer":  # before it is there
            raise AttributeError(name)
        return getattr(self.wrapped_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # schedulers replace this method by one that counts; the wrapped optimizer keeps its own
        if name == "step":
            vars(self)[name] = value
        else:
            setattr(self.wrapped_optimizer, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.wrapped_optimizer.__setstate__(state)

    def __reduce__(self) -> Any:
        return distributed_optimizer, (self.wrapped_optimizer,)
