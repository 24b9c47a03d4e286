"""What every collective does first: who takes part, is everybody here, do all mean the same."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch import Tensor

from camshaft.distributed import agreement, guard
from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.groups import not_in_group, resolve
from camshaft.errors import RankDivergenceError, annotate

_OUR_OWN = (RankDivergenceError, NotImplementedError)
_HINT = "CAMSHAFT_DEBUG=1 lets the ranks compare their calls first, and shows which rank called what from which line"


class Call:
    """One call of a collective on this rank.

    Attributes:
        group: the group, ``None`` for all ranks.
        ranks: the global ranks of the group, in their order.
        is_member: whether this rank is one of them.
    """

    __slots__ = ("_backend", "_collective", "group", "is_member", "ranks")

    def __init__(self, collective: str, backend: Backend, group: Group | None, ranks: Sequence[int]) -> None:
        self._collective = collective
        self._backend = backend
        self.group = group
        self.ranks = ranks
        self.is_member = group is None or self._rank in ranks

    @property
    def _rank(self) -> int:
        return self._backend.topology.rank

    def require_member(self) -> None:
        """Refuse a rank that is not in the group."""
        if not self.is_member:
            raise not_in_group(self._collective, self._rank, self.ranks)

    def check_member(self, name: str, rank: int) -> int:
        """Give a rank argument as a plain integer, if it is in the group."""
        try:
            rank = operator.index(rank)
        except TypeError as error:
            raise TypeError(f"{name} must be a rank, an integer, got {rank!r}") from error
        if rank not in self.ranks:
            raise ValueError(f"{name} must be a rank of the group {list(self.ranks)}, got {rank!r}")
        return rank

    def one_for_each(self, name: str, values: Any) -> tuple[list[Any], TypeError | ValueError | None]:
        """Give values as a list of one for each rank; or ``None`` for each, and what is wrong with the values."""
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

    def checked_shapes(self, tensor: Tensor, shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Give the shapes of the ranks' tensors, if that of this rank is its own."""
        held, wrong = self.one_for_each("shapes", shapes)
        if wrong is not None:
            raise wrong
        try:
            plain = [tuple(map(operator.index, shape)) for shape in held]
        except TypeError as error:
            raise TypeError(f"shapes must hold a shape for each rank, as (2, 3), got {shapes!r}") from error
        if len(set(map(len, plain))) > 1:
            raise ValueError(f"shapes must all have the same number of dimensions, got {plain}")
        place = self.ranks.index(self._rank)
        if plain[place] != tuple(tensor.shape):
            raise ValueError(f"shapes must hold this rank's shape {tuple(tensor.shape)} at {place}, got {plain[place]}")
        return plain

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
            among = f", among the ranks {list(self.ranks)}" if self.ranks else ""
            where = f"in {self._collective} on rank {self._rank}{among}"
            annotate(error, where)
            raise_if_some_left(error, self._backend, self.ranks, where)
            is_of_library = isinstance(error, RuntimeError) and not isinstance(error, _OUR_OWN)
            if is_of_library and not agreement.enabled() and len(self.ranks) > 1:  # it may be that the calls differ
                annotate(error, _HINT)


def raise_if_some_left(error: BaseException, backend: Backend, ranks: Sequence[int], where: str) -> None:
    """Raise a better error where a library fails because ranks have left the run: it only says who hung up.

    Raises:
        RankDivergenceError: some of the ranks have left.
    """
    if isinstance(error, RuntimeError) and not isinstance(error, _OUR_OWN) and (text := departures(backend, ranks)):
        raise RankDivergenceError(f"{text}, {where}") from error


def annotate_departures(error: BaseException, backend: Backend) -> None:
    """Note on an error from anywhere, the backward pass of DDP say, which ranks have left the run."""
    is_of_library = isinstance(error, RuntimeError) and not isinstance(error, _OUR_OWN)
    if is_of_library and (text := departures(backend, range(backend.topology.world_size))):
        annotate(error, text)


def departures(backend: Backend, ranks: Sequence[int]) -> str:
    """Describe which of the ranks have left the run, and how; empty if none has."""
    found = "; ".join(f"rank {rank} {how}" for rank, how in backend.left(ranks).items())
    return found and f"{found}; every rank must take part in each collective"


def find(collective: str, backend: Backend, group: Any) -> Call:
    """Find who takes part in a collective, which :meth:`Call.begin` begins.

    Raises:
        ValueError: ``group`` is none.
    """
    return Call(collective, backend, *resolve(backend, group))


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
