"""Train on any backend: with_camshaft.py --backend gloo --nproc_per_node 2 [WEIGHTS]"""

from __future__ import annotations

import argparse

import torch
from images import make_images, make_model
from torch import nn

import camshaft.distributed as idist
from camshaft.engine import create_supervised_trainer


def training(local_rank: int, weights: str | None) -> None:
    device = idist.device()
    images = make_images()
    loader = idist.auto_dataloader(images, batch_size=32, shuffle=False)
    model = idist.auto_model(make_model())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    loss_fn = nn.functional.cross_entropy
    trainer = create_supervised_trainer(model, optimizer, loss_fn, device=device)
    trainer.run(loader, max_epochs=3)

    correct = 0
    with torch.no_grad():
        for x, y in loader:
            correct += int((model(x.to(device)).argmax(1) == y.to(device)).sum())
    correct = idist.all_reduce(correct)
    if idist.get_rank() == 0:
        size, backend = idist.get_world_size(), idist.backend()
        print(f"world size {size}, backend {backend}: {correct / len(images):.1%} correct")
        if weights:
            torch.save([one.detach().cpu() for one in model.parameters()], weights)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend")
    parser.add_argument("--nproc_per_node", type=int)
    parser.add_argument("weights", nargs="?")
    args = parser.parse_args()
    with idist.Parallel(args.backend, args.nproc_per_node) as parallel:
        parallel.run(training, args.weights)
