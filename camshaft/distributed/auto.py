"""Model, optimizer and loader, made ready for whatever backend is there."""

from __future__ import annotations

import logging
import warnings
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from camshaft.distributed.context import current
from camshaft.distributed.sampling import DistributedProxySampler
from camshaft.distributed.topology import Topology

__all__ = ["DistributedProxySampler", "auto_dataloader", "auto_model", "auto_optim"]

Model = TypeVar("Model", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def auto_model(model: Model, sync_bn: bool = False, **kwargs: Any) -> Model:
    """Put a model on this rank's device, and make it train together with those of the other ranks.

    With torch's backends it is wrapped in ``DistributedDataParallel``; with Horovod and XLA it gets the weights of
    rank 0. A model that is wrapped already, in one of torch's ways, stays as it is. Without any context, on a machine
    with several GPUs, it is wrapped in ``DataParallel``.

    Args:
        model: a module, also a compiled one.
        sync_bn: let batch norm use the statistics of all ranks.
        kwargs: for ``DistributedDataParallel``; other backends, and a single process, pay no heed to them.

    Returns:
        The model, or what it is wrapped in.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: the backend chooses an argument itself, or lacks synchronized batch norm.

    >>> auto_model(nn.Linear(2, 1))
    Linear(in_features=2, out_features=1, bias=True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}")
    backend = current()
    if not all(_is_on(backend.device, tensor) for tensor in (*model.parameters(), *model.buffers())):
        model.to(backend.device)
    return cast(Model, backend.wrap_model(model, sync_bn, **kwargs))


def auto_optim(optimizer: AnyOptimizer, **kwargs: Any) -> AnyOptimizer:
    """Make an optimizer step together with those of the other ranks.

    Args:
        optimizer: of the parameters of a model that went through :func:`auto_model`.
        kwargs: for ``horovod.torch.DistributedOptimizer``; other backends pay no heed to them.

    Returns:
        The optimizer: as it is in a single process and with torch's backends, wrapped for Horovod and XLA.

    Raises:
        TypeError: ``optimizer`` is none.

    >>> auto_optim(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.5)).defaults["lr"]
    0.5
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    return cast(AnyOptimizer, current().wrap_optimizer(optimizer, **kwargs))


def auto_dataloader(dataset: Dataset[Any], **kwargs: Any) -> DataLoader[Any]:
    """Make a loader that gives this rank its part of the data.

    With more ranks than one: ``batch_size`` is that of all ranks together, and is divided by their number if it is
    not smaller; ``num_workers`` is that of a node, divided by its processes and rounded up; and the sampler becomes one
    that deals the samples out: torch's ``DistributedSampler`` where none is given, which **shuffles unless
    shuffle=False is given**, else a :class:`DistributedProxySampler` around the one given. Where the samples do not
    come out even, both repeat some, so that all ranks make as many batches. An iterable dataset must itself give
    different data on each rank, and a batch sampler different batches.

    Args:
        dataset: what to load.
        kwargs: for ``torch.utils.data.DataLoader``; ``pin_memory`` is on by default if the device is a GPU.

    Returns:
        The loader; on XLA one that moves the batches to the device.

    >>> auto_dataloader([1.0, 2.0, 3.0], batch_size=2).batch_size
    2
    """
    backend = current()
    logger = logging.getLogger(f"{__name__}.auto_dataloader")
    if backend.topology.world_size > 1:
        kwargs = _for_one_rank(dataset, kwargs, backend.topology, logger)
    device = backend.device.type
    if device == "xla" and kwargs.get("pin_memory"):
        warnings.warn("pin_memory=True is of no use on XLA, and is turned off", stacklevel=2)
        kwargs["pin_memory"] = False
    kwargs.setdefault("pin_memory", device == "cuda")
    logger.info("DataLoader of %s with %s", type(dataset).__name__, kwargs)
    return cast("DataLoader[Any]", backend.wrap_loader(DataLoader(dataset, **kwargs)))


def _for_one_rank(
    dataset: Dataset[Any], kwargs: dict[str, Any], topology: Topology, logger: logging.Logger
) -> dict[str, Any]:
    """Give the arguments of the loader of one rank."""
    kwargs = dict(kwargs)
    size, local_size = topology.world_size, topology.local_world_size
    if kwargs.get("num_workers", 0) >= local_size:
        kwargs["num_workers"] = -(-kwargs["num_workers"] // local_size)
    if kwargs.get("batch_sampler") is not None:
        warnings.warn("batch_sampler is used as it is: it must give each rank its own batches", stacklevel=3)
        return kwargs
    if (kwargs.get("batch_size") or 0) >= size:
        kwargs["batch_size"] //= size
    sampler = kwargs.get("sampler")
    if isinstance(dataset, IterableDataset):
        logger.info("an iterable dataset is used as it is: it must give each rank its own data")
    elif isinstance(sampler, DistributedSampler):
        if (sampler.rank, sampler.num_replicas) != (topology.rank, size):
            warnings.warn(
                f"sampler is made for rank {sampler.rank} of {sampler.num_replicas}, but this is rank {topology.rank} "
                f"of {size}",
                stacklevel=3,
            )
    elif sampler is None:
        given = kwargs.pop("shuffle", None)
        shuffle = given is None or bool(given)
        logger.info("the samples are dealt out to %d ranks, with shuffle=%s", size, shuffle)
        kwargs["sampler"] = DistributedSampler(dataset, size, topology.rank, shuffle=shuffle)
    else:
        kwargs["sampler"] = DistributedProxySampler(sampler, size, topology.rank)
    return kwargs


def _is_on(device: torch.device, tensor: torch.Tensor) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
