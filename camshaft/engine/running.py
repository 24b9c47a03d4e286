"""Which engines run in this thread: one may run another in a handler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_here = threading.local()


@contextmanager
def running(engine: Any) -> Iterator[None]:
    """Note that an engine runs."""
    engines: list[Any] = _here.__dict__.setdefault("engines", [])
    engines.append(engine)
    try:
        yield
    finally:
        engines.pop()


def outermost() -> Any:
    """Give the engine that runs in no handler of another, or ``None`` if none runs."""
    engines = _here.__dict__.get("engines")
    return engines[0] if engines else None
