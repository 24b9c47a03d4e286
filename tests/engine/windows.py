"""What training with windows of micro-batches must come to, calculated with one big batch for each window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from camshaft.engine import Engine, create_supervised_trainer

RATE = 0.125
Batch = tuple[Tensor, Tensor]


class Weighted(nn.Module):
    """A small model in operations that autocast leaves alone, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(1, keepdim=True) + self.bias


def batches_of(*sizes: int, seed: int = 0) -> list[Batch]:
    """Make batches of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 2, dtype=torch.float64, generator=generator),
            torch.randn(size, 1, dtype=torch.float64, generator=generator),
        )
        for size in sizes
    ]


def squared(y_pred: Tensor, y: Tensor) -> Tensor:
    return ((y_pred - y) ** 2).mean()


def samples(x: Tensor, y: Tensor) -> int:
    return len(y)


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def expected(
    windows: Iterable[Sequence[Batch]], clip: Callable[[list[nn.Parameter]], Any] = lambda parameters: None
) -> Tensor:
    """Return the weights after one plain step for each window, on all of its samples at once."""
    model = Weighted()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for window in windows:
        optimizer.zero_grad()
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        squared(model(x), y).backward()
        clip(list(model.parameters()))
        optimizer.step()
    return weights_of(model)


def check(model: nn.Module, data: Sequence[Batch], windows: Iterable[Sequence[int]]) -> None:
    """Compare the weights with those after such steps, each given by the places of its batches."""
    torch.testing.assert_close(weights_of(model), expected([[data[index] for index in window] for window in windows]))


def trainer_of(model: nn.Module, size: int, loss_fn: Any = squared, **options: Any) -> tuple[Engine[Any, Any], list]:
    """Make a trainer with windows of this size; and a list that gets the iteration of each step."""
    optimizer, steps = torch.optim.SGD(model.parameters(), RATE), []
    trainer = create_supervised_trainer(model, optimizer, loss_fn, gradient_accumulation_steps=size, **options)
    optimizer.register_step_post_hook(lambda *arguments: steps.append(trainer.state.iteration))
    return trainer, steps
