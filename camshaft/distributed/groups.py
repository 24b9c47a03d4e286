"""What users name a group by, and the groups that lists of ranks were made into."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Sequence
from typing import Any, overload

import torch.distributed as dist

from camshaft.distributed import agreement
from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.guard import check_all_present

_SEQUENCES = (list, tuple, range)
_OPTIONS = tuple(inspect.signature(dist.new_group).parameters)[1:]
_NOT_FOR_GROUPS = ("undefined", "fake")
_made: weakref.WeakKeyDictionary[Backend, dict[tuple[int, ...], Group]] = weakref.WeakKeyDictionary()


@overload
def resolve(backend: Backend, group: None) -> None: ...
@overload
def resolve(backend: Backend, group: Any) -> Group: ...
def resolve(backend: Backend, group: Any) -> Group | None:
    """Find the group that a user means: ``None`` for all ranks, ranks in a sequence, or a group made before.

    Ranks are made into a group once. Its members must all name it then; the other ranks too, where the backend needs
    them for that, and in the same order of calls.

    Raises:
        ValueError: it is none of these, or a rank is out of range.
        RankDivergenceError: the group is still to be made, and not all who must help run this part of the program.
    """
    if group is None or isinstance(group, Group):
        return group
    if isinstance(group, _SEQUENCES):
        ranks = checked_ranks(backend, group)
        return _made.setdefault(backend, {}).get(tuple(ranks)) or _make_of_ranks(backend, ranks)
    adopted = backend.adopt_group(group)
    if adopted is None:
        raise ValueError(f"group must be None, a list of ranks or a group from new_group, got {group!r}")
    return adopted


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
    _meet(backend, members(backend, None), ranks)
    group = backend.new_group(ranks, **options)
    if not options:
        _made.setdefault(backend, {}).setdefault(tuple(ranks), group)
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


def members(backend: Backend, group: Group | None) -> Sequence[int]:
    """List the global ranks of a group."""
    return range(backend.topology.world_size) if group is None else group.ranks
