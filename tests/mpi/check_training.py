"""Replicated and sharded training with torch, over an MPI process group."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import camshaft.distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, Preemption
from tests.distributed.check_handlers import folder
from tests.distributed.checking import check
from tests.mpi.checking import place, same


class Network(nn.Module):
    """Two layers with batch normalization, and a third layer that only even ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 2)
        self.extra = nn.Linear(8, 2)

    def forward(self, x: Tensor, with_extra: bool = False) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        return self.second(hidden) + (self.extra(hidden) if with_extra else 0)


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, **options: Any) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank()), **options).square().mean().backward()
        optimizer.step()


def assert_equal_on_all_ranks(model: nn.Module) -> None:
    for tensor in model.parameters():
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.detach())
        for part in parts:
            assert torch.equal(part, parts[0])


@check
def ddp_starts_from_the_weights_of_rank_0_and_keeps_them_equal() -> None:
    """With gradients that are compressed or only reduced, and with layers that only some of the ranks use."""
    rank, _ = place()
    for hook in (None, default_hooks.fp16_compress_hook, default_hooks.allreduce_hook):
        for with_extra in (False, rank % 2 == 0):
            model = DistributedDataParallel(network(seed=rank), find_unused_parameters=True)
            assert_equal_on_all_ranks(model)
            if hook is not None:
                model.register_comm_hook(None, hook)
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), with_extra=with_extra)
            assert_equal_on_all_ranks(model)


@check
def ddp_averages_the_gradients_of_the_ranks_and_reduces_nothing_within_no_sync() -> None:
    rank, size = place()
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    with model.no_sync():
        model(batch(0, rank)).sum().backward()
    same(model.module.weight.grad[0], batch(0, rank).sum(0))
    model(batch(1, rank)).sum().backward()
    both = [batch(0, other).sum(0) + batch(1, other).sum(0) for other in range(size)]
    same(model.module.weight.grad[0], torch.stack(both).mean(0))


@check
def join_handles_different_numbers_of_batches() -> None:
    rank, _ = place()
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        train(model, optimizer, steps=2 + rank)
    assert_equal_on_all_ranks(model)


@check
def sharded_optimizers_and_models_match_ddp() -> None:
    def trained(wrap: Callable[[nn.Module], nn.Module], optimizer: Callable[..., torch.optim.Optimizer]) -> Tensor:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
        train(model, optimizer(model.parameters(), lr=0.1))
        whole = [getattr(parameter, "full_tensor", lambda kept=parameter: kept)() for parameter in model.parameters()]
        return torch.cat([tensor.detach().reshape(-1) for tensor in whole])

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = trained(DistributedDataParallel, torch.optim.Adam)
    same(trained(lambda model: fully_shard(model, mesh=mesh), torch.optim.Adam), wanted)
    zero = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam)
    same(trained(DistributedDataParallel, zero), wanted)


@check
def preemption_by_a_signal_to_one_rank() -> None:
    rank, size = place()
    trainer: Engine[int, Any] = Engine(lambda engine, batch: idist.all_reduce(1))
    if rank == size - 1:
        trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: signal.raise_signal(signal.SIGUSR1))
    with folder() as path:
        preemption = Preemption(Checkpoint({"trainer": trainer}, path))
        preemption.attach(trainer)
        trainer.run(range(10_000))
        assert preemption.signal == signal.SIGUSR1
        assert [file.name for file in path.glob("*.pt")] == [f"trainer_{trainer.state.iteration}.pt"]
