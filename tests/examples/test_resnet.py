"""The residual network learns with each option."""

from __future__ import annotations

import re

import pytest
import torch

from examples import resnet
from tests.torchvision_import import import_torchvision


@pytest.mark.parametrize("options", [(), pytest.param(("--amp", "--compile", "eager"), marks=pytest.mark.jobs)])
def test_it_learns_the_angles(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = resnet.training(
        0, resnet.parse(["--images", "400", "--noise", "2", "--epochs", "2", "--batch_size", "10", *options])
    )
    assert set(accuracy) == {"model", "average"}
    assert min(accuracy.values()) > 0.5  # 0.1 by chance
    found = re.findall(r"epoch (\d): loss [\d.]+, accuracy .*; (\d+) images/s", capsys.readouterr().out)
    assert [epoch for epoch, _ in found] == ["1", "2"]
    assert all(int(speed) > 0 for _, speed in found)


def test_images_are_reproducible_and_differ_from_those_for_validation() -> None:
    training, validation = resnet.load_data(resnet.parse(["--images", "80"]))
    assert (len(training), len(validation)) == (80, 20)
    image, label = training[13]
    torch.testing.assert_close(image, resnet.Stripes(1)[13][0])
    assert label == validation[13][1] == 3
    assert not torch.equal(image, validation[13][0])


def test_the_learning_rate_rises_and_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers: list[torch.optim.Optimizer] = []
    monkeypatch.setattr(resnet.idist, "auto_optim", lambda optimizer: optimizers.append(optimizer) or optimizer)
    trainer, model, average = resnet.make_trainer(resnet.make_model("small", 10), resnet.parse(["--lr", "0.5"]), 40)
    rates: list[float] = []
    trainer.add_event_handler("ITERATION_COMPLETED", lambda: rates.append(optimizers[0].param_groups[0]["lr"]))
    trainer.run([(torch.randn(4, 3, 32, 32), torch.arange(4))] * 40)
    assert rates[0] == 0
    assert rates[:4] == sorted(rates[:4])
    assert max(rates) == rates[3] == pytest.approx(0.5)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] < 0.01
    assert model.training
    assert not average.training


def test_a_network_of_torchvision() -> None:
    import_torchvision()
    for name, small, size in (("resnet18", True, 32), ("resnet50", False, 64)):
        model = resnet.make_model(name, 7, small_images=small).eval()
        assert model(torch.randn(1, 3, size, size)).shape == (1, 7)
