"""What the engine asks of its data: a length, if it has one, and samplers that want to know the epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def length_of(data: Any) -> int | None:
    """Give ``len(data)``, or ``None`` where there is none.

    >>> length_of([1, 2]), length_of(iter([1, 2])), length_of(None)
    (2, None, None)
    """
    try:
        return len(data)
    except TypeError:  # also what loaders over data without a length raise
        return None


def check_iterable(data: Any) -> None:
    """Refuse data that cannot be iterated over."""
    if not isinstance(data, Iterable):
        raise TypeError(f"data must be iterable, got {data!r} of type {type(data).__name__}")


def announce_epoch(data: Any, number: int) -> None:
    """Call ``set_epoch(number)`` on the samplers and batch samplers of a loader that have it."""
    told: list[Any] = []
    for sampler in _samplers(data):
        if not any(sampler is one for one in told) and callable(getattr(sampler, "set_epoch", None)):
            told.append(sampler)
            sampler.set_epoch(number)


def _samplers(data: Any) -> Iterator[Any]:
    """Walk the chain of samplers: a batch sampler may wrap another one, and each may hold a sampler."""
    yield getattr(data, "sampler", None)
    wrapper = getattr(data, "batch_sampler", None)
    seen: list[Any] = []
    while wrapper is not None and not any(wrapper is one for one in seen):
        seen.append(wrapper)
        yield wrapper
        yield getattr(wrapper, "sampler", None)
        wrapper = getattr(wrapper, "batch_sampler", None)
