"""What users name a group by, and the groups that lists of ranks were made into."""

from __future__ import annotations

import weakref
from typing import Any

from camshaft.distributed.backend import Backend, Group

_made: weakref.WeakKeyDictionary[Backend, dict[tuple[int, ...], Group]] = weakref.WeakKeyDictionary()


def resolve(backend: Backend, group: Any) -> Group | None:
    """Find the group that a user means: ``None`` for all ranks, a list of ranks, or a group made before.

    A list is made into a group once; all ranks must use it in the same order of calls then.

    Raises:
        ValueError: it is none of these, or a rank is out of range.
    """
    if group is None or isinstance(group, Group):
        return group
    if isinstance(group, list):
        ranks = checked_ranks(backend, group)
        cache = _made.setdefault(backend, {})
        if tuple(ranks) not in cache:
            cache[tuple(ranks)] = backend.new_group(ranks)
        return cache[tuple(ranks)]
    adopted = backend.adopt_group(group)
    if adopted is None:
        raise ValueError(f"group must be None, a list of ranks or a group from new_group, got {group!r}")
    return adopted


def checked_ranks(backend: Backend, ranks: Any) -> list[int]:
    """Check a list of ranks, and give it in the order of the ranks, which is that of every group.

    Raises:
        ValueError: it is no list of different integers in ``[0, world_size)``.
    """
    size = backend.topology.world_size
    if not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks) or not ranks:
        raise ValueError(f"ranks must be a non-empty list of int, got {ranks!r}")
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise ValueError(f"ranks must be different and in [0, {size}), got {ranks}")
    return sorted(ranks)


def members(backend: Backend, group: Group | None) -> tuple[int, ...]:
    """List the global ranks of a group."""
    return tuple(range(backend.topology.world_size)) if group is None else group.ranks
