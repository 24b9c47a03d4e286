"""Optimizers whose gradients Horovod averages."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import camshaft.distributed as idist
from tests.distributed.checking import check, equal, place, same


def linear(fill: float, **options: Any) -> nn.Linear:
    model = nn.Linear(2, 1, bias=False, **options)
    nn.init.constant_(model.weight, fill)
    return model


def mean_of_ranks() -> float:
    return (idist.get_world_size() - 1) / 2


@check
def gradients_are_averaged_with_any_options_and_hooks_run_once_per_step() -> None:
    rank, size = place()
    for options in ({}, {"compression": hvd.Compression.fp16}, {"groups": 1}, {"op": hvd.Sum}):
        model, calls = linear(1.0), []
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=1.0), **options)
        assert idist.auto_optim(optimizer) is optimizer, "it is not wrapped again"
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        model(torch.tensor([[rank, 2.0]])).sum().backward()
        optimizer.step()
        times = size if "op" in options else 1
        same(model.weight, torch.tensor([[1 - mean_of_ranks() * times, 1 - 2.0 * times]]))
        equal(calls, ["before", "after"])


@check
def wrapping_changes_neither_weights_nor_state() -> None:
    """Horovod's broadcast_optimizer_state takes a step, which applies weight decay and advances Adam's step count."""
    model = linear(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    wrapped = idist.auto_optim(optimizer)
    same(model.weight, torch.ones(1, 2))
    assert model.weight.grad is None
    assert not wrapped.state
    assert not wrapped.state_dict()["state"]


@check
def all_ranks_continue_with_the_state_of_rank_0() -> None:
    rank, _ = place()
    model = linear(1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    for _ in range(3 if rank == 0 else 0):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    wrapped = idist.auto_optim(optimizer)
    equal(wrapped.param_groups[0]["lr"], 0.1)
    state = wrapped.state[model.weight]
    equal(float(state["step"]), 3.0)
    for part in state.values():
        same(idist.all_gather(part.reshape(1, -1)), part.reshape(1, -1).repeat(idist.get_world_size(), 1))
    assert optimizer.state is wrapped.state


@check
def a_scheduler_of_the_wrapped_optimizer_stays_valid() -> None:
    model = linear(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    wrapped = idist.auto_optim(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer._opt_called = True  # type: ignore[attr-defined]  # the wrapped optimizer steps instead
    wrapped.step()
    scheduler.step()
    equal(wrapped.param_groups[0]["lr"], 0.5)


@check
def optimizers_of_several_models_can_reduce_at_the_same_time() -> None:
    """Unless gradients get unique names, those of different models collide."""
    rank, _ = place()
    models = [linear(1.0), linear(2.0), linear(3.0)]
    optimizers = [idist.auto_optim(torch.optim.SGD(model.parameters(), lr=1.0)) for model in models]
    optimizers[2] = idist.auto_optim(
        torch.optim.SGD(models[2].parameters(), lr=1.0), named_parameters=models[2].named_parameters()
    )
    for number, model in enumerate(models):
        model(torch.tensor([[rank, number]], dtype=torch.float32)).sum().backward()
    for optimizer in optimizers[:2][::-1] + optimizers[2:]:
        optimizer.step()
    for number, model in enumerate(models):
        same(model.weight, torch.tensor([[number + 1 - mean_of_ranks(), 1.0]]))


@check
def scalar_bfloat16_and_strided_gradients_are_averaged() -> None:
    """Horovod rejects bfloat16 and non-contiguous gradients during ``backward``."""
    rank, _ = place()
    scalar = nn.Parameter(torch.tensor(1.0))
    low = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    turned = nn.Parameter(torch.ones(3, 2).t())
    optimizer = idist.auto_optim(torch.optim.SGD([scalar, low, turned], lr=1.0))
    (scalar * rank + (low * rank).sum() + (turned * rank).sum()).backward()
    assert turned.grad is not None
    optimizer.step()
    left = 1 - mean_of_ranks()
    same(scalar, torch.tensor(left))
    same(low, torch.full((2,), left, dtype=torch.bfloat16))
    same(turned.contiguous(), torch.full((2, 3), left))


@check
def missing_gradients_count_as_zero() -> None:
    rank, size = place()
    used, unused = linear(1.0), linear(1.0)
    optimizer = idist.auto_optim(torch.optim.SGD([used.weight, unused.weight], lr=1.0))
    for model in [used, unused][: 1 + (rank == 0)]:
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    same(used.weight, torch.zeros(1, 2))
    same(unused.weight, torch.full((1, 2), 1 - 1 / size))


@check
def synchronize_reduces_gradients_and_step_does_not_reduce_them_again() -> None:
    rank, _ = place()
    model = linear(1.0)
    optimizer: Any = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    total = mean_of_ranks() * idist.get_world_size()
    for skips in (False, True):
        optimizer.zero_grad()
        nn.init.ones_(model.weight)
        model(torch.tensor([[rank, 0.0]])).sum().backward()
        optimizer.synchronize()
        optimizer.synchronize()
        same(model.weight.grad, torch.tensor([[total, 0.0]]))  # type: ignore[arg-type]  # not None
        with optimizer.skip_synchronize() if skips else nullcontext():
            optimizer.step()
        same(model.weight, torch.tensor([[1 - total, 1.0]]))


@check
def gradients_computed_after_synchronize_are_reduced_too() -> None:
    rank, _ = place()
    model = linear(1.0)
    optimizer: Any = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        model(torch.tensor([[rank, 2.0]])).sum().backward()
        optimizer.synchronize()
    optimizer.step()
    same(model.weight, torch.tensor([[1 - 2 * mean_of_ranks(), -3.0]]))


@check
def a_skipped_step_does_not_affect_the_next() -> None:
    """A gradient scaler skips steps."""
    rank, size = place()
    model = linear(1.0)
    optimizer: Any = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.tensor([[7.0, rank]])).sum().backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    if rank == 0:  # the others have no gradients, but must take part
        model(torch.tensor([[1.0, 2.0]])).sum().backward()
    optimizer.step()
    same(model.weight, torch.tensor([[1 - 1 / size, 1 - 2 / size]]))


@check
def gradients_may_be_discarded_before_the_step() -> None:
    rank, _ = place()
    for passes in (1, 2):
        model = linear(1.0)
        optimizer: Any = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=1.0), backward_passes_per_step=passes)
        model(torch.tensor([[9.0, 9.0]])).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        same(model.weight.grad, torch.zeros(1, 2))  # type: ignore[arg-type]  # not None
        for _ in range(passes):
            model(torch.tensor([[rank, 2.0]])).sum().backward()
        optimizer.step()
        same(model.weight, torch.tensor([[1 - passes * mean_of_ranks(), 1 - passes * 2.0]]))


@check
def closures_and_too_many_backward_passes_are_refused() -> None:
    model = linear(1.0)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(NotImplementedError, match=r"backend 'horovod' does not support step\(closure\): use gloo"):
        optimizer.step(lambda: 1.0)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="Increase backward_passes_per_step"):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()


@check
def a_checkpoint_of_the_wrapped_optimizer_loads_into_a_plain_one() -> None:
    model = linear(1.0)
    wrapped = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=0.5))
    model(torch.ones(1, 2)).sum().backward()
    wrapped.step()
    saved = copy.deepcopy(wrapped.state_dict())
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    plain.load_state_dict(saved)
    equal(plain.param_groups[0]["lr"], 0.5)
    equal(float(plain.state[model.weight]["step"]), 1.0)
    wrapped.load_state_dict(saved)
    model(torch.ones(1, 2)).sum().backward()
    wrapped.step()
    equal(float(wrapped.state[model.weight]["step"]), 2.0)
