"""A single process: every collective is over one rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from camshaft.distributed.backends.contract import Backend, Group, accelerator
from camshaft.distributed.topology import Topology

logger = logging.getLogger("camshaft.distributed.auto.auto_model")


class SerialBackend(Backend):
    """A run of one process.

    >>> SerialBackend().all_reduce(torch.ones(2), "SUM", None)
    tensor([1., 1.])
    """

    name = None
    model_name = "serial"
    topology = Topology()
    has_meshes = True  # of one rank, which needs none

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a property, so that importing needs no driver
        """The accelerator, if there is one."""
        return accelerator() or torch.device("cpu")

    @property
    def carrier(self) -> torch.device:
        """The CPU: nothing is moved."""
        return torch.device("cpu")

    def bring(self, tensor: Tensor) -> Tensor:
        """Return the tensor where it is."""
        return tensor

    def all_reduce(self, tensor: Tensor, op: str, group: Group | None) -> Tensor:
        """Return the tensor."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Group | None) -> Tensor:
        """Return the tensor as the only row."""
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None) -> Tensor:
        """Return the tensor."""
        return tensor

    def barrier(self, group: Group | None) -> None:
        """Do nothing."""

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], group: Group | None) -> Tensor:
        """Return the tensor."""
        return tensor

    def wrap_model(self, model: nn.Module, sync_bn: bool, **options: Any) -> nn.Module:
        """Use all GPUs of the machine, if there are several."""
        if self.device.type != "cuda" or torch.cuda.device_count() < 2 or isinstance(model, nn.DataParallel):
            return model
        logger.info("the model is wrapped in DataParallel over %d GPUs", torch.cuda.device_count())
        return nn.DataParallel(model)

    def new_group(self, ranks: list[int], **options: Any) -> Group:
        """Return the list of the only rank."""
        return ranks

    def ranks_of(self, group: Any) -> Sequence[int] | None:
        """Accept the list of the only rank."""
        return group if isinstance(group, list) and group == [0] and type(group[0]) is int else None
