"""Any value over tensors: numbers are reduced exactly, everything else is encoded, exchanged, and decoded.

A value travels as a row: its length, that of the longest value its sender sends, and its first bytes. If the longest
of all does not fit, all are sent again in full, in a second exchange whose size every rank knows by then. A rank that
cannot send its value sends a refusal instead, so that no rank waits for it and all raise its error.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import pickle
import reprlib
import struct
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate
from numbers import Complex, Integral, Number, Rational, Real
from typing import Any

import torch
from torch import Tensor

from camshaft.distributed.backends.contract import Backend, Group
from camshaft.errors import MismatchError, annotate, level_of_caller

Wrong = TypeError | ValueError | None
"""Why this rank cannot take part; all ranks raise it."""

CPU = torch.device("cpu")
PLAIN = (Tensor, torch.nn.Parameter)
ROW = 512  # bytes of a row
_HEAD = struct.Struct("<qq")
ROOM = ROW - _HEAD.size  # bytes of a value that fit into its row
_TEXT, _TENSOR, _LAYOUT, _REFUSAL = b"stT!"  # the first byte; a pickle begins with another one
_ERRORS = {"TypeError": TypeError, "ValueError": ValueError}

# --- encoding ----------------------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """Return a value as bytes.

    Raises:
        TypeError: it cannot be pickled, or is a tensor without data.

    >>> decode(encode(16777217)), decode(encode("größer")), decode(encode({"a": [1, None]}))
    (16777217, 'größer', {'a': [1, None]})
    """
    if type(value) is str:
        return b"s" + value.encode("utf-8", "surrogatepass")
    if isinstance(value, Tensor):
        if value.is_meta:  # it can be pickled, but not moved to another device
            raise TypeError(f"a tensor to exchange must hold values, got one on {value.device}")
        if type(value) in PLAIN and is_dense(value):
            return b"t" + pickle.dumps((value.dtype, value.shape, bytes_of(value)))
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"a value to exchange must be picklable, got {reprlib.repr(value)}: {error}") from error


def decode(data: bytes | memoryview) -> Any:
    """Return the value that :func:`encode` was given; a tensor is on the CPU.

    Raises:
        TypeError: it cannot be unpickled here.
    """
    if data[0] == _TEXT:
        return str(memoryview(data)[1:], "utf-8", "surrogatepass")
    if data[0] == _TENSOR:
        dtype, shape, content = pickle.loads(memoryview(data)[1:])
        return (
            torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
            if content
            else torch.empty(shape, dtype=dtype)
        )
    try:
        return pickle.loads(data)  # from a rank of this job, which runs our code anyway
    except Exception as error:
        raise TypeError(f"a value was pickled on its rank, but cannot be unpickled here: {error}") from error


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements of a tensor lie in memory: it is not sparse, quantized, nested or on ``meta``.

    >>> is_dense(torch.ones(2)), is_dense(torch.eye(2).to_sparse())
    (True, False)
    """
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta and not tensor.is_nested


def bytes_of(tensor: Tensor) -> bytes:
    """Return the elements of a dense tensor in row-major order.

    >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8))
    b'\\x01\\x02\\x03\\x04'
    """
    here = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(here.data_ptr(), here.nbytes)


# --- tensors for the backend -------------------------------------------------------------------------------


class Buffer:
    """Bytes that a backend moves.

    Args:
        content: the bytes; on the CPU the tensor shares their memory.
        device: the device that the backend moves them from and to.
        dtype: of the tensor.

    Attributes:
        tensor: what the backend moves.
    """

    __slots__ = ("_content", "_is_here", "tensor")

    def __init__(self, content: bytearray, device: torch.device, dtype: torch.dtype = torch.uint8) -> None:
        self._content = content
        self._is_here = device == CPU
        self.tensor = torch.frombuffer(content, dtype=dtype)
        if not self._is_here:
            self.tensor = self.tensor.to(device)

    def read(self, moved: Tensor | None = None) -> memoryview:
        """Return the bytes in the tensor now, or in the one that the backend returned in its place."""
        return memoryview(self._content if self._is_here else bytes_of(self.tensor if moved is None else moved))


def prepared(backend: Backend, tensor: Tensor, collective: str = "", in_place: bool = False) -> Tensor:
    """Return a tensor on the device and in the layout that the backend works on, without its graph.

    Args:
        backend: of this rank.
        tensor: of the user.
        collective: the name of one whose result often enters a loss, to warn if the tensor has a graph.
        in_place: the result is written into the tensor, by :func:`copied_back` unless the backend has done it.

    Raises:
        TypeError: it is sparse, quantized, nested or on ``meta``.
        ValueError: it is written to, and several elements share memory.
    """
    is_elsewhere = tensor.device != backend.device
    if is_elsewhere or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        check_dense(tensor)  # not in every call: this function is on the way of small collectives
    is_contiguous = tensor.is_contiguous()
    if (
        in_place
        and not is_contiguous
        and any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    ):
        raise ValueError(
            "tensor must have its own memory for each element, got one that was expanded to "
            f"{tuple(tensor.shape)}: make it contiguous first"
        )
    if tensor.requires_grad:
        if collective and tensor.grad_fn is not None and torch.is_grad_enabled():
            warnings.warn(
                f"{collective} returns values without gradients: where they are needed, use that of "
                "torch.distributed.nn.functional; elsewhere, pass tensor.detach()",
                stacklevel=level_of_caller(),
            )
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if is_elsewhere:
        tensor = backend.bring(tensor)
    return tensor if is_contiguous else tensor.contiguous()


def check_dense(tensor: Tensor) -> None:
    """Raise ``TypeError`` for a tensor that is sparse, quantized, nested or on ``meta``."""
    if not is_dense(tensor):
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"tensor must be dense and hold values, got a {kind} one on {tensor.device}")


def copied_back(result: Tensor, tensor: Tensor) -> Tensor:
    """Copy what a backend returned into the user's tensor, unless it is there already, and return that tensor."""
    if result.data_ptr() != tensor.data_ptr() or result.device != tensor.device:
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            tensor.copy_(result)
    return tensor


# --- exchanging --------------------------------------------------------------------------------------------


def all_gather_values(backend: Backend, value: Any, group: Group | None, wrong: Wrong = None) -> list[Any]:
    """Return the values of all ranks, each with its own type."""
    gathered = gather_values(backend, value, None, group, wrong)
    assert gathered is not None, "they are for all ranks"
    return gathered


def gather_values(
    backend: Backend, value: Any, dst: int | None, group: Group | None, wrong: Wrong = None
) -> list[Any] | None:
    """Return the values of all ranks on rank ``dst``, ``None`` for all ranks; an error is raised on all ranks."""
    (data, *_), wrong = _encoded(backend, [value], wrong)
    contents, lengths, longest = read_rows(_gathered(backend, rows_of([data], backend.carrier), ROW, group), wrong)
    is_here = dst in (None, backend.topology.rank)
    if longest > ROOM:
        sent = _padded(backend, data, longest)
        if dst is None:
            flat = _gathered(backend, sent, longest, group)
        else:
            flat = memoryview(bytes_of(backend.gather(sent.tensor, dst, group)))
        contents = [flat[longest * k : longest * k + length] for k, length in enumerate(lengths)] if is_here else []
    return _decoded(backend, contents, group) if is_here else None


def broadcast_value(backend: Backend, value: Any, src: int, group: Group | None, wrong: Wrong = None) -> Any:
    """Return the value of rank ``src``, on that rank the very object."""
    is_root = backend.topology.rank == src
    data: list[bytes] = []
    if is_root and isinstance(value, Tensor) and is_dense(value) and value.nbytes > ROOM // 2:
        data = [b"T" + pickle.dumps((value.shape, value.dtype))]  # its content follows
    elif is_root:
        data, wrong = _encoded(backend, [value], wrong)
    row = rows_of(data, backend.carrier) if is_root else Buffer(bytearray(ROW), backend.carrier)
    (content,), (length,), _ = read_rows(row.read(backend.broadcast(row.tensor, src, group)), wrong)
    if content[0] == _LAYOUT:
        shape, dtype = pickle.loads(content[1:])
        tensor = prepared(backend, value) if is_root else torch.empty(shape, dtype=dtype, device=backend.device)
        tensor = backend.broadcast(tensor, src, group)
        return value if is_root else tensor
    if length > ROOM:
        rest = _padded(backend, data[0] if is_root else b"", length)
        content = rest.read(backend.broadcast(rest.tensor, src, group))
    return value if is_root else _placed(decode(content), backend)


def scatter_values(backend: Backend, values: Sequence[Any], src: int, group: Group | None, wrong: Wrong = None) -> Any:
    """Return this rank's of the values that rank ``src`` has, in the order of the ranks in the group."""
    is_root = backend.topology.rank == src
    data, wrong = _encoded(backend, values, wrong) if is_root else ([], None)
    rows = rows_of(data, backend.carrier).tensor.view(-1, ROW) if is_root else None
    own = Buffer(bytearray(ROW), backend.carrier)
    (content,), (length,), longest = read_rows(own.read(backend.scatter(rows, own.tensor, src, group)), wrong)
    if longest > ROOM:
        stacked = torch.stack([_padded(backend, one, longest).tensor for one in data]) if is_root else None
        own = Buffer(bytearray(longest), backend.carrier)
        content = own.read(backend.scatter(stacked, own.tensor, src, group))[:length]
    return _placed(decode(content), backend)


def all_to_all_values(backend: Backend, values: Sequence[Any], group: Group | None, wrong: Wrong = None) -> list[Any]:
    """Send the k-th value to the k-th rank, and return the values meant for this rank."""
    data, wrong = _encoded(backend, values, wrong)
    ones = [1] * len(data)
    rows = backend.all_to_all(rows_of(data, backend.carrier).tensor.view(-1, ROW), ones, ones, group)
    contents, lengths, longest = read_rows(memoryview(bytes_of(rows)), wrong)
    if longest > ROOM:
        sent = Buffer(bytearray().join(data), backend.carrier).tensor
        flat = memoryview(bytes_of(backend.all_to_all(sent, [len(one) for one in data], lengths, group)))
        contents = [flat[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]
    return [_placed(one, backend) for one in _decoded(backend, contents, group)]


def rows_of(data: Sequence[bytes], device: torch.device) -> Buffer:
    """Return values as rows, one after the other."""
    longest = max(map(len, data))
    rows = b"".join(_HEAD.pack(len(one), longest) + one[:ROOM].ljust(ROOM, b"\0") for one in data)
    return Buffer(bytearray(rows), device)


def read_rows(flat: memoryview, wrong: Wrong = None) -> tuple[list[memoryview], list[int], int]:
    """Return the bytes of each value that fit into its row, the lengths of the values, and the greatest length.

    Raises:
        TypeError, ValueError: ``wrong``, or the error of the rank that sent a refusal.
    """
    if wrong is not None:
        raise wrong
    contents, lengths, longest = [], [], 0
    for start in range(0, len(flat), ROW):
        length, of_sender = _HEAD.unpack_from(flat, start)
        begin = start + _HEAD.size
        content = flat[begin : begin + min(length, ROOM)]
        if content[0] == _REFUSAL:
            name, _, text = str(content[1:], "utf-8", "replace").partition(":")
            raise _ERRORS[name](text)
        contents.append(content)
        lengths.append(length)
        if of_sender > longest:
            longest = of_sender
    return contents, lengths, longest


def refusal(error: TypeError | ValueError, rank: int) -> bytes:
    """Return what a rank sends in place of a value that it cannot send."""
    text = f"!{type(error).__name__}:rank {rank} cannot take part: {error}"
    return text.encode("utf-8", "replace")[:ROOM]


def _encoded(backend: Backend, values: Sequence[Any], wrong: Wrong = None) -> tuple[list[bytes], Wrong]:
    """Return the values as bytes; if one cannot be encoded, a refusal for each, and why."""
    if wrong is None:
        try:
            return [encode(value) for value in values], None
        except TypeError as error:
            wrong = error
    return [refusal(wrong, backend.topology.rank)] * len(values), wrong


def _padded(backend: Backend, data: bytes, size: int) -> Buffer:
    return Buffer(bytearray(data.ljust(size, b"\0")), backend.carrier)


def _gathered(backend: Backend, sent: Buffer, length: int, group: Group | None) -> memoryview:
    """Return the bytes of all ranks, one after the other; each sends ``length`` bytes."""
    received = Buffer(bytearray(len(backend.members(group)) * length), backend.carrier)
    backend.all_gather_into(received.tensor, sent.tensor, group)
    return received.read()


def _decoded(backend: Backend, contents: Sequence[memoryview], group: Group | None) -> list[Any]:
    values: list[Any] = []
    try:
        for content in contents:
            values.append(decode(content))
    except TypeError as error:
        annotate(error, f"the value is that of rank {backend.members(group)[len(values)]}")
        raise
    return values


def _placed(value: Any, backend: Backend) -> Any:
    return value.to(backend.device) if isinstance(value, Tensor) else value


# --- numbers -----------------------------------------------------------------------------------------------

# A sum goes through the backend, an int as a 64-bit integer, a float in double precision. Both are eight bytes long, so
# a rank that expects the other kind would misread them. A mark of the kind therefore travels with the number: the marks
# add up to this rank's own times the number of ranks only if all are the same. Two elements take gloo hardly longer
# than one; three would. For the other reductions, which a mark would not survive, all ranks gather all numbers.

_BITWISE = ("AND", "OR")
_IN_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "PRODUCT": operator.mul,
    "MIN": lambda one, other: other if other < one or other != other else one,  # NaN wins, as in torch
    "MAX": lambda one, other: other if other > one or other != other else one,
    "AND": operator.and_,
    "OR": operator.or_,
}
_MARKS: dict[type, float] = {int: 1, float: 1.0, complex: -1.0, type(None): 0}  # None: this rank has no valid number
_INTEGERS = (torch.int64, {1: struct.Struct("=q"), 2: struct.Struct("=qq")})  # a number, a number and its mark
_FLOATS = (torch.float64, {1: struct.Struct("=d"), 2: struct.Struct("=dd")})


def check_reduction(backend: Backend, tensor: Any, op: str) -> None:
    """Check the reduction, and whether it applies to a tensor.

    An argument that is neither a tensor nor a number is refused together with the other ranks, which may have numbers.
    ``None`` is refused at once: the other ranks may have tensors, and the exchanges would not match.
    """
    if tensor is None:
        raise TypeError("tensor must be a tensor or a number, got None")
    if op not in backend.reductions and (isinstance(tensor, Tensor) or op not in _IN_PYTHON):
        raise ValueError(f"op must be one of {backend.reductions} on {backend.model_name}, got {op!r}")
    if op in _BITWISE and isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"op {op!r} is for integers and bools, got a tensor of {tensor.dtype}")


def reduced_number(backend: Backend, number: Any, op: str, group: Group | None, size: int) -> Any:
    """Reduce a number over the ``size`` ranks of a group; all of them raise if one has no valid number.

    Raises:
        TypeError: it cannot be reduced exactly, or other ranks have numbers of another kind.
        ValueError: the sum might not fit into 64 bits.
    """
    plain: int | float | complex | None = None
    wrong: Wrong = None
    try:
        plain = plain_number(number, op, size)
    except (TypeError, ValueError) as error:
        wrong = error
    if op in _IN_PYTHON:
        return functools.reduce(_IN_PYTHON[op], all_gather_values(backend, plain, group, wrong))
    kind, mark = type(plain), _MARKS[type(plain)]
    dtype, form_of = _INTEGERS if type(mark) is int else _FLOATS

    def reduced(part: float) -> Any:
        numbers = [part, mark] if op == "SUM" else [part]  # the reductions of a single backend, such as AVERAGE
        form = form_of[len(numbers)]
        moved = Buffer(bytearray(form.pack(*numbers)), backend.carrier, dtype)
        result, *marks = form.unpack(moved.read(backend.all_reduce(moved.tensor, op, group)))
        if wrong is not None:  # only now, so that no rank waits
            raise wrong
        if marks and marks[0] != mark * size:
            raise MismatchError(
                f"all ranks must add numbers of the same kind, but this one has {plain!r} of type {kind.__name__}, and "
                "another rank has another kind, a value that cannot be added, or is in another collective"
            )
        return result

    if isinstance(plain, complex):
        return complex(reduced(plain.real), reduced(plain.imag))
    return reduced(0 if plain is None else plain)


def plain_number(number: Any, op: str, size: int) -> int | float | complex:
    """Return a number as one of Python's own kinds; a ``bool`` counts in a sum and in a product.

    Raises:
        TypeError: it is not a number, or cannot be reduced exactly, or not with this ``op``.
        ValueError: the sum of ``size`` such numbers might not fit into 64 bits.

    >>> plain_number(True, "SUM", 2), plain_number(True, "MAX", 2)
    (1, True)
    """
    kind = type(number)  # looked at first: isinstance of an abstract class takes much longer
    if kind is float and op not in _BITWISE:
        return float(number)
    numpy = None if kind is int else sys.modules.get("numpy")  # whose bool is not registered as a Number
    if kind is bool or (numpy is not None and isinstance(number, numpy.bool_)):
        return int(number) if op in ("SUM", "PRODUCT") else bool(number)
    if kind is int or isinstance(number, Integral):
        whole, limit = int(number), (2**63 - 1) // size
        if op not in _IN_PYTHON and not -limit <= whole <= limit:
            raise ValueError(f"tensor must be such that the sum over {size} ranks fits into 64 bits, got {whole}")
        return whole
    if not isinstance(number, Number):
        raise TypeError(
            f"tensor must be a tensor or a number, got {reprlib.repr(number)} of type {type(number).__name__}"
        )
    if op in _BITWISE:
        raise TypeError(f"tensor must be an integer for op={op!r}, got {number!r}")
    if isinstance(number, Real) and not isinstance(number, Rational):
        return float(number)
    if isinstance(number, Complex) and not isinstance(number, Real) and op not in ("MIN", "MAX"):
        return complex(number)
    raise TypeError(f"tensor must be a number that can be reduced exactly, got {number!r}: convert it to float")
