"""Find a learning rate, and find out where the time of a training goes.

    python examples/profile_and_tune.py

A search raises the learning rate in each step until the loss explodes, and suggests the one at which the loss falls
the fastest; the network is then trained with it. You see the suggestion, the accuracy, and a table of the time spent
on data, on training steps, and on handlers: loading is slow on purpose, as if the images came from a slow disk. The
curve of the search is saved as `runs/profile_and_tune/learning_rate.png`, and the shares of the time as
`runs/profile_and_tune/time.png`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import BasicTimeProfiler, FastaiLRFinder
from camshaft.utils import manual_seed


class SlowDigits(Dataset[tuple[Tensor, int]]):
    """The digits of scikit-learn, read from an imaginary slow disk."""

    def __init__(self, seconds: float) -> None:
        from sklearn import datasets

        scans, digits = datasets.load_digits(return_X_y=True)
        self.images, self.digits, self.seconds = torch.tensor(scans, dtype=torch.float32) / 16, digits.tolist(), seconds

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.seconds)
        return self.images[index], self.digits[index]


def training(config: argparse.Namespace) -> float:
    """Search, train, and return the accuracy."""
    from matplotlib import pyplot

    manual_seed(config.seed)
    config.output.mkdir(parents=True, exist_ok=True)
    data = SlowDigits(config.seconds)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)

    finder = FastaiLRFinder()
    objects = {"model": model, "optimizer": optimizer}  # restored after the search
    with finder.attach(trainer, objects, end_lr=10.0, num_iter=100) as searching:
        searching.run(loader)
    axes = finder.plot()
    axes.figure.savefig(config.output / "learning_rate.png")
    finder.apply_suggested_lr(optimizer)
    print(f"learning rate {finder.lr_suggestion():.3f}")

    profiler = BasicTimeProfiler()
    profiler.attach(trainer)
    evaluator = create_supervised_evaluator(model)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        scores, digits = evaluator.run([(data.images, torch.tensor(data.digits))]).output
        engine.state.metrics["accuracy"] = (scores.argmax(dim=1) == digits).float().mean().item()

    trainer.run(loader, max_epochs=config.epochs)
    accuracy = float(trainer.state.metrics["accuracy"])
    print(f"accuracy {accuracy:.1%}")
    results = profiler.get_results()
    profiler.print_results(results)

    parts = {"data": results["dataflow_stats"], "steps": results["processing_stats"]}
    seconds = {name: float(part["total"]) for name, part in parts.items()}
    seconds["handlers"] = float(results["event_handlers_stats"]["total_time"])
    figure, axes = pyplot.subplots()
    axes.bar(list(seconds), list(seconds.values()))
    axes.set_ylabel("seconds")
    figure.savefig(config.output / "time.png")
    pyplot.close("all")
    print(f"saved two plots in {config.output}")
    return accuracy


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the digits (default: 5)")
    parser.add_argument("--seconds", type=float, default=0.0005, help="time to read an image (default: 0.0005)")
    parser.add_argument("--output", type=Path, default=Path("runs/profile_and_tune"), help="folder for the plots")
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    training(parse())
