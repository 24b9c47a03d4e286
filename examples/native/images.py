"""Images and the model for all scripts in this folder."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def make_images() -> TensorDataset:
    """Create 512 noisy images of 8 x 8 pixels; in images of class k, row k is brighter."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(8, (512,), generator=generator)
    images = torch.randn(512, 1, 8, 8, generator=generator)
    images[torch.arange(512), 0, classes] += 1
    return TensorDataset(images, classes)


def make_model() -> nn.Module:
    """Create a small convolutional network with the same initial weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d((1, 8)),
        nn.Flatten(),
        nn.Linear(64, 8),
    )
