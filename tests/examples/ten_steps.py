"""Ten steps of the example for all backends, by whatever command: the weights must be those of one process."""

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
SHORT = ("--model", "tiny", "--log_interval", "5")


def command(name: str) -> str:
    """Return the path of a command of the environment that the tests run in."""
    return str(Path(sys.executable).parent / name)


def run(
    launch: Sequence[str], *arguments: str, environment: Mapping[str, str] | None = None, seconds: float = 80
) -> tuple[str, list[Tensor]]:
    """Run the example, and give what it wrote and the weights that it ended with."""
    return run_for_weights([*launch, str(EXAMPLE), *SHORT, *arguments, "--weights"], environment or {}, seconds)


@cache
def of_one_process() -> list[Tensor]:
    return run([sys.executable])[1]


def assert_ten_steps(launch: Sequence[str], *arguments: str, shows: str, **options: Mapping[str, str]) -> None:
    """Assert that a command trains as one process does, and that rank 0 shows a line, once."""
    output, weights = run(launch, *arguments, environment=options.get("environment"))
    assert output.count(shows) == 1, output
    assert output.count("iteration 10: loss") == 1, output
    torch.testing.assert_close(weights, of_one_process(), rtol=1e-4, atol=1e-6)
