"""Messages from one rank to another: a tensor, a number, a string, or any object that can be pickled.

A message is one row of bytes that tells what comes, and holds it if it is short. What does not fit, and the
content of a tensor, follows under a number that the row tells, so that messages may be waited for in any order.
"""

from __future__ import annotations

import itertools
import struct
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from camshaft.distributed.backend import Backend, Group, Work
from camshaft.distributed.calls import raise_if_some_left
from camshaft.distributed.context import current
from camshaft.distributed.encoding import decode, encode, to_bytes
from camshaft.distributed.groups import not_in_group, resolve
from camshaft.distributed.guard import check_all_present
from camshaft.distributed.outbox import Transfer, pending
from camshaft.distributed.placement import brought
from camshaft.errors import annotate

_HEAD = struct.Struct("<qq?")  # bytes of the value, number of the message, whether a tensor follows
_ROW = 512
_ROOM = _ROW - _HEAD.size
_MOST = 64 << 20  # bytes that may be under way to a rank before send waits for it after all
_MAX_TAG = 1 << 14  # MPI's smallest limit, halved: rows have even tags, what follows has odd ones

_numbers = itertools.count()


def send(value: Any, dst: int, tag: int = 0, group: Any = None) -> None:
    """Send a value to one rank, and wait until it has received it.

    While this rank has begun to receive something with :func:`irecv`, it waits for nobody, as the other may be waiting
    for this one; then the value is on its way, and may be changed too.

    Args:
        value: a tensor, or a number, a string, or any object that can be pickled.
        dst: the rank that receives it.
        tag: a number, in ``[0, 16384)``, that the receiver names too.
        group: as for :func:`all_reduce`; ``dst`` is a global rank, also with a group.

    Raises:
        TypeError: the value cannot be pickled.
        ValueError: ``dst`` is this rank or not in the group, or ``tag`` is out of range.
        RankDivergenceError: this rank is not in the group, or ``dst`` does not run this part of the program.
        RuntimeError: this message, or one that :func:`isend` began, did not arrive.
    """
    try:
        backend, begun = _begin("send", value, dst, tag, group)
        under_way = pending(backend)
        if under_way.awaited:
            under_way.to(dst).keep(begun)
            under_way.to(dst).drain(_MOST)
        else:
            for work, _ in begun:
                work.wait()
    except BaseException as error:
        _say_where(error, "send", "to", dst, tag)
        raise


def isend(value: Any, dst: int, tag: int = 0, group: Any = None) -> Sending:
    """Begin to send a value; it is copied, so it may be changed at once.

    Arguments and errors are those of :func:`send`. What nobody has received is waited for by :func:`finalize`.

    Returns:
        A handle; :meth:`Sending.wait` returns when the value may be changed, which is at once.
    """
    try:
        backend, begun = _begin("isend", value, dst, tag, group)
        pending(backend).to(dst).keep(begun)
    except BaseException as error:
        _say_where(error, "isend", "to", dst, tag)
        raise
    return Sending()


def recv(src: int, tag: int = 0, group: Any = None, out: Tensor | None = None) -> Any:
    """Receive what one rank sends.

    Args:
        src: the rank that sends.
        tag: the number that it named.
        group: as for :func:`send`.
        out: a tensor to receive a tensor of that shape and dtype into; ``None`` makes a new one.

    Returns:
        The value; a tensor is on :func:`device`, or it is ``out``.

    Raises:
        TypeError: ``out`` is no tensor.
        ValueError: ``out`` does not fit what was sent, or ``src``, ``tag`` are out of range.
        RankDivergenceError: this rank is not in the group, or ``src`` does not run this part of the program.
    """
    return _begin_to_receive("recv", src, tag, group, out).wait()


def irecv(src: int, tag: int = 0, group: Any = None, out: Tensor | None = None) -> Receiving:
    """Begin to receive what one rank sends; arguments and errors are those of :func:`recv`.

    Returns:
        A handle; :meth:`Receiving.wait` gives the value.
    """
    return _begin_to_receive("irecv", src, tag, group, out)


class Sending:
    """A message that is on its way."""

    def wait(self) -> None:
        """Return when the value may be changed, which is at once."""


class Receiving:
    """A message that is to come."""

    def __init__(
        self, function: str, backend: Backend, src: int, tag: int, group: Group | None, out: Tensor | None
    ) -> None:
        self._function, self._tag = function, tag
        self._backend, self._src, self._group, self._out = backend, src, group, out
        self._place = backend.messages_at(group)
        self._row = torch.empty(_ROW, dtype=torch.uint8, device=self._place)
        self._work: Work | None = backend.receive(self._row, src, 2 * tag, group)
        under_way, key = pending(backend), id(self._row)
        under_way.awaited[key] = (self._work, self._row)
        self._drop = weakref.finalize(self, under_way.drop, key)
        self._drop.atexit = False
        self._value: Any = None
        self._error: BaseException | None = None

    def wait(self) -> Any:
        """Wait for the value, and give it."""
        try:
            if self._work is not None:
                self._wait_and_read(self._work)
            if self._error is not None:
                raise self._error
        except BaseException as error:
            _say_where(error, self._function, "from", self._src, self._tag)
            raise
        return self._value

    def _wait_and_read(self, work: Work) -> None:
        """Wait for the row, and read the value, or the error that everybody gets who waits for it."""
        try:
            work.wait()
        except Exception as error:
            self._work, self._error = None, error
            self._drop()
            return
        self._work = None
        self._drop.detach()
        del pending(self._backend).awaited[id(self._row)]
        try:
            self._value = self._read()
        except BaseException as error:
            self._error = error

    def _read(self) -> Any:
        row = to_bytes(self._row.view(1, -1))[0]
        length, number, is_tensor = _HEAD.unpack_from(row)
        data = row[_HEAD.size : _HEAD.size + length]
        if length > _ROOM:
            rest = self._receive(torch.empty(length - _ROOM, dtype=torch.uint8, device=self._place), number)
            data += to_bytes(rest.view(1, -1))[0]
        if not is_tensor:
            return self._checked(decode(data))
        shape, dtype = decode(data)
        tensor = self._receive(torch.empty(shape, dtype=dtype, device=self._place), number)
        return self._checked(tensor.to(self._backend.device))

    def _receive(self, tensor: Tensor, number: int) -> Tensor:
        self._backend.receive(tensor, self._src, 2 * number + 1, self._group).wait()
        return tensor

    def _checked(self, value: Any) -> Any:
        """Put the value where it is wanted, if it fits; it has come in any case, so that the sender need not wait."""
        out = self._out
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


def _begin_to_receive(function: str, src: int, tag: int, group: Any, out: Tensor | None) -> Receiving:
    try:
        if out is not None and not isinstance(out, Tensor):
            raise TypeError(f"out must be a tensor or None, got {out!r}")
        backend, found = _route(function, "src", src, tag, group)
        return Receiving(function, backend, src, tag, found, out)
    except BaseException as error:
        _say_where(error, function, "from", src, tag)
        raise


def _say_where(error: BaseException, function: str, direction: str, other: int, tag: int) -> None:
    """Note which message an error is of, once: some raise the same one each time that somebody waits."""
    backend = current()
    note = f"in {function} on rank {backend.topology.rank}, {direction} rank {other}, tag {tag}"
    if note not in getattr(error, "__notes__", ()):
        annotate(error, note)
    raise_if_some_left(error, backend, [other], note)


def _begin(function: str, value: Any, dst: int, tag: int, group: Any) -> tuple[Backend, list[Transfer]]:
    """Begin to send, and give the transfers with their buffers, which must live as long."""
    backend, found = _route(function, "dst", dst, tag, group)
    tensor = value if _is_plain(value) else None
    data = encode(value if tensor is None else (value.shape, value.dtype))
    number = next(_numbers) % _MAX_TAG
    place = backend.messages_at(found)
    head = _HEAD.pack(len(data), number, tensor is not None)
    buffers = [_bytes((head + data[:_ROOM]).ljust(_ROW, b"\0"), place)]
    if len(data) > _ROOM:
        buffers.append(_bytes(data[_ROOM:], place))
    if tensor is not None:
        buffers.append(brought(backend, tensor).to(place, copy=True))
    tags = [2 * tag, *[2 * number + 1] * (len(buffers) - 1)]
    begun = [(backend.send(buffer, dst, one, found), buffer) for buffer, one in zip(buffers, tags, strict=True)]
    return backend, begun


def _is_plain(value: Any) -> bool:
    """Tell a tensor that shape, dtype and content are all of, from one of another class or layout, which is pickled."""
    if type(value) not in (Tensor, Parameter):
        return False
    return value.layout == torch.strided and not value.is_quantized and not value.is_nested


def _bytes(data: bytes, place: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(place)


def _route(function: str, name: str, other: int, tag: int, group: Any) -> tuple[Backend, Group | None]:
    """Check who talks to whom."""
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
