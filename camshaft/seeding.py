"""Seed every random number generator, and capture and restore their states."""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, SupportsIndex

import torch

from camshaft.arguments import check_type


def manual_seed(seed: SupportsIndex) -> None:
    """Seed Python's ``random``, torch on all devices, NumPy where it is installed, and XLA where it is in use.

    This does not start XLA: ``initialize("xla-tpu")`` later seeds it with the seed of torch.

    Args:
        seed: any integer. torch and torch_xla take it modulo ``2**64``, NumPy modulo ``2**32``.

    Raises:
        TypeError: ``seed`` is not an integer; nothing was seeded.

    >>> manual_seed(17)
    >>> first = random.random(), torch.rand(1).item()
    >>> manual_seed(17)
    >>> first == (random.random(), torch.rand(1).item())
    True
    """
    try:
        number = operator.index(seed)
    except TypeError as error:
        raise TypeError(f"seed must be an integer, got {seed!r} of type {type(seed).__name__}") from error
    random.seed(number)
    torch.manual_seed(number % 2**64)
    if (torch_xla := sys.modules.get("torch_xla")) is not None and torch_xla._XLAC._xla_runtime_is_initialized():
        import_module("torch_xla.core.xla_model").set_rng_state(number % 2**64)
    if (numpy := _import_if_installed("numpy")) is not None:
        numpy.random.seed(number % 2**32)


def capture_random_state() -> dict[str, Any]:
    """Return the states of Python's ``random``, torch's CPU generator and, where installed, NumPy's.

    The dict contains only numbers, strings, tensors, and lists, tuples and dicts of those, so
    ``torch.load(..., weights_only=True)`` can load it.

    >>> state = capture_random_state()
    >>> drawn = random.random()
    >>> restore_random_state(state)
    >>> drawn == random.random()
    True
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := _import_if_installed("numpy")) is not None:
        state["numpy"] = _plain(numpy.random.get_state(legacy=False))
    return state


def restore_random_state(state: Mapping[str, Any] | Sequence[Any]) -> None:
    """Restore a captured state; that of NumPy is skipped where it is not installed.

    Args:
        state: from ``capture_random_state``, or a list ``[random.getstate(), torch.get_rng_state()]``, optionally with
            ``numpy.random.get_state()`` as its third element.

    Raises:
        TypeError: ``state`` is neither a mapping nor a list or tuple.
        ValueError: a generator is missing, or rejects its state. All generators are unchanged.
    """
    if isinstance(state, (list, tuple)) and len(state) in (2, 3):
        state = dict(zip(("python", "torch", "numpy"), state, strict=False))
    check_type("state", state, (Mapping, list, tuple), "a mapping or a list")
    if not isinstance(state, Mapping) or not {"python", "torch"} <= state.keys():
        raise ValueError(f"state must hold 'python' and 'torch', or be a list of 2 or 3 elements, got {list(state)}")
    before = capture_random_state()
    try:
        _apply(state)
    except Exception as error:
        _apply(before)
        raise ValueError(f"state must hold valid generator states, and one is not: {error}") from error


@contextmanager
def preserved_random_state(*, devices: bool = True) -> Iterator[None]:
    """Restore all generators after a block, even if it raises.

    Args:
        devices: whether to also restore the generators of all devices in use. This does not initialize CUDA.

    >>> manual_seed(3)
    >>> with preserved_random_state():
    ...     drawn = random.random()
    >>> drawn == random.random()
    True
    """
    modules = [module for module in (torch.cuda, torch.xpu) if devices and module.is_initialized()]
    on_devices = [module.get_rng_state_all() for module in modules]
    on_mps = torch.mps.get_rng_state() if devices and torch.backends.mps.is_available() else None
    state = capture_random_state()
    try:
        yield
    finally:
        _apply(state)
        for module, states in zip(modules, on_devices, strict=True):
            module.set_rng_state_all(states)
        if on_mps is not None:
            torch.mps.set_rng_state(on_mps)


def _import_if_installed(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


def _apply(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"].cpu())  # map_location may have moved it
    if "numpy" in state and (numpy := _import_if_installed("numpy")) is not None:
        numpy.random.set_state(state["numpy"])


def _plain(value: Any) -> Any:
    """Convert the NumPy arrays and scalars in ``value`` to lists and numbers."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
