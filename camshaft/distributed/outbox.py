"""What was begun and nobody waits for: its memory must live until it has left this process, or has come."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable

from torch import Tensor

from camshaft.distributed.backend import Backend, Work

Transfer = tuple[Work, Tensor]

_LOOK_AT = 4 << 20  # bytes that are kept before somebody looks which of them have left
_EACH = 64 << 10  # bytes that each transfer counts for besides its own, so that small ones do not pile up


class Outbox:
    """What was sent to one rank, in its order, and may not have left yet.

    Args:
        dst: the rank.
    """

    def __init__(self, dst: int) -> None:
        self._dst = dst
        self._kept: deque[Transfer] = deque()
        self._weight = 0
        self._look_at = _LOOK_AT

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, begun: list[Transfer]) -> None:
        """Hold the buffers of transfers until they have left; nobody need wait for them.

        Raises:
            RuntimeError: an earlier one did not arrive.
        """
        self._kept += begun
        self._weight += sum(map(_weight, begun))
        if self._weight >= self._look_at:
            self._look()

    def drain(self, most: int = 0) -> None:
        """Wait until no more than so many bytes are kept.

        Raises:
            RuntimeError: something did not arrive.
        """
        leaving = []
        while self._kept and self._weight > most:
            leaving.append(self._kept.popleft())
            self._weight -= _weight(leaving[-1])
        self._finish(leaving)

    def _look(self) -> None:
        """Let go of what has left; what remains doubles before the next look, so a look costs next to nothing."""
        looked_at = [(transfer[0].is_completed(), transfer) for transfer in self._kept]
        self._kept = deque(transfer for has_ended, transfer in looked_at if not has_ended)
        self._weight = sum(map(_weight, self._kept))
        self._look_at = max(_LOOK_AT, 2 * self._weight)
        self._finish(transfer for has_ended, transfer in looked_at if has_ended)

    def _finish(self, transfers: Iterable[Transfer]) -> None:
        """Wait for each, and raise the first error."""
        causes = []
        for work, _ in transfers:
            try:
                work.wait()
            except Exception as error:
                causes.append(error)
        for cause in causes:
            raise RuntimeError(f"a message to rank {self._dst} was not received: {cause}") from cause


class Pending:
    """What one rank has under way.

    Attributes:
        awaited: the transfers that are to fill a buffer and that somebody holds a handle of.
    """

    def __init__(self) -> None:
        self.awaited: dict[int, Transfer] = {}
        self._dropped: list[Transfer] = []
        self._outboxes: dict[int, Outbox] = {}

    def to(self, dst: int) -> Outbox:
        """Give what is under way to a rank."""
        return self._outboxes.setdefault(dst, Outbox(dst))

    def drop(self, key: int) -> None:
        """Stop waiting for a transfer, but keep its buffer, which may still be written to."""
        if (transfer := self.awaited.pop(key, None)) is not None:
            self._dropped = [*(kept for kept in self._dropped if not kept[0].is_completed()), transfer]

    def drain(self) -> None:
        """Wait until all that was sent has left.

        Raises:
            RuntimeError: something did not arrive.
        """
        while self._outboxes:
            self._outboxes.popitem()[1].drain()


_pending: weakref.WeakKeyDictionary[Backend, Pending] = weakref.WeakKeyDictionary()


def pending(backend: Backend) -> Pending:
    """Give what is under way through a backend."""
    return _pending.setdefault(backend, Pending())


def _weight(transfer: Transfer) -> int:
    return transfer[1].numel() * transfer[1].element_size() + _EACH
