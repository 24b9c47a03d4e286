"""Tensors and modules that are sharded over ranks (DTensors, ``fully_shard``): local parts and full tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor; if ``torch.distributed.tensor`` was never imported, no value is."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def any_dtensor(values: Iterable[Any]) -> bool:
    """Return whether any of the values is a DTensor; reads them only if there can be one."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and any(isinstance(value, kind) for value in values)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor, which shares its memory, or a plain tensor unchanged.

    >>> tensor = torch.ones(2)
    >>> local(tensor) is tensor
    True
    """
    part: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]  # of DTensors
    return part


def full_value(value: Any) -> Any:
    """Return the full tensor of a DTensor, or any other value unchanged.

    This communicates if :func:`needs_all_ranks`, so all ranks of the mesh must call it.
    """
    return value.full_tensor() if is_dtensor(value) else value


def needs_all_ranks(value: Any) -> bool:
    """Return whether a value is a DTensor that this rank does not hold in full."""
    return is_dtensor(value) and bool(groups_of_parts(value))


def groups_of_parts(tensor: Any) -> tuple[Any, ...]:
    """Return the process groups over which a DTensor is sharded or partial; none for a plain or replicated tensor."""
    if not is_dtensor(tensor):
        return ()
    mesh = tensor.device_mesh
    split = (dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return tuple(mesh.get_group(dim) for dim in split if mesh.size(dim) > 1)


def groups_of_gradients(parameters: Iterable[Any]) -> list[Any]:
    """Return the process groups over which gradients of parameters are averaged.

    These are the groups of all mesh dimensions except ``"tp"``, whose ranks have the same batches. If the dimension of
    tensor parallelism has another name, averaging over it as well does not change the result.
    """
    meshes = [parameter.device_mesh for parameter in parameters if is_dtensor(parameter)]
    groups: dict[Any, None] = {}
    for mesh in dict.fromkeys(meshes):
        names = mesh.mesh_dim_names or (None,) * mesh.ndim
        data = (dim for dim, name in enumerate(names) if name != "tp" and mesh.size(dim) > 1)
        groups.update((mesh.get_group(dim), None) for dim in data)
    return list(groups)


# --- modules that fully_shard has prepared -------------------------------------------------------------------------


def reshard(model: Any) -> None:
    """Make ``model.parameters()`` return the sharded parameters, which the optimizer holds.

    After a forward pass without a backward pass, modules of ``fully_shard`` may expose their full parameters instead,
    and use them in the next pass even if the sharded ones have changed in the meantime.
    """
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()


def is_fully_sharded(module: Any) -> bool:
    """Return whether ``fully_shard`` was applied to a module."""
    return callable(getattr(module, "set_requires_gradient_sync", None)) and callable(getattr(module, "reshard", None))


def is_wrapped(model: Any) -> bool:
    """Return whether a model, compiled or not, reduces its gradients already.

    That is, it is wrapped in ``DistributedDataParallel``, or it or a part of it is sharded. This does not import FSDP.

    >>> is_wrapped(torch.nn.Linear(1, 1))
    False
    """
    inner = getattr(model, "_orig_mod", model)
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    return isinstance(inner, torch.nn.parallel.DistributedDataParallel) or any(
        isinstance(module, kind) or is_fully_sharded(module) for module in inner.modules()
    )


def outermost_sharded(module: Any) -> Iterator[Any]:
    """Yield the outermost modules that ``fully_shard`` was applied to.

    >>> list(outermost_sharded(torch.nn.Sequential(torch.nn.Linear(1, 1))))
    []
    """
    if is_fully_sharded(module):
        yield module
    else:
        for child in module.children():
            yield from outermost_sharded(child)


@contextmanager
def without_reduction(modules: Iterable[Any]) -> Iterator[None]:
    """Make backward passes keep the full gradients on each rank instead of reducing them."""
    modules = list(modules)
    for module in modules:
        module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True)


def discard_gradients(modules: Iterable[Any]) -> None:
    """Drop the gradients kept by :func:`without_reduction`, which ``zero_grad`` does not clear."""
    for outer in modules:
        for module in filter(is_fully_sharded, outer.modules()):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for parameter in (one for group in groups if group is not None for one in group.fsdp_params):
                if "unsharded_accumulated_grad" in vars(parameter):  # torch 2.15 keeps all of them in the parameter
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
