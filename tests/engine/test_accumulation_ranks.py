"""Windows on two ranks: one exchange of gradients each, and the same weights as one process on all the data."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from camshaft.distributed import auto_dataloader
from camshaft.engine import Events
from tests.engine.traces import Sizeless, at
from tests.engine.windows import RATE, Weighted, batches_of, expected, samples, squared, trainer_of, weights_of
from tests.ranks import on_ranks, run_on_ranks

SIZES = [(4,) * 6, (4,) * 6]  # of the batches of each rank
UNEVEN = [(5, 1, 2, 3, 1, 2), (1, 4, 2, 1, 3, 1)]
LIMIT = 0.3


def data_of(sizes):
    return [batches_of(*own, seed=rank) for rank, own in enumerate(sizes)]


def on_a_rank(sizes, size, count=6, sized=True, action=None, fails_at=None, **options):
    """Train on the batches of this rank; give the weights, and how often gradients were exchanged and stepped."""
    exchanges, calls = [], []

    def hook(group, bucket):
        exchanges.append(1)
        return allreduce_hook(group, bucket)

    def loss_fn(y_pred, y):
        calls.append(1)
        if len(calls) == fails_at:
            raise ArithmeticError("no loss")
        return squared(y_pred, y)

    model = DistributedDataParallel(Weighted())
    model.register_comm_hook(None, hook)
    data = data_of(sizes)[torch.distributed.get_rank()][:count]
    trainer, steps = trainer_of(model, size, loss_fn, **options)
    if action is not None:
        at(trainer, Events.ITERATION_COMPLETED, ACTIONS[action], 4)
    if fails_at is not None:
        trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    trainer.run(data if sized else Sizeless(*data), max_epochs=2)
    if action == "pause":
        trainer.run(data, max_epochs=2)
    return weights_of(model), len(exchanges), steps, model.require_backward_grad_sync


ACTIONS = {
    "end epoch": lambda engine: engine.terminate_epoch(),
    "end": lambda engine: engine.terminate(),
    "pause": lambda engine: engine.interrupt(),
}


def all_tokens(x, y):
    return torch.tensor(len(y))


CASES = {
    # name: (arguments, windows, exchanges by DDP)
    "whole windows": ({"size": 2}, [[0, 1], [2, 3], [4, 5]] * 2, 6),
    "a shorter last window": ({"size": 4}, [[0, 1, 2, 3], [4, 5]] * 2, 4),
    "a window of an epoch": ({"size": 9, "count": 3}, [[0, 1, 2]] * 2, 2),
    "unknown length": ({"size": 2, "count": 3, "sized": False}, [[0, 1], [2]] * 2, 3 + 2),  # known in epoch 2
    "an epoch cut short": ({"size": 3, "action": "end epoch"}, [[0, 1, 2], [3], [0, 1, 2], [3, 4, 5]], 3),
    "a run ended": ({"size": 3, "action": "end"}, [[0, 1, 2]], 1),
    "a pause": ({"size": 3, "action": "pause"}, [[0, 1, 2], [3, 4, 5]] * 2, 4),
    "an error swallowed": ({"size": 3, "fails_at": 5}, [[0, 1, 2], [3], [5, 0, 1], [2, 3, 4]], 3),
}


def union(sizes, windows):
    """Give each window with the batches of all ranks in it."""
    data = data_of(sizes)
    return [[batches[index] for batches in data for index in window] for window in windows]


def check(results, weights, exchanges, num_steps, **tolerance):
    (first, *counts), (second, *others) = results
    assert torch.equal(first, second)
    torch.testing.assert_close(first, weights, **tolerance)
    assert counts == others
    assert (counts[0], len(counts[1]), counts[2]) == (exchanges, num_steps, True)


@pytest.mark.parametrize("weighed", [False, True], ids=["even batches", "uneven batches by weight"])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_step_like_one_process_on_all_their_batches(case, weighed):
    arguments, windows, exchanges = CASES[case]
    sizes, options = (UNEVEN, {"batch_weight": samples}) if weighed else (SIZES, {})
    results = run_on_ranks(2, on_a_rank, sizes, **arguments, **options)
    check(results, expected(union(sizes, windows)), exchanges, len(windows))


def test_weights_may_be_tensors_and_batches_need_no_window_to_be_weighed():
    results = run_on_ranks(2, on_a_rank, UNEVEN, 1, batch_weight=all_tokens)
    windows = [[index] for index in range(6)] * 2
    check(results, expected(union(UNEVEN, windows)), 12, 12)


@pytest.mark.parametrize("action", [None, "end epoch"])
def test_the_gradient_of_all_ranks_is_clipped(action):
    results = run_on_ranks(2, on_a_rank, SIZES, 3, action=action, clip_grad_norm=LIMIT)
    windows = [[0, 1, 2], [3], [0, 1, 2], [3, 4, 5]] if action else [[0, 1, 2], [3, 4, 5]] * 2
    weights = expected(union(SIZES, windows), lambda parameters: nn.utils.clip_grad_norm_(parameters, LIMIT))
    check(results, weights, 3 if action else 4, 4, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weighed", [False, True], ids=["even batches", "uneven batches by weight"])
@on_ranks(2)
def test_ranks_that_shard_the_model_step_like_one_process_on_all_their_batches(weighed):
    from torch.distributed.fsdp import fully_shard  # takes a second

    sizes, options = (UNEVEN, {"batch_weight": samples}) if weighed else (SIZES, {})
    own = data_of(sizes)[torch.distributed.get_rank()]
    for name, (case, windows, _) in CASES.items():
        if "fails_at" in case:
            continue
        model, data, action = Weighted(), own[: case.get("count", 6)], case.get("action")
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        trainer, steps = trainer_of(model, case["size"], clip_grad_norm=LIMIT, **options)
        if action is not None:
            at(trainer, Events.ITERATION_COMPLETED, ACTIONS[action], 4)
        trainer.run(data if case.get("sized", True) else Sizeless(*data), max_epochs=2)
        if action == "pause":
            trainer.run(data, max_epochs=2)
        whole = torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])
        weights = expected(union(sizes, windows), lambda parameters: nn.utils.clip_grad_norm_(parameters, LIMIT))
        torch.testing.assert_close(whole, weights, atol=1e-7, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        assert len(steps) == len(windows), name


@on_ranks(2)
def test_ranks_that_shard_the_model_and_have_batches_of_different_sizes_step_like_one_process():
    from torch.distributed.fsdp import fully_shard

    [(x, y)] = batches_of(7)
    for size, windows in ((1, [[0], [1]]), (2, [[0, 1]])):
        model, alone = Weighted(), Weighted()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        shares = []
        trainer, _ = trainer_of(model, size)
        at(trainer, Events.ITERATION_COMPLETED, lambda engine, shares=shares: shares.append(engine.batch_share), 2)
        trainer.run(auto_dataloader(torch.utils.data.TensorDataset(x, y), batch_size=4, shuffle=False))
        assert shares[0] != 1.0
        optimizer = torch.optim.SGD(alone.parameters(), RATE)
        for window in windows:
            optimizer.zero_grad()
            for batch in window:
                (squared(alone(x[batch * 4 :][:4]), y[batch * 4 :][:4]) / len(window)).backward()
            optimizer.step()
        whole = torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])
        torch.testing.assert_close(whole, weights_of(alone), atol=1e-8, rtol=0)


class Small(nn.Sequential):
    """A model whose layers can be split over ranks."""

    def __init__(self):
        super().__init__(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1), nn.Tanh())
        self.double()


def sharded_and_replicated(model):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def sharded_and_tensor_parallel(model):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def sharded_in_the_older_way(model):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True}
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), device_mesh=mesh, **options)


def wrapped_inside(model):
    return nn.Sequential(DistributedDataParallel(model))


WRAPPERS = {  # and the number of ranks that divide the data
    sharded_and_replicated: 4,
    sharded_and_tensor_parallel: 2,
    sharded_in_the_older_way: 4,
    wrapped_inside: 4,
}


@on_ranks(4)
def test_weights_of_batches_are_averaged_over_the_ranks_that_gradients_are_averaged_over():
    sizes = [(5, 1, 2, 3), (1, 4, 2, 1), (2, 2, 7, 1), (3, 1, 1, 1)]
    inputs = batches_of(3)[0][0]
    for wrap, divide in WRAPPERS.items():
        torch.manual_seed(0)
        alone = Small()
        wrapped = wrap(copy.deepcopy(alone))
        data = data_of(sizes[:divide])
        own = data[torch.distributed.get_rank() * divide // 4]
        trainer, _ = trainer_of(wrapped, 2, batch_weight=samples)
        trainer.run(own, max_epochs=2)
        windows = [[batches[index] for batches in data for index in window] for window in [(0, 1), (2, 3)]]
        big = [tuple(torch.cat(parts) for parts in zip(*window, strict=True)) for window in windows]
        trainer_of(alone, 1)[0].run(big, max_epochs=2)
        torch.testing.assert_close(
            wrapped(inputs), alone(inputs), atol=1e-8, rtol=0, msg=lambda text, wrap=wrap: f"{wrap}: {text}"
        )


@on_ranks(2)
def test_a_compiled_wrapper_averages_a_window_that_is_cut_short_too():
    data = data_of(SIZES)[torch.distributed.get_rank()]
    with torch.compiler.set_stance("force_eager"):  # compiling takes seconds, and is not what is asked here
        model = torch.compile(DistributedDataParallel(Weighted()), backend="eager")
        trainer, steps = trainer_of(model, 3)
        at(trainer, Events.ITERATION_COMPLETED, ACTIONS["end epoch"], 4)
        trainer.run(data)
    assert steps == [3, 4]
    torch.testing.assert_close(weights_of(model), expected(union(SIZES, [[0, 1, 2], [3]])))


@on_ranks(2)
def test_ranks_exchange_gradients_again_after_an_error_between_exchanges():
    model = DistributedDataParallel(Weighted())
    trainer, _ = trainer_of(model, 4)
    synchronized = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda e: synchronized.append(model.require_backward_grad_sync))
    with pytest.raises(ValueError, match="unpack"):
        trainer.run([*batches_of(2, 2), ("no pair",)], max_epochs=2)
    assert synchronized == [True] * 3
    with pytest.raises(RuntimeError, match="size"):
        trainer.run([(torch.ones(2, 3), torch.ones(2, 1))] * 3, max_epochs=2)
    assert model.require_backward_grad_sync


class Lonely(nn.Module):
    """A wrapper for several ranks that cannot average afterwards."""

    def __init__(self):
        super().__init__()
        self.module = Weighted()
        self.no_sync_calls = 0

    def forward(self, x):
        return self.module(x)

    def no_sync(self):
        self.no_sync_calls += 1
        return nullcontext()


def test_a_wrapper_that_cannot_average_afterwards_drops_the_window_and_says_so():
    model = Lonely()
    trainer, steps = trainer_of(model, 3)
    at(trainer, Events.ITERATION_COMPLETED, lambda engine: engine.terminate_epoch(), 5)
    with pytest.warns(
        UserWarning, match=r"inside a window of 3 .* Lonely cannot .* last 2 batches are dropped"
    ) as told:
        trainer.run(batches_of(4, 4, 4, 4, 4, 4))
    assert len(told) == 1
    assert steps == [3]
    assert model.no_sync_calls == 4


class Branching(nn.Module):
    """Uses one of two weights, so that ranks may have gradients that others lack."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
        for branch in self.branches:
            nn.init.ones_(branch.weight)

    def forward(self, x):
        return self.branches[torch.distributed.get_rank()](x)


@on_ranks(2)
def test_ranks_with_different_gradients_average_a_window_that_is_cut_short():
    model = DistributedDataParallel(Branching(), find_unused_parameters=True)
    trainer, steps = trainer_of(model, 3, lambda y_pred, y: y_pred.sum())
    at(trainer, Events.ITERATION_COMPLETED, ACTIONS["end epoch"], 1)
    trainer.run([(torch.ones(1, 1), torch.zeros(1, 1))] * 3)
    assert steps == [1]
    first, second = (float(branch.weight.detach()) for branch in model.module.branches)
    assert first == second != 1.0
