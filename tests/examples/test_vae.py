"""The autoencoder learns, and draws as text."""

from __future__ import annotations

import re

import pytest
import sklearn  # noqa: F401  # sets environment variables when it is first imported
import torch

from examples import vae


@pytest.mark.jobs
def test_it_learns_and_draws(capsys: pytest.CaptureFixture[str]) -> None:
    assert vae.training(vae.parse(["--epochs", "10"])) < 25  # 44 without training, 26 for the mean image
    shown = capsys.readouterr().out
    total, reconstruction, code = map(float, re.findall(r"[\d.]+(?= nats| to)", shown)[:3])
    assert total == pytest.approx(reconstruction + code, abs=0.02)
    drawing = shown.splitlines()[-24:]
    assert {len(line) for line in drawing} == {6 * 8 * 2}
    assert set("".join(drawing)) <= set(" .:*#")


def test_it_draws_from_the_mean_when_it_is_evaluated() -> None:
    model = vae.Autoencoder().eval()
    images = torch.rand(3, 64)
    torch.testing.assert_close(model(images)[0], model(images)[0])
    assert not torch.equal(model.train()(images)[0], model(images)[0])
