"""Train a classifier on images in ten tints; the same code runs with every backend and launcher.

You see the backend, the device, and the world size, and the loss of ten iterations, which falls, from rank 0 alone.

python examples/distributed_backends.py
python examples/distributed_backends.py --backend gloo --nproc_per_node 2
torchrun --nproc_per_node 2 examples/distributed_backends.py --backend gloo
python -m torch.distributed.launch --nproc_per_node 2 --use_env examples/distributed_backends.py --backend gloo
srun --ntasks 2 python examples/distributed_backends.py --backend gloo
mpirun -np 2 python examples/distributed_backends.py --backend mpi
horovodrun -np 2 python examples/distributed_backends.py --backend horovod
python examples/distributed_backends.py --backend horovod --nproc_per_node 2
python examples/distributed_backends.py --backend xla-tpu --nproc_per_node 1
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import camshaft.distributed as idist
from camshaft.engine import Engine, Events
from camshaft.utils import manual_seed

CLASSES = 10


class RandomImages(Dataset[tuple[Tensor, Tensor]]):
    """Noise with a tint, which is the class: the same images in every process."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        noise = torch.randn(3, self.size, self.size, generator=generator)
        label = torch.randint(CLASSES, (), generator=generator)
        tint = 2 * torch.cos(2 * torch.pi * (label / CLASSES + torch.arange(3) / 3))
        return noise + tint[:, None, None], label


def make_model(name: str) -> Any:
    """Create one of torchvision's classifiers, or a tiny one."""
    if name == "tiny":
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES)
        )
    import torchvision.models

    return torchvision.models.get_model(name, weights=None, num_classes=CLASSES)


def training(local_rank: int, config: argparse.Namespace) -> None:
    """Train; runs in every process."""
    manual_seed(config.seed)
    model = idist.auto_model(make_model(config.model))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=config.lr))
    images = RandomImages(config.num_iterations * config.batch_size, config.image_size)
    loader = idist.auto_dataloader(images, batch_size=config.batch_size, shuffle=False)

    def step(engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
        model.train()
        x, y = (part.to(idist.device()) for part in batch)
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(x).log_softmax(1), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Engine(step)

    @trainer.on(Events.STARTED)
    @idist.one_rank_only()
    def show() -> None:
        print(
            f"world size {idist.get_world_size()} on {idist.device()} with {idist.backend()}, this is rank 0",
            flush=True,
        )

    @trainer.on(Events.ITERATION_COMPLETED(every=config.log_interval))
    def log() -> None:
        loss = idist.all_reduce(trainer.state.output.item()) / idist.get_world_size()
        if idist.get_rank() == 0:
            print(f"iteration {trainer.state.iteration}: loss {loss:.4f}", flush=True)

    @trainer.on(Events.COMPLETED)
    @idist.one_rank_only()
    def save() -> None:
        if config.weights:
            torch.save([parameter.detach().cpu() for parameter in model.parameters()], config.weights)

    trainer.run(loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", help="gloo, nccl, mpi, horovod, xla-tpu, or auto (default: a single process)")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    parser.add_argument("--batch_size", type=int, default=16, help="images in a batch, over all processes")
    parser.add_argument("--log_interval", type=int, default=1, help="iterations between two lines of output")
    parser.add_argument("--num_iterations", type=int, default=10)
    parser.add_argument("--model", default="tiny", help="a classifier of torchvision, or tiny")
    parser.add_argument("--lr", type=float, default=0.3, help="learning rate (default: 0.3)")
    parser.add_argument("--image_size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=543)
    parser.add_argument("--weights", help="file for the final weights")
    config = parser.parse_args()
    with idist.Parallel(backend=config.backend, nproc_per_node=config.nproc_per_node) as parallel:
        parallel.run(training, config)


if __name__ == "__main__":
    main()
