"""The device of these tests: the GPU, or the CPU where ``scripts/gpu.py`` rehearses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Make every operation that waits for the GPU an error."""
    set_sync_debug_mode("error")
    try:
        yield
    finally:
        set_sync_debug_mode("default")


def set_sync_debug_mode(mode: str) -> None:
    if ON_GPU:
        torch.cuda.set_sync_debug_mode(mode)
