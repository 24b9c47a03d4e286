"""The scripts of the same training, camshaft's and those without it: all must come to the same weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from tests.examples.weights import ROOT, run_for_weights

FOLDER = ROOT / "examples" / "native"
LIMIT = 150.0  # seconds for what takes a tenth of that where the cores are free


def run(launch: Sequence[str], script: str, *arguments: str, **variables: str) -> tuple[str, list[Tensor]]:
    """Run a script, and give what it wrote and the weights that it ended with."""
    return run_for_weights([*launch, str(FOLDER / script), *arguments], variables, LIMIT)


@cache
def of_one_process() -> list[Tensor]:
    """Return the weights of camshaft's script in one process, which learned something."""
    output, weights = run([sys.executable], "with_camshaft.py")
    (accuracy,) = re.findall(r"^1 processes with None: ([0-9.]+)% correct$", output, re.MULTILINE)
    assert float(accuracy) > 80, output
    return weights


def assert_same_weights(launch: Sequence[str], script: str, *arguments: str, shows: str, **variables: str) -> None:
    """Assert that a command trains as one process does, and that rank 0 alone shows what it trained with."""
    output, weights = run(launch, script, *arguments, **variables)
    assert output.count(f"{shows}: ") == output.count(" correct\n") == 1, output
    torch.testing.assert_close(weights, of_one_process(), rtol=1e-4, atol=1e-5)
