"""Shard a model over a mesh, with torch's ``parallelize_module`` and ``fully_shard``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from camshaft.arguments import described
from camshaft.distributed.backends.contract import Backend
from camshaft.distributed.collectives.call import enter
from camshaft.distributed.models.mesh import size_of
from camshaft.dtensors import any_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Shard: TypeAlias = type[nn.Module] | Iterable[type[nn.Module]] | Callable[[nn.Module], bool]
_MOST_NAMES = 20  # of modules in an error, to find the right one
_REPLACED = "_camshaft_replaced_in_model"  # set on a parameter for which the model now has a distributed one
_adapted: WeakSet[Optimizer] = WeakSet()


@dataclass(frozen=True)
class Layout:
    """How a model is distributed over a mesh; see :func:`camshaft.distributed.auto_model` for all but the last.

    Args:
        policies: those of ``mp_policy``, ``offload_policy`` and ``reshard_after_forward`` that are given.
    """

    shard: Shard | None = None
    tensor_plan: Any = None
    policies: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.shard is not None and not callable(self.shard):  # an iterator can be read only once
            object.__setattr__(self, "shard", tuple(self.shard))

    def check(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        """Reject a layout that does not fit a model, before anything is changed.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: the plan or ``shard`` matches no module, or an argument that the mesh requires is missing.
        """
        self._blocks(model)
        names = [name for name, _ in model.named_modules()]
        for pattern in self._styles():
            if not any(_matches(name, pattern) for name in names):
                raise ValueError(
                    f"tensor_plan has a pattern that matches no module, {pattern!r}, where * matches one component "
                    f"of a name: the model has {_listed(names)}"
                )
        if mesh is None:
            return
        if self.tensor_plan is None and size_of(mesh, "tp") > 1 and not has_distributed(model):
            raise ValueError(
                f"tensor_plan must be given, as the mesh has tp={size_of(mesh, 'tp')}: the styles of modules by name, "
                'such as {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}'
            )
        if self.tensor_plan is not None and has_distributed(model):
            raise ValueError("tensor_plan must be None for a model that is parallelized already, got a plan")

    def is_replicated(self, mesh: DeviceMesh) -> bool:
        """Return whether all ranks hold the full model, so that ``DistributedDataParallel`` is sufficient."""
        return 1 < size_of(mesh, "dp_replicate") == mesh.size() and not self.policies

    def apply(self, model: nn.Module, mesh: DeviceMesh, backend: Backend) -> None:
        """Distribute a model in place, with the weights of rank 0; all ranks must call this.

        With replicas and tensor parallelism, but no sharding, ``fully_shard`` shards over one rank, because torch's
        ``DistributedDataParallel`` does not support distributed parameters.

        Raises:
            ValueError: modules that shared a weight no longer do.
        """
        before = dict(model.named_parameters(remove_duplicate=False))
        with enter("auto_model", backend, None, how=f"mesh {mesh.mesh_dim_names}"):
            backend.broadcast_model(model)
            self._broadcast_shards(model, mesh, backend)
        if self.tensor_plan is not None and size_of(mesh, "tp") > 1:
            from torch.distributed.tensor.parallel import parallelize_module

            for pattern, style in self._styles().items():
                for module in [module for name, module in model.named_modules() if _matches(name, pattern)]:
                    parallelize_module(module, mesh["tp"], style, src_data_rank=None)  # the weights are equal already
        if self._is_sharded(mesh):
            self._shard(model, mesh)
        else:
            tensors = (*model.parameters(), *model.buffers())
            if any(one.device.type != backend.device.type and not one.is_meta for one in tensors):
                model.to(backend.device)
        after = dict(model.named_parameters(remove_duplicate=False))
        kept = {id(parameter) for parameter in after.values()}
        names: dict[Tensor, str] = {}
        for name, parameter in before.items():
            first = names.setdefault(parameter, name)
            if after[name] is not after[first]:  # by a plan, or by fully_shard before torch 2.13
                raise ValueError(
                    f"{first} and {name} were tied, and would be trained separately: tensor_plan and shard must not "
                    "match the modules that hold them"
                )
            if id(parameter) not in kept:
                setattr(parameter, _REPLACED, first)

    def _styles(self) -> Mapping[str, Any]:
        """Return the plan, by the patterns of the names of modules."""
        return self.tensor_plan if isinstance(self.tensor_plan, Mapping) else {"": self.tensor_plan}

    def _is_sharded(self, mesh: DeviceMesh) -> bool:
        alone = all(size_of(mesh, axis) == 1 for axis in ("dp_replicate", "dp_shard", "cp"))
        return not alone or bool(self.policies) or size_of(mesh, "tp") == 1

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        from torch.distributed.fsdp import fully_shard

        options, over = dict(self.policies), _sharding_mesh(mesh)
        if over.size(over.ndim - 1) == 1:
            options.setdefault("reshard_after_forward", False)  # nothing would be freed
        for block in (*reversed(self._blocks(model)), model):  # those inside of others come first
            fully_shard(block, mesh=over, **options)

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that are sharded individually, besides the model itself."""
        inside = [module for module in model.modules() if module is not model]
        if self.shard is None:
            lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
            sizes = [sum(parameter.numel() for parameter in one.parameters()) for one in lists]
            return list(dict.fromkeys(_called(lists[sizes.index(max(sizes))]))) if lists else []
        if not isinstance(self.shard, type) and callable(self.shard):
            found = [module for module in inside if self.shard(module)]
        else:
            kinds = (self.shard,) if isinstance(self.shard, type) else tuple(self.shard)
            if not kinds:
                return []
            found = [module for module in inside if isinstance(module, kinds)]
        if not found:
            names = _listed(sorted({type(module).__name__ for module in inside})) or "no submodules"
            raise ValueError(f"shard matches no module, got {described(self.shard)}: the model has {names}")
        return found

    def _broadcast_shards(self, model: nn.Module, mesh: DeviceMesh, backend: Backend) -> None:
        """Broadcast tensors that are already tensor-parallel along each other axis, from the first rank of the axis."""
        for tensor in (*model.parameters(), *model.buffers()):
            if not hasattr(tensor, "device_mesh") or tensor.is_meta:
                continue
            local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]  # of a DTensor
            for axis in ("dp_shard", "cp", "dp_replicate"):
                if size_of(mesh, axis) > 1:
                    group = mesh[axis].get_group()
                    local.copy_(backend.broadcast(local.contiguous(), backend.members(group)[0], group))


def has_distributed(model: nn.Module) -> bool:
    """Return whether a model has distributed parameters: it is sharded or parallelized, perhaps by hand."""
    return any_dtensor(model.parameters())


def is_meta(model: nn.Module) -> bool:
    """Return whether a model has parameters without memory, which are initialized later."""
    return any(one.is_meta for one in model.parameters())


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module that is called; of a list of modules, which is not, those in it."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        yield module
        return
    for one in module.children():
        yield from _called(one)


# --- optimizers of parameters that are replaced -------------------------------------------------------------------


def check_not_adapted(model: nn.Module) -> None:
    """Raise ``ValueError`` if an optimizer passed to ``auto_optim`` holds parameters of a model to be sharded."""
    mine = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in _adapted:
        held = [mine[id(one)] for group in optimizer.param_groups for one in group["params"] if id(one) in mine]
        if held:
            raise ValueError(_stale(optimizer, held))


def remember_optimizer(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` if an optimizer holds parameters that sharding has replaced; otherwise remember it."""
    held = [
        vars(one)[_REPLACED] for group in optimizer.param_groups for one in group["params"] if _REPLACED in vars(one)
    ]
    if held:
        raise ValueError(_stale(optimizer, held))
    _adapted.add(optimizer)


def _stale(optimizer: Optimizer, names: list[str]) -> str:
    return (
        f"optimizer {type(optimizer).__name__} was created before the model was sharded: {len(names)} of its "
        f"parameters ({_listed(names, 3)}) are not those of the sharded model, and would never change; create it after "
        "auto_model, from model.parameters()"
    )


def _sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a mesh for ``fully_shard``: the axis of replicas, if there is one, and the axis of shards."""
    if size_of(mesh, "cp") == 1:
        return mesh["dp_replicate", "dp_shard"] if size_of(mesh, "dp_replicate") > 1 else mesh["dp_shard"]
    shards = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")  # exists; see Backend.new_mesh
    if size_of(mesh, "dp_replicate") == 1:
        return shards
    with warnings.catch_warnings():  # newer torch prefers another way to combine axes, which older torch lacks
        warnings.filterwarnings("ignore", "Slicing a flattened dim")
        return mesh["dp_replicate", "dp_shard_cp"]


def _matches(name: str, pattern: str) -> bool:
    """Return whether torch applies a pattern to a module: each part of its name matches that of the pattern."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _listed(names: Iterable[str], most: int = _MOST_NAMES) -> str:
    names = [name for name in names if name]
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
