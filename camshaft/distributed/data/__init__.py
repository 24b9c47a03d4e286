"""Which samples a rank is given, and in which order: computed from a seed, an epoch and a position."""

from __future__ import annotations

from camshaft.distributed.data.one_by_one import ExactSampler
from camshaft.distributed.data.orders import Order, Sequential, Shuffled, ShuffledWindows, Weighted
from camshaft.distributed.data.prefetch import prefetch_to_device
from camshaft.distributed.data.sampler import ExactBatchSampler

__all__ = [
    "ExactBatchSampler",
    "ExactSampler",
    "Order",
    "Sequential",
    "Shuffled",
    "ShuffledWindows",
    "Weighted",
    "prefetch_to_device",
]
