"""The residual network learns with each option, on synthetic images and on images in a folder."""

from __future__ import annotations

import hashlib
import pickle
import re
from pathlib import Path

import numpy
import pytest
import torch

from examples import resnet
from tests.torchvision_import import import_torchvision


@pytest.mark.parametrize("options", [(), pytest.param(("--amp", "--compile", "eager"), marks=pytest.mark.jobs)])
def test_it_learns_the_angles(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = resnet.training(0, resnet.parse(["--images", "400", "--epochs", "2", "--batch_size", "10", *options]))
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


def test_a_folder_of_images_and_a_network_of_torchvision(tmp_path: Path) -> None:
    import_torchvision()
    from PIL import Image

    for part in ("train", "val"):
        for name, color in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (250, 230), color).save(tmp_path / part / name / "one.png")
    training, validation = resnet.load_data(resnet.parse(["--data", "folder", "--root", str(tmp_path)]))
    assert training.classes == ["blue", "red"]
    for part in (training, validation):
        image, label = part[1]
        assert image.shape == (3, 224, 224)
        assert image[0].min() > image[2].max()
        assert label == 1
    for name, small, size in (("resnet18", True, 32), ("resnet50", False, 64)):
        model = resnet.make_model(name, 7, small_images=small).eval()
        assert model(torch.randn(1, 3, size, size)).shape == (1, 7)


@pytest.mark.jobs
def test_images_of_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_torchvision()
    from torchvision.datasets import CIFAR10

    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()

    def save(file: str, content: dict[str, object]) -> str:
        (folder / file).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / file).read_bytes()).hexdigest()

    def batch(value: int) -> dict[str, object]:  # one image in the archive's format: 32 x 32 bytes per color channel
        return {"data": numpy.full((1, 3 * 32 * 32), value, dtype=numpy.uint8), "labels": [value % 10]}

    for name, values in (("train_list", range(5)), ("test_list", [255])):
        files = [file for file, _ in getattr(CIFAR10, name)]
        sums = [[file, save(file, batch(value))] for file, value in zip(files, values, strict=True)]
        monkeypatch.setattr(CIFAR10, name, sums)
    names = save(CIFAR10.meta["filename"], {CIFAR10.meta["key"]: [f"class {number}" for number in range(10)]})
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": names})

    training, validation = resnet.load_data(resnet.parse(["--data", "cifar10", "--root", str(tmp_path)]))
    assert (len(training), len(validation), len(training.classes)) == (5, 1, 10)
    assert [label for _, label in training] == [0, 1, 2, 3, 4]
    image, label = validation[0]
    assert (image.shape, label) == ((3, 32, 32), 5)
    assert image.min() > 2  # white
