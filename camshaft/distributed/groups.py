"""Who takes part in a collective: what users name a group by, and the groups created from lists of ranks."""

from __future__ import annotations

import inspect
import operator
import reprlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.ranks import alone, begin, check_all_present, explain
from camshaft.errors import RankDivergenceError

_SEQUENCES = (list, tuple, range)
_OPTIONS = tuple(inspect.signature(dist.new_group).parameters)[1:]
_NOT_FOR_GROUPS = ("undefined", "fake")


class Call:
    """One call of a collective on this rank; in a ``with`` block, errors say where they were raised.

    Attributes:
        group: the group, ``None`` for all ranks.
        ranks: the global ranks of the group, in its order.
        is_member: whether this rank is one of them.
    """

    __slots__ = ("_backend", "_collective", "group", "is_member", "ranks")

    def __init__(self, collective: str, backend: Backend, group: Any) -> None:
        self._collective = collective
        self._backend = backend
        self.group, self.ranks = resolve(backend, group)
        self.is_member = group is None or backend.topology.rank in self.ranks

    def begin(self, value: Any = None, how: str = "", root: Any = None) -> None:
        """Check on members that the collective can complete; see :func:`camshaft.distributed.ranks.begin`."""
        if self.is_member:
            begin(self._backend, self._collective, self.group, self.ranks, value, how, root)

    def require_member(self) -> None:
        """Raise ``RankDivergenceError`` on a rank that is not in the group."""
        if not self.is_member:
            raise not_in_group(self._collective, self._backend.topology.rank, self.ranks)

    def check_member(self, name: str, rank: int) -> int:
        """Return a rank argument as a plain integer; raise an error if it is not in the group."""
        try:
            rank = operator.index(rank)
        except TypeError as error:
            raise TypeError(f"{name} must be a rank, an integer, got {rank!r}") from error
        if rank not in self.ranks:
            raise ValueError(f"{name} must be a rank of the group {list(self.ranks)}, got {rank!r}")
        return rank

    def one_for_each(self, name: str, values: Any) -> tuple[list[Any], TypeError | ValueError | None]:
        """Return a list of one value for each rank; or of ``None`` for each, and the error to raise on all ranks."""
        size = len(self.ranks)
        kind: type[TypeError | ValueError]
        try:
            length = len(values)
            held = list(values)
        except TypeError:
            kind = ValueError if values is None else TypeError
            got = "None" if values is None else f"{reprlib.repr(values)} of type {type(values).__name__}"
        else:
            if length == len(held) == size:
                return held, None
            kind, got = ValueError, f"{length} values"
        return [None] * size, kind(f"{name} must hold one value for each of {size} ranks, got {got}")

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            explain(error, self._backend, self._collective, self.ranks)


def enter(collective: str, backend: Backend, group: Any, value: Any = None, how: str = "", root: Any = None) -> Call:
    """Begin a collective; the arguments are those of :func:`camshaft.distributed.ranks.begin`.

    Raises:
        ValueError: ``group`` is not a group.
        RankDivergenceError: not all ranks can be here or, in debug mode, they call something else.
    """
    call = Call(collective, backend, group)
    if backend.job.compares_collectives or alone.get() is not None:  # else there is nothing to check
        call.begin(value, how, root)
    return call


def resolve(backend: Backend, group: Any) -> tuple[Group | None, Sequence[int]]:
    """Return the group that a user means, and its ranks.

    Args:
        backend: of this rank.
        group: ``None`` for all ranks, a sequence of ranks, or a group in the backend's own terms. The first use of a
            sequence creates a group: by its members or, where the backend needs them, by all ranks in the same order.

    Raises:
        ValueError: it is not one of these, the group was destroyed, or a rank is out of range.
        RankDivergenceError: the group must be created, and not all ranks needed for it run this block of code.
    """
    if group is None:
        return None, backend.members(None)
    ranks = backend.ranks_of(group)
    if ranks is not None:
        return group, ranks
    if not isinstance(group, _SEQUENCES):
        raise ValueError(f"group must be None, a list of ranks or a group from new_group that exists, got {group!r}")
    checked = checked_ranks(backend, group)
    found = _known(backend, checked)
    if found is None and not backend.members_make_groups:
        found = make(backend, checked)
    elif found is None:
        if backend.topology.rank in checked:
            _check_can_make(backend, checked, checked)
        found = backend.job.groups[tuple(checked)] = backend.group_of_members(checked)
    return found, checked


def make(backend: Backend, ranks: list[int], /, **options: Any) -> Group:
    """Create a group, on all ranks; without options, it is the one that a list of its ranks means from now on.

    Raises:
        TypeError: unknown option.
        ValueError: torch does not have the ``backend``.
        RankDivergenceError: not all ranks are here or, in debug mode, they call something else.
    """
    if unknown := [name for name in options if name not in _OPTIONS]:  # also where the backend ignores all of them
        raise TypeError(f"new_group takes {_OPTIONS} besides the ranks, got {unknown}")
    name = options.get("backend")  # also one for each kind of device: "cpu:gloo,cuda:nccl"
    if name and not all(dist.is_backend_available(part.rpartition(":")[2]) for part in str(name).split(",")):
        known = [one for one in dist.Backend.backend_list if one not in _NOT_FOR_GROUPS]
        raise ValueError(f"backend must be one of {tuple(filter(dist.is_backend_available, known))}, got {name!r}")
    _check_can_make(backend, backend.members(None), ranks)
    group = backend.new_group(ranks, **options)
    if not options and _known(backend, ranks) is None:
        backend.job.groups[tuple(ranks)] = group
    return group


def checked_ranks(backend: Backend, ranks: Any) -> list[int]:
    """Return a list of ranks in ascending order, which is the order of every group.

    Raises:
        ValueError: it is not a list of different integers in ``[0, world_size)``.
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


def not_in_group(function: str, rank: int, ranks: Sequence[int]) -> RankDivergenceError:
    """Return the error for a rank that calls what only the members of a group may call."""
    known = f" {list(ranks)}" if ranks else ""  # torch does not know the members of a group that this rank is not in
    return RankDivergenceError(f"{function} was called on rank {rank}, which is not in its group{known}")


def _known(backend: Backend, ranks: list[int]) -> Group | None:
    """Return the group created from these ranks, unless it was destroyed since."""
    group = backend.job.groups.get(tuple(ranks))
    return None if group is None or backend.ranks_of(group) is None else group


def _check_can_make(backend: Backend, needed: Sequence[int], ranks: list[int]) -> None:
    if len(needed) == backend.topology.world_size or backend.store() is not None:
        begin(backend, "new_group", None, needed, how=str(ranks))
    else:  # without a store, only all ranks can compare
        check_all_present("new_group", needed, backend.topology.rank)
