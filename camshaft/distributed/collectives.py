"""Collectives for tensors, numbers, strings and objects, the same on every backend.

A tensor that already is where the backend works is reduced or overwritten **in place** by :func:`all_reduce`
and :func:`broadcast`, and given back; from another device it is copied, and the result goes back there.
Everything else gives new values and leaves its arguments alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from numbers import Number
from typing import Any, TypeVar, cast

from torch import Tensor

from camshaft.distributed.calls import enter
from camshaft.distributed.context import current
from camshaft.distributed.exchange import all_gather_values, all_to_all_values, broadcast_value, scatter_values
from camshaft.distributed.groups import checked_ranks
from camshaft.distributed.placement import brought, check_shapes, in_place, portable, prepared, reduced_number

T = TypeVar("T")


def all_reduce(tensor: T, op: str = "SUM", group: Any = None) -> T:
    """Reduce a tensor, or a number, over the ranks; every rank gets the result.

    Args:
        tensor: of the same shape and dtype on all ranks, reduced in place; or a number, of which an ``int`` is
            reduced as a 64-bit integer and a ``float`` in double precision.
        op: ``"SUM"``, ``"PRODUCT"``, ``"MIN"``, ``"MAX"``, ``"AND"`` or ``"OR"`` (bitwise), as far as the backend
            has them.
        group: ``None`` for all ranks, a list of ranks, or what :func:`new_group` gave. Who is not in it gets the
            argument back.

    Raises:
        TypeError: neither a tensor nor a number.
        ValueError: the backend does not know ``op``, or ``group`` is none.
        RankDivergenceError: not all ranks of the group are here.

    >>> import torch
    >>> all_reduce(3), all_reduce(torch.tensor([1.0, 2.0]), op="MAX")
    (3, tensor([1., 2.]))
    """
    if not isinstance(tensor, (Tensor, Number)):
        raise TypeError(f"tensor must be a tensor or a number, got {tensor!r} of type {type(tensor).__name__}")
    backend = current()
    if op not in backend.reductions:
        raise ValueError(f"op must be one of {backend.reductions} on {backend.model_name}, got {op!r}")
    with enter("all_reduce", backend, group, tensor, op) as call:
        if not call.is_member:
            return tensor
        if isinstance(tensor, Tensor):
            return cast(T, in_place(backend, tensor, lambda here: backend.all_reduce(here, op, call.group)))
        return cast(T, reduced_number(backend, tensor, op, call.group))


def all_gather(tensor: Any, group: Any = None) -> Any:
    """Gather what the ranks have; every rank gets all of it, in the order of the ranks.

    Args:
        tensor: a tensor of the same shape on all ranks, or a number, a string, or any object that can be
            pickled.
        group: as for :func:`all_reduce`.

    Returns:
        For tensors of shape ``(d, ...)`` one of shape ``(ranks * d, ...)``; of shape ``()`` one of shape
        ``(ranks,)``, except in a single process without a context, where it stays as it is. For all else a list.

    >>> import torch
    >>> all_gather(torch.tensor([1, 2])), all_gather("größer")
    (tensor([1, 2]), ['größer'])
    """
    backend = current()
    with enter("all_gather", backend, group, tensor) as call:
        if not call.is_member:
            return tensor
        if not isinstance(tensor, Tensor):
            return all_gather_values(backend, tensor, call.group)
        if backend.name is None:
            return tensor
        stacked = backend.all_gather(brought(backend, tensor), call.group).to(tensor.device)
        return stacked.flatten(0, 1) if tensor.dim() else stacked


def all_gather_tensors_with_shapes(tensor: Tensor, shapes: Sequence[Sequence[int]], group: Any = None) -> list[Tensor]:
    """Gather tensors of different shapes that every rank knows.

    Args:
        tensor: with the same number of dimensions on all ranks.
        shapes: the shape of each rank's tensor, in the order of the ranks of the group.
        group: as for :func:`all_reduce`.

    Returns:
        The tensors of the ranks.

    >>> import torch
    >>> all_gather_tensors_with_shapes(torch.ones(2, 1), [(2, 1)])
    [tensor([[1.],
            [1.]])]
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a tensor, got {tensor!r} of type {type(tensor).__name__}")
    backend = current()
    with enter("all_gather_tensors_with_shapes", backend, group, None) as call:
        if not call.is_member:
            return [tensor]
        check_shapes(tensor, shapes, call)
        largest = [max(sizes) for sizes in zip_longest(*shapes)]
        padded = tensor.new_zeros(largest)
        padded[tuple(map(slice, tensor.shape))] = tensor
        stacked = backend.all_gather(brought(backend, padded), call.group).to(tensor.device)
        return [row[tuple(map(slice, shape))] for row, shape in zip(stacked, shapes, strict=True)]


def broadcast(tensor: Any, src: int = 0, safe_mode: bool = False, group: Any = None) -> Any:
    """Give every rank what one of them has.

    Args:
        tensor: a tensor, a number, a string, a path, or any object that can be pickled. Tensors have the same
            shape and dtype on all ranks, and are overwritten in place; the other kinds are the same on all ranks.
        src: the rank that has it.
        safe_mode: what the other ranks pass does not matter, and may be ``None``.
        group: as for :func:`all_reduce`.

    Raises:
        ValueError: the value is ``None`` where it is needed, or ``src`` is not in the group.

    >>> broadcast(16777217), broadcast("model.pt")
    (16777217, 'model.pt')
    """
    backend = current()
    with enter("broadcast", backend, group, None if safe_mode else tensor) as call:
        if not call.is_member:
            return tensor
        call.check_member("src", src)
        here = backend.topology.rank == src
        if tensor is None and (here or not safe_mode):
            raise ValueError(
                "tensor must not be None on the rank that sends it, and elsewhere only with safe_mode=True"
            )
        if safe_mode:
            tensor = prepared(backend, tensor, src, call.group)
        if isinstance(tensor, Tensor):
            return in_place(backend, tensor, lambda place: backend.broadcast(place, src, call.group))
        return broadcast_value(backend, tensor, src, call.group)


def barrier(group: Any = None) -> None:
    """Wait until all ranks of a group are here."""
    backend = current()
    with enter("barrier", backend, group, None) as call:
        if call.is_member:
            backend.barrier(call.group)


def new_group(ranks: list[int], **kwargs: Any) -> Any:
    """Make a group of some ranks; all ranks must call this, in the same order.

    Args:
        ranks: global ranks, a list in any order; the group has them in theirs.
        kwargs: for the backend, as ``timeout``.

    Raises:
        ValueError: ``ranks`` is not a list of different integers in range.

    >>> new_group([0])
    Group(ranks=[0])
    """
    backend = current()
    ranks = checked_ranks(backend, ranks)
    with enter("new_group", backend, None, ranks):
        return backend.new_group(ranks, **kwargs)


def reduce(tensor: T, dst: int = 0, op: str = "SUM", group: Any = None) -> T | None:
    """Reduce a tensor or a number over the ranks; rank ``dst`` gets the result, the others ``None``.

    The argument is left as it is. See :func:`all_reduce` for the arguments.

    >>> reduce(3)
    3
    """
    if not isinstance(tensor, (Tensor, Number)):
        raise TypeError(f"tensor must be a tensor or a number, got {tensor!r} of type {type(tensor).__name__}")
    backend = current()
    if op not in backend.reductions:
        raise ValueError(f"op must be one of {backend.reductions} on {backend.model_name}, got {op!r}")
    with enter("reduce", backend, group, tensor, op) as call:
        call.require_member()
        call.check_member("dst", dst)
        mine = backend.topology.rank == dst
        if not isinstance(tensor, Tensor):
            number = reduced_number(backend, tensor, op, call.group)
            return cast(T, number) if mine else None
        reduced = backend.reduce(brought(backend, tensor).clone(), dst, op, call.group)
        return cast(T, reduced.to(tensor.device)) if mine else None


def gather(tensor: Any, dst: int = 0, group: Any = None) -> Any:
    """Gather what the ranks have on rank ``dst``, as :func:`all_gather` gives it; the others get ``None``.

    >>> gather("a")
    ['a']
    """
    backend = current()
    with enter("gather", backend, group, tensor) as call:
        call.require_member()
        call.check_member("dst", dst)
        mine = backend.topology.rank == dst
        if not isinstance(tensor, Tensor):
            values = all_gather_values(backend, tensor, call.group)
            return values if mine else None
        stacked = backend.gather(brought(backend, tensor), dst, call.group)
        if not mine:
            return None
        stacked = stacked.to(tensor.device)
        return stacked.flatten(0, 1) if tensor.dim() else stacked


def scatter(values: Sequence[Any] | None, src: int = 0, group: Any = None) -> Any:
    """Give every rank its own of the values that rank ``src`` has, in the order of the ranks.

    Args:
        values: one for each rank: tensors of any shapes, or numbers, strings, objects. Only ``src`` needs them.
        src: the rank that has them.
        group: as for :func:`all_reduce`, but who is not in it must not call this.

    >>> scatter([7])
    7
    """
    backend = current()
    with enter("scatter", backend, group, None) as call:
        call.require_member()
        call.check_member("src", src)
        held = None
        if backend.topology.rank == src:
            call.check_count("values", values)
            held = [portable(value) for value in values or ()]
        return scatter_values(backend, held, src, call.group)


def reduce_scatter(tensor: Tensor, op: str = "SUM", group: Any = None) -> Tensor:
    """Reduce a tensor over the ranks and give each its part: the k-th rank the k-th of equal parts.

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
    if op not in backend.reductions:
        raise ValueError(f"op must be one of {backend.reductions} on {backend.model_name}, got {op!r}")
    with enter("reduce_scatter", backend, group, tensor, op) as call:
        call.require_member()
        size = len(call.ranks)
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) % size:
            raise ValueError(f"tensor must be one whose first dimension is a multiple of {size}, got {tensor!r}")
        rows = brought(backend, tensor).view(size, -1, *tensor.shape[1:])
        return backend.reduce_scatter(rows, op, call.group).to(tensor.device)


def all_to_all(values: Sequence[Any], group: Any = None) -> list[Any]:
    """Send the k-th of the values to the k-th rank, and give what the ranks sent here, in their order.

    Args:
        values: one for each rank: tensors of any shapes, or numbers, strings, objects.
        group: as for :func:`scatter`.

    >>> all_to_all(["to myself"])
    ['to myself']
    """
    backend = current()
    with enter("all_to_all", backend, group, None) as call:
        call.require_member()
        call.check_count("values", values)
        return all_to_all_values(backend, [portable(value) for value in values], call.group)
