"""Train a small U-Net to find discs, boxes, and triangles, on one process or several.

    python examples/segmentation.py
    torchrun --nproc_per_node 2 examples/segmentation.py --backend gloo

The images are drawn here: shapes of random colors, sizes, and places on a noisy background. After each epoch you see
the mean IoU on 101 images that are not trained on: the overlap of predicted and true pixels divided by their union,
averaged over the four classes. It is computed from the counts of all pixels on all processes, so each image counts
once, although 101 images cannot be divided evenly. At the end, an image is printed as text: on the left the truth, on
the right the prediction.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import camshaft.distributed as idist
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import attach_metrics
from camshaft.utils import manual_seed

SIZE = 32  # pixels along an edge
SYMBOLS = ".o#^"  # background, disc, box, triangle


def draw(count: int, seed: int) -> TensorDataset:
    """Draw images with one shape of each class, and the class of every pixel; later shapes cover earlier ones."""
    random = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 3, SIZE, SIZE, generator=random) / 2
    classes = torch.zeros(count, SIZE, SIZE, dtype=torch.int64)
    row, column = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    for number in (1, 2, 3):
        center = torch.randint(6, SIZE - 6, (2, count, 1, 1), generator=random)
        radius = torch.randint(4, 9, (count, 1, 1), generator=random)
        down, right = row - center[0], column - center[1]
        disc = down**2 + right**2 <= radius**2
        box = (down.abs() <= radius) & (right.abs() <= radius)
        triangle = (down.abs() <= radius) & (2 * right.abs() <= down + radius)
        inside = (disc, box, triangle)[number - 1]
        color = torch.rand(count, 3, 1, 1, generator=random) / 2 + 0.5
        images = torch.where(inside[:, None], color, images)
        classes[inside] = number
    return TensorDataset(images, classes)


class UNet(nn.Module):
    """Halves the resolution twice and doubles it again, and passes the features of each level on to the way up."""

    def __init__(self, width: int = 16, classes: int = len(SYMBOLS)) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

        self.top, self.middle, self.bottom = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up_middle, self.up_top = block(6 * width, 2 * width), block(3 * width, width)
        self.halve, self.double_size = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        top = self.top(images)
        middle = self.middle(self.halve(top))
        bottom = self.bottom(self.halve(middle))
        middle = self.up_middle(torch.cat([self.double_size(bottom), middle], dim=1))
        top = self.up_top(torch.cat([self.double_size(middle), top], dim=1))
        logits: Tensor = self.head(top)
        return logits


def as_text(classes: Tensor) -> list[str]:
    return ["".join(SYMBOLS[one] for one in row) for row in classes.tolist()]


def training(local_rank: int, config: argparse.Namespace) -> float:
    """Train, and return the mean IoU after the last epoch; runs in every process."""
    from torchmetrics.classification import MulticlassJaccardIndex

    manual_seed(config.seed)
    device, held_out = idist.device(), draw(101, seed=1)
    loader = idist.auto_dataloader(draw(config.images, seed=0), batch_size=16, shuffle=True, seed=config.seed)
    held_out_loader = idist.auto_dataloader(held_out, batch_size=16, shuffle=False)
    model = idist.auto_model(UNet())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=config.lr))
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy, device)
    evaluator = create_supervised_evaluator(model, device=device)
    attach_metrics(evaluator, {"iou": MulticlassJaccardIndex(len(SYMBOLS), validate_args=False)})

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        reached = evaluator.run(held_out_loader).metrics["iou"]
        if idist.get_rank() == 0:
            print(f"epoch {engine.state.epoch}: mean IoU {reached:.1%}", flush=True)

    trainer.run(loader, max_epochs=config.epochs)
    if idist.get_rank() == 0:
        image, truth = held_out[0]
        model.eval()
        with torch.no_grad():
            found = getattr(model, "module", model)(image[None].to(device)).argmax(dim=1)[0]
        print("\n".join(f"{left}   {right}" for left, right in zip(as_text(truth), as_text(found), strict=True)))
    return float(evaluator.state.metrics["iou"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=480, help="images to train on (default: 480)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the images (default: 8)")
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate (default: 0.005)")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--backend", help="gloo, nccl, mpi, horovod, xla-tpu, or auto (default: a single process)")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    config = parse()
    with idist.Parallel(backend=config.backend, nproc_per_node=config.nproc_per_node) as parallel:
        parallel.run(training, config)
