"""Iterable datasets are sharded over ranks and workers without loss."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import pickle
import random
import warnings

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import camshaft.distributed as idist
from camshaft.data.loaders import Stream
from camshaft.engine import Engine
from camshaft.types import Stateful
from camshaft.utils import manual_seed
from tests.distributed.test_ranks import at_rank
from tests.ranks import run_on_ranks


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


def read(dataset, workers):
    return [int(sample) for sample in DataLoader(dataset, batch_size=None, num_workers=workers)]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 3])
def test_every_sample_is_read_once(size, workers):
    parts = [read(Stream(Files(range(7)), (rank, size)), workers) for rank in range(size)]
    assert sorted(itertools.chain(*parts)) == list(range(70))
    assert all(parts)
    if size == 1:
        for dataset in (Counted(), Files(range(2))):
            loader = idist.auto_dataloader(dataset, batch_size=None, num_workers=workers)
            assert sorted(map(int, loader)) == list(range(20))


def test_num_shards_and_set_epoch_are_optional():
    dataset = Stream(Endless(), (1, 3))
    dataset.set_epoch(1)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert [int(sample) for sample in itertools.islice(loader, 4)] == [2, 3, 8, 9]


def test_the_state_of_the_whole_dataset_is_not_taken_for_that_of_a_shard():
    assert isinstance(Saved(range(4)), Stateful)
    assert not isinstance(Stream(Saved(range(4)), (1, 2)), Stateful)


def test_attributes_of_the_dataset_are_forwarded():
    dataset = Stream(Files(range(4)), (0, 2))
    assert dataset.title == "numbers"
    with pytest.raises(AttributeError, match="'Files' object has no attribute 'none'"):
        _ = dataset.none
    with pytest.raises(TypeError):
        len(dataset)
    for other in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert list(other) == list(dataset)


def test_fewer_shards_than_readers_are_refused():
    with pytest.raises(ValueError, match="got num_shards=4 for 5 ranks: split it into more"):
        Stream(Files(range(4)), (0, 5))
    with at_rank(0, 3), pytest.raises(ValueError, match="got num_shards=4 for 3 ranks with 2 workers each"):
        idist.auto_dataloader(Files(range(4)), num_workers=4)  # of the three processes of the node


# --- epochs and random numbers in workers -------------------------------------------------------------------------


class Told(Dataset):
    """Samples that are the epoch that the dataset was told last."""

    epoch = -1

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch


class ToldStream(IterableDataset):
    """A stream without shards, likewise."""

    epoch = -1

    def __iter__(self):
        info = get_worker_info()
        yield from [self.epoch] * (2 if info is None else 2 // info.num_workers)

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dataset", [Told(), ToldStream(), Files(range(4))], ids=["map-style", "stream", "shards"])
def test_an_epoch_reaches_the_dataset_in_workers(dataset, persistent):
    loader = idist.auto_dataloader(dataset, batch_size=2, num_workers=2, persistent_workers=persistent)
    epochs = []
    engine = Engine(lambda engine, batch: epochs.append((engine.state.epoch - 1, *batch.tolist())))
    engine.run(loader, max_epochs=3)
    del loader
    engine.state.dataloader = None
    told = {
        (epoch, number // 1000 if isinstance(dataset, Files) else number) for epoch, *rest in epochs for number in rest
    }
    assert told == {(0, 0), (1, 1), (2, 2)}


class Drawing(IterableDataset):
    """Random numbers from all three generators, without end; each reader draws its own."""

    def __iter__(self):
        while True:
            yield torch.tensor([torch.rand(()).item(), random.random(), numpy.random.random()])


def drawn(workers):
    warnings.simplefilter("ignore")  # that it has no shards, and of forks
    multiprocessing.process.current_process()._config["daemon"] = False  # else it may have no workers
    multiprocessing.set_start_method("fork", force=True)
    manual_seed(5)
    loader = idist.auto_dataloader(Drawing(), batch_size=1, num_workers=workers * idist.get_nproc_per_node())
    numbers = [tuple(batch[0].tolist()) for batch in itertools.islice(loader, 4)]
    del loader
    return numbers, torch.rand(()).item(), random.random(), numpy.random.random()


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_draw_different_random_numbers_for_streams_and_the_same_otherwise(workers):
    first, again = run_on_ranks(2, drawn, workers), run_on_ranks(2, drawn, workers)
    assert first == again, "they follow from the seed"
    (numbers, *rest), (others, *their_rest) = first
    for mine, theirs in zip(zip(*numbers, strict=True), zip(*others, strict=True), strict=True):
        assert len({*mine, *theirs}) == 8
    assert rest == their_rest, "training draws what it drew without the stream"
    manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    assert rest == [torch.rand(()).item(), random.random(), numpy.random.random()]
