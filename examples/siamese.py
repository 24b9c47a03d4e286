"""Learn to compare images: the distance of two points tells whether two images show the same digit.

    python examples/siamese.py

A network maps each image to a point, and the triplet loss pulls two images of a digit together and pushes one of
another digit away. It is trained on two thirds of the digits of scikit-learn. After each fifth epoch you see how
often an image is closer to another one of its digit than to one of another digit, among the trained images and among
the others.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from camshaft.engine import Engine, Events
from camshaft.handlers import RunningAverage
from camshaft.utils import manual_seed

Triplet = tuple[Tensor, Tensor, Tensor]


class Triplets(Dataset[Triplet]):
    """An image, another one of the same digit, and one of another digit; the latter two are random."""

    def __init__(self, images: Tensor, digits: Tensor) -> None:
        self.images, self.digits = images, digits

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Triplet:
        same = self.digits == self.digits[index]
        pick = [int(torch.multinomial(mask.float(), 1)) for mask in (same, ~same)]
        return self.images[index], self.images[pick[0]], self.images[pick[1]]


def training(config: argparse.Namespace) -> dict[str, float]:
    """Train, and return how often the order of distances is right."""
    from sklearn import datasets

    manual_seed(config.seed)
    scans, labels = datasets.load_digits(return_X_y=True)
    images, digits = torch.tensor(scans, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    trained = torch.arange(len(digits)) % 3 > 0
    loader = DataLoader(Triplets(images[trained], digits[trained]), batch_size=64, shuffle=True)
    held_out = {
        "trained images": DataLoader(Triplets(images[trained], digits[trained]), batch_size=512),
        "new images": DataLoader(Triplets(images[~trained], digits[~trained]), batch_size=512),
    }

    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 32)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_function = nn.TripletMarginLoss(margin=1.0)

    def train_step(engine: Engine, batch: Triplet) -> float:
        model.train()
        loss: Tensor = loss_function(*model(torch.cat([*batch])).chunk(3))  # the same weights for all three
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluation_step(engine: Engine, batch: Triplet) -> Tensor:
        model.eval()
        anchor, same, other = model(torch.cat([*batch])).chunk(3)
        is_right: Tensor = (anchor - same).norm(dim=1) < (anchor - other).norm(dim=1)
        return is_right

    trainer, evaluator = Engine(train_step), Engine(evaluation_step)
    RunningAverage().attach(trainer, "loss")

    @evaluator.on(Events.ITERATION_COMPLETED)
    def count(engine: Engine) -> None:
        engine.state.right = torch.cat([engine.state.right, engine.state.output])

    def share_of_right(data: DataLoader[Triplet]) -> float:
        evaluator.state.right = torch.empty(0, dtype=torch.bool)
        evaluator.run(data)
        return float(evaluator.state.right.float().mean())

    @trainer.on(Events.STARTED | Events.EPOCH_COMPLETED(every=5))
    def evaluate(engine: Engine) -> None:
        right = ", ".join(f"{name} {share_of_right(data):.1%}" for name, data in held_out.items())
        print(f"epoch {engine.state.epoch}: loss {engine.state.metrics.get('loss', 1):.3f}, right order: {right}")

    trainer.run(loader, max_epochs=config.epochs)
    return {name: share_of_right(data) for name, data in held_out.items()}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the digits (default: 20)")
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    training(parse())
