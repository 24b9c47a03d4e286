"""The siamese network orders distances, also of images that it was not trained on."""

from __future__ import annotations

import pytest
import sklearn  # noqa: F401  # sets environment variables when it is first imported
import torch

from examples import siamese


@pytest.mark.jobs
def test_it_learns_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    right = siamese.training(siamese.parse(["--epochs", "3"]))
    assert right["trained images"] > 0.9
    assert right["new images"] > 0.88
    assert "epoch 0: loss 1.000, right order: trained images" in capsys.readouterr().out


def test_a_triplet_holds_two_images_of_a_digit_and_one_of_another() -> None:
    digits = torch.arange(30) % 10
    triplets = siamese.Triplets(digits.float(), digits)
    for index in range(len(triplets)):
        anchor, same, other = triplets[index]
        assert anchor == same != other
