"""Train a small convolutional network to read handwritten digits.

    python examples/mnist.py
    python examples/mnist.py --data mnist --root ~/data --epochs 3
    python examples/mnist.py --checkpoints runs/digits --tensorboard runs/digits/curves --patience 3
    torchrun --nproc_per_node 2 examples/mnist.py --backend gloo

You see a progress bar with the loss, and after each epoch the accuracy on the images for training and validation, which
reaches 98 percent. The best weights are kept in a new folder in `runs/mnist`. With `--checkpoints`, the same command
resumes after a kill. The 1,797 images of 8 x 8 pixels come with scikit-learn; only `--data mnist` downloads anything.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import camshaft.distributed as idist
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import (
    Checkpoint,
    EarlyStopping,
    ModelCheckpoint,
    ProgressBar,
    TensorboardLogger,
    global_step_from_engine,
)
from camshaft.utils import manual_seed, setup_logger


class Accuracy:
    """Count correct predictions on the device, and reduce over ranks; a metric of torchmetrics works as well."""

    def reset(self) -> None:
        self.right, self.total = torch.zeros((), dtype=torch.long, device=idist.device()), 0

    def update(self, scores: Tensor, digits: Tensor) -> None:
        self.right += (scores.argmax(dim=1) == digits).sum()
        self.total += len(digits)

    def compute(self) -> float:
        return float(idist.all_reduce(self.right).item() / idist.all_reduce(self.total))


def load_digits() -> list[TensorDataset]:
    from sklearn import datasets

    scans, digits = datasets.load_digits(return_X_y=True)
    images, labels = torch.tensor(scans, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(digits)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).split([1437, 360])
    return [TensorDataset(images[part], labels[part]) for part in order]


def load_mnist(root: Path) -> list[TensorDataset]:
    try:
        from torchvision.datasets import MNIST

        with idist.one_rank_first(local=True):  # one rank per node downloads, the others read the files
            parts = [MNIST(str(root), train=train, download=True) for train in (True, False)]
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: a torchvision for another torch, too
        raise SystemExit(f"--data mnist needs torchvision, and MNIST in {root} or a network: {error}") from error
    return [TensorDataset(part.data[:, None].float() / 255, part.targets) for part in parts]


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 4 * 4, 10)),
    )


def training(local_rank: int, config: argparse.Namespace) -> float | None:
    """Train and return the last validation accuracy, or None if there was nothing to do; runs in every process."""
    manual_seed(config.seed + idist.get_data_parallel_rank())  # dropout; auto_model broadcasts the weights of rank 0
    setup_logger("camshaft.handlers.checkpoint", format="%(message)s")  # says where a run resumes
    parts = load_digits() if config.data == "digits" else load_mnist(config.root)
    data = idist.auto_dataloader(parts[0], batch_size=config.batch_size, shuffle=True, seed=config.seed)
    model = idist.auto_model(make_model())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=config.lr))
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy, device=idist.device())
    bar = ProgressBar(persist=True)
    bar.attach(trainer, output_transform=lambda loss: {"loss": loss})

    loaders, evaluators = {}, {}
    for name, part in zip(("train", "validation"), parts, strict=True):
        loaders[name] = idist.auto_dataloader(part, batch_size=512, shuffle=False)
        evaluators[name] = create_supervised_evaluator(model, {"accuracy": Accuracy()}, device=idist.device())

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        train, validation = (one.run(loaders[name]).metrics["accuracy"] for name, one in evaluators.items())
        bar.log_message(f"epoch {engine.state.epoch}: train accuracy {train:.2%}, validation accuracy {validation:.2%}")

    best = ModelCheckpoint(config.output, "best", score_name="accuracy", require_empty=not config.checkpoints)
    evaluators["validation"].add_event_handler(Events.COMPLETED, best, {"model": model})
    to_save: dict[str, Any] = {"trainer": trainer, "model": model, "optimizer": optimizer, "best": best}
    if config.patience:
        to_save["stopping"] = EarlyStopping(config.patience, score_name="accuracy", trainer=trainer)
        evaluators["validation"].add_event_handler(Events.COMPLETED, to_save["stopping"])
    if config.tensorboard:
        logger = TensorboardLogger(log_dir=config.tensorboard)
        logger.attach_output_handler(
            trainer, Events.ITERATION_COMPLETED(every=10), "training", output_transform=lambda loss: {"loss": loss}
        )
        for name, evaluator in evaluators.items():
            epoch = global_step_from_engine(trainer)
            logger.attach_output_handler(evaluator, Events.COMPLETED, name, "all", global_step_transform=epoch)

    if config.checkpoints:
        checkpoint = Checkpoint(to_save, config.checkpoints)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)  # after `evaluate`, which was registered earlier
        checkpoint.resume_latest()

    trainer.run(data, max_epochs=config.epochs)
    bar.log_message(f"best model saved as {best.last_checkpoint}")
    if config.tensorboard:
        logger.close()
    return evaluators["validation"].state.metrics.get("accuracy")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("digits", "mnist"), default="digits", help="data set (default: digits)")
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of MNIST, downloaded if missing")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images (default: 10)")
    parser.add_argument("--batch_size", type=int, default=32, help="images in a batch, over all processes")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default: 0.002)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights and the order of the data")
    parser.add_argument("--output", type=Path, help="folder for the best model (default: a new one)")
    parser.add_argument("--checkpoints", type=Path, help="folder for the newest checkpoint, from which a run resumes")
    parser.add_argument("--tensorboard", type=Path, help="folder for TensorBoard curves")
    parser.add_argument("--patience", type=int, help="stop after this many epochs without improvement")
    parser.add_argument("--backend", help="gloo, nccl, mpi, horovod, xla-tpu, or auto (default: a single process)")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    config = parser.parse_args(arguments)
    new = Path("runs/mnist", time.strftime("%Y-%m-%d_%H-%M-%S"))  # or a worse model would stay beside a better one
    config.output = config.output or (config.checkpoints / "best" if config.checkpoints else new)
    return config


if __name__ == "__main__":
    config = parse()
    with idist.Parallel(backend=config.backend, nproc_per_node=config.nproc_per_node) as parallel:
        parallel.run(training, config)
