"""Models that train together over Horovod: the same weights at the start, and batch norm over all ranks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from camshaft.distributed.backends.horovod.types import rows_of_bytes
from camshaft.distributed.backends.horovod.waiting import wait

_OF_TORCH = frozenset(inspect.signature(nn.parallel.DistributedDataParallel).parameters) - {"module"}


def check_options(options: dict[str, Any]) -> None:
    """Refuse arguments that no way to wrap a model knows; those of torch's have no meaning here.

    Raises:
        TypeError: one is not known.
    """
    if unknown := sorted(set(options) - _OF_TORCH):
        raise TypeError(f"{unknown} are not known to auto_model, but {sorted(_OF_TORCH)} are")


def broadcast_model(hvd: Any, model: nn.Module, prefix: str, seconds: float) -> None:
    """Give all ranks the parameters and buffers of rank 0, those that are not saved too.

    ``horovod.torch.broadcast_parameters`` takes neither dtypes that Horovod refuses nor tensors in another layout.
    """
    begun: list[tuple[int, Tensor, Tensor]] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        here = tensor.detach()
        if here.numel() > 0:
            sent = here.contiguous()
            row = rows_of_bytes(sent, sent.nbytes)
            begun.append((hvd.broadcast_async_(row, 0, name=f"{prefix}.{name}"), here, sent))
    for handle, here, sent in begun:
        wait(hvd, handle, "auto_model", seconds)
        if here.data_ptr() != sent.data_ptr():
            here.copy_(sent)


def with_sync_batch_norm(hvd: Any, model: nn.Module, device: torch.device) -> nn.Module:
    """Replace the batch norm layers of a model by Horovod's, which use the statistics of all ranks.

    Raises:
        ValueError: the device is no GPU.
    """
    if device.type != "cuda":
        raise ValueError(
            f"sync_bn must be False on {device}: Horovod synchronizes batch norm on GPUs only, as backend 'nccl' does"
        )
    return _converted(hvd, model)


def _converted(hvd: Any, module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        setattr(module, name, _converted(hvd, child))
    if not isinstance(module, _BatchNorm) or isinstance(module, (nn.SyncBatchNorm, hvd.SyncBatchNorm)):
        return module
    layer: nn.Module = hvd.SyncBatchNorm(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
    )
    layer._parameters.update(module._parameters)  # the same tensors: an optimizer may hold them
    layer._buffers.update(module._buffers)
    return layer.train(module.training)
