"""Map functions over nested lists, tuples and mappings, and move tensors to a device."""

from __future__ import annotations

import copy
import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch

from camshaft.types import DeviceLike

T = TypeVar("T")


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
    shape = list(indices.shape)  # in operations that torch.jit.script compiles
    shape.insert(1, num_classes)
    onehot = torch.zeros(shape, dtype=torch.uint8, device=indices.device)
    return onehot.scatter_(1, indices.to(torch.int64).unsqueeze(1), 1)


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
