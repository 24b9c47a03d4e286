"""Run scripts of the same training, with camshaft and without, and compare their weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from tests.examples.weights import ROOT, run_for_weights

FOLDER = ROOT / "examples" / "native"


def run(launch: Sequence[str], script: str, *arguments: str, **variables: str) -> tuple[str, list[Tensor]]:
    """Run a script and return its output and its final weights."""
    return run_for_weights([*launch, str(FOLDER / script), *arguments], variables)


@cache
def train_on_one_process() -> list[Tensor]:
    """Return the weights of camshaft's script in one process; assert that it has learned."""
    output, weights = run([sys.executable], "with_camshaft.py")
    (accuracy,) = re.findall(r"^world size 1, backend None: ([0-9.]+)% correct$", output, re.MULTILINE)
    assert float(accuracy) > 80, output
    return weights


def assert_same_weights(launch: Sequence[str], script: str, *arguments: str, shows: str, **variables: str) -> None:
    """Assert that a command gives the weights of one process, and that only rank 0 prints the line."""
    output, weights = run(launch, script, *arguments, **variables)
    assert output.count(f"{shows}: ") == output.count(" correct") == 1, output
    torch.testing.assert_close(weights, train_on_one_process(), rtol=1e-4, atol=1e-5)
