"""What users name a group by, and the groups that lists of ranks were made into."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from camshaft.distributed import agreement
from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.guard import check_all_present
from camshaft.errors import RankDivergenceError

_SEQUENCES = (list, tuple, range)
_OPTIONS = tuple(inspect.signature(dist.new_group).parameters)[1:]
_NOT_FOR_GROUPS = ("undefined", "fake")
_made: weakref.WeakKeyDictionary[Backend, dict[tuple[int, ...], Group]] = weakref.WeakKeyDictionary()


def resolve(backend: Backend, group: Any) -> tuple[Group | None, Sequence[int]]:
    """Find the group that a user means, and its ranks.

    Args:
        backend: of this rank.
        group: ``None`` for all ranks, a sequence of ranks, or a group in the backend's own terms. Ranks are made into
            a group once. Its members must all name it then; the other ranks too, where the backend needs them for that,
            and in the same order of calls.

    Raises:
        ValueError: it is not one of these, the group was destroyed, or a rank is out of range.
        RankDivergenceError: the group is still to be made, and not all who must help run this part of the program.
    """
    if group is None:
        return None, backend.members(None)
    ranks = backend.ranks_of(group)
    if ranks is not None:
        return group, ranks
    if not isinstance(group, _SEQUENCES):
        raise ValueError(f"group must be None, a list of ranks or a group from new_group that exists, got {group!r}")
    checked = checked_ranks(backend, group)
    known = _known(backend, checked)
    return (_make_of_ranks(backend, checked) if known is None else known), checked


def _known(backend: Backend, ranks: list[int]) -> Group | None:
    """Return the group that these ranks were made into, unless it was destroyed since."""
    group = _made.setdefault(backend, {}).get(tuple(ranks))
    return None if group is None or backend.ranks_of(group) is None else group


def _make_of_ranks(backend: Backend, ranks: list[int]) -> Group:
    """Make the group that ranks mean, by its members if they can do it, else with the help of all ranks."""
    if not backend.members_make_groups:
        return make(backend, ranks)
    if backend.topology.rank in ranks:
        _meet(backend, ranks, ranks)
    group = _made[backend][tuple(ranks)] = backend.group_of_members(ranks)
    return group


def make(backend: Backend, ranks: list[int], /, **options: Any) -> Group:
    """Make a group with the help of all ranks; without options, it is the one that a list of its ranks means.

    Raises:
        TypeError: torch knows no such option.
        ValueError: torch does not have the ``backend``.
        RankDivergenceError: they cannot all be here; or, in debug mode, they do something else.
    """
    if options:
        _check_options(options)
    _meet(backend, backend.members(None), ranks)
    group = backend.new_group(ranks, **options)
    if not options and _known(backend, ranks) is None:
        _made[backend][tuple(ranks)] = group
    return group


def _meet(backend: Backend, helpers: Sequence[int], ranks: list[int]) -> None:
    """Refuse to wait for ranks that do not help to make a group."""
    check_all_present("new_group", helpers, backend.topology.rank)
    can_compare = len(helpers) == backend.topology.world_size or backend.store() is not None
    if agreement.patience is not None and can_compare:
        agreement.check(backend, None, helpers, "new_group", how=str(ranks))


def _check_options(options: dict[str, Any]) -> None:
    """Refuse what no group can be made with, also where the backend looks at none of it, and before anybody waits."""
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise TypeError(f"new_group takes {_OPTIONS} besides the ranks, got {unknown}")
    backend = options.get("backend")  # its name, or one for each kind of device, "cpu:gloo,cuda:nccl"
    names = [] if backend is None else [part.rpartition(":")[2] for part in str(backend).split(",")]
    if not all(map(dist.is_backend_available, names)):
        known = [name for name in dist.Backend.backend_list if name not in _NOT_FOR_GROUPS]
        raise ValueError(f"backend must be one of {tuple(filter(dist.is_backend_available, known))}, got {backend!r}")


def not_in_group(function: str, rank: int, ranks: Sequence[int]) -> RankDivergenceError:
    """Return the error of a rank that calls what the members of a group alone may call."""
    known = f" {list(ranks)}" if ranks else ""  # torch tells no rank the members of a group that it is not in
    return RankDivergenceError(f"{function} was called on rank {rank}, which is not in its group{known}")


def checked_ranks(backend: Backend, ranks: Any) -> list[int]:
    """Check a list of ranks, and give it in the order of the ranks, which is that of every group.

    Raises:
        ValueError: it is no list of different integers in ``[0, world_size)``.
    """
    size = backend.topology.world_size
    try:
        plain = [operator.index(rank) for rank in ranks] if isinstance(ranks, _SEQUENCES) else []
    except TypeError:
        plain = []
    if not plain or bool in map(type, ranks):
        raise ValueError(f"ranks must be a non-empty list of int, got {ranks!r}")
    if len(set(plain)) < len(plain) or not all(0 <= rank < size for rank in plain):
        raise ValueError(f"ranks must be different and in [0, {size}), got {ranks}")
    return sorted(plain)
