"""Train a small convolutional network to read handwritten digits.

By default, it uses the 1,797 images of 8 x 8 pixels that come with scikit-learn, so nothing is downloaded:

    python examples/mnist.py
    python examples/mnist.py --data mnist --root ~/data --epochs 3
    python examples/mnist.py --checkpoints runs/digits --resume --tensorboard runs/digits/curves --patience 3
    torchrun --nproc_per_node 2 examples/mnist.py --backend gloo
    mpirun -np 2 python examples/mnist.py --backend mpi
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

import camshaft.distributed as idist
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import (
    Checkpoint,
    DiskSaver,
    EarlyStopping,
    ModelCheckpoint,
    ProgressBar,
    TensorboardLogger,
    global_step_from_engine,
)
from camshaft.utils import manual_seed


class Accuracy:
    """Count correct predictions on the device; reduce over ranks once, at the end of the evaluation."""

    def attach(self, engine: Engine, name: str) -> None:
        engine.add_event_handler(Events.STARTED, self.reset)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.update)
        engine.add_event_handler(Events.COMPLETED, self.compute, name)

    def reset(self) -> None:
        self.right, self.total = torch.zeros((), dtype=torch.long, device=idist.device()), 0

    def update(self, engine: Engine) -> None:
        scores, digits = engine.state.output
        self.right += (scores.argmax(dim=1) == digits).sum()
        self.total += len(digits)

    def compute(self, engine: Engine, name: str) -> None:
        engine.state.metrics[name] = idist.all_reduce(self.right).item() / idist.all_reduce(self.total)


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
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision was built for another torch
        raise SystemExit(f"--data mnist needs a torchvision that matches the installed torch: {error}") from error
    try:
        with idist.one_rank_first(local=True):  # one rank per node downloads, the others read the files
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


def training(local_rank: int, config: argparse.Namespace) -> float | None:
    """Train and return the last validation accuracy, or None if there was nothing to do; runs in every process."""
    manual_seed(config.seed)
    parts = load_digits() if config.data == "digits" else load_mnist(config.root)
    data = idist.auto_dataloader(parts[0], batch_size=config.batch_size, shuffle=True, seed=config.seed)
    model = idist.auto_model(make_model())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=config.lr))
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy, device=idist.device())

    # after each epoch, compute the accuracy on the training and validation images
    loaders, evaluators = {}, {}
    for name, part in zip(("train", "validation"), parts, strict=True):
        loaders[name] = idist.auto_dataloader(part, batch_size=512, shuffle=False)
        evaluators[name] = create_supervised_evaluator(model, {"accuracy": Accuracy()}, device=idist.device())

    bar = ProgressBar(persist=True)
    bar.attach(trainer, output_transform=lambda loss: {"loss": loss})

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        for name, evaluator in evaluators.items():
            evaluator.run(loaders[name])
        reached = ", ".join(f"{name} accuracy {one.state.metrics['accuracy']:.2%}" for name, one in evaluators.items())
        bar.log_message(f"epoch {engine.state.epoch}: {reached}")

    def accuracy(engine: Engine) -> float:
        return float(evaluators["validation"].state.metrics["accuracy"])

    best = ModelCheckpoint(config.output, "best", accuracy, "accuracy", require_empty=False)
    evaluators["validation"].add_event_handler(Events.COMPLETED, best, {"model": model}, order=1)

    # optional features
    objects: dict[str, Any] = {"trainer": trainer, "model": model, "optimizer": optimizer, "best": best}

    if config.patience:
        objects["stopping"] = EarlyStopping(config.patience, accuracy, trainer)
        evaluators["validation"].add_event_handler(Events.COMPLETED, objects["stopping"], order=1)

    if config.checkpoints:
        saver = DiskSaver(config.checkpoints, require_empty=not config.resume)
        checkpoint = Checkpoint(objects, saver, include_self=True)
        trainer.add_event_handler(
            Events.EPOCH_COMPLETED, checkpoint
        )  # runs after `evaluate`, which was registered earlier
        if config.resume:
            newest = Checkpoint.resume({**objects, "checkpointer": checkpoint}, config.checkpoints)
            bar.log_message(f"resuming from {newest}" if newest else "no checkpoint yet, starting a new run")

    if config.tensorboard:
        logger = TensorboardLogger(log_dir=config.tensorboard)
        logger.attach_output_handler(
            trainer, Events.ITERATION_COMPLETED(every=10), "training", output_transform=lambda loss: {"loss": loss}
        )
        for name, evaluator in evaluators.items():
            epoch = global_step_from_engine(trainer)
            logger.attach_output_handler(evaluator, Events.COMPLETED, name, "all", global_step_transform=epoch)

    if trainer.state.epoch < config.epochs:
        trainer.run(data, max_epochs=config.epochs)
        bar.log_message(f"best model saved as {best.last_checkpoint}")
    if config.tensorboard:
        logger.close()
    return evaluators["validation"].state.metrics.get("accuracy")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network to read handwritten digits.")
    parser.add_argument("--data", choices=("digits", "mnist"), default="digits", help="data set (default: digits)")
    parser.add_argument(
        "--root", type=Path, default=Path("data"), help="folder of MNIST, which is downloaded if missing"
    )
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images (default: 10)")
    parser.add_argument(
        "--batch_size", type=int, default=32, help="images in a batch, over all processes (default: 32)"
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default: 0.002)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the weights and the order of the data (default: 1)"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/mnist"), help="folder for the best model")
    parser.add_argument("--checkpoints", type=Path, help="folder for the newest checkpoint of the training")
    parser.add_argument(
        "--resume", action="store_true", help="resume from the newest checkpoint in --checkpoints, if there is one"
    )
    parser.add_argument("--tensorboard", type=Path, help="folder for TensorBoard curves")
    parser.add_argument("--patience", type=int, help="stop after this many epochs without improvement")
    parser.add_argument("--backend", help="gloo, nccl, mpi, horovod, xla-tpu, or auto (default: a single process)")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    config = parser.parse_args(arguments)
    if config.resume and not config.checkpoints:
        parser.error("--resume needs --checkpoints DIR")
    return config


if __name__ == "__main__":
    config = parse()
    with idist.Parallel(backend=config.backend, nproc_per_node=config.nproc_per_node) as parallel:
        parallel.run(training, config)
