"""Shapes are drawn in the format of Pascal VOC, and found on two ranks, with a metric that is the same on both."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import camshaft.distributed as idist
from tests.ranks import run_on_ranks
from tests.torchvision_import import import_torchvision


def load_example() -> Any:
    import_torchvision()
    return importlib.import_module("examples.segmentation")


def train(folder: Path, *arguments: str) -> float:
    example = load_example()
    config = example.parse(["--output", str(folder), *arguments])
    return float(example.training(idist.get_local_rank(), config))


@pytest.mark.jobs
def test_it_finds_the_shapes_on_two_ranks(tmp_path: Path) -> None:
    load_example().draw_shapes(tmp_path / "shapes", train=320, val=51)
    one, other = run_on_ranks(2, train, tmp_path, "--epochs", "3")
    assert one == other > 0.3  # 0.1 if everything is background
    assert (tmp_path / "predictions.png").read_bytes().startswith(b"\x89PNG")


def test_every_pixel_of_a_drawing_has_a_class(tmp_path: Path) -> None:
    example = load_example()
    example.draw_shapes(tmp_path / "shapes", train=3, val=2)
    assert len(example.load_data(tmp_path / "shapes", "train", 32)) == 3
    data = example.load_data(tmp_path / "shapes", "val", 32)
    assert len(data) == 2
    for image, classes in (data[0], data[1]):
        assert image.shape == (3, 32, 32)
        assert 0 <= image.min() <= image.max() <= 1
        assert classes.dtype == torch.int64
        assert 3 in classes.unique()  # the triangle is drawn last, so nothing covers it
        assert set(classes.unique().tolist()) <= {0, 1, 2, 3}
        assert image[:, classes == 0].mean() < 0.4 < image[:, classes > 0].mean()


@pytest.mark.parametrize(("name", "classes"), [("fcn_resnet10", 4), ("lraspp_mobilenet_v3_large", 21)])
def test_the_network_returns_a_score_for_each_class_and_pixel(name: str, classes: int) -> None:
    model = load_example().make_model(name, classes).eval()
    assert model(torch.rand(2, 3, 64, 64))["out"].shape == (2, classes, 64, 64)
