"""What every collective does first: who takes part, is everybody here, do all mean the same."""

from __future__ import annotations

from collections.abc import Sized
from types import TracebackType
from typing import Any

from camshaft.distributed import agreement
from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.groups import members, resolve
from camshaft.distributed.guard import check_all_present
from camshaft.errors import RankDivergenceError, annotate


class Call:
    """One call of a collective on this rank.

    Attributes:
        group: the group, ``None`` for all ranks.
        ranks: global ranks of the group, in their order.
        is_member: whether this rank is one of them.
    """

    __slots__ = ("_rank", "collective", "group", "is_member", "ranks")

    def __init__(self, collective: str, group: Group | None, ranks: tuple[int, ...], rank: int) -> None:
        self.collective = collective
        self.group = group
        self.ranks = ranks
        self._rank = rank
        self.is_member = rank in ranks

    @property
    def place(self) -> int:
        """This rank's number in the group."""
        return self.ranks.index(self._rank)

    def require_member(self) -> None:
        """Refuse a rank that is not in the group."""
        if not self.is_member:
            raise RankDivergenceError(
                f"{self.collective} was called on rank {self._rank}, which is not in its group {list(self.ranks)}"
            )

    def check_member(self, name: str, rank: int) -> None:
        """Refuse a rank argument that is not in the group."""
        if rank not in self.ranks:
            raise ValueError(f"{name} must be a rank of the group {list(self.ranks)}, got {rank!r}")

    def check_count(self, name: str, values: Sized | None) -> None:
        """Refuse a list that does not hold one value for each rank."""
        if values is None or len(values) != len(self.ranks):
            got = "None" if values is None else f"{len(values)} values"
            raise ValueError(f"{name} must hold one value for each of {len(self.ranks)} ranks, got {got}")

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            annotate(error, f"in {self.collective} on rank {self._rank}, among the ranks {list(self.ranks)}")


def enter(collective: str, backend: Backend, group: Any, value: Any, op: str | None = None) -> Call:
    """Begin a collective.

    Raises:
        ValueError: ``group`` is none.
        RankDivergenceError: ranks of the group cannot be here; or, in debug mode, they are somewhere else.
    """
    found = resolve(backend, group)
    ranks = members(backend, found)
    rank = backend.topology.rank
    if rank in ranks:
        check_all_present(collective, ranks, rank)
        if agreement.enabled():
            agreement.check(backend, ranks, agreement.describe(collective, value, op))
    return Call(collective, found, ranks, rank)
