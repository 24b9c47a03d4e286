"""Nested lists, tuples and mappings: map functions over them, move their tensors to a device, format them as text."""

from __future__ import annotations

import copy
import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Number, Real
from typing import Any, TypeVar, cast

import torch

from camshaft.types import DeviceLike

T = TypeVar("T")
_MOST_ELEMENTS = 10  # of a tensor in a text


def apply_to_type(x: Any, input_type: type[T] | tuple[type, ...], func: Callable[[T], Any]) -> Any:
    """Apply ``func`` to every instance of ``input_type`` in ``x``, however deeply nested.

    Args:
        x: an instance, a string or bytes (returned unchanged), or a nested mapping or sequence of those.
        input_type: a type or a tuple of types; checked first, so it may also be that of a container.
        func: called with each instance.

    Returns:
        The same structure with the results. A container is rebuilt as its own type, or, if that is impossible as for
        ``range``, as a ``dict``, ``tuple`` or ``list``.

    Raises:
        TypeError: ``x`` contains something else, such as a number, ``None`` or a set.

    >>> apply_to_type({"a": (1, 2), "b": "text"}, int, lambda value: value * 10)
    {'a': (10, 20), 'b': 'text'}
    """
    if isinstance(x, input_type):
        return func(cast(T, x))  # a tuple of types narrows to Any
    if isinstance(x, (str, bytes)):
        return x
    if isinstance(x, Mapping):
        content = {key: apply_to_type(value, input_type, func) for key, value in x.items()}
        return _rebuilt(x, content, content.items())
    if isinstance(x, Sequence):
        items = [apply_to_type(item, input_type, func) for item in x]
        return _rebuilt(x, items, enumerate(items))
    types = input_type if isinstance(input_type, tuple) else (input_type,)
    names = " or ".join(getattr(one, "__name__", str(one)) for one in types)
    raise TypeError(
        f"x must be made of {names}, str, bytes, mappings and sequences, "
        f"got {reprlib.repr(x)} of type {type(x).__name__}"
    )


def apply_to_tensor(x: Any, func: Callable[[torch.Tensor], Any]) -> Any:
    """Apply ``func`` to every tensor in ``x``, like ``apply_to_type`` with ``torch.Tensor``.

    >>> apply_to_tensor([torch.tensor(1), {"y": torch.tensor(2)}], torch.Tensor.item)
    [1, {'y': 2}]
    """
    return apply_to_type(x, torch.Tensor, func)


def convert_tensor(x: T, device: DeviceLike | None = None, non_blocking: bool = False) -> T:
    """Move every tensor in ``x`` to ``device``.

    Args:
        x: a tensor, a string or bytes, or a nested mapping or sequence of those.
        device: target device; ``None`` leaves the tensors where they are, but containers are still copied and checked.
        non_blocking: whether to copy from pinned memory asynchronously.

    Raises:
        TypeError: ``x`` contains something else, such as a number or ``None``.

    >>> convert_tensor([torch.ones(2), "label"], device="meta")[0].device
    device(type='meta')
    """
    if isinstance(x, torch.Tensor):
        if device is None:
            return x
        return cast(T, x.to(device, non_blocking=non_blocking))  # T is a tensor here
    moved: T = apply_to_tensor(x, lambda tensor: convert_tensor(tensor, device, non_blocking))
    return moved


def to_onehot(indices: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Convert class indices of shape ``(N, ...)`` to one-hot vectors of shape ``(N, num_classes, ...)``.

    The result is ``uint8`` on the device of ``indices``.

    Raises:
        TypeError: ``indices`` does not hold integers.
        RuntimeError: an index is outside ``[0, num_classes)``; on a GPU this is a device-side assertion.

    >>> to_onehot(torch.tensor([0, 2]), num_classes=3)
    tensor([[1, 0, 0],
            [0, 0, 1]], dtype=torch.uint8)
    """
    if indices.is_floating_point() or indices.is_complex():
        raise TypeError(f"indices must be a tensor of integers, got dtype {indices.dtype}")
    shape = (*indices.shape[:1], num_classes, *indices.shape[1:])
    onehot = torch.zeros(shape, dtype=torch.uint8, device=indices.device)
    return onehot.scatter_(1, indices.to(torch.int64).unsqueeze(1), 1)


def to_str_list(data: Any) -> list[str]:
    """Format ``data`` as a flat list of texts.

    Numbers and 0-d tensors have 4 decimals; 1-d tensors are in brackets, truncated after 10 elements; tensors of more
    dimensions are shown by their shape. Items of a mapping are prefixed with ``key: ``. A sequence becomes one text,
    joined by commas; mappings inside a value become entries of their own, before it. ``None`` and empty values leave
    the bare ``key: ``, or nothing without a key. Strings and all other values are dropped.

    >>> to_str_list({"loss": 0.25, "size": (2, 3), "weight": torch.ones(2, 3), "name": "run"})
    ['loss: 0.2500', 'size: 2.0000, 3.0000', 'weight: Shape[2, 3]']
    """
    texts: list[str] = []
    if isinstance(data, Mapping):
        for key, value in data.items():
            texts += _entries(value, prefix=f"{key}: ")
        return texts
    return _entries(data, prefix="")


def _rebuilt(original: Any, content: Any, assignments: Iterable[tuple[Any, Any]]) -> Any:
    """Return ``content`` as the type of ``original``, or unchanged if that is impossible.

    Args:
        original: a mapping or a sequence.
        content: a dict or a list.
        assignments: the same as pairs of a key or an index and a value.
    """
    if type(original) in (dict, list):
        return content
    if isinstance(original, tuple) and hasattr(original, "_make"):
        return original._make(content)  # a named tuple; its constructor takes the fields one by one
    if not isinstance(original, deque):  # built from a list, it forgets its maxlen
        with suppress(Exception):  # constructors of users may raise anything
            return type(original)(content)
    if isinstance(original, (dict, list, deque)):  # copies of other types may share their storage with the original
        with suppress(Exception):
            built = copy.copy(original)
            for key, value in assignments:
                built[key] = value
            return built
    return tuple(content) if isinstance(original, tuple) else content


def _entries(value: Any, prefix: str) -> list[str]:
    """Return the entries of mappings inside ``value``, then that of ``value`` itself, if any."""
    nested: list[str] = []
    own = ", ".join(_own_texts(value, nested))
    has_entry = own or (prefix and (value is None or _is_container(value)))
    return [*nested, prefix + own] if has_entry else nested


def _own_texts(value: Any, nested: list[str]) -> Iterator[str]:
    """Yield the texts of ``value``; add those of mappings in it to ``nested`` instead."""
    if isinstance(value, Real):
        yield f"{float(value):.4f}"  # Fraction has no float format before Python 3.12
    elif isinstance(value, Number):
        yield f"{value:.4f}"
    elif isinstance(value, torch.Tensor):
        yield _tensor_text(value)
    elif isinstance(value, Mapping):
        nested += to_str_list(value)
    elif _is_container(value):
        for item in value:
            yield from _own_texts(item, nested)


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes))


def _tensor_text(tensor: torch.Tensor) -> str:
    if tensor.ndim == 0:
        return f"{tensor.item():.4f}"
    if tensor.ndim > 1:
        return f"Shape{list(tensor.shape)}"
    texts = [f"{number:.4f}" for number in tensor[:_MOST_ELEMENTS].tolist()]
    return f"[{', '.join(texts + ['...'] * (len(tensor) > _MOST_ELEMENTS))}]"
