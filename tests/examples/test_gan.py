"""The example with two optimizers and custom events: the drawings approach the digits."""

from __future__ import annotations

import re

import pytest
import sklearn  # noqa: F401  # sets environment variables when it is first imported
import torch

from examples import gan


def test_the_drawings_approach_the_digits(capsys: pytest.CaptureFixture[str]) -> None:
    end = gan.training(0, gan.parse(["--epochs", "14", "--show_every", "200"]))
    shown = capsys.readouterr().out.splitlines()
    distances = {int(step): float(one) for step, one in re.findall(r"step (\d+): distance ([\d.]+)", "\n".join(shown))}
    assert list(distances) == [0, 200, 400]  # 14 epochs of 29 batches
    assert end < distances[0] / 2
    assert len(shown[-8]) == 8 * 8 * 2
    assert set("".join(shown[-8:])) <= set(" .:*#")


def test_the_distance_is_zero_for_equal_sets_and_grows_with_that_of_the_means() -> None:
    drawings = torch.randn(200, 4)
    assert gan.frechet_distance(drawings, drawings) == pytest.approx(0, abs=1e-5)
    assert gan.frechet_distance(drawings, drawings + 2) == pytest.approx(16, rel=1e-5)
