"""Adapt a model, an optimizer and a loader to the current backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from camshaft.arguments import check_type, described
from camshaft.distributed.backends.contract import Backend, check_ddp_options
from camshaft.distributed.job import current, warn_if_one_of_many
from camshaft.distributed.models.layout import (
    Layout,
    Shard,
    check_not_adapted,
    has_distributed,
    is_meta,
    remember_optimizer,
)
from camshaft.distributed.models.mesh import use_mesh
from camshaft.distributed.models.replicas import register
from camshaft.dtensors import is_wrapped

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.tensor.parallel import ParallelStyle

_NO_SYNC_BN = "sync_bn must be False for a model that is sharded or parallelized, got True"

Model = TypeVar("Model", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def auto_model(
    model: Model,
    sync_bn: bool = False,
    *,
    mesh: DeviceMesh | None = None,
    shard: Shard | None = None,
    tensor_plan: Mapping[str, ParallelStyle] | ParallelStyle | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    **kwargs: Any,
) -> Model:
    """Move a model to this rank's device, and make it train together with those of the other ranks.

    With torch's backends it is wrapped in ``DistributedDataParallel``; with Horovod and XLA it receives the weights of
    rank 0. Without a distributed context, on a machine with several GPUs, it is wrapped in ``DataParallel``.

    With a mesh, it is distributed in place by torch's ``parallelize_module`` along ``tp``, and by ``fully_shard`` along
    ``dp_shard`` and ``cp``, with replicas along ``dp_replicate``; if only ``dp_replicate`` is larger than one, it is
    wrapped in ``DistributedDataParallel``. All ranks first receive the weights of rank 0. The model need not fit on one
    device, because it is moved there block by block. A model on the meta device stays there: initialize it yourself,
    after ``model.to_empty(device=idist.device())``, and compute its buffers, also in a run that resumes: checkpoints
    lack those that are not persistent. The layout arguments have no effect in a single process.

    Replicas must stay equal. If they drift apart, because weights were unfrozen afterwards, the wrapper is not called,
    or one rank loads other weights, trainers of :func:`camshaft.engine.create_supervised_trainer` warn after the epoch,
    with the first parameter that differs; in debug mode they raise.

    A model that is already wrapped, sharded or parallelized is returned unchanged. With ``mesh``, a model that you have
    made tensor-parallel is still sharded along the other axes, if there are any.

    Args:
        model: a module; it may be compiled.
        sync_bn: synchronize the statistics of batch norm over all ranks. Not for models that are sharded or
            parallelized.
        mesh: a mesh from :func:`make_mesh`. If ``None``, :func:`get_mesh` is used if a layout argument below is given.
        shard: the modules to shard individually, besides the model itself: module classes, or a predicate on a module;
            by default, the modules in the largest ``ModuleList``.
        tensor_plan: torch's ``ParallelStyle`` by module name; ``*`` matches one component of a name.
        mp_policy: torch's ``MixedPrecisionPolicy``.
        offload_policy: torch's ``OffloadPolicy``.
        reshard_after_forward: as for torch's ``fully_shard``.
        kwargs: for ``DistributedDataParallel``; ignored by other backends and layouts, and in a single process.

    Returns:
        The model, or its wrapper.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the backend chooses an argument itself, or lacks synchronized batch norm; ``shard`` or a pattern of
            the plan matches no module, or unties weights; the mesh lacks ranks, or requires an argument that is
            missing; or an optimizer passed to :func:`auto_optim` holds parameters that would be replaced.
        NotImplementedError: the backend does not support meshes.

    >>> auto_model(nn.Linear(2, 1))
    Linear(in_features=2, out_features=1, bias=True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {described(model)}")
    backend = current()
    if backend.name is None:
        remedy = 'call idist.initialize("gloo"), or use Parallel, before auto_model'
        warn_if_one_of_many("no backend is initialized", remedy)
    policies = {
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "reshard_after_forward": reshard_after_forward,
    }
    layout = Layout(shard, tensor_plan, {name: value for name, value in policies.items() if value is not None})
    if sync_bn and has_distributed(model):
        raise ValueError(_NO_SYNC_BN)
    if mesh is not None or layout != Layout():
        return _distributed(model, sync_bn, layout, mesh, backend, kwargs)
    device, tensors = backend.device, (*model.parameters(), *model.buffers())
    is_uninitialized = device.type != "meta" and backend.topology.world_size == 1 and is_meta(model)
    if has_distributed(model) or is_uninitialized:
        return model
    if any(one.device.type != device.type or device.index not in (None, one.device.index) for one in tensors):
        model.to(device)
    wrapped = backend.wrap_model(model, sync_bn, **kwargs)
    register(wrapped, is_replicated=True)
    return cast(Model, wrapped)


def _distributed(
    model: Model, sync_bn: bool, layout: Layout, mesh: DeviceMesh | None, backend: Backend, options: dict[str, Any]
) -> Model:
    """Distribute a model over a mesh."""
    if not backend.has_meshes:
        backend.lack("device meshes", "gloo or nccl")
    check_ddp_options(options)
    inner: nn.Module = getattr(model, "_orig_mod", model)
    if mesh is None:
        mesh = backend.job.mesh
    else:
        check_type("mesh", mesh, DeviceMesh, "a DeviceMesh, as of make_mesh")
        use_mesh(backend, mesh)
    layout.check(inner, mesh)
    if is_wrapped(inner):
        return model
    if mesh is None and backend.name is not None:
        raise ValueError("mesh must be given to distribute the model: mesh = idist.make_mesh(dp_shard=-1)")
    if mesh is None:
        return model if is_meta(inner) else model.to(backend.device)
    # DistributedDataParallel needs weights, but fully_shard over single ranks does not.
    if layout.is_replicated(mesh) and not has_distributed(inner) and not is_meta(inner):
        return auto_model(model, sync_bn, **options)
    if sync_bn:
        raise ValueError(_NO_SYNC_BN)
    check_not_adapted(inner)
    layout.apply(inner, mesh, backend)
    return model


def auto_optim(optimizer: AnyOptimizer, **kwargs: Any) -> AnyOptimizer:
    """Make an optimizer step together with those of the other ranks.

    Args:
        optimizer: of the parameters of a model returned by :func:`auto_model`.
        kwargs: for ``horovod.torch.DistributedOptimizer``; ignored by other backends.

    Returns:
        The optimizer: unchanged in a single process and with torch's backends, wrapped for Horovod and XLA.

    Raises:
        TypeError: ``optimizer`` is not a torch optimizer.
        ValueError: it was created before :func:`auto_model` sharded the model, which replaced its parameters.

    >>> import torch
    >>> auto_optim(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.5)).defaults["lr"]
    0.5
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {described(optimizer)}")
    remember_optimizer(optimizer)
    return cast(AnyOptimizer, current().wrap_optimizer(optimizer, **kwargs))
