"""Loaders that move batches to an XLA device while the one before is computed with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def moving_loader(loader: Iterable[Any], device: Any, **options: Any) -> Any:
    """Wrap a loader in torch_xla's ``MpDeviceLoader``, and mend what that one loses.

    Args:
        loader: gives batches on the CPU; the new one takes over its ``dataset``, ``sampler`` and ``batch_sampler``.
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
        """Raises what the loader raises, and ends its threads when nobody wants more batches."""

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
    """An error of a loader, handed on in the place of a batch."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Guarded:
    """A loader whose errors become its last batch: in the thread that reads it, they would only end the epoch."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._loader
        except Exception as error:
            yield _Failure(error)
