"""Which samples a rank gets, and in which order: computed from a seed, an epoch and a position."""

from __future__ import annotations

from camshaft.data.orders import Order, Sequential, Shuffled, ShuffledWindows, Weighted
from camshaft.data.read_ahead import prefetch_to_device
from camshaft.data.samplers import ExactBatchSampler, ExactSampler

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
