"""Iterable datasets are split among ranks and workers without loss."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from camshaft.distributed.data.iterable import sharded
from camshaft.types import Stateful


class Files(IterableDataset):
    """Samples in files of ten; files are dealt out, and a worker that finds others takes its part, as datasets do."""

    def __init__(self, files, epoch=0):
        self.files, self.epoch, self.title = list(files), epoch, "numbers"

    @property
    def num_shards(self):
        return len(self.files)

    def shard(self, num_shards, index):
        return type(self)(self.files[index::num_shards])  # which forgets the epoch, as theirs does

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        files = self.files if info is None else self.files[info.id :: info.num_workers]
        for file, place in itertools.product(files, range(10)):
            yield 1000 * self.epoch + 10 * file + place


class Endless(IterableDataset):
    """Deals out samples, does not say into how many parts, and knows no epochs."""

    def __init__(self, start=0, step=1):
        self.start, self.step = start, step

    def shard(self, *, num_shards, index):
        return Endless(self.start + index * self.step, self.step * num_shards)

    def __iter__(self):
        return itertools.count(self.start, self.step)


class Saved(Files):
    """Knows where it is."""

    begin = now = 0

    def __iter__(self):
        for place, sample in enumerate(super().__iter__(), 1):
            if place > self.begin:
                self.now = place
                yield sample

    def state_dict(self):
        return {"now": self.now}

    def load_state_dict(self, state_dict):
        self.begin = state_dict["now"]


def read(dataset, workers, **options):
    return [int(sample) for sample in DataLoader(dataset, batch_size=None, num_workers=workers, **options)]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 3])
def test_every_sample_is_read_once(size, workers):
    parts = [read(sharded(Files(range(7)), rank, size), workers) for rank in range(size)]
    assert sorted(itertools.chain(*parts)) == list(range(70))
    assert all(parts)


def test_a_dataset_need_not_say_into_how_many_parts_it_can_be_split():
    loader = DataLoader(sharded(Endless(), 1, 3), batch_size=None, num_workers=2)
    samples = [int(sample) for sample in itertools.islice(loader, 4)]
    assert samples == [2, 3, 8, 9]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_part_knows_the_epoch(workers):
    dataset = sharded(Files(range(4)), 0, 2)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    for epoch in (0, 3, 4):
        dataset.set_epoch(epoch)
        assert {int(sample) // 1000 for sample in loader} == {epoch}
        assert dataset.epoch == epoch
    del loader


def test_a_dataset_that_knows_no_epochs_is_not_told():
    dataset = sharded(Endless(), 0, 2)
    dataset.set_epoch(1)
    assert list(itertools.islice(dataset, 2)) == [0, 2]


def test_a_part_is_gone_on_with():
    dataset = sharded(Saved(range(4)), 1, 2)
    samples = iter(dataset)
    first = list(itertools.islice(samples, 13))
    state = copy.deepcopy(dataset.state_dict())
    rest = list(samples)
    again = sharded(Saved(range(4)), 1, 2)
    again.load_state_dict(state)
    assert again.state_dict() == {"now": 13}
    assert list(again) == rest
    assert list(again) == first + rest, "only the pass that was cut is shorter"
    assert isinstance(again, Stateful)
    assert not isinstance(sharded(Files(range(4)), 1, 2), Stateful)


def test_a_part_that_nobody_reads_yet_has_a_state():
    assert sharded(Saved(range(4)), 1, 2).state_dict() == {"now": 0}


def test_what_the_dataset_has_is_there():
    dataset = sharded(Files(range(4)), 0, 2)
    assert dataset.title == "numbers"
    with pytest.raises(AttributeError, match="'Files' object has no attribute 'none'"):
        _ = dataset.none
    with pytest.raises(TypeError):
        len(dataset)
    for other in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert list(other) == list(dataset)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(TypeError, match=r"dataset must have a method shard\(num_shards, index\), got \[\]"):
        sharded([], 0, 2)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        sharded(Files(range(4)), 2, 2)
    with pytest.raises(ValueError, match="got num_shards=4 for 5 ranks: split it into more"):
        sharded(Files(range(4)), 0, 5)
    dataset = sharded(Files(range(4)), 0, 3)
    with pytest.raises(ValueError, match="got num_shards=4 for 3 ranks with 2 workers each"):
        read(dataset, 2)
    with mock.patch.object(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1):
        gc.collect()  # the workers end with their loader, which the traceback held
