"""Who takes part in a collective, what it checks first, and what its errors say."""

from __future__ import annotations

import inspect
import operator
import reprlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, SupportsIndex

import torch.distributed as dist
from torch import Tensor

from camshaft import activity
from camshaft.arguments import check_known, check_type
from camshaft.distributed.backends.contract import Backend, Group
from camshaft.distributed.collectives.values import check_dense
from camshaft.distributed.failures import OUR_OWN, debug, translate
from camshaft.distributed.failures.alone import alone, check_all_present
from camshaft.errors import RankDivergenceError, annotate
from camshaft.text import counted, shortened_ranks

_SEQUENCES = (list, tuple, range)
_OPTIONS = tuple(inspect.signature(dist.new_group).parameters)[1:]
_HINT = (
    "set CAMSHAFT_DEBUG=1 to compare the ranks' calls before each collective, and see which rank called what, and where"
)


class Call:
    """One call of a collective on this rank; in a ``with`` block, errors say where they were raised.

    Attributes:
        group: the group, ``None`` for all ranks.
        ranks: the global ranks of the group, in its order.
        is_member: whether this rank is one of them.

    Raises:
        ValueError: ``group`` is not a group.
    """

    __slots__ = ("_added", "_backend", "_collective", "_has_begun", "_is_tensor", "group", "is_member", "ranks")

    def __init__(self, collective: str, backend: Backend, group: Any) -> None:
        self._collective = collective
        self._backend = backend
        self._added: list[Any] | None = None  # to the calls of the backend
        self._has_begun = self._is_tensor = False
        if group is None:  # not worth a call
            self.group, self.ranks, self.is_member = None, backend.everyone, True
        else:
            self.group, self.ranks = _resolve(backend, group)
            self.is_member = backend.topology.rank in self.ranks

    def begin(self, value: Any = None, how: str = "", root: Any = None) -> None:
        """Check on members that the collective can complete; the arguments of this rank are checked before.

        Args:
            value: what this rank passes; in debug mode, dtype and shape of a tensor are compared.
            how: what else is the same on all ranks, for example the reduction.
            root: the rank that sends, or that receives the result.

        Raises:
            RankDivergenceError: not all ranks can be here or, in debug mode, they call something else.
            RankFailedError: another rank has failed.
            TypeError: in debug mode, the tensor is sparse, quantized, nested or on ``meta``.
        """
        backend = self._backend
        block = alone.get()
        if not self.is_member or (backend.name is None and block is None):  # nothing is checked or recorded
            return
        job = backend.job
        if block is not None:
            check_all_present(self._collective, self.ranks, backend.topology.rank)
        if job.verdict is not None:
            raise job.verdict()
        if (clock := activity.own_clock) is not None:
            clock.pause()
            self._has_begun = True
        self._is_tensor = isinstance(value, Tensor)
        if job.compares_collectives:
            if self._is_tensor:
                check_dense(value)  # else, the others would wait for this rank in the next comparison
            try:
                debug.compare(backend, self.group, self.ranks, self._collective, value, how, root)
            except RankDivergenceError as error:
                lost = error.__cause__  # the connection to the store
                if lost is not None and (found := translate(lost, backend)) is not lost:
                    raise found from found.__cause__
                raise
        if backend.adds_calls and backend.calls is not None:
            name = "all" if self.group is None else getattr(self.group, "group_name", str(list(self.ranks)))
            tensors = [value] if self._is_tensor else []
            self._added = backend.calls.begin(name, self.ranks, self._collective, tensors)

    def require_member(self) -> None:
        """Raise ``RankDivergenceError`` on a rank that is not in the group."""
        if not self.is_member:
            known = (
                f" {shortened_ranks(self.ranks)}" if self.ranks else ""
            )  # unknown for a group that this rank is not in
            rank = self._backend.topology.rank
            raise RankDivergenceError(f"{self._collective} was called on rank {rank}, which is not in its group{known}")

    def check_member(self, name: str, rank: int) -> int:
        """Return a rank argument as a plain integer; raise an error if it is not one, or not in the group."""
        if type(rank) is not int:  # looked at first: isinstance of a protocol takes much longer
            check_type(name, rank, SupportsIndex, "an integer")
        if rank not in self.ranks:
            raise ValueError(f"{name} must be a rank of the group {shortened_ranks(self.ranks)}, got {rank!r}")
        return int(rank)

    def one_for_each(self, name: str, values: Any) -> tuple[list[Any], ValueError | None]:
        """Return a list of one value for each rank; or of ``None`` for each, and the error to raise on all ranks."""
        size = len(self.ranks)
        try:
            if len(values) == size and len(held := list(values)) == size:
                return held, None
        except TypeError:  # not a container
            pass
        got = f"{reprlib.repr(values)} of type {type(values).__name__}"
        return [None] * size, ValueError(f"{name} must hold {counted(size, 'value')}, one for each rank, got {got}")

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                among = f", among the ranks {shortened_ranks(self.ranks)}" if self.ranks else ""
                rank = self._backend.topology.rank
                explain(error, self._backend, self.ranks, f"in {self._collective} on rank {rank}{among}")
        finally:
            if self._added is not None:
                # a tensor may still be refused, but in place of another value that is wrong, all ranks get its error
                self._backend.calls.end(
                    self._added, not (self._is_tensor and isinstance(error, (TypeError, ValueError)))
                )
            if self._has_begun and (clock := activity.own_clock) is not None:
                clock.resume()


def enter(collective: str, backend: Backend, group: Any, value: Any = None, how: str = "") -> Call:
    """Begin a collective: :class:`Call` and :meth:`Call.begin`."""
    call = Call(collective, backend, group)
    call.begin(value, how)
    return call


def make(backend: Backend, ranks: list[int], /, **options: Any) -> Group:
    """Create a group, on all ranks; without options, it is the one that a list of its ranks means from now on.

    Raises:
        TypeError: unknown option.
        RankDivergenceError: not all ranks are here or, in debug mode, they call something else.
    """
    check_known(options, _OPTIONS, "new_group")  # also where the backend ignores all of them
    if not ranks:
        return ranks
    _check_can_make(backend, backend.members(None), ranks)
    group = backend.new_group(ranks, **options)
    if not options and _known(backend, ranks) is None:
        backend.job.groups[tuple(ranks)] = group
    return group


def checked_ranks(backend: Backend, ranks: Any) -> list[int]:
    """Return a list of ranks in ascending order, which is the order of every group.

    Raises:
        ValueError: it is not a list of distinct integers in ``[0, world_size)``, at least one unless there is a
            single process.
    """
    size = backend.topology.world_size
    try:
        plain = [operator.index(rank) for rank in ranks] if isinstance(ranks, _SEQUENCES) else []
    except TypeError:
        plain = []
    if isinstance(ranks, _SEQUENCES) and not ranks and size == 1:  # as list(range(1, size)) is
        return []
    if not plain or bool in map(type, ranks):
        raise ValueError(f"ranks must be a non-empty list of int, got {ranks!r}")
    if len(set(plain)) < len(plain) or not all(0 <= rank < size for rank in plain):
        raise ValueError(f"ranks must be distinct and in [0, {size}), got {ranks}")
    return sorted(plain)


def explain(error: BaseException, backend: Backend, ranks: Sequence[int], where: str) -> None:
    """Add to an error where it was raised, and replace one of a library that only reports a closed connection.

    Raises:
        RankFailedError: another rank has failed or left before.
        RankDivergenceError: the ranks called different collectives.
    """
    annotate(error, where)
    found = translate(error, backend, ranks)
    if found is not error:
        annotate(found, where)
        raise found from found.__cause__
    is_of_library = isinstance(error, RuntimeError) and not isinstance(error, OUR_OWN)
    if is_of_library and not backend.job.compares_collectives and len(ranks) > 1:
        annotate(error, _HINT)


def _resolve(backend: Backend, group: Any) -> tuple[Group, Sequence[int]]:
    """Return the group that a user means, and its ranks.

    Args:
        backend: of this rank.
        group: a sequence of ranks, or a group in the backend's own terms. The first use of a sequence creates a group:
            by its members or, where the backend needs them, by all ranks in the same order.

    Raises:
        ValueError: it is not one of these, the group was destroyed, or a rank is out of range.
        RankDivergenceError: the group must be created, and not all ranks needed for it run this block of code.
    """
    ranks = backend.ranks_of(group)
    if ranks is not None:
        return group, ranks
    if not isinstance(group, _SEQUENCES):
        raise ValueError(f"group must be None, a list of ranks, or an existing group from new_group, got {group!r}")
    checked = checked_ranks(backend, group)
    if not checked:
        return group, ()
    found = _known(backend, checked)
    if found is None and not backend.members_make_groups:
        found = make(backend, checked)
    elif found is None:
        if backend.topology.rank in checked:
            _check_can_make(backend, checked, checked)
        found = backend.job.groups[tuple(checked)] = backend.group_of_members(checked)
    return found, checked


def _known(backend: Backend, ranks: list[int]) -> Group | None:
    """Return the group created from these ranks, unless it was destroyed since."""
    group = backend.job.groups.get(tuple(ranks))
    return None if group is None or backend.ranks_of(group) is None else group


def _check_can_make(backend: Backend, needed: Sequence[int], ranks: list[int]) -> None:
    check_all_present("new_group", needed, backend.topology.rank)
    if backend.job.compares_collectives and (len(needed) == backend.topology.world_size or backend.store() is not None):
        debug.compare(backend, None, needed, "new_group", how=str(ranks))
