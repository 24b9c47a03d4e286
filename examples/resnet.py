"""Train a residual network with mixed precision, learning rate warm-up, weight averaging (EMA), and throughput.

    python examples/resnet.py
    python examples/resnet.py --model resnet18 --images 20000 --amp --compile
    torchrun --nproc_per_node 2 examples/resnet.py --backend gloo
    mpirun -np 2 python examples/resnet.py --backend mpi

After each epoch you see the loss, the accuracy of the model and of its averaged weights, and images per second. The
images are drawn: noisy stripes in ten classes, one angle per class. For images from files, see cifar10.py and
imagenet.py.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import camshaft.distributed as idist
from camshaft.data import prefetch_to_device
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import (
    CosineAnnealingScheduler,
    EMAHandler,
    Throughput,
    create_lr_scheduler_with_warmup,
)
from camshaft.utils import manual_seed


class Stripes(Dataset[tuple[Tensor, int]]):
    """Synthetic images of 32 x 32 pixels, generated on access and reproducible; the class is the angle."""

    classes = range(10)

    def __init__(self, count: int, first: int = 0, noise: float = 4.0) -> None:
        self.count, self.first, self.noise = count, first, noise
        self.x, self.y = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="xy")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        angle, phase = index % 10 * math.pi / 10, torch.rand(3, 1, 1, generator=generator) * 2 * math.pi
        stripes = torch.sin((math.cos(angle) * self.x + math.sin(angle) * self.y) / 2 + phase)
        return stripes + self.noise * torch.randn(3, 32, 32, generator=generator), index % 10


def load_data(config: argparse.Namespace) -> tuple[Stripes, Stripes]:
    """Return images for training and for validation."""
    return Stripes(config.images, 0, config.noise), Stripes(config.images // 4, 10**9, config.noise)


class Accuracy:
    """Count correct predictions on the device, and reduce over ranks; a metric of torchmetrics works as well."""

    def reset(self) -> None:
        self.counts = torch.zeros(2, dtype=torch.long, device=idist.device())

    def update(self, scores: Tensor, classes: Tensor) -> None:
        right = scores.argmax(dim=1) == classes
        self.counts += torch.stack([right.sum(), torch.ones_like(right).sum()])

    def compute(self) -> float:
        right, total = idist.all_reduce(self.counts).tolist()
        return float(right / total)


class Block(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)),
        )
        around = (nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.around = nn.Sequential(*around) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.around(x))


def make_model(name: str, classes: int, small_images: bool = True) -> nn.Module:
    """Create a network of three blocks, or one of torchvision's."""
    if name == "small":
        stem = (nn.Conv2d(3, 16, 3, 2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        blocks = (Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    import torchvision.models

    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes)
    if small_images:  # the usual stem, for 224 x 224 pixels, would reduce them too much
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def make_trainer(network: nn.Module, config: argparse.Namespace, steps: int) -> tuple[Engine, nn.Module, nn.Module]:
    """Return a trainer, the model that it trains, and the average of its weights."""
    model: Any = torch.compile(network, backend=config.compile) if config.compile else network
    model = idist.auto_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    optimizer = idist.auto_optim(optimizer)
    trainer = create_supervised_trainer(
        model, optimizer, nn.functional.cross_entropy, device=idist.device(), non_blocking=True,
        amp_mode="amp" if config.amp else None, amp_dtype=torch.bfloat16 if config.amp else None,
    )  # fmt: skip

    warm_up = max(2, steps // 10)
    # the last step of the warm-up is the first step of the cosine
    cosine = CosineAnnealingScheduler(optimizer, "lr", config.lr, 0.0, max(2, steps - warm_up + 1))
    schedule = create_lr_scheduler_with_warmup(cosine, 0.0, warm_up)
    trainer.add_event_handler(Events.ITERATION_STARTED, schedule)

    average = EMAHandler(network, momentum=min(0.5, 20 / steps))  # averages over about a twentieth of the run
    average.attach(trainer)
    Throughput(samples=lambda batch: len(batch[1])).attach(trainer, Events.EPOCH_COMPLETED)
    return trainer, model, average.ema_model


def training(local_rank: int, config: argparse.Namespace) -> dict[str, float]:
    """Train and return the accuracy of the model and of its average; runs in every process."""
    manual_seed(config.seed)
    parts = load_data(config)
    options = {"batch_size": config.batch_size, "num_workers": config.num_workers}
    data = prefetch_to_device(idist.auto_dataloader(parts[0], shuffle=True, seed=config.seed, **options))
    validation = prefetch_to_device(idist.auto_dataloader(parts[1], shuffle=False, **options))
    network = make_model(config.model, len(parts[0].classes))
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's annotations
    trainer, model, average = make_trainer(network, config, steps=config.epochs * len(data))

    evaluators = {}
    for name, one in (("model", model), ("average", average)):
        metrics = {"accuracy": Accuracy()}
        evaluators[name] = create_supervised_evaluator(one, metrics, device=idist.device(), non_blocking=True)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate() -> None:
        reached = {name: one.run(validation).metrics["accuracy"] for name, one in evaluators.items()}
        if idist.get_rank() == 0:
            print(
                f"epoch {trainer.state.epoch}: loss {trainer.state.output:.3f}, accuracy {reached['model']:.1%}, "
                f"of the average {reached['average']:.1%}; {trainer.state.metrics['samples_per_second']:.0f} images/s",
                flush=True,
            )

    trainer.run(data, max_epochs=config.epochs)
    return {name: float(one.state.metrics["accuracy"]) for name, one in evaluators.items()}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help="small, or a model of torchvision such as resnet18")
    parser.add_argument("--images", type=int, default=2000, help="number of synthetic training images (default: 2000)")
    parser.add_argument("--noise", type=float, default=4.0, help="standard deviation of the noise (default: 4)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the images (default: 4)")
    parser.add_argument("--batch_size", type=int, default=50, help="images in a batch, over all processes")
    parser.add_argument("--num_workers", type=int, default=0, help="processes per node that load images")
    parser.add_argument("--lr", type=float, default=0.1, help="maximum learning rate (default: 0.1)")
    parser.add_argument("--amp", action="store_true", help="use bfloat16 autocast")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the model")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--backend", help="gloo, nccl, mpi, horovod, xla-tpu, or auto (default: a single process)")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    config = parse()
    with idist.Parallel(backend=config.backend, nproc_per_node=config.nproc_per_node) as parallel:
        parallel.run(training, config)
