"""Collectives for tensors, numbers, strings and objects, the same on every backend.

:func:`all_reduce` and :func:`broadcast` change a tensor **in place**, and return it. Everything else returns new
values and leaves its arguments alone. A value that cannot be sent raises the same error on all ranks, and none hangs.
Those after which the ranks hold different values are called by all ranks of a group, and no others.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

from camshaft.distributed.collectives.call import Call, checked_ranks, enter, make
from camshaft.distributed.collectives.values import (
    all_gather_values,
    all_to_all_values,
    broadcast_value,
    check_reduction,
    copied_back,
    gather_values,
    prepared,
    reduced_number,
    scatter_values,
)
from camshaft.distributed.job import current

T = TypeVar("T")


def all_reduce(tensor: T, op: str = "SUM", group: Any = None) -> T:
    """Reduce a tensor, or a number, over the ranks; every rank gets the result.

    Args:
        tensor: of the same shape and dtype on all ranks, reduced in place; or a number, of the same kind on all
            ranks: an ``int`` is reduced as a 64-bit integer, a ``float`` in double precision, and ``True`` counts as 1.
        op: ``"SUM"``, ``"PRODUCT"``, ``"MIN"``, ``"MAX"``, ``"AND"`` or ``"OR"`` (bitwise), if the backend supports it.
        group: ``None`` for all ranks, a list of ranks, or a group from :func:`new_group` or of the library below, such
            as a process group of torch. Ranks outside of it get the argument back.

    Raises:
        TypeError: not a tensor or a number that can be reduced; on all ranks if one of them has another value among
            numbers. ``None`` raises on this rank only.
        ValueError: the backend does not support ``op``, ``group`` is not a group, or a number does not fit into 64
            bits.
        RankDivergenceError: not all ranks of the group are here.

    >>> import torch
    >>> all_reduce(3), all_reduce(torch.tensor([1.0, 2.0]), op="MAX")
    (3, tensor([1., 2.]))
    """
    backend = current()
    if op != "SUM" or tensor is None:  # every backend adds up everything else
        check_reduction(backend, tensor, op)
    with Call("all_reduce", backend, group) as call:
        if not call.is_member:
            return tensor
        call.begin(tensor, op)
        if isinstance(tensor, Tensor):
            here = prepared(backend, tensor, in_place=True)
            reduced = backend.all_reduce(here, op, call.group)
            return tensor if reduced is tensor else cast(T, copied_back(reduced, tensor))
        return cast(T, reduced_number(backend, tensor, op, call.group, len(call.ranks)))


def all_gather(tensor: Any, group: Any = None) -> Any:
    """Gather a value from every rank; every rank gets all of them, in the order of the ranks.

    The result has no gradient. For one, as in a contrastive loss, use ``torch.distributed.nn.functional.all_gather``.

    Args:
        tensor: a tensor of the same shape on all ranks, or a number, a string, or any picklable object.
        group: as for :func:`all_reduce`.

    Returns:
        For tensors of shape ``(d, ...)`` one of shape ``(ranks * d, ...)``; of shape ``()`` one of shape
        ``(ranks,)``, except in a single process without a backend, where it is returned unchanged. For other values a
        list.

    Raises:
        TypeError: on all ranks, if a value cannot be pickled.

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
        here = prepared(backend, tensor, "all_gather")
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
        TypeError: ``tensor`` is not a tensor, or ``shapes`` does not hold shapes.
        ValueError: ``shapes`` does not hold one for each rank, of as many dimensions as ``tensor``, or a wrong one for
            this rank.

    >>> import torch
    >>> all_gather_tensors_with_shapes(torch.ones(2, 1), [(2, 1)])
    [tensor([[1.],
            [1.]])]
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a tensor, got {tensor!r} of type {type(tensor).__name__}")
    backend = current()
    with Call("all_gather_tensors_with_shapes", backend, group) as call:
        if not call.is_member:
            return [tensor]
        try:
            plain = [tuple(map(operator.index, shape)) for shape in shapes]
        except TypeError as error:
            raise TypeError(f"shapes must hold a shape for each rank, as (2, 3), got {shapes!r}") from error
        _, wrong = call.one_for_each("shapes", plain)
        if wrong is not None:
            raise wrong
        if any(len(shape) != tensor.dim() for shape in plain):
            raise ValueError(f"shapes must all have {tensor.dim()} dimensions, as this rank's tensor, got {plain}")
        place = call.ranks.index(backend.topology.rank)
        if plain[place] != tuple(tensor.shape):
            raise ValueError(f"shapes must hold this rank's shape {tuple(tensor.shape)} at {place}, got {plain[place]}")
        largest = [max(sizes) for sizes in zip(*plain, strict=True)]
        padded = prepared(backend, tensor, "all_gather_tensors_with_shapes").new_zeros(largest)
        call.begin(how=f"{tensor.dtype} {plain}" if backend.job.compares_collectives else "")
        padded[tuple(map(slice, tensor.shape))] = tensor.detach()
        stacked = backend.all_gather(padded, call.group).to(tensor.device)
        return [row[tuple(map(slice, shape))] for row, shape in zip(stacked, plain, strict=True)]


def broadcast(tensor: Any, src: int = 0, safe_mode: bool = False, group: Any = None) -> Any:
    """Send a value from one rank to all.

    Args:
        tensor: a tensor, a number, a string, a path, or any picklable object. Tensors have the same shape and dtype on
            all ranks, and are overwritten in place; other values are of the same kind on all ranks.
        src: the rank that sends its value.
        safe_mode: the other ranks may pass anything, also ``None``.
        group: as for :func:`all_reduce`.

    Raises:
        TypeError: on all ranks, if the value cannot be pickled.
        ValueError: the value is ``None`` where it is needed, or ``src`` is not in the group.

    >>> broadcast(16777217), broadcast("model.pt")
    (16777217, 'model.pt')
    """
    backend = current()
    with Call("broadcast", backend, group) as call:
        if not call.is_member:
            return tensor
        src = call.check_member("src", src)
        wrong = None
        if tensor is None and not (safe_mode and backend.topology.rank != src):
            wrong = ValueError(
                "tensor must not be None on the rank that sends it, and elsewhere only with safe_mode=True"
            )
            if not safe_mode:  # the other ranks may pass tensors, which expect no refusal
                raise wrong
        call.begin(None if safe_mode else tensor, root=src)
        if isinstance(tensor, Tensor) and not safe_mode:
            here = prepared(backend, tensor, in_place=True)
            sent = backend.broadcast(here, src, call.group)
            return tensor if sent is tensor else copied_back(sent, tensor)
        return broadcast_value(backend, tensor, src, call.group, wrong)


def reduce(tensor: T, dst: int = 0, op: str = "SUM", group: Any = None) -> T | None:
    """Reduce a tensor or a number over the ranks; rank ``dst`` gets the result, the others ``None``.

    The argument is left as it is. See :func:`all_reduce` for the arguments.

    >>> reduce(3)
    3
    """
    backend = current()
    check_reduction(backend, tensor, op)
    with Call("reduce", backend, group) as call:
        call.require_member()
        dst = call.check_member("dst", dst)
        is_root = backend.topology.rank == dst
        call.begin(tensor, op, dst)
        if not isinstance(tensor, Tensor):
            number = reduced_number(backend, tensor, op, call.group, len(call.ranks))
            return cast(T, number) if is_root else None
        reduced = backend.reduce(prepared(backend, tensor).clone(), dst, op, call.group)
        return cast(T, reduced.to(tensor.device)) if is_root else None


def gather(tensor: Any, dst: int = 0, group: Any = None) -> Any:
    """Gather a value from every rank; rank ``dst`` gets what :func:`all_gather` returns, the others ``None``.

    >>> gather("a")
    ['a']
    """
    backend = current()
    with Call("gather", backend, group) as call:
        call.require_member()
        dst = call.check_member("dst", dst)
        call.begin(tensor, root=dst)
        if not isinstance(tensor, Tensor):
            return gather_values(backend, tensor, dst, call.group)
        stacked = backend.gather(prepared(backend, tensor), dst, call.group)
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
    with Call("scatter", backend, group) as call:
        call.require_member()
        src = call.check_member("src", src)
        call.begin(root=src)
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
    with Call("reduce_scatter", backend, group) as call:
        call.require_member()
        size = len(call.ranks)
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) % size:
            raise ValueError(f"tensor must be one whose first dimension is a multiple of {size}, got {tensor!r}")
        rows = prepared(backend, tensor).view(size, len(tensor) // size, *tensor.shape[1:])
        call.begin(tensor, op)
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


def barrier(group: Any = None) -> None:
    """Wait until all ranks of a group have called this."""
    backend = current()
    with Call("barrier", backend, group) as call:
        if call.is_member:
            call.begin()
            backend.barrier(call.group)


def new_group(ranks: Sequence[int], **kwargs: Any) -> Any:
    """Create a group of some ranks; all ranks must call this, in the same order.

    Args:
        ranks: global ranks, a list, tuple or range in any order; the group orders them by rank. In a single process
            there may be none, so ``list(range(1, world_size))`` works there too.
        kwargs: for ``torch.distributed.new_group``, such as ``timeout``, if the backend supports them.

    Returns:
        What the library below calls a group, so that it can be passed there too, as in
        ``DistributedDataParallel(model, process_group=group)``: a process group of torch, on the ranks outside of it
        ``torch.distributed.GroupMember.NON_GROUP_MEMBER``; a process set of Horovod; ``[ranks]`` on XLA; the list of
        ranks in a single process.

    Raises:
        TypeError: unknown argument.
        ValueError: ``ranks`` is not a list of different integers in range.
        RankDivergenceError: not all ranks are here.

    >>> new_group([0])
    [0]
    """
    backend = current()
    return make(backend, checked_ranks(backend, ranks), **kwargs)
