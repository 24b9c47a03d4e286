"""A script for one process trains the same on many with `auto_model` and `auto_optim`."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import camshaft.distributed as idist
from camshaft.distributed.topology import Topology
from tests.distributed.observed import see
from tests.distributed.test_ranks import Somewhere
from tests.ranks import on_ranks

INPUTS = torch.linspace(-2, 2, 32).sin().view(8, 4)
TARGETS = INPUTS.sum(1, keepdim=True).tanh()


class Net(nn.Module):
    """A model with parameters that are shared, frozen, or not always used, and with batch norm."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm1d(4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.last = nn.Linear(4, 1)
            self.spare = nn.Linear(4, 1)

    def forward(self, x, spare=False):
        x = self.frozen(self.second(self.first(x).tanh()).tanh())
        return (self.spare if spare else self.last)(x)


def trained(model, inputs, targets, steps=4, **options):
    optimizer = idist.auto_optim(SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs, **options), targets).backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in model.parameters()]


def mine(tensor):
    return tensor[idist.get_rank() :: idist.get_world_size()]


def close(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# --- auto_model on real ranks ------------------------------------------------------------------------------------


@on_ranks(2)
def test_shared_frozen_and_unused_parameters_train_as_in_one_process():
    alone = trained(Net(), INPUTS, TARGETS)
    model = idist.auto_model(Net(), find_unused_parameters=True)
    assert isinstance(model, DistributedDataParallel)
    assert model.find_unused_parameters
    weights = trained(model, mine(INPUTS), mine(TARGETS))
    close(weights, alone)
    assert all(torch.equal(*pair) for pair in zip(*idist.all_gather(weights), strict=True))
    assert set(model.state_dict()) == {f"module.{name}" for name in Net().state_dict()}


@on_ranks(2)
def test_a_compiled_model_trains_as_in_one_process_whichever_comes_first():
    alone = trained(Net(), INPUTS, TARGETS)
    compiled = torch.compile(Net(), backend="eager")
    first = idist.auto_model(compiled, find_unused_parameters=True)
    assert isinstance(first, DistributedDataParallel)
    close(trained(first, mine(INPUTS), mine(TARGETS)), alone)
    second = torch.compile(idist.auto_model(Net(), find_unused_parameters=True), backend="eager")
    assert idist.auto_model(second) is second
    close(trained(second, mine(INPUTS), mine(TARGETS)), alone)


@on_ranks(2)
def test_a_frozen_model_gets_the_weights_of_the_first_rank_whatever_their_layout():
    rank = idist.get_rank()
    model = nn.Sequential(nn.Conv2d(3, 2, 2), nn.BatchNorm2d(2)).requires_grad_(False)
    model.to(memory_format=torch.channels_last)
    model.register_buffer("wide", torch.tensor([rank, 5]).expand(3, 2))
    model[0].weight.copy_(torch.arange(24.0).view(2, 3, 2, 2) + 100 * rank)
    model[1].running_mean.fill_(rank)
    assert not model[0].weight.is_contiguous()
    assert idist.auto_model(model) is model
    assert torch.equal(model[0].weight, torch.arange(24.0).view(2, 3, 2, 2))
    assert model[1].running_mean.tolist() == [0, 0]
    assert model.wide.tolist() == [[0, 5]] * 3


@on_ranks(1)
def test_a_run_of_one_process_wraps_nothing():
    model, optimizer = Net(), SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    assert idist.backend() == "gloo"
    assert idist.auto_model(model, sync_bn=True, find_unused_parameters=True) is model
    assert type(model.norm) is nn.BatchNorm1d
    assert idist.auto_optim(optimizer, unknown=3) is optimizer


# --- auto_model without ranks ------------------------------------------------------------------------------------


class OnMeta(Somewhere):
    """A backend on the meta device."""

    device = torch.device("meta")

    def __init__(self):
        super().__init__(Topology())


def test_a_model_is_moved_with_parameters_and_buffers_but_only_if_needed(monkeypatch):
    for model in (nn.Module(), nn.Linear(2, 2, device="meta")):
        model.register_buffer("table", torch.ones(2))
        with idist.use_backend(OnMeta()):
            assert idist.auto_model(model) is model
        assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    model = Net()
    monkeypatch.setattr(model, "to", pytest.fail)
    assert idist.auto_model(model) is model


def test_without_a_context_all_gpus_are_used_and_it_is_logged(monkeypatch, caplog):
    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    see(monkeypatch, "cuda", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(nn, "DataParallel", Wrapped)
    caplog.set_level(logging.INFO, logger="camshaft.distributed.auto.auto_model")
    wrapped = idist.auto_model(model := nn.Identity())
    assert (type(wrapped), wrapped.module) == (Wrapped, model)
    assert idist.auto_model(wrapped) is wrapped
    assert caplog.messages == ["the model is wrapped in DataParallel over 2 GPUs"]
