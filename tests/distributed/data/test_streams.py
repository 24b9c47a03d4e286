"""Iterable datasets are sharded over ranks and workers without loss."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import camshaft.distributed as idist
from camshaft.distributed.data.loaders import ShardedStream
from camshaft.types import Stateful


class Files(IterableDataset):
    """Samples in files of ten, sharded by file; a worker that finds others reads its own files only, as datasets do."""

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
    """Sharded by sample, without num_shards and epochs."""

    def __init__(self, start=0, step=1):
        self.start, self.step = start, step

    def shard(self, *, num_shards, index):
        return Endless(self.start + index * self.step, self.step * num_shards)

    def __iter__(self):
        return itertools.count(self.start, self.step)


class Counted(Endless):
    """The first samples of such a dataset."""

    def shard(self, *, num_shards, index):
        return Counted(self.start + index * self.step, self.step * num_shards)

    def __iter__(self):
        return iter(range(self.start, 20, self.step))


class Saved(Files):
    """Knows where it is."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def read(dataset, workers, **options):
    return [int(sample) for sample in DataLoader(dataset, batch_size=None, num_workers=workers, **options)]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 3])
def test_every_sample_is_read_once(size, workers):
    parts = [read(ShardedStream(Files(range(7)), rank, size), workers) for rank in range(size)]
    assert sorted(itertools.chain(*parts)) == list(range(70))
    assert all(parts)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("dataset", [Counted(), Files(range(2))], ids=["samples", "two files"])
def test_a_single_process_reads_every_sample_once_with_any_number_of_workers(dataset, workers):
    loader = idist.auto_dataloader(dataset, batch_size=None, num_workers=workers)
    assert sorted(map(int, loader)) == list(range(20))


def test_num_shards_is_optional():
    loader = DataLoader(ShardedStream(Endless(), 1, 3), batch_size=None, num_workers=2)
    samples = [int(sample) for sample in itertools.islice(loader, 4)]
    assert samples == [2, 3, 8, 9]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_knows_the_epoch(workers):
    dataset = ShardedStream(Files(range(4)), 0, 2)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    for epoch in (0, 3, 4):
        dataset.set_epoch(epoch)
        assert {int(sample) // 1000 for sample in loader} == {epoch}
        assert dataset.epoch == epoch
    del loader


def test_a_dataset_without_set_epoch_is_sharded_too():
    dataset = ShardedStream(Endless(), 0, 2)
    dataset.set_epoch(1)
    assert list(itertools.islice(dataset, 2)) == [0, 2]


def test_the_state_of_the_whole_dataset_is_not_taken_for_that_of_a_shard():
    assert isinstance(Saved(range(4)), Stateful)
    assert not isinstance(ShardedStream(Saved(range(4)), 1, 2), Stateful)


def test_attributes_of_the_dataset_are_forwarded():
    dataset = ShardedStream(Files(range(4)), 0, 2)
    assert dataset.title == "numbers"
    with pytest.raises(AttributeError, match="'Files' object has no attribute 'none'"):
        _ = dataset.none
    with pytest.raises(TypeError):
        len(dataset)
    for other in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert list(other) == list(dataset)


def test_fewer_shards_than_readers_are_refused():
    with pytest.raises(ValueError, match="got num_shards=4 for 5 ranks: split it into more"):
        ShardedStream(Files(range(4)), 0, 5)
    dataset = ShardedStream(Files(range(4)), 0, 3)
    with pytest.raises(ValueError, match="got num_shards=4 for 3 ranks with 2 workers each"):
        read(dataset, 2)
    with mock.patch.object(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1):
        gc.collect()  # the workers end with their loader, which the traceback held
