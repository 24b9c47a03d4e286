"""The network starts at bicubic interpolation and beats it on patches that it was not trained on."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pytest
import sklearn  # noqa: F401  # sets environment variables when it is first imported
import torch

from examples import super_resolution


@pytest.mark.jobs
def test_it_beats_bicubic_interpolation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matplotlib.use("agg")
    config = super_resolution.parse(["--epochs", "8", "--output", str(tmp_path)])
    interpolated, *ratios = super_resolution.training(config)
    assert interpolated > 20
    assert ratios[-1] > interpolated + 0.1
    assert f"epoch 8: {ratios[-1]:.2f} dB, bicubic interpolation {interpolated:.2f} dB" in capsys.readouterr().out
    assert (tmp_path / "patches.png").read_bytes().startswith(b"\x89PNG")


def test_the_network_starts_at_bicubic_interpolation() -> None:
    small = torch.rand(2, 3, 5, 7)
    torch.testing.assert_close(super_resolution.Upscaler()(small), super_resolution.bicubic(small, 2))
