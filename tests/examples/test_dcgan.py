"""The generator draws images that resemble digits more than its first ones do, and saves pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import sklearn.datasets
import torch

from examples import dcgan


@pytest.mark.jobs
def test_drawings_get_closer_to_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mean = torch.tensor(sklearn.datasets.load_digits().images, dtype=torch.float32).mean(0) / 8 - 1
    distances = [
        (dcgan.training(dcgan.parse([*options, "--output", str(tmp_path)])).mean(0)[0] - mean).square().mean()
        for options in (("--epochs", "1", "--draw_every", "1"), ("--epochs", "8", "--draw_every", "8"))
    ]
    assert distances[1] < distances[0] / 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_1.png", "epoch_8.png"]
    assert f"saved {tmp_path / 'epoch_8.png'}" in capsys.readouterr().out


def test_the_shapes_of_the_networks_and_of_a_grid() -> None:
    drawings = dcgan.make_generator()(torch.randn(32, dcgan.NOISE, 1, 1))
    assert drawings.shape == (32, 1, 8, 8)
    assert dcgan.make_discriminator()(drawings).shape == (32, 1)
    grid = dcgan.as_grid(drawings.detach())
    assert grid.shape == (40, 80)
    assert 0 <= grid.min() <= grid.max() <= 1
