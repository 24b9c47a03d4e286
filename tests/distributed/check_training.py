"""The same script trains on any number of ranks, and comes to the same weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, TensorDataset

import camshaft.distributed as idist
from tests.distributed.checking import check, equal, place, same

SAMPLES = 16
INPUTS = torch.linspace(-1, 1, SAMPLES * 3).view(SAMPLES, 3).sin()
DATA = TensorDataset(INPUTS, INPUTS @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.3)


def model_of(rank: int) -> nn.Sequential:
    """Make a model whose numbers all are those of the rank."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(2, 1))
    for number, tensor in enumerate((*model.parameters(), *model.buffers())):
        tensor.detach().fill_(rank + number + 1)
    return model


def numbers_of(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().cpu().clone() for tensor in (*model.parameters(), *model.buffers())]


def small_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for parameter in model.parameters():
        parameter.detach().copy_(torch.linspace(-0.5, 0.7, parameter.numel()).view_as(parameter))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> list[Tensor]:
    """Train for some epochs, and give the weights."""
    device = next(model.parameters()).device
    for _ in range(3):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
    return numbers_of(model)


@check
def auto_model_starts_from_the_weights_of_the_first_rank() -> None:
    rank, _ = place()
    model = idist.auto_model(model_of(rank))
    for got, wanted in zip(numbers_of(model), numbers_of(model_of(0)), strict=True):
        same(got, wanted)
    for tensor in (*model.parameters(), *model.buffers()):
        equal(tensor.device.type, idist.device().type)


@check
def auto_model_takes_a_model_without_anything_to_train_but_nothing_else() -> None:
    rank, _ = place()
    model = idist.auto_model(model_of(rank).requires_grad_(False))
    for got, wanted in zip(numbers_of(model), numbers_of(model_of(0)), strict=True):
        same(got, wanted)
    assert isinstance(idist.auto_model(nn.ReLU()), nn.ReLU)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        idist.auto_model("model")  # type: ignore[type-var]  # what is refused
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer"):
        idist.auto_optim(nn.Linear(1, 1))  # type: ignore[type-var]  # what is refused


@check
def training_comes_to_the_weights_of_one_process() -> None:
    alone = small_model()
    batches = [DATA[k : k + 8] for k in range(0, SAMPLES, 8)]
    wanted = train(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), batches)

    model = idist.auto_model(small_model())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    got = train(model, optimizer, idist.auto_dataloader(DATA, batch_size=8, shuffle=False))

    for one, other, begin in zip(got, wanted, numbers_of(small_model()), strict=True):
        assert not torch.allclose(other, begin, atol=1e-2), "the steps change the weights"
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for others in idist.all_gather(got):
        for one, other in zip(others, got, strict=True):
            same(one, other)


def drawn(loader: Any) -> list[int]:
    """Return what all ranks draw from a loader of numbers, after checking that each draws as many."""
    parts = idist.all_gather([number for batch in loader for number in batch.tolist()])
    equal([len(part) for part in parts], [len(parts[0])] * len(parts))
    return sorted(number for part in parts for number in part)


@check
def auto_dataloader_deals_all_samples_out() -> None:
    _, size = place()
    alike = torch.Generator().manual_seed(7)  # on all ranks; those that are threads share torch's own
    samplers = RandomSampler(range(12), generator=alike), SequentialSampler(range(12))
    for options in ({}, {"shuffle": False}, *({"sampler": sampler} for sampler in samplers)):
        loader = idist.auto_dataloader(range(12), batch_size=4, **options)  # type: ignore[arg-type]  # it has items
        equal(drawn(loader), list(range(12)))
        equal(drawn(loader), list(range(12)))
        equal(len(next(iter(loader))), 4 // size)


@check
def auto_dataloader_gives_every_rank_all_of_an_iterable_dataset() -> None:
    _, size = place()

    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    warnings.filterwarnings("ignore", "Numbers has no method shard")
    equal(drawn(idist.auto_dataloader(Numbers())), sorted([*range(5)] * size))
