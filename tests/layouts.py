"""Small models, and the ways in which ranks may shard them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

PLAN = {"blocks.0.up": "column", "blocks.0.down": "row", "blocks.1.up": "column", "blocks.1.down": "row"}


class Block(nn.Module):
    """Two layers that tensor parallelism splits, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A model in double precision, the same on all ranks, with parameters that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + 0.0  # fully_shard warns of an output that is a view


@dataclass(frozen=True)
class Layout:
    """A mesh, and what is done to a model with it: ``dp_replicate``, ``dp_shard``, and ``tp`` multiply to the ranks."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    has_names: bool = True
    has_root: bool = True  # otherwise, fully_shard is applied to each child of the model, but not to the model

    @property
    def data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def data_rank(self) -> int:
        return dist.get_rank() // self.tp

    def apply(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard  # takes a second
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        sizes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        names = [name for name, size in sizes.items() if size > 1] or ["dp_shard"]
        mesh = init_device_mesh(
            "cpu", tuple(sizes[name] for name in names), mesh_dim_names=tuple(names) if self.has_names else None
        )
        data = tuple(name for name in names if name != "tp")
        if self.tp > 1:
            styles = {"column": ColwiseParallel, "row": RowwiseParallel}
            plan = {name: styles[style]() for name, style in PLAN.items()}
            parallelize_module(model, mesh["tp"], plan)
        if data:
            own = mesh if not self.has_names or data == tuple(names) else mesh[data if len(data) > 1 else data[0]]
            for module in (*model.blocks, model) if self.has_root else (model.embed, *model.blocks, model.head):
                fully_shard(module, mesh=own)
        return model


def made(layout: Layout, change: Callable[[Net], Any] = lambda net: None) -> Any:
    net = Net()
    change(net)
    return layout.apply(net)


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Gather the weights, by name."""
    return {name: whole_of(value) for name, value in model.state_dict().items()}


def whole_of(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def data_of(layout: Layout, sizes: list[list[int]]) -> tuple[list[Any], list[Any]]:
    """Return the batches of this rank, and those of all data-parallel ranks; zeros among the targets are padding."""
    everyone = []
    for rank in range(layout.data_ranks):
        generator = torch.Generator().manual_seed(rank)
        batches = []
        for size in sizes[rank]:
            x = torch.randn(4 * size, 3, dtype=torch.float64, generator=generator)
            y = torch.randn(4 * size, 1, dtype=torch.float64, generator=generator)
            y[: 1 + rank % 3] = 0
            batches.append((x, y))
        everyone.append(batches)
    return everyone[layout.data_rank], everyone


def token_loss(y_pred: Tensor, y: Tensor) -> Tensor:
    return (((y_pred - y) ** 2) * (y != 0)).sum() / (y != 0).sum()


def tokens(x: Tensor, y: Tensor) -> Tensor:
    return (y != 0).sum()


def trained_alone(
    everyone: list[Any], windows: list[list[int]], limit: float, make_optimizer: Callable[..., Any]
) -> nn.Module:
    """Train in one process, with one batch for each window and the micro-batches of all ranks in it."""
    model = Net()
    optimizer = make_optimizer(model.parameters())
    for window in windows:
        chosen = [batches[index] for batches in everyone for index in window]
        x, y = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        optimizer.zero_grad()
        token_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    return model


def copied(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(dict(model.state_dict()))
