"""Collectives for tensors, numbers, strings and objects, the same on every backend.

A tensor is reduced or overwritten **in place** by :func:`all_reduce` and :func:`broadcast`, and given back. Everything
else gives new values and leaves its arguments alone. What a rank cannot send it refuses in the same exchange, so that
all ranks raise the error and none waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

from camshaft.distributed import agreement
from camshaft.distributed.calls import enter, find
from camshaft.distributed.context import current
from camshaft.distributed.exchange import all_gather_values, broadcast_value
from camshaft.distributed.groups import checked_ranks, make
from camshaft.distributed.numbers import check_reduction, reduced_number
from camshaft.distributed.placement import brought, in_place

T = TypeVar("T")


def all_reduce(tensor: T, op: str = "SUM", group: Any = None) -> T:
    """Reduce a tensor, or a number, over the ranks; every rank gets the result.

    Args:
        tensor: of the same shape and dtype on all ranks, reduced in place; or a number, of the same kind on all
            ranks: an ``int`` is reduced as a 64-bit integer, a ``float`` in double precision, and ``True`` counts.
        op: ``"SUM"``, ``"PRODUCT"``, ``"MIN"``, ``"MAX"``, ``"AND"`` or ``"OR"`` (bitwise), as far as the backend
            has them.
        group: ``None`` for all ranks, a list of ranks, or a group from :func:`new_group` or of the library below, such
            as a process group of torch. Ranks outside of it get the argument back.

    Raises:
        TypeError: neither a tensor nor a number, or not one that can be reduced; on every rank, if the others have
            numbers and this one something else, ``None`` excepted, which raises here alone.
        ValueError: the backend does not know ``op``, or ``group`` is none; or a number does not fit into 64 bits.
        RankDivergenceError: not all ranks of the group are here.

    >>> import torch
    >>> all_reduce(3), all_reduce(torch.tensor([1.0, 2.0]), op="MAX")
    (3, tensor([1., 2.]))
    """
    backend = current()
    check_reduction(backend, tensor, op)
    with enter("all_reduce", backend, group, tensor, op) as call:
        if not call.is_member:
            return tensor
        if isinstance(tensor, Tensor):
            return cast(T, in_place(backend, tensor, backend.all_reduce, op, call.group))
        return cast(T, reduced_number(backend, tensor, op, call.group, len(call.ranks)))


def all_gather(tensor: Any, group: Any = None) -> Any:
    """Gather what the ranks have; every rank gets all of it, in the order of the ranks.

    Args:
        tensor: a tensor of the same shape on all ranks, or a number, a string, or any object that can be
            pickled.
        group: as for :func:`all_reduce`.

    Returns:
        For tensors of shape ``(d, ...)`` one of shape ``(ranks * d, ...)``; of shape ``()`` one of shape
        ``(ranks,)``, except in a single process without a context, where it stays as it is. For all else a list.

    Raises:
        TypeError: on every rank, if what one of them has cannot be pickled.

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
        here = brought(backend, tensor)
        sizes = here.shape or (1,)
        out = here.new_empty((len(call.ranks) * sizes[0], *sizes[1:]))
        backend.all_gather_into(out, here if tensor.dim() else here.view(1), call.group)
        return out if here is tensor else out.to(tensor.device)


def all_gather_tensors_with_shapes(tensor: Tensor, shapes: Sequence[Sequence[int]], group: Any = None) -> list[Tensor]:
    """Gather tensors of different shapes that every rank knows.

    Args:
        tensor: with the same number of dimensions and the same dtype on all ranks.
        shapes: the shape of each rank's tensor, in the order of the ranks of the group.
        group: as for :func:`all_reduce`.

    Returns:
        The tensors of the ranks.

    Raises:
        TypeError: ``tensor`` is none, or ``shapes`` holds something else.
        ValueError: ``shapes`` does not hold one for each rank, all with as many dimensions, or another one than this
            rank's for it.

    >>> import torch
    >>> all_gather_tensors_with_shapes(torch.ones(2, 1), [(2, 1)])
    [tensor([[1.],
            [1.]])]
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a tensor, got {tensor!r} of type {type(tensor).__name__}")
    backend = current()
    with find("all_gather_tensors_with_shapes", backend, group) as call:
        if not call.is_member:
            return [tensor]
        plain = call.checked_shapes(tensor, shapes)
        call.begin(how=f"{tensor.dtype} {plain}" if agreement.enabled() else "")
        largest = [max(sizes) for sizes in zip(*plain, strict=True)]
        padded = brought(backend, tensor).new_zeros(largest)
        padded[tuple(map(slice, tensor.shape))] = tensor.detach()
        stacked = backend.all_gather(padded, call.group).to(tensor.device)
        return [row[tuple(map(slice, shape))] for row, shape in zip(stacked, plain, strict=True)]


def broadcast(tensor: Any, src: int = 0, safe_mode: bool = False, group: Any = None) -> Any:
    """Give every rank what one of them has.

    Args:
        tensor: a tensor, a number, a string, a path, or any object that can be pickled. Tensors have the same
            shape and dtype on all ranks, and are overwritten in place; the other kinds are the same on all ranks.
        src: the rank that has it.
        safe_mode: what the other ranks pass does not matter, and may be ``None``.
        group: as for :func:`all_reduce`.

    Raises:
        TypeError: on every rank, if the value cannot be pickled.
        ValueError: the value is ``None`` where it is needed, or ``src`` is not in the group.

    >>> broadcast(16777217), broadcast("model.pt")
    (16777217, 'model.pt')
    """
    backend = current()
    with enter("broadcast", backend, group, None if safe_mode else tensor, root=src) as call:
        if not call.is_member:
            return tensor
        src = call.check_member("src", src)
        wrong = None
        if tensor is None and not (safe_mode and backend.topology.rank != src):
            wrong = ValueError(
                "tensor must not be None on the rank that sends it, and elsewhere only with safe_mode=True"
            )
            if not safe_mode:  # without it nobody knows what the others wait for
                raise wrong
        if isinstance(tensor, Tensor) and not safe_mode:
            return in_place(backend, tensor, backend.broadcast, src, call.group)
        return broadcast_value(backend, tensor, src, call.group, wrong)


def barrier(group: Any = None) -> None:
    """Wait until all ranks of a group are here."""
    backend = current()
    with enter("barrier", backend, group) as call:
        if call.is_member:
            backend.barrier(call.group)


def new_group(ranks: Sequence[int], **kwargs: Any) -> Any:
    """Make a group of some ranks; all ranks must call this, in the same order.

    Args:
        ranks: global ranks, a list, tuple or range in any order; the group orders them by rank.
        kwargs: what ``torch.distributed.new_group`` takes, such as ``timeout``, as far as the backend supports it.

    Returns:
        What the library below calls a group, so that it can be passed there too, as in
        ``DistributedDataParallel(model, process_group=group)``: a process group of torch, on the ranks outside of it
        ``torch.distributed.GroupMember.NON_GROUP_MEMBER``; a process set of Horovod; ``[ranks]`` on XLA; the list of
        ranks in a single process.

    Raises:
        TypeError: an argument is not known.
        ValueError: ``ranks`` is not a list of different integers in range, or torch does not have ``backend``.
        RankDivergenceError: not all ranks are here.

    >>> new_group([0])
    [0]
    """
    backend = current()
    return make(backend, checked_ranks(backend, ranks), **kwargs)
