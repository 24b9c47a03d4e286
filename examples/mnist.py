"""Train a small convolutional network to read handwritten digits.

By default it reads the 1,797 scans of 8 x 8 pixels that come with scikit-learn, so nothing is downloaded:

    python examples/mnist.py
    python examples/mnist.py --data mnist --root ~/data --epochs 3
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import ModelCheckpoint, ProgressBar
from camshaft.utils import manual_seed


class Accuracy:
    """Count right answers on the device; read them once, at the end of the evaluation."""

    def attach(self, engine: Engine, name: str) -> None:
        engine.add_event_handler(Events.STARTED, self.reset)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.update)
        engine.add_event_handler(Events.COMPLETED, self.compute, name)

    def reset(self) -> None:
        self.right, self.total = torch.zeros((), dtype=torch.long), 0

    def update(self, engine: Engine) -> None:
        scores, digits = engine.state.output
        self.right = self.right.to(scores.device) + (scores.argmax(dim=1) == digits).sum()
        self.total += len(digits)

    def compute(self, engine: Engine, name: str) -> None:
        engine.state.metrics[name] = self.right.item() / self.total


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    from sklearn import datasets

    images, digits = datasets.load_digits(return_X_y=True)
    scans = TensorDataset(
        torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(digits, dtype=torch.long)
    )
    train, validation = random_split(scans, [1437, 360], torch.Generator().manual_seed(0))
    return TensorDataset(*train[:]), TensorDataset(*validation[:])


def load_mnist(root: Path) -> tuple[TensorDataset, TensorDataset]:
    try:
        from torchvision.datasets import MNIST
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision made for another build of torch
        raise SystemExit(f"--data mnist needs a torchvision that fits the installed torch: {error}") from error
    try:
        parts = [MNIST(str(root), train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        raise SystemExit(f"MNIST is not in {root} and cannot be downloaded: {error}") from error
    train, validation = (TensorDataset(part.data[:, None].float() / 255, part.targets) for part in parts)
    return train, validation


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 4 * 4, 10)),
    )


def main(arguments: argparse.Namespace) -> float:
    manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, validation = load_digits() if arguments.data == "digits" else load_mnist(arguments.root)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)

    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy, device=device)
    evaluators = {
        name: create_supervised_evaluator(model, {"accuracy": Accuracy()}, device=device)
        for name in ("train", "validation")
    }
    loaders = {"train": DataLoader(training, batch_size=512), "validation": DataLoader(validation, batch_size=512)}

    bar = ProgressBar(persist=True)
    bar.attach(trainer, output_transform=lambda loss: {"loss": loss})

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        for name, evaluator in evaluators.items():
            evaluator.run(loaders[name])
        reached = ", ".join(f"{name} accuracy {one.state.metrics['accuracy']:.2%}" for name, one in evaluators.items())
        bar.log_message(f"epoch {engine.state.epoch}: {reached}")

    best = ModelCheckpoint(
        arguments.output, "best", score_name="accuracy", require_empty=False,
        score_function=lambda engine: engine.state.metrics["accuracy"],
    )  # fmt: skip
    evaluators["validation"].add_event_handler(Events.COMPLETED, best, {"model": model}, order=1)

    trainer.run(DataLoader(training, batch_size=arguments.batch_size, shuffle=True), max_epochs=arguments.epochs)
    print(f"best model saved as {best.last_checkpoint}")
    accuracy: float = evaluators["validation"].state.metrics["accuracy"]
    return accuracy


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network to read handwritten digits.")
    parser.add_argument("--data", choices=("digits", "mnist"), default="digits", help="which scans (default: digits)")
    parser.add_argument("--root", type=Path, default=Path("data"), help="where MNIST is, or is downloaded to")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training scans (default: 10)")
    parser.add_argument("--batch_size", type=int, default=32, help="scans in a batch (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default: 0.002)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and order (default: 1)")
    parser.add_argument("--output", type=Path, default=Path("runs/mnist"), help="where the best model is saved")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
