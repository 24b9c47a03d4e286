"""Train with Horovod: horovodrun -np 2 python with_horovod.py [WEIGHTS]"""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch
from images import make_images, make_model
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

hvd.init()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", hvd.local_rank())
    torch.cuda.set_device(device)

images = make_images()
loader = DataLoader(
    images,
    batch_size=32 // hvd.size(),
    sampler=DistributedSampler(images, hvd.size(), hvd.rank(), shuffle=False),
)
model = make_model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()

correct = torch.zeros((), device=device)
with torch.no_grad():
    for x, y in loader:
        correct += (model(x.to(device)).argmax(1) == y.to(device)).sum()
correct = hvd.allreduce(correct, name="correct", op=hvd.Sum)
if hvd.rank() == 0:
    accuracy = correct.item() / len(images)
    print(f"world size {hvd.size()}, backend horovod: {accuracy:.1%} correct")
    if sys.argv[1:]:
        torch.save([one.detach().cpu() for one in model.parameters()], sys.argv[1])
