"""Map a function over nested lists, tuples and mappings, and move tensors to a device."""

from __future__ import annotations

import copy
import reprlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from camshaft.types import DeviceLike

T = TypeVar("T")


def apply_to_type(x: Any, input_type: type[T] | tuple[type, ...], func: Callable[[T], Any]) -> Any:
    """Apply ``func`` to every instance of ``input_type`` in ``x``, however deeply nested.

    Args:
        x: an instance, a string or bytes (returned unchanged), or a mapping or sequence of those, nested.
        input_type: a type or a tuple of types; asked first, so it may also be that of a container.
        func: called with each instance.

    Returns:
        The same structure with the results in place. A container is rebuilt as its own type; one that cannot
        be, such as ``range``, becomes a plain ``dict``, ``tuple`` or ``list``.

    Raises:
        TypeError: something in ``x`` is none of these, for example a number, ``None`` or a set.

    >>> apply_to_type({"a": (1, 2), "b": "text"}, int, lambda value: value * 10)
    {'a': (10, 20), 'b': 'text'}
    """
    if isinstance(x, input_type):
        return func(cast(T, x))  # a tuple of types narrows to Any
    if isinstance(x, (str, bytes)):
        return x
    if isinstance(x, Mapping):
        return _rebuild_mapping(x, {key: apply_to_type(value, input_type, func) for key, value in x.items()})
    if isinstance(x, Sequence):
        return _rebuild_sequence(x, [apply_to_type(item, input_type, func) for item in x])
    raise TypeError(
        f"x must be made of {_names(input_type)}, str, bytes, mappings and sequences, "
        f"got {reprlib.repr(x)} of type {type(x).__name__}"
    )


def apply_to_tensor(x: Any, func: Callable[[torch.Tensor], Any]) -> Any:
    """Apply ``func`` to every tensor in ``x``; as ``apply_to_type`` with ``torch.Tensor``.

    >>> apply_to_tensor([torch.tensor(1), {"y": torch.tensor(2)}], torch.Tensor.item)
    [1, {'y': 2}]
    """
    return apply_to_type(x, torch.Tensor, func)


def convert_tensor(x: T, device: DeviceLike | None = None, non_blocking: bool = False) -> T:
    """Move every tensor in ``x`` to ``device``.

    Args:
        x: a tensor, a string or bytes, or a mapping or sequence of those, nested.
        device: where to; ``None`` leaves the tensors where they are (containers are copied and checked all
            the same).
        non_blocking: do not wait for copies from pinned memory.

    Raises:
        TypeError: ``x`` holds something else, for example a number or ``None``.

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
    """Turn class indices of shape ``(N, ...)`` into one-hot vectors of shape ``(N, num_classes, ...)``.

    The result is ``uint8`` on the device of ``indices``.

    Raises:
        TypeError: ``indices`` are not integers.
        RuntimeError: an index lies outside ``[0, num_classes)``; on a GPU this is a device-side assertion.

    >>> to_onehot(torch.tensor([0, 2]), num_classes=3)
    tensor([[1, 0, 0],
            [0, 0, 1]], dtype=torch.uint8)
    """
    if indices.is_floating_point() or indices.is_complex():
        raise TypeError(f"indices must be a tensor of integers, got dtype {indices.dtype}")
    shape = (*indices.shape[:1], num_classes, *indices.shape[1:])
    onehot = torch.zeros(shape, dtype=torch.uint8, device=indices.device)
    return onehot.scatter_(1, indices.to(torch.int64).unsqueeze(1), 1)


def _rebuild_mapping(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return values
    built = _construct(original, values)
    if built is None and isinstance(original, dict):
        built = _copy_and_assign(original, values.items())
    return values if built is None else built


def _rebuild_sequence(original: Sequence[Any], items: list[Any]) -> Any:
    if type(original) is list:
        return items
    if isinstance(original, tuple) and hasattr(original, "_make"):
        return original._make(items)  # a named tuple; its constructor takes the fields one by one
    built = _construct(original, items) if not isinstance(original, deque) else None
    if built is None and isinstance(original, (list, deque)):  # a deque built from a list forgets its maxlen
        built = _copy_and_assign(original, enumerate(items))
    if built is None:
        return tuple(items) if isinstance(original, tuple) else items
    return built


def _construct(original: Any, content: Any) -> Any:
    """Call the type of ``original`` with ``content``, or return None if it is built another way."""
    try:
        return type(original)(content)
    except Exception:  # a foreign constructor that was given what it was not made for may raise anything
        return None


def _copy_and_assign(original: Any, values: Any) -> Any:
    """Replace the values in a copy, or return None if that is impossible.

    Only for subclasses of the built-in containers: their copies never share the storage. A copy of any other
    type may, and then the assignments would change the user's own data.
    """
    try:
        built = copy.copy(original)
        for key, value in values:
            built[key] = value
    except Exception:  # as in _construct: the methods are the user's
        return None
    return built


def _names(input_type: type | tuple[type, ...]) -> str:
    types = input_type if isinstance(input_type, tuple) else (input_type,)
    return " or ".join(getattr(one, "__name__", str(one)) for one in types)
