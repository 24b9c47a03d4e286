"""Parts of tensors: the region of a sharded tensor on this rank, and tensors whose chunks are in several files."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from camshaft.dtensors import is_dtensor, local
from camshaft.errors import DamagedCheckpointError

Offset = tuple[int, ...]
Chunk = tuple[Offset, Tensor]
"""A part of a tensor, and where it begins in it."""
Region = tuple[Offset, Offset]
"""Where a part of a tensor begins, and its shape."""


class Chunks:
    """A tensor whose chunks are in the shards of a checkpoint; only the chunks that a region needs are read.

    Args:
        name: its name in error messages.
        whole: a tensor without data that has its shape and dtype.
        chunks: its parts.

    >>> parts = Chunks(
    ...     "w", torch.empty(4, device="meta"), [((0,), torch.ones(3)), ((3,), torch.zeros(1))]
    ... )
    >>> parts.read(), parts.read((2,), (2,))
    (tensor([1., 1., 1., 0.]), tensor([1., 0.]))
    """

    def __init__(self, name: str, whole: Tensor, chunks: Sequence[Chunk]) -> None:
        self.name, self.shape, self.dtype, self._chunks = name, whole.shape, whole.dtype, chunks

    def read(self, offset: Offset | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """Return a region, by default all of the tensor.

        Raises:
            DamagedCheckpointError: the chunks do not cover it.
        """
        offset = offset or (0,) * len(self.shape)
        out = torch.empty(tuple(self.shape if shape is None else shape), dtype=self.dtype)
        missing = out.numel()
        for begins, chunk in self._chunks:
            source, target = [], []
            for mine, my_size, its, its_size in zip(offset, out.shape, begins, chunk.shape, strict=True):
                first, last = max(mine, its), min(mine + my_size, its + its_size)
                source.append(slice(first - its, max(first, last) - its))
                target.append(slice(first - mine, max(first, last) - mine))
            if part := chunk[tuple(source)].numel():
                out[tuple(target)] = chunk[tuple(source)]
                missing -= part
        if missing:
            raise DamagedCheckpointError(f"the shards lack {missing:,} elements of the tensor {self.name}")
        return out


def region(tensor: Any) -> Region:
    """Return where this rank's part of a sharded tensor begins, and its shape."""
    utils: Any = sys.modules["torch.distributed.tensor._utils"]
    shape, offset = utils.compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(map(int, offset)), tuple(map(int, shape))


def own_chunk(tensor: Any) -> Chunk | None:
    """Return this rank's part of a sharded tensor, if it has any; all ranks of its mesh call this."""
    if any(placement.is_partial() for placement in tensor.placements):
        replicate: Any = sys.modules["torch.distributed.tensor"].Replicate()
        tensor = tensor.redistribute(placements=[replicate if one.is_partial() else one for one in tensor.placements])
    part = local(tensor).detach()
    if tensor.device_mesh.get_coordinate() is None or part.numel() == 0:  # the mesh has other ranks
        return None
    return region(tensor)[0], part


def owners(regions: Sequence[Mapping[str, Region]], shapes: Mapping[str, Sequence[int]]) -> list[set[str]]:
    """Decide which rank saves which tensors: each region once, by the rank that holds it and has the least to save.

    Args:
        regions: of each rank, by the name of the tensor.
        shapes: of the whole tensors.

    Raises:
        ValueError: the regions do not make up a tensor.

    >>> left, right = ((0,), (2,)), ((2,), (2,))
    >>> owned = owners([{"a": left}, {"a": right, "b": left}, {"a": right}], {"a": (4,), "b": (2,)})
    >>> [sorted(names) for names in owned]
    [['a'], ['a', 'b'], []]
    """
    owned: list[set[str]] = [set() for _ in regions]
    num_elements = [0] * len(regions)
    for name, shape in sorted(shapes.items(), key=lambda item: prod(item[1]), reverse=True):
        ranks = defaultdict[Region, list[int]](list)
        for rank, mine in enumerate(regions):
            if name in mine:
                ranks[mine[name]].append(rank)
        if (found := sum(prod(size) for _, size in ranks)) != prod(shape):
            raise ValueError(f"the shards of {name} must have {prod(shape):,} elements in total, got {found:,}")
        for (_, size), holders in ranks.items():
            saver = min(holders, key=num_elements.__getitem__)
            owned[saver].add(name)
            num_elements[saver] += prod(size)
    return owned


def like(own: Any, value: Any) -> Any:
    """Shard a full tensor like the one that it replaces, without communication; return other values unchanged."""
    in_chunks = isinstance(value, Chunks)
    if is_dtensor(value):  # a state in memory, which is sharded already
        return value
    if not is_dtensor(own) or getattr(value, "shape", None) != own.shape:
        return value.read() if in_chunks else value
    if own.device_mesh.get_coordinate() is None:  # the mesh has other ranks
        part = own.to_local().to(value.dtype)
    elif in_chunks:
        part = value.read(*region(own))
    else:
        part = value[tuple(slice(first, first + size) for first, size in zip(*region(own), strict=True))].clone()
    part = part.to(own.device)
    kind: Any = sys.modules["torch.distributed.tensor"]
    return kind.DTensor.from_local(
        part, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )
