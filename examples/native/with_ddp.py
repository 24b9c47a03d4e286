"""Train on gloo or nccl: torchrun --standalone --nproc-per-node 2 with_ddp.py [WEIGHTS]"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from images import make_images, make_model
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

backend = "nccl" if torch.cuda.is_available() else "gloo"
dist.init_process_group(backend)
device = torch.device("cpu")
if backend == "nccl":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

images = make_images()
loader = DataLoader(
    images,
    batch_size=32 // dist.get_world_size(),
    sampler=DistributedSampler(images, shuffle=False),
)
model = nn.parallel.DistributedDataParallel(make_model().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()

correct = torch.zeros((), device=device)
with torch.no_grad():
    for x, y in loader:
        correct += (model(x.to(device)).argmax(1) == y.to(device)).sum()
dist.all_reduce(correct)
if dist.get_rank() == 0:
    size = dist.get_world_size()
    print(f"world size {size}, backend {backend}: {correct.item() / len(images):.1%} correct")
    if sys.argv[1:]:
        torch.save([one.detach().cpu() for one in model.parameters()], sys.argv[1])
dist.destroy_process_group()
