"""Messages from one rank to another: a tensor, a number, a string, or any picklable object.

A message is a row of bytes that describes the value, and holds it if it is short. What does not fit, and the content
of a tensor, follows under a number given in the row, so that messages may be waited for in any order.
"""

from __future__ import annotations

import itertools
import struct
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from camshaft.distributed.backends.contract import Backend, Group, Resource, Work
from camshaft.distributed.collectives.call import Call, explain
from camshaft.distributed.collectives.values import PLAIN, bytes_of, decode, encode, is_dense, prepared
from camshaft.distributed.failures.alone import check_all_present
from camshaft.distributed.job import current

Transfer = tuple[Work, Tensor]
"""A transfer in progress, and its buffer, which must live as long."""

_HEAD = struct.Struct("<qq?")  # bytes of the value, number of the message, whether a tensor follows
_ROW = 512
_ROOM = _ROW - _HEAD.size
_MOST_IN_FLIGHT = 64 << 20  # bytes in flight to a rank from which on `send` waits during a receive, too
_EACH = 64 << 10  # bytes that each message counts for besides its own, so that small ones do not pile up
_MAX_TAG = 1 << 14  # MPI's smallest limit, halved: rows have even tags, what follows has odd ones

_numbers = itertools.count()


def send(value: Any, dst: int, tag: int = 0, group: Any = None) -> None:
    """Send a value to one rank, and wait until it has received it.

    While a receive started with :func:`irecv` is in progress on this rank, it does not wait, since the other rank may
    be waiting for this one; the value may then be changed at once, too. Once 64 MB are on their way to that rank, in
    more messages than this rank is receiving, it waits for the oldest of them.

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
    backend = current()
    with _explained(backend, "send", f"to rank {dst}, tag {tag}", dst):
        started = _start(backend, "send", value, dst, tag, group)
        transfers = backend.job.resource(Transfers)
        if transfers.awaited:
            transfers.keep_within_limit(dst, started)
        else:
            for work, _ in started:
                work.wait()


def isend(value: Any, dst: int, tag: int = 0, group: Any = None) -> Sending:
    """Start to send a value; it is copied, so it may be changed at once.

    Arguments and errors are those of :func:`send`. :func:`finalize` waits for messages that have not been received.

    Returns:
        A handle; :meth:`Sending.wait` returns when the value may be changed, which is at once.
    """
    backend = current()
    with _explained(backend, "isend", f"to rank {dst}, tag {tag}", dst):
        backend.job.resource(Transfers).keep(dst, _start(backend, "isend", value, dst, tag, group))
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
    return Receiving("recv", src, tag, group, out).wait()


def irecv(src: int, tag: int = 0, group: Any = None, out: Tensor | None = None) -> Receiving:
    """Start to receive a value from one rank; arguments and errors are those of :func:`recv`.

    Returns:
        A handle; :meth:`Receiving.wait` returns the value.
    """
    return Receiving("irecv", src, tag, group, out)


class Sending:
    """A message that is being sent."""

    def wait(self) -> None:
        """Return when the value may be changed, which is at once."""


class Receiving:
    """A message that is being received."""

    def __init__(self, function: str, src: int, tag: int, group: Any, out: Tensor | None) -> None:
        self._backend, self._src, self._out = current(), src, out
        self._function, self._where = function, f"from rank {src}, tag {tag}"
        with _explained(self._backend, function, self._where, src):
            if out is not None and not isinstance(out, Tensor):
                raise TypeError(f"out must be a tensor or None, got {out!r}")
            self._group = _group_for(self._backend, function, "src", src, tag, group)
            self._place = self._backend.messages_at(self._group)
            self._row = torch.zeros(_ROW, dtype=torch.uint8, device=self._place)
            self._work = self._backend.receive(self._row, src, 2 * tag, self._group)
        self._value: Any = None
        self._error: Exception | None = None
        transfers = self._backend.job.resource(Transfers)
        self._awaited = transfers.awaited
        self._awaited.add(self)
        # A handle that is dropped is no longer awaited, but its message may still arrive in the buffer.
        self._drop = weakref.finalize(self, transfers.drop, (self._work, self._row))
        self._drop.atexit = False

    def wait(self) -> Any:
        """Wait for the value, and return it; every call raises the error if there was one."""
        if self in self._awaited:
            try:
                with _explained(self._backend, self._function, self._where, self._src):
                    self._value = self._read()
            except Exception as error:
                self._error = error
            self._awaited.remove(self)
        if self._error is not None:
            raise self._error
        return self._value

    def _read(self) -> Any:
        self._work.wait()
        self._drop.detach()
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
    """The messages of this rank in flight; their buffers must live until they have arrived.

    Attributes:
        awaited: what is being received, and was not waited for.
        dropped: what is being received although its handle was dropped.
    """

    def __init__(self) -> None:
        self.awaited: weakref.WeakSet[Receiving] = weakref.WeakSet()
        self.dropped: deque[Transfer] = deque()
        self._sent: deque[tuple[int, Transfer]] = deque()
        self._ahead: defaultdict[int, deque[list[Transfer]]] = defaultdict(deque)  # by `send` to a rank, oldest first
        self._weights: Counter[int] = Counter()  # of these messages

    def drop(self, receiving: Transfer) -> None:
        """Keep what is received for nobody, and drop some of what has arrived since: two for each."""
        for _ in range(min(2, len(self.dropped))):
            work, row = kept = self.dropped.popleft()
            if bool(row[: _HEAD.size].any()):  # gloo writes a message before anybody waits for it
                with suppress(RuntimeError):  # nobody wants to know
                    work.wait()
            else:
                self.dropped.append(kept)
        self.dropped.append(receiving)

    def keep(self, dst: int, started: list[Transfer]) -> None:
        """Keep what is sent to a rank, and drop some of what has arrived since: two for each, so nothing piles up.

        Raises:
            RuntimeError: an earlier message did not arrive.
        """
        looks = min(2 * len(started), len(self._sent))
        self._sent += [(dst, transfer) for transfer in started]
        for _ in range(looks):
            kept = self._sent.popleft()
            if kept[1][0].is_completed():
                _complete(*kept)
            else:
                self._sent.append(kept)

    def keep_within_limit(self, dst: int, message: list[Transfer]) -> None:
        """Keep a message, drop those to this rank that have arrived since, and wait for the oldest beyond the limit.

        Two ranks that first send to each other as many messages as they receive, of any size, do not wait.

        Raises:
            RuntimeError: an earlier message did not arrive.
        """
        ahead = self._ahead[dst]
        ahead.append(message)
        self._weights[dst] += _weight(message)
        while len(ahead) > 1:
            is_over = self._weights[dst] > _MOST_IN_FLIGHT and len(ahead) > len(self.awaited)
            if not is_over and not all(work.is_completed() for work, _ in ahead[0]):
                break
            oldest = ahead.popleft()
            self._weights[dst] -= _weight(oldest)
            for transfer in oldest:
                _complete(dst, transfer)

    def finish(self) -> None:
        """Wait until everything has been sent.

        Raises:
            RuntimeError: a message did not arrive.
        """
        for dst, ahead in self._ahead.items():
            self._sent.extend((dst, transfer) for transfer in itertools.chain(*ahead))
        self._ahead.clear()
        while self._sent:
            _complete(*self._sent.popleft())


def _weight(message: list[Transfer]) -> int:
    return _EACH + sum(buffer.nbytes for _, buffer in message)


def _complete(dst: int, transfer: Transfer) -> None:
    try:
        transfer[0].wait()
    except Exception as error:
        raise RuntimeError(f"a message to rank {dst} was not received: {error}") from error


def _start(backend: Backend, function: str, value: Any, dst: int, tag: int, group: Any) -> list[Transfer]:
    """Start to send, and return the transfers."""
    found = _group_for(backend, function, "dst", dst, tag, group)
    # Shape, dtype and content are all of such a tensor; one of another class or layout is pickled.
    is_plain = type(value) in PLAIN and is_dense(value)
    data = encode((value.shape, value.dtype) if is_plain else value)
    number = next(_numbers) % _MAX_TAG
    place = backend.messages_at(found)
    row = _HEAD.pack(len(data), number, is_plain) + data[:_ROOM]
    parts = [row.ljust(_ROW, b"\0"), *([data[_ROOM:]] if len(data) > _ROOM else [])]
    buffers = [torch.frombuffer(bytearray(part), dtype=torch.uint8).to(place) for part in parts]
    if is_plain:
        buffers.append(prepared(backend, value).to(place, copy=True))
    tags = [2 * tag, *[2 * number + 1] * (len(buffers) - 1)]
    return [(backend.send(buffer, dst, one, found), buffer) for buffer, one in zip(buffers, tags, strict=True)]


def _group_for(backend: Backend, function: str, name: str, other: int, tag: int, group: Any) -> Group | None:
    """Check the arguments, and return the group in the backend's own terms."""
    rank = backend.topology.rank
    if not isinstance(tag, int) or not 0 <= tag < _MAX_TAG:
        raise ValueError(f"tag must be an integer in [0, {_MAX_TAG}), got {tag!r}")
    call = Call(function, backend, group)
    call.require_member()
    if other not in call.ranks or other == rank:
        others = [member for member in call.ranks if member != rank]
        raise ValueError(f"{name} must be another rank of the group, one of {others}, got {other!r}")
    check_all_present(function, (rank, other), rank)
    return call.group


@contextmanager
def _explained(backend: Backend, function: str, where: str, other: int) -> Iterator[None]:
    """Add the message to an error."""
    try:
        yield
    except BaseException as error:
        waited_for = [other] if isinstance(other, int) else ()
        explain(error, backend, waited_for, f"in {function} on rank {backend.topology.rank}, {where}")
        raise
