"""Distill the knowledge of a large network into a small one, with few labels.

    python examples/distillation.py

A teacher learns all handwritten digits of scikit-learn's training images. Two students, 25 times smaller, get the
labels of only 60 of them; one of the two also sees how the teacher scores all the others. You see three accuracies on
images that no network was trained on: that of the teacher, of the student that learns from labels alone, and of the
distilled one, which comes close to its teacher.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from torch.utils.data import DataLoader, TensorDataset

from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.utils import manual_seed


def make_network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def accuracy_of(model: nn.Module, images: Tensor, digits: Tensor) -> float:
    scores, _ = create_supervised_evaluator(model).run([(images, digits)]).output
    return float((scores.argmax(dim=1) == digits).float().mean())


def training(config: argparse.Namespace) -> dict[str, float]:
    """Train the three networks, and return their accuracy."""
    from sklearn import datasets

    manual_seed(config.seed)
    scans, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(scans))
    images, digits = torch.tensor(scans, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    test, images, digits = (images[:400], digits[:400]), images[400:], digits[400:]
    few = TensorDataset(images[: config.labels], digits[: config.labels])

    def fit(model: nn.Module, trainer: Engine, data: TensorDataset, name: str) -> float:
        passes = config.steps * 64 // len(data) + 1
        trainer.run(DataLoader(data, batch_size=64, shuffle=True), max_epochs=passes)
        reached = accuracy_of(model, *test)
        print(f"{name}: {sum(weights.numel() for weights in model.parameters()):,} weights, accuracy {reached:.1%}")
        return reached

    teacher = make_network(256)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=2e-3)
    trainer = create_supervised_trainer(teacher, optimizer, cross_entropy)
    accuracy = {"teacher": fit(teacher, trainer, TensorDataset(images, digits), "teacher, all labels")}

    alone = make_network(28)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=5e-3)
    trainer = create_supervised_trainer(alone, optimizer, cross_entropy)
    accuracy["alone"] = fit(alone, trainer, few, f"student alone, {config.labels} labels")

    student = make_network(28)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    labeled = torch.arange(len(images)) < config.labels

    def step(engine: Engine, batch: list[Tensor]) -> float:
        images, digits, is_labeled = batch
        with torch.no_grad():
            soft = softmax(teacher(images) / config.temperature, dim=1)
        scores = student(images)
        loss = kl_div(log_softmax(scores / config.temperature, dim=1), soft, reduction="batchmean")
        loss = loss * config.temperature**2  # keeps the size of the gradients
        loss = loss + (cross_entropy(scores, digits, reduction="none") * is_labeled).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    trainer = Engine(step)

    @trainer.on(Events.EPOCH_STARTED)
    def freeze_teacher() -> None:
        teacher.eval()

    accuracy["distilled"] = fit(student, trainer, TensorDataset(images, digits, labeled), "student, distilled")
    return accuracy


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=60, help="labels that the students see (default: 60)")
    parser.add_argument("--steps", type=int, default=600, help="steps of each network (default: 600)")
    parser.add_argument("--temperature", type=float, default=4.0, help="softness of the teacher's scores (default: 4)")
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    training(parse())
