"""What every collective does first: who takes part, is everybody here, do all mean the same."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Sized
from types import TracebackType
from typing import Any

from torch import Tensor

from camshaft.distributed import agreement, guard
from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.groups import members, resolve
from camshaft.errors import RankDivergenceError, annotate

_OUR_OWN = (RankDivergenceError, NotImplementedError)
_HINT = "CAMSHAFT_DEBUG=1 lets the ranks compare their calls first, and shows which rank called what from which line"


class Call:
    """One call of a collective on this rank.

    Attributes:
        group: the group, ``None`` for all ranks.
        is_member: whether this rank is one of them.
    """

    __slots__ = ("_backend", "_collective", "group", "is_member")

    def __init__(self, collective: str, backend: Backend, group: Group | None, is_member: bool) -> None:
        self._collective = collective
        self._backend = backend
        self.group = group
        self.is_member = is_member

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks of the group, in their order."""
        return members(self._backend, self.group)

    @property
    def _rank(self) -> int:
        return self._backend.topology.rank

    def require_member(self) -> None:
        """Refuse a rank that is not in the group."""
        if not self.is_member:
            raise RankDivergenceError(
                f"{self._collective} was called on rank {self._rank}, which is not in its group {list(self.ranks)}"
            )

    def check_member(self, name: str, rank: int) -> int:
        """Give a rank argument as a plain integer, if it is in the group."""
        try:
            rank = operator.index(rank)
        except TypeError as error:
            raise TypeError(f"{name} must be a rank, an integer, got {rank!r}") from error
        if rank not in self.ranks:
            raise ValueError(f"{name} must be a rank of the group {list(self.ranks)}, got {rank!r}")
        return rank

    def wrong_count(self, name: str, values: Sized | None) -> ValueError | None:
        """Say what is wrong with a list that does not hold one value for each rank."""
        if values is not None and len(values) == len(self.ranks):
            return None
        got = "None" if values is None else f"{len(values)} values"
        return ValueError(f"{name} must hold one value for each of {len(self.ranks)} ranks, got {got}")

    def check_shapes(self, tensor: Tensor, shapes: Sequence[Sequence[int]]) -> None:
        """Refuse shapes that do not hold this rank's own at its place."""
        if wrong := self.wrong_count("shapes", shapes):
            raise wrong
        place = self.ranks.index(self._rank)
        mine = tuple(shapes[place])
        if mine != tuple(tensor.shape):
            raise ValueError(f"shapes must hold this rank's shape {tuple(tensor.shape)} at {place}, got {mine}")

    def begin(self, value: Any = None, how: str = "", root: Any = None, is_long: bool = False) -> None:
        """See that all ranks are here, and in debug mode that they do the same; see :func:`enter`."""
        if self.is_member:
            guard.check_all_present(self._collective, self.ranks, self._rank)
            if agreement.patience is not None:
                agreement.check(self._backend, self.group, self.ranks, self._collective, value, how, root, is_long)

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            annotate(error, f"in {self._collective} on rank {self._rank}, among the ranks {list(self.ranks)}")
            is_of_library = isinstance(error, RuntimeError) and not isinstance(error, _OUR_OWN)
            if is_of_library and not agreement.enabled() and len(self.ranks) > 1:  # it may be that the calls differ
                annotate(error, _HINT)


def find(collective: str, backend: Backend, group: Any) -> Call:
    """Find who takes part in a collective, which :meth:`Call.begin` begins.

    Raises:
        ValueError: ``group`` is none.
    """
    if group is None:
        return Call(collective, backend, None, True)
    found = resolve(backend, group)
    return Call(collective, backend, found, backend.topology.rank in found.ranks)


def enter(
    collective: str,
    backend: Backend,
    group: Any,
    value: Any = None,
    how: str = "",
    root: Any = None,
    is_long: bool = False,
) -> Call:
    """Begin a collective.

    Args:
        collective: its name.
        backend: who carries it out.
        group: what the user names its ranks by.
        value: a tensor of the same shape and dtype on all ranks; other kinds may differ.
        how: what else is the same on all ranks, the reduction say.
        root: the rank that sends, or that gets the result.
        is_long: some ranks may do something else for long before they come.

    Raises:
        ValueError: ``group`` is none.
        RankDivergenceError: ranks of the group cannot be here; or, in debug mode, they are somewhere else.
    """
    call = find(collective, backend, group)
    if agreement.patience is not None or guard.alone.get() is not None:  # else there is nothing to see
        call.begin(value, how, root, is_long)
    return call
