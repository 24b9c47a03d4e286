"""Train with torch_xla, a process for each device: PJRT_DEVICE=TPU python with_xla.py [WEIGHTS]"""

from __future__ import annotations

import sys

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from images import make_images, make_model
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torch_xla.distributed.parallel_loader import MpDeviceLoader


def train(index: int) -> None:
    device = torch_xla.device()
    images = make_images()
    part = DataLoader(
        images,
        batch_size=32 // xr.world_size(),
        sampler=DistributedSampler(images, xr.world_size(), xr.global_ordinal(), shuffle=False),
    )
    loader = MpDeviceLoader(part, device)
    model = make_model().to(device)
    xm.broadcast_master_param(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            xm.optimizer_step(optimizer)

    right = torch.zeros((), device=device)
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum()
    right = xm.all_reduce(xm.REDUCE_SUM, right)
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    if xr.global_ordinal() == 0:
        print(f"{xr.world_size()} processes with xla-tpu: {right.item() / len(images):.1%} right")
        if sys.argv[1:]:
            torch.save(weights, sys.argv[1])


if __name__ == "__main__":
    torch_xla.launch(train)
