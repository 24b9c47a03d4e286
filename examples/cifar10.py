"""Train on CIFAR-10 with the usual handlers, in one process or many, on any backend.

    python examples/cifar10.py
    python examples/cifar10.py --data ~/cifar-10-batches-py --epochs 30 --batch_size 512
    torchrun --nproc_per_node 2 examples/cifar10.py --backend gloo
    mpirun -np 2 python examples/cifar10.py --backend mpi

You see a progress bar with the running loss, and the accuracy on the test images after each epoch, exact over all
processes. The best weights and the latest checkpoint are kept in `runs/cifar10`, and the same command resumes after a
kill. The training ends early if the accuracy has not improved for `--patience` epochs. Without `--data`, small files in
the format of CIFAR-10 are generated, with a frame in about the color of the class; the real ones are at
https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import camshaft.distributed as idist
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import (
    Checkpoint,
    EarlyStopping,
    LRScheduler,
    ProgressBar,
    RunningAverage,
    TerminateOnNan,
    global_step_from_engine,
)
from camshaft.utils import manual_seed, setup_logger


def write_files(folder: Path, count: int = 60) -> None:
    """Write files in the format of CIFAR-10, with fewer images."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")  # so that the folder is complete, or absent
    unfinished.mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = random.integers(0, 10, count)
        images = random.integers(0, 256, (count, 3, 32, 32), dtype=numpy.uint8)
        for image, label in zip(images, labels, strict=True):
            color = numpy.array([label % 2, label // 2 % 2, label // 4]) * 110 + random.normal(20, 30, 3)
            image[:, :8] = image[:, -8:] = color.clip(0, 255).astype(numpy.uint8)[:, None, None]
        content = {b"data": images.reshape(count, -1), b"labels": labels.tolist()}
        (unfinished / name).write_bytes(pickle.dumps(content))
    unfinished.rename(folder)


def load(folder: Path, *names: str) -> TensorDataset:
    parts = [pickle.loads((folder / name).read_bytes(), encoding="bytes") for name in names]
    images = torch.cat([torch.from_numpy(part[b"data"]) for part in parts]).reshape(-1, 3, 32, 32)
    return TensorDataset(images, torch.tensor([label for part in parts for label in part[b"labels"]]))


def make_model() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), nn.Flatten(), nn.Linear(2048, 10))


def prepare_batch(batch: list[Tensor], device: torch.device, non_blocking: bool) -> tuple[Tensor, Tensor]:
    images, labels = (one.to(device, non_blocking=non_blocking) for one in batch)
    return images.float() / 127.5 - 1, labels


def training(local_rank: int, config: argparse.Namespace) -> float:
    """Train, and return the accuracy after the last epoch; runs in every process."""
    from torchmetrics.classification import MulticlassAccuracy

    manual_seed(config.seed)
    setup_logger("camshaft.handlers.checkpoint", format="%(message)s")  # says where a run resumes
    device, folder = idist.device(), config.data or config.output / "cifar-10-batches-py"
    with idist.one_rank_first(local=True):
        if config.data is None and not folder.exists():
            write_files(folder)
    train_data = load(folder, *(f"data_batch_{number}" for number in range(1, 6)))
    train_loader = idist.auto_dataloader(train_data, batch_size=config.batch_size, shuffle=True, seed=config.seed)
    test_loader = idist.auto_dataloader(load(folder, "test_batch"), batch_size=1000, shuffle=False)

    model = idist.auto_model(make_model())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=config.lr))
    loss_function = nn.functional.cross_entropy
    trainer = create_supervised_trainer(model, optimizer, loss_function, device, prepare_batch=prepare_batch)
    metrics = {"accuracy": MulticlassAccuracy(10, average="micro", validate_args=False)}
    evaluator = create_supervised_evaluator(model, metrics, device, prepare_batch=prepare_batch)

    steps = config.epochs * len(train_loader)
    schedule = LRScheduler(torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, total_steps=steps + 1))
    trainer.add_event_handler(Events.ITERATION_STARTED, schedule)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    average = RunningAverage()
    average.attach(trainer, "loss")
    bar = ProgressBar()
    bar.attach(trainer, ["loss"])

    def accuracy(engine: Engine) -> float:
        return float(engine.state.metrics["accuracy"])

    stopping = EarlyStopping(config.patience, score_function=accuracy, trainer=trainer)
    epoch = global_step_from_engine(trainer)
    best = Checkpoint({"model": model}, config.output, "best", accuracy, "accuracy", global_step_transform=epoch)
    evaluator.add_event_handler(Events.COMPLETED, stopping)
    evaluator.add_event_handler(Events.COMPLETED, best)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        reached = evaluator.run(test_loader).metrics["accuracy"]
        bar.log_message(f"epoch {engine.state.epoch}: accuracy {reached:.1%}")
        if stopping.counter == config.patience:
            bar.log_message(f"no better accuracy in {config.patience} epochs: stopping")

    to_save = {"trainer": trainer, "model": model, "optimizer": optimizer, "schedule": schedule}
    latest = Checkpoint({**to_save, "average": average, "stopping": stopping, "best": best}, config.output)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, latest)  # after `evaluate`, which was registered earlier
    latest.resume_latest()
    if trainer.state.iteration >= steps or stopping.counter >= config.patience:
        bar.log_message("already finished: pass a larger --epochs or --patience to continue")
    else:
        trainer.run(train_loader, max_epochs=config.epochs)
    return float(evaluator.state.metrics.get("accuracy", 0.0))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with data_batch_1 and so on (default: generated files)")
    parser.add_argument("--output", type=Path, default=Path("runs/cifar10"), help="folder for checkpoints")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images, in all runs (default: 20)")
    parser.add_argument("--batch_size", type=int, default=30, help="images in a step, over all processes")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default: 0.002)")
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better accuracy before it stops")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--backend", help="gloo, nccl, mpi, horovod, xla-tpu, or auto (default: a single process)")
    parser.add_argument("--nproc_per_node", type=int, help="processes to start; omit under a launcher")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    config = parse()
    with idist.Parallel(backend=config.backend, nproc_per_node=config.nproc_per_node) as parallel:
        parallel.run(training, config)
