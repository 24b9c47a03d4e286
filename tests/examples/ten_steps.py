"""Run ten steps of examples/distributed_backends.py with any command, and compare the weights with one process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from examples import distributed_backends
from tests.examples.weights import run_for_weights

EXAMPLE = Path(distributed_backends.__file__)
SHORT = ("--log_interval", "5", "--lr", "0.01")  # with a larger rate, rounding errors grow


def command(name: str) -> str:
    """Return the path of a command in the environment of the tests."""
    return str(Path(sys.executable).parent / name)


def run(
    launch: Sequence[str], *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[str, list[Tensor]]:
    """Run the example and return its output and its final weights."""
    return run_for_weights([*launch, str(EXAMPLE), *SHORT, *arguments, "--weights"], environment or {})


@cache
def train_on_one_process() -> list[Tensor]:
    return run([sys.executable])[1]


def assert_ten_steps(launch: Sequence[str], *arguments: str, shows: str, **options: Mapping[str, str]) -> None:
    """Assert that a command gives the weights of one process, and that only rank 0 prints the line."""
    output, weights = run(launch, *arguments, environment=options.get("environment"))
    assert output.count(shows) == 1, output
    assert output.count("iteration 10: loss") == 1, output
    torch.testing.assert_close(weights, train_on_one_process(), rtol=1e-4, atol=1e-6)
