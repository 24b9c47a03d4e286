"""Collectives after which the ranks hold different values: one rank all of them, or each rank its own.

All ranks of the group call them, and no others. Arguments are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

from camshaft.distributed.groups import enter
from camshaft.distributed.run import current
from camshaft.distributed.values.exchange import all_to_all_values, brought, gather_values, scatter_values
from camshaft.distributed.values.scalars import check_reduction, reduced_number

T = TypeVar("T")


def reduce(tensor: T, dst: int = 0, op: str = "SUM", group: Any = None) -> T | None:
    """Reduce a tensor or a number over the ranks; rank ``dst`` gets the result, the others ``None``.

    The argument is left as it is. See :func:`all_reduce` for the arguments.

    >>> reduce(3)
    3
    """
    backend = current()
    check_reduction(backend, tensor, op)
    with enter("reduce", backend, group, tensor, op, dst) as call:
        call.require_member()
        is_root = backend.topology.rank == call.check_member("dst", dst)
        if not isinstance(tensor, Tensor):
            number = reduced_number(backend, tensor, op, call.group, len(call.ranks))
            return cast(T, number) if is_root else None
        reduced = backend.reduce(brought(backend, tensor).clone(), dst, op, call.group)
        return cast(T, reduced.to(tensor.device)) if is_root else None


def gather(tensor: Any, dst: int = 0, group: Any = None) -> Any:
    """Gather a value from every rank; rank ``dst`` gets what :func:`all_gather` returns, the others ``None``.

    >>> gather("a")
    ['a']
    """
    backend = current()
    with enter("gather", backend, group, tensor, root=dst) as call:
        call.require_member()
        dst = call.check_member("dst", dst)
        if not isinstance(tensor, Tensor):
            return gather_values(backend, tensor, dst, call.group)
        stacked = backend.gather(brought(backend, tensor), dst, call.group)
        if backend.topology.rank != dst:
            return None
        stacked = stacked.to(tensor.device)
        return stacked.flatten(0, 1) if tensor.dim() else stacked


def scatter(values: Sequence[Any] | None, src: int = 0, group: Any = None) -> Any:
    """Distribute the values of rank ``src`` over the ranks, one for each, in the order of the ranks.

    Args:
        values: one for each rank: tensors of any shapes, or numbers, strings, objects. Only ``src`` needs them.
        src: the rank that sends them.
        group: as for :func:`all_reduce`, but ranks outside of it must not call this.

    Returns:
        The value for this rank; a tensor is on :func:`device`.

    >>> scatter([7])
    7
    """
    backend = current()
    with enter("scatter", backend, group, root=src) as call:
        call.require_member()
        src = call.check_member("src", src)
        held, wrong = call.one_for_each("values", values)
        return scatter_values(backend, held, src, call.group, wrong)


def reduce_scatter(tensor: Tensor, op: str = "SUM", group: Any = None) -> Tensor:
    """Reduce a tensor over the ranks, and return the k-th of equal chunks on the k-th rank.

    Args:
        tensor: of shape ``(ranks * d, ...)`` on all ranks.
        op: as for :func:`all_reduce`.
        group: as for :func:`scatter`.

    Returns:
        A tensor of shape ``(d, ...)``.

    >>> import torch
    >>> reduce_scatter(torch.tensor([1, 2]))
    tensor([1, 2])
    """
    backend = current()
    check_reduction(backend, tensor, op)
    with enter("reduce_scatter", backend, group, tensor, op) as call:
        call.require_member()
        size = len(call.ranks)
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) % size:
            raise ValueError(f"tensor must be one whose first dimension is a multiple of {size}, got {tensor!r}")
        rows = brought(backend, tensor).view(size, len(tensor) // size, *tensor.shape[1:])
        return backend.reduce_scatter(rows, op, call.group).to(tensor.device)


def all_to_all(values: Sequence[Any], group: Any = None) -> list[Any]:
    """Send the k-th value to the k-th rank, and return what the ranks sent to this one, in their order.

    Args:
        values: one for each rank: tensors of any shapes, or numbers, strings, objects.
        group: as for :func:`scatter`.

    Returns:
        The values; tensors are on :func:`device`.

    >>> all_to_all(["to this rank"])
    ['to this rank']
    """
    backend = current()
    with enter("all_to_all", backend, group) as call:
        call.require_member()
        held, wrong = call.one_for_each("values", values)
        return all_to_all_values(backend, held, call.group, wrong)
