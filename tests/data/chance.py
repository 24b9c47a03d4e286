"""A chi-square test, shared by the tests of random orders."""

from __future__ import annotations

import torch
from torch import Tensor

UNLIKELY = 1e-6


def histogram(values: Tensor, num_bins: int) -> Tensor:
    return torch.bincount(values, minlength=num_bins)


def looks_random(counts: Tensor, expected: Tensor | None = None) -> bool:
    """Compare counts with the expected ones (by default equal in all bins) by a chi-square test."""
    if expected is None:
        expected = torch.ones(len(counts))
    expected = expected.to(torch.float64) * (counts.sum() / expected.sum())
    assert expected.min() >= 5, "too few counts for a chi-square test"
    deviation = ((counts - expected) ** 2 / expected).sum()
    chance = torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).to(torch.float64), deviation / 2)
    return float(chance) > UNLIKELY
