"""What users name a group by, and the groups that lists of ranks were made into."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, overload

from camshaft.distributed import agreement
from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.guard import check_all_present

_made: weakref.WeakKeyDictionary[Backend, dict[tuple[int, ...], Group]] = weakref.WeakKeyDictionary()


@overload
def resolve(backend: Backend, group: None) -> None: ...
@overload
def resolve(backend: Backend, group: Any) -> Group: ...
def resolve(backend: Backend, group: Any) -> Group | None:
    """Find the group that a user means: ``None`` for all ranks, a list of ranks, or a group made before.

    A list is made into a group once, for which all ranks must use it, in the same order of calls.

    Raises:
        ValueError: it is none of these, or a rank is out of range.
        RankDivergenceError: the group is still to be made, and not all ranks run this part of the program.
    """
    if group is None or isinstance(group, Group):
        return group
    if isinstance(group, list):
        ranks = checked_ranks(backend, group)
        return _made.setdefault(backend, {}).get(tuple(ranks)) or make(backend, ranks)
    adopted = backend.adopt_group(group)
    if adopted is None:
        raise ValueError(f"group must be None, a list of ranks or a group from new_group, got {group!r}")
    return adopted


def make(backend: Backend, ranks: list[int], /, **options: Any) -> Group:
    """Make a group with the help of all ranks; without options, it is the one that a list of its ranks means.

    Raises:
        RankDivergenceError: they cannot all be here; or, in debug mode, they do something else.
    """
    everybody = members(backend, None)
    check_all_present("new_group", everybody, backend.topology.rank)
    if agreement.patience is not None:
        agreement.check(backend, None, everybody, "new_group", how=str(ranks))
    group = backend.new_group(ranks, **options)
    if not options:
        _made.setdefault(backend, {}).setdefault(tuple(ranks), group)
    return group


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


def members(backend: Backend, group: Group | None) -> Sequence[int]:
    """List the global ranks of a group."""
    return range(backend.topology.world_size) if group is None else group.ranks
