"""On a GPU: batches arrive whole while others are on their way, and the host waits for none of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import camshaft.distributed as idist
from camshaft.distributed.data import prefetch_to_device


class Batches:
    """Big tensors, each full of its number."""

    def __init__(self, count, pinned):
        self.count, self.pinned = count, pinned

    def __iter__(self):
        for number in range(self.count):
            yield {"x": torch.full((1 << 20,), float(number), pin_memory=self.pinned), "name": str(number)}


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_arrive_whole_and_in_order(pinned):
    sums = []
    for number, batch in enumerate(prefetch_to_device(Batches(30, pinned))):
        assert batch["x"].device.type == idist.device().type == "cuda"
        assert batch["name"] == str(number)
        sums.append(batch["x"].mean())  # on the stream of this step, and nobody waits
        batch["x"].fill_(-1.0)
    assert torch.stack(sums).tolist() == [float(number) for number in range(30)]


def test_memory_is_not_used_anew_while_a_step_still_reads_it():
    results = []
    for batch in prefetch_to_device(Batches(20, pinned=True), "cuda:0"):
        torch.cuda._sleep(10_000_000)  # the step is behind when the batch is dropped
        results.append(batch["x"].clone())
        del batch
    assert [one.unique().tolist() for one in results] == [[float(number)] for number in range(20)]


def test_the_host_waits_for_no_copy():
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in prefetch_to_device(list(Batches(10, pinned=True)), "cuda"):
            batch["x"].add_(1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_loader_with_workers_that_pins():
    loader = prefetch_to_device(
        DataLoader([float(number) for number in range(40)], batch_size=4, num_workers=2, pin_memory=True)
    )
    assert len(loader) == 10
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == [float(number) for number in range(40)]
