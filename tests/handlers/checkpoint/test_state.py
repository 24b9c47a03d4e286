"""The state of sharded models and optimizers."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from camshaft import distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver
from tests.handlers.parts import at, load
from tests.ranks import on_ranks


def make(seed=0, sharded=True):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def whole(state):
    return {name: tensor.full_tensor() for name, tensor in state.items()}


@on_ranks(2)
def test_sharded_state_is_saved_unsharded_and_resumes_sharded_or_unsharded(tmp_path):
    batch = torch.ones(2, 3)
    model, optimizer = make()
    step(model, optimizer, batch)
    checkpoint = Checkpoint({"model": model, "optimizer": optimizer}, DiskSaver(tmp_path), n_saved=None)
    checkpoint(at(1))
    step(model, optimizer, batch)
    expected = whole(model.state_dict())
    idist.barrier()
    saved = load(tmp_path / "checkpoint_1.pt")
    assert saved["model"]["0.weight"].shape == (5, 3)
    assert type(saved["optimizer"]["state"][0]["exp_avg"]) is torch.Tensor

    for sharded in (True, False):
        other, its_optimizer = make(seed=1, sharded=sharded)
        Checkpoint.resume({"model": other, "optimizer": its_optimizer}, tmp_path)
        step(other, its_optimizer, batch)
        state = other.state_dict()
        assert all(isinstance(tensor, DTensor) for tensor in state.values()) == sharded
        for name, tensor in (whole(state) if sharded else state).items():
            torch.testing.assert_close(tensor, expected[name])


@on_ranks(2)
def test_sharded_state_is_saved_in_the_background(tmp_path):
    model, optimizer = make()
    engine = Engine(lambda engine, batch: step(model, optimizer, batch))
    checkpoint = Checkpoint({"model": model}, DiskSaver(tmp_path), asynchronous=True)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), checkpoint)
    engine.run([torch.ones(2, 3)] * 3)
    idist.barrier()
    first, first_optimizer = make(sharded=False)
    step(first, first_optimizer, torch.ones(2, 3))
    for name, tensor in load(tmp_path / "model_1.pt").items():
        torch.testing.assert_close(tensor, first.state_dict()[name])


@on_ranks(2)
def test_sharded_tensors_are_gathered_on_the_rank_on_which_the_disk_saver_writes(tmp_path):
    model, _ = make()
    Checkpoint({"model": model}, DiskSaver(tmp_path, save_on_rank=1))(at(1))
    expected = whole(model.state_dict())
    idist.barrier()
    for name, tensor in load(tmp_path / "model_1.pt").items():
        torch.testing.assert_close(tensor, expected[name])
