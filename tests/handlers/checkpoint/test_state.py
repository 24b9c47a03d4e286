"""The state of sharded models and optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from camshaft import distributed as idist
from camshaft.engine import Engine, Events
from camshaft.handlers import Checkpoint, DiskSaver
from tests.handlers.parts import at, load
from tests.ranks import on_ranks, run_on_ranks


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


class Counting:
    """A loader with a state of its own."""

    def __init__(self):
        self.done = 0

    def __iter__(self):
        while self.done < 5:
            self.done += 1
            yield self.done
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def save_state_of_loader(folder):
    engine = Engine(lambda engine, batch: None)
    checkpoint = Checkpoint({"trainer": engine}, folder)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), checkpoint)
    engine.run(Counting())


def resume_state_of_loader(folder):
    engine, seen = Engine(lambda engine, batch: seen.append(batch)), []
    try:
        Checkpoint({"trainer": engine}, folder).resume_latest()
    except ValueError as error:
        return str(error)
    engine.run(Counting(), max_epochs=1)
    return seen


@pytest.mark.parametrize(("saved", "resumed"), [(2, 2), (1, 1), (2, 1), (2, 3), (1, 2)])
def test_the_state_of_a_loader_is_that_of_as_many_ranks(tmp_path, saved, resumed):
    run_on_ranks(saved, save_state_of_loader, tmp_path)
    for found in run_on_ranks(resumed, resume_state_of_loader, tmp_path):
        if saved == resumed:
            assert found == [4, 5]
        else:
            assert f"states of the loaders of {saved} rank" in found
            assert f"but this job has {resumed} rank" in found
