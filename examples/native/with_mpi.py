"""Train over MPI with mpi4py: mpirun -np 2 python with_mpi.py [WEIGHTS]"""

from __future__ import annotations

import sys

import torch
from images import make_images, make_model
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

world = MPI.COMM_WORLD
images = make_images()
loader = DataLoader(
    images,
    batch_size=32 // world.size,
    sampler=DistributedSampler(images, world.size, world.rank, shuffle=False),
)
model = make_model()
for tensor in model.state_dict().values():
    world.Bcast(tensor.numpy())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            world.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())
            parameter.grad /= world.size
        optimizer.step()

correct = 0
with torch.no_grad():
    for x, y in loader:
        correct += int((model(x).argmax(1) == y).sum())
correct = world.allreduce(correct)
if world.rank == 0:
    print(f"world size {world.size}, backend mpi: {correct / len(images):.1%} correct")
    if sys.argv[1:]:
        torch.save([parameter.detach() for parameter in model.parameters()], sys.argv[1])
