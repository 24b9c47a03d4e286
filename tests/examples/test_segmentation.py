"""Shapes are drawn, and found on two ranks, with a metric that is the same on both."""

from __future__ import annotations

import pytest
import torch

import camshaft.distributed as idist
from examples import segmentation
from tests.ranks import run_on_ranks
from tests.torchvision_import import import_torchvision


def train(*arguments: str) -> float:
    import_torchvision()  # which torchmetrics imports if it is installed
    return segmentation.training(idist.get_local_rank(), segmentation.parse([*arguments]))


@pytest.mark.jobs
@pytest.mark.timeout(225)
def test_it_finds_the_shapes_on_two_ranks() -> None:
    one, other = run_on_ranks(2, train, "--images", "320", "--epochs", "3", limit=200)
    assert one == other > 0.4  # 0.15 if everything is background


def test_every_pixel_of_a_drawing_has_a_class() -> None:
    images, classes = segmentation.draw(5, seed=3).tensors
    assert images.shape == (5, 3, segmentation.SIZE, segmentation.SIZE)
    assert classes.shape == (5, segmentation.SIZE, segmentation.SIZE)
    assert 0 <= images.min()
    assert images.max() <= 1
    for image, truth in zip(images, classes, strict=True):
        assert 3 in truth.unique()  # the triangle is drawn last, so nothing covers it
        assert image[:, truth == 0].max() <= 0.5 <= image[:, truth > 0].min()
    assert all(
        one.equal(other) for one, other in zip((images, classes), segmentation.draw(5, seed=3).tensors, strict=True)
    )


def test_the_network_returns_a_score_for_each_class_and_pixel() -> None:
    assert segmentation.UNet(width=2)(torch.rand(2, 3, 32, 32)).shape == (2, 4, 32, 32)


def test_classes_are_drawn_as_text() -> None:
    assert segmentation.as_text(torch.tensor([[0, 1], [2, 3]])) == [".o", "#^"]
