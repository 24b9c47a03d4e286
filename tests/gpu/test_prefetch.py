"""On a GPU, prefetched batches arrive complete, and the host does not wait for copies."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import camshaft.distributed as idist
from camshaft.data import prefetch_to_device
from tests.gpu.devices import DEVICE, ON_GPU, no_synchronization

SIZE = 1 << (20 if ON_GPU else 10)


class Batches:
    """Yield large tensors, each filled with its index."""

    def __init__(self, count, pinned):
        self.count, self.pinned = count, pinned and ON_GPU

    def __iter__(self):
        for number in range(self.count):
            yield {"x": torch.full((SIZE,), float(number), pin_memory=self.pinned), "name": str(number)}


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_arrive_complete_and_in_order(pinned):
    sums = []
    for number, batch in enumerate(prefetch_to_device(Batches(30, pinned))):
        assert batch["x"].device.type == idist.device().type == DEVICE.type
        assert batch["name"] == str(number)
        sums.append(batch["x"].mean())  # on this step's stream, without synchronization
        batch["x"].fill_(-1.0)
    assert torch.stack(sums).tolist() == [float(number) for number in range(30)]


def test_memory_is_not_reused_while_a_step_reads_it():
    results = []
    for batch in prefetch_to_device(Batches(20, pinned=True), DEVICE):
        if ON_GPU:
            torch.cuda._sleep(10_000_000)  # the step is still running when the batch is dropped
        results.append(batch["x"].clone())
        del batch
    assert [one.unique().tolist() for one in results] == [[float(number)] for number in range(20)]


def test_the_host_does_not_wait_for_copies():
    with no_synchronization():
        for batch in prefetch_to_device(list(Batches(10, pinned=True)), DEVICE):
            batch["x"].add_(1.0)


@pytest.mark.skipif(not ON_GPU, reason="starts processes, and on a CPU nothing is prefetched")
def test_a_loader_with_workers_and_pinned_memory():
    loader = prefetch_to_device(
        DataLoader([float(number) for number in range(40)], batch_size=4, num_workers=2, pin_memory=True)
    )
    assert len(loader) == 10
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == [float(number) for number in range(40)]
