"""XLA with one process for many devices: each batch is cut up among them, and the parameters are on all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from camshaft.distributed.backends.xla.backend import XlaBackend
from camshaft.distributed.backends.xla.loader import moving_loader
from camshaft.distributed.topology import Topology


class XlaSpmdBackend(XlaBackend):
    """One process, whose device stands for all those of a mesh with the axis ``"data"``.

    Args:
        shutdown: called when the run ends.
    """

    def __init__(self, shutdown: Callable[[], None] | None = None) -> None:
        import torch_xla
        import torch_xla.distributed.spmd as spmd

        super().__init__(Topology(), torch_xla.device(), shutdown)
        self.mesh: Any = spmd.get_1d_mesh("data")

    def wrap_model(self, model: nn.Module, sync_bn: bool, **options: Any) -> nn.Module:
        """Put the parameters and buffers on all devices; batch norm sees the whole batch as it is."""
        from torch_xla.distributed.spmd import mark_sharding

        for tensor in (*model.parameters(), *model.buffers()):
            mark_sharding(tensor, self.mesh, (None,) * tensor.dim())
        return model

    def wrap_loader(self, loader: Iterable[Any]) -> Any:
        """Cut each batch up among the devices."""
        return moving_loader(loader, self.device, input_sharding=BatchSharding(self.mesh))


class BatchSharding:
    """How tensors of a batch lie on the devices of a mesh: cut along the first dimension, where that can be.

    A batch that cannot be dealt out evenly, as the last one, is put on all devices, which compute the same then.

    Args:
        mesh: with the one axis ``"data"``.

    Attributes:
        minibatch: whether each process has a part of the batch only.
    """

    minibatch = False

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def xla_spec(self, tensor: Tensor) -> Any:
        """Give the sharding of one tensor, ``None`` for on all devices; the loader of torch_xla asks for it."""
        from torch_xla.distributed.spmd import ShardingSpec

        if tensor.dim() == 0 or len(tensor) % self._mesh.size():
            return None
        axes = ("data", *(None,) * (tensor.dim() - 1))
        return ShardingSpec(self._mesh, axes).xla_spec(tensor)
