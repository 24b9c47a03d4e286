"""Messages from one rank to another: a tensor, a number, a string, or any picklable object.

A message is a row of bytes that describes the value, and holds it if it is short. What does not fit, and the content
of a tensor, follows under a number given in the row, so that messages may be waited for in any order.
"""

from __future__ import annotations

import itertools
import struct
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from camshaft.distributed.backend import Backend, Group, Resource, Work
from camshaft.distributed.groups import not_in_group, resolve
from camshaft.distributed.ranks import check_all_present, raise_if_some_left
from camshaft.distributed.run import current
from camshaft.distributed.values.exchange import brought
from camshaft.distributed.values.serialization import bytes_of, decode, encode
from camshaft.errors import annotate

Transfer = tuple[Work, Tensor]
"""A transfer in progress, and its buffer, which must live as long."""

_HEAD = struct.Struct("<qq?")  # bytes of the value, number of the message, whether a tensor follows
_ROW = 512
_ROOM = _ROW - _HEAD.size
_MOST_IN_FLIGHT = 64 << 20  # bytes in flight to a rank after which `send` waits for it after all
_MAX_TAG = 1 << 14  # MPI's smallest limit, halved: rows have even tags, what follows has odd ones
_LOOK_AT = 4 << 20  # bytes that are kept before looking which of them have been sent
_EACH = 64 << 10  # bytes that each transfer counts for besides its own, so that small ones do not pile up

_numbers = itertools.count()


def send(value: Any, dst: int, tag: int = 0, group: Any = None) -> None:
    """Send a value to one rank, and wait until it has received it.

    While a receive started with :func:`irecv` is in progress on this rank, it does not wait, since the other rank may
    be waiting for this one; the value may then be changed at once, too.

    Args:
        value: a tensor, or a number, a string, or any picklable object.
        dst: the rank that receives it.
        tag: a number in ``[0, 16384)``; the receiver passes the same.
        group: as for :func:`all_reduce`; ``dst`` is a global rank, also with a group.

    Raises:
        TypeError: the value cannot be pickled.
        ValueError: ``dst`` is this rank or not in the group, or ``tag`` is out of range.
        RankDivergenceError: this rank is not in the group, or ``dst`` does not run this block of code.
        RuntimeError: this message, or one started with :func:`isend`, did not arrive.
    """
    try:
        backend, started = _start("send", value, dst, tag, group)
        transfers = backend.job.resource(Transfers)
        if transfers.awaited:
            transfers.to(dst).keep(started)
            transfers.to(dst).drain(_MOST_IN_FLIGHT)
        else:
            for work, _ in started:
                work.wait()
    except BaseException as error:
        _explain(error, "send", "to", dst, tag)
        raise


def isend(value: Any, dst: int, tag: int = 0, group: Any = None) -> Sending:
    """Start to send a value; it is copied, so it may be changed at once.

    Arguments and errors are those of :func:`send`. :func:`finalize` waits for messages that have not been received.

    Returns:
        A handle; :meth:`Sending.wait` returns when the value may be changed, which is at once.
    """
    try:
        backend, started = _start("isend", value, dst, tag, group)
        backend.job.resource(Transfers).to(dst).keep(started)
    except BaseException as error:
        _explain(error, "isend", "to", dst, tag)
        raise
    return Sending()


def recv(src: int, tag: int = 0, group: Any = None, out: Tensor | None = None) -> Any:
    """Receive a value from one rank.

    Args:
        src: the rank that sends.
        tag: the number that the sender passes.
        group: as for :func:`send`.
        out: a tensor to receive a tensor of that shape and dtype into; ``None`` creates a new one.

    Returns:
        The value; a tensor is on :func:`device`, or it is ``out``.

    Raises:
        TypeError: ``out`` is not a tensor.
        ValueError: ``out`` does not fit what was sent, or ``src`` or ``tag`` is out of range.
        RankDivergenceError: this rank is not in the group, or ``src`` does not run this block of code.
    """
    return _start_to_receive("recv", src, tag, group, out).wait()


def irecv(src: int, tag: int = 0, group: Any = None, out: Tensor | None = None) -> Receiving:
    """Start to receive a value from one rank; arguments and errors are those of :func:`recv`.

    Returns:
        A handle; :meth:`Receiving.wait` returns the value.
    """
    return _start_to_receive("irecv", src, tag, group, out)


class Sending:
    """A message that is being sent."""

    def wait(self) -> None:
        """Return when the value may be changed, which is at once."""


class Receiving:
    """A message that is being received."""

    def __init__(
        self, function: str, backend: Backend, src: int, tag: int, group: Group | None, out: Tensor | None
    ) -> None:
        self._function, self._tag = function, tag
        self._backend, self._src, self._group, self._out = backend, src, group, out
        self._place = backend.messages_at(group)
        self._row = torch.empty(_ROW, dtype=torch.uint8, device=self._place)
        self._work: Work | None = backend.receive(self._row, src, 2 * tag, group)
        transfers, key = backend.job.resource(Transfers), id(self._row)
        transfers.awaited[key] = (self._work, self._row)
        self._drop = weakref.finalize(self, transfers.drop, key)
        self._drop.atexit = False
        self._value: Any = None
        self._error: BaseException | None = None

    def wait(self) -> Any:
        """Wait for the value, and return it; every call raises the error if there was one."""
        try:
            if self._work is not None:
                self._wait_and_read(self._work)
            if self._error is not None:
                raise self._error
        except BaseException as error:
            _explain(error, self._function, "from", self._src, self._tag)
            raise
        return self._value

    def _wait_and_read(self, work: Work) -> None:
        try:
            work.wait()
        except Exception as error:
            self._work, self._error = None, error
            self._drop()
            return
        self._work = None
        self._drop.detach()
        self._backend.job.resource(Transfers).awaited.pop(id(self._row), None)
        try:
            self._value = self._read()
        except BaseException as error:
            self._error = error

    def _read(self) -> Any:
        row = bytes_of(self._row)
        length, number, is_tensor = _HEAD.unpack_from(row)
        data = row[_HEAD.size : _HEAD.size + length]
        if length > _ROOM:
            data += bytes_of(self._receive(torch.empty(length - _ROOM, dtype=torch.uint8, device=self._place), number))
        value = decode(data)
        if is_tensor:
            shape, dtype = value
            value = self._receive(torch.empty(shape, dtype=dtype, device=self._place), number).to(self._backend.device)
        out = self._out  # checked only now: the message has to be received in any case, as the sender may wait for it
        if out is None:
            return value
        if not isinstance(value, Tensor):
            raise ValueError(f"out must be None, as rank {self._src} sent a value of type {type(value).__name__}")
        if (out.shape, out.dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"out must be of shape {tuple(value.shape)} and {value.dtype}, as rank {self._src} sent it, "
                f"got shape {tuple(out.shape)} and {out.dtype}"
            )
        with torch.no_grad():
            return out.copy_(value)

    def _receive(self, tensor: Tensor, number: int) -> Tensor:
        self._backend.receive(tensor, self._src, 2 * number + 1, self._group).wait()
        return tensor


class Transfers(Resource):
    """The transfers of this rank in a job.

    Attributes:
        awaited: receives in progress that a handle exists for.
    """

    def __init__(self) -> None:
        self.awaited: dict[int, Transfer] = {}
        self._dropped: list[Transfer] = []
        self._outboxes: dict[int, Outbox] = {}

    def to(self, dst: int) -> Outbox:
        """Return the transfers to a rank."""
        return self._outboxes.setdefault(dst, Outbox(dst))

    def drop(self, key: int) -> None:
        """Stop waiting for a receive, but keep its buffer, which may still be written to."""
        if (transfer := self.awaited.pop(key, None)) is not None:
            self._dropped = [*(kept for kept in self._dropped if not kept[0].is_completed()), transfer]

    def finish(self) -> None:
        """Wait until everything has been sent.

        Raises:
            RuntimeError: a message did not arrive.
        """
        while self._outboxes:
            self._outboxes.popitem()[1].drain()


class Outbox:
    """What is being sent to one rank, in order; keeps the buffers alive without anybody waiting.

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

    def keep(self, started: list[Transfer]) -> None:
        """Keep the buffers of transfers until these are complete.

        Raises:
            RuntimeError: an earlier message did not arrive.
        """
        self._kept += started
        self._weight += sum(map(_weight, started))
        if self._weight >= self._look_at:
            self._release_completed()

    def drain(self, most: int = 0) -> None:
        """Wait until no more than ``most`` bytes are kept.

        Raises:
            RuntimeError: a message did not arrive.
        """
        leaving = []
        while self._kept and self._weight > most:
            leaving.append(self._kept.popleft())
            self._weight -= _weight(leaving[-1])
        self._finish(leaving)

    def _release_completed(self) -> None:
        """Release completed transfers; what remains must double before the next look, so looking costs little."""
        looked_at = [(transfer[0].is_completed(), transfer) for transfer in self._kept]
        self._kept = deque(transfer for is_completed, transfer in looked_at if not is_completed)
        self._weight = sum(map(_weight, self._kept))
        self._look_at = max(_LOOK_AT, 2 * self._weight)
        self._finish(transfer for is_completed, transfer in looked_at if is_completed)

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


def _weight(transfer: Transfer) -> int:
    return _EACH + transfer[1].nbytes


def _start(function: str, value: Any, dst: int, tag: int, group: Any) -> tuple[Backend, list[Transfer]]:
    """Start to send, and return the transfers."""
    backend, found = _route(function, "dst", dst, tag, group)
    # Shape, dtype and content are all of such a tensor; one of another class or layout is pickled.
    is_plain = type(value) in (Tensor, Parameter) and value.layout == torch.strided
    is_plain = is_plain and not value.is_quantized and not value.is_nested
    data = encode((value.shape, value.dtype) if is_plain else value)
    number = next(_numbers) % _MAX_TAG
    place = backend.messages_at(found)
    row = _HEAD.pack(len(data), number, is_plain) + data[:_ROOM]
    parts = [row.ljust(_ROW, b"\0"), *([data[_ROOM:]] if len(data) > _ROOM else [])]
    buffers = [torch.frombuffer(bytearray(part), dtype=torch.uint8).to(place) for part in parts]
    if is_plain:
        buffers.append(brought(backend, value).to(place, copy=True))
    tags = [2 * tag, *[2 * number + 1] * (len(buffers) - 1)]
    return backend, [(backend.send(buffer, dst, one, found), buffer) for buffer, one in zip(buffers, tags, strict=True)]


def _start_to_receive(function: str, src: int, tag: int, group: Any, out: Tensor | None) -> Receiving:
    try:
        if out is not None and not isinstance(out, Tensor):
            raise TypeError(f"out must be a tensor or None, got {out!r}")
        backend, found = _route(function, "src", src, tag, group)
        return Receiving(function, backend, src, tag, found, out)
    except BaseException as error:
        _explain(error, function, "from", src, tag)
        raise


def _route(function: str, name: str, other: int, tag: int, group: Any) -> tuple[Backend, Group | None]:
    """Check the arguments, and return the backend and the group."""
    backend = current()
    rank = backend.topology.rank
    if not isinstance(tag, int) or not 0 <= tag < _MAX_TAG:
        raise ValueError(f"tag must be an integer in [0, {_MAX_TAG}), got {tag!r}")
    found, ranks = resolve(backend, group)
    if rank not in ranks:
        raise not_in_group(function, rank, ranks)
    if other not in ranks or other == rank:
        others = [member for member in ranks if member != rank]
        raise ValueError(f"{name} must be another rank of the group, one of {others}, got {other!r}")
    check_all_present(function, (rank, other), rank)
    return backend, found


def _explain(error: BaseException, function: str, direction: str, other: int, tag: int) -> None:
    """Add the message to its error, once: waiting again raises the same one."""
    backend = current()
    note = f"in {function} on rank {backend.topology.rank}, {direction} rank {other}, tag {tag}"
    if note not in getattr(error, "__notes__", ()):
        annotate(error, note)
    raise_if_some_left(error, backend, [other], note)
