"""The loader of auto_dataloader that moves batches to an XLA device."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from camshaft.distributed.backends.xla import device_loader
from camshaft.engine import Engine

DEVICE = torch.device("xla:0")


@pytest.fixture(autouse=True)
def without_megascale(monkeypatch):
    """Threads of torch_xla's loader set and restore this variable; a race between them can leave it set."""
    monkeypatch.setenv("SKIP_MEGASCALE_PJRT_CLIENT", "true")


class Numbers(Dataset):
    def __init__(self, size, bad=None):
        self.size, self.bad = size, bad

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError(f"sample {index} cannot be read")
        return torch.tensor(float(index))


class Sample(NamedTuple):
    image: torch.Tensor
    name: str
    extra: tuple


def test_each_pass_yields_the_batches_on_the_device():
    plain = DataLoader(Numbers(5), batch_size=2)
    loader = device_loader(plain, DEVICE)
    assert isinstance(loader, MpDeviceLoader)
    assert (len(loader), loader.dataset, loader.sampler) == (3, plain.dataset, plain.sampler)
    for _ in range(2):
        batches = list(loader)
        assert [batch.device for batch in batches] == [DEVICE] * 3
        assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert [len(pair) for pair in zip(loader, loader, strict=True)] == [2, 2, 2], "two concurrent passes"


def test_an_error_in_the_loader_is_raised_after_the_batches_before_it():
    loader = device_loader(DataLoader(Numbers(6, bad=4), batch_size=2), DEVICE)
    batches = []
    with pytest.raises(OSError, match="sample 4 cannot be read"):
        batches.extend(loader)
    batches.clear()
    with pytest.raises(OSError, match="sample 4"):
        for batch in loader:
            batches.append(batch.tolist())
    assert batches == [[0, 1], [2, 3]]


def test_batches_keep_their_structure():
    sample = Sample(torch.ones(2), "one", (torch.zeros(1), 3, None))
    (moved,) = device_loader([sample], DEVICE)
    assert isinstance(moved, Sample)
    assert (moved.name, type(moved.extra), moved.extra[1:]) == ("one", tuple, (3, None))
    assert moved.image.device == moved.extra[0].device == DEVICE
    (moved,) = device_loader([{"x": [torch.ones(1, dtype=torch.int64)], "y": "not a tensor"}], DEVICE)
    assert (moved["x"][0].tolist(), moved["x"][0].dtype, moved["y"]) == ([1], torch.int64, "not a tensor")


def test_stopping_an_iteration_early_leaves_no_thread():
    loader = device_loader(DataLoader(Numbers(500), batch_size=1), DEVICE)
    for batch in loader:
        assert batch.tolist() == [0]
        break
    Engine(lambda engine, batch: None).run(loader, max_iters=3)


def test_an_engine_sets_the_epoch_of_the_sampler():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    loader = device_loader(DataLoader(Numbers(8), sampler=sampler, batch_size=2), DEVICE)
    epochs, seen = [], []
    trainer = Engine(lambda engine, batch: seen.extend(batch.tolist()))
    trainer.add_event_handler("EPOCH_COMPLETED", lambda engine: epochs.append((sampler.epoch, tuple(seen))))
    trainer.run(loader, max_epochs=2)
    assert trainer.state.epoch_length == 2
    assert epochs[0][0] != epochs[1][0]
    assert epochs[1][1][:4] != epochs[1][1][4:]
