"""Train with torch_xla on all devices: PJRT_DEVICE=TPU python with_xla.py [WEIGHTS]"""

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
    world_size, rank = xr.world_size(), xr.global_ordinal()
    images = make_images()
    host_loader = DataLoader(
        images,
        batch_size=32 // world_size,
        sampler=DistributedSampler(images, world_size, rank, shuffle=False),
    )
    loader = MpDeviceLoader(host_loader, device)
    model = make_model().to(device)
    xm.broadcast_master_param(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            xm.optimizer_step(optimizer)

    correct = torch.zeros((), device=device)
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum()
    correct = xm.all_reduce(xm.REDUCE_SUM, correct)
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    if rank == 0:
        accuracy = correct.item() / len(images)
        print(f"world size {world_size}, backend xla-tpu: {accuracy:.1%} correct")
        if sys.argv[1:]:
            torch.save(weights, sys.argv[1])


if __name__ == "__main__":
    torch_xla.launch(train)
