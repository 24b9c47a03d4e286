"""The optimizer of auto_optim on XLA behaves like the wrapped one, except for its step."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import camshaft.distributed as idist
from camshaft.distributed.backends.xla import XlaBackend
from camshaft.distributed.job import use_backend
from camshaft.distributed.topology import Topology


@pytest.fixture(autouse=True)
def on_one_device():
    with use_backend(XlaBackend(Topology(), torch.device("xla:0"))):
        yield


@pytest.fixture
def weight():
    return nn.Parameter(torch.ones(2, device="xla"))


def momentum(weight):
    return torch.optim.SGD([weight], lr=0.5, momentum=0.9)


def test_it_keeps_the_class_of_the_optimizer_and_so_do_copies_and_pickles(weight):
    optimizer = momentum(weight)
    wrapped = idist.auto_optim(optimizer)
    assert wrapped.wrapped_optimizer is optimizer
    assert idist.auto_optim(wrapped) is wrapped
    pickled = pickle.loads(pickle.dumps(idist.auto_optim(momentum(nn.Parameter(torch.ones(2))))))
    for other in (wrapped, copy.deepcopy(wrapped), pickled):
        assert isinstance(other, torch.optim.SGD)
        assert type(other).__name__ == "SGD"
        assert repr(other) == repr(optimizer)
        assert other is wrapped or other.wrapped_optimizer is not optimizer
        assert other.state_dict()["param_groups"] == wrapped.state_dict()["param_groups"]
        assert other.step() is None
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapped.nothing


def test_step_takes_a_closure_on_one_device(weight):
    wrapped = idist.auto_optim(torch.optim.LBFGS([weight], max_iter=5))
    calls = []

    def closure():
        calls.append(1)
        wrapped.zero_grad()
        loss = ((weight - 3) ** 2).sum()
        loss.backward()
        return loss

    assert wrapped.step(closure).item() == 8.0
    assert len(calls) > 1
    torch.testing.assert_close(weight.detach().cpu(), torch.full((2,), 3.0))


def test_both_optimizers_share_one_state(weight):
    optimizer = momentum(weight)
    wrapped = idist.auto_optim(optimizer)
    weight.grad = torch.ones_like(weight)
    wrapped.step()
    assert wrapped.state is optimizer.state
    assert wrapped.param_groups is optimizer.param_groups
    saved = copy.deepcopy(wrapped.state_dict())
    wrapped.zero_grad()
    assert weight.grad is None
    wrapped.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 2.0})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]
    other = momentum(weight)
    loaded = idist.auto_optim(other)
    loaded.load_state_dict(saved)
    assert other.state[weight]["momentum_buffer"].tolist() == [1.0, 1.0]
    assert loaded.state is other.state
    wrapped.defaults = {"lr": 7.0}
    assert optimizer.defaults == {"lr": 7.0}


@pytest.mark.parametrize("early", [True, False], ids=["created before", "created after"])
def test_schedulers_and_hooks_see_each_step_once(weight, early):
    optimizer = momentum(weight)
    scheduler = StepLR(optimizer, 1, gamma=0.1) if early else None
    wrapped = idist.auto_optim(optimizer)
    scheduler = scheduler or StepLR(wrapped, 1, gamma=0.1)
    plateau = ReduceLROnPlateau(wrapped)
    calls = []
    wrapped.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    wrapped.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    for rate in (0.5, 0.05):
        assert wrapped.param_groups[0]["lr"] == pytest.approx(rate)
        weight.grad = torch.ones_like(weight)
        wrapped.step()
        scheduler.step()  # would warn, and so fail, if it had not seen a step
        plateau.step(1.0)
    wrapped.state_dict()
    assert calls == ["before", "after", "before", "after", "saved"]
    torch.testing.assert_close(weight.detach().cpu(), torch.full((2,), 1 - 0.5 - 0.05 * 1.9))
