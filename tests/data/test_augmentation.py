"""Samples with random augmentation follow from seed, epoch and index, whoever loads them."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import subprocess
import sys

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

import camshaft.distributed as idist
from camshaft.data.augmentation import (
    Indices,
    SeededLoader,
    fetches_batches,
    is_ready,
    preserved_generators,
    seed_generators,
)
from camshaft.data.permutation import key_of, mixed
from camshaft.engine.deterministic import ReproducibleBatchSampler, update_dataloader
from camshaft.seeding import capture_random_state, manual_seed

N = 11


class Batches(BatchSampler):
    """Batches in order, from a batch on, of one rank of several."""

    def __init__(self, batch_size=3, seed=17, begin=0, rank=0, ranks=1):
        super().__init__(range(N), batch_size, drop_last=False)
        self.seed, self.epoch, self.begin, self.rank, self.ranks = seed, 1, begin, rank, ranks

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        parts = itertools.islice(super().__iter__(), self.begin, None)
        return (Indices(part[self.rank :: self.ranks], self.seed, self.epoch) for part in parts)


def draw():
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(1).item()]


class Augmented(Dataset):
    """Samples made of random numbers of all three; some draw more of them than others."""

    def __getitem__(self, index):
        for _ in range(index % 3):
            draw()
        return torch.tensor([index, *draw()], dtype=torch.float64)

    def __len__(self):
        return N


class Whole(Augmented):
    """The same, fetched in batches."""

    def __getitems__(self, indices):
        shift = random.random() + numpy.random.rand() + torch.rand(1).item()
        return [self[index] + shift for index in indices]


class Other(Dataset):
    """Nothing random."""

    def __getitem__(self, index):
        return float(index)


def passes(dataset, num_epochs=2, workers=None, collate_fn=None, **of_sampler):
    """Return the batches of some epochs, drawing and seeding between batches as a training step would."""
    batches = Batches(**of_sampler)
    loader = SeededLoader(dataset, batch_sampler=batches, collate_fn=collate_fn, **(workers or {}))
    seen = []
    for epoch in range(1, num_epochs + 1):
        batches.set_epoch(epoch)
        for batch in loader:
            seen.append(batch)
            draw()
        manual_seed(epoch)
    return seen


@pytest.fixture(params=[(0, False), (2, False), (2, True)], ids=["0", "2", "2 persistent"])
def workers(request, monkeypatch):
    number, persistent = request.param
    monkeypatch.setattr(DataLoader, "check_worker_number_rationality", lambda self: None)  # it warns on few cores
    return {"num_workers": number, "persistent_workers": persistent}


def by_sample(batches):
    """Return the rows of all batches in the order of their first number."""
    rows = torch.cat(batches)
    return rows[rows[:, 0].argsort()]


def equal(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


# What samples are made of


@pytest.fixture(scope="module")
def expected():
    """The samples of two epochs, seeded as the loader promises."""
    with preserved_generators():
        return [torch.stack([sample_of(epoch, index) for index in range(N)]) for epoch in (1, 2)]


def sample_of(epoch, index):
    seed_generators(mixed(key_of(17, epoch), index))
    return Augmented()[index]


def test_samples_are_the_same_with_any_workers_batches_ranks_and_resumes(expected, workers):
    seen = passes(Augmented(), workers=workers)
    assert torch.equal(by_sample(seen[:4]), expected[0])
    assert torch.equal(by_sample(seen[4:]), expected[1])
    assert torch.equal(by_sample(passes(Augmented(), 1, workers=workers, begin=2)), expected[0][6:])
    for batch_size in (1, 4, N):
        assert torch.equal(by_sample(passes(Augmented(), 1, batch_size=batch_size)), expected[0])
    for ranks in (2, 3):
        parts = [passes(Augmented(), 1, batch_size=4, rank=rank, ranks=ranks) for rank in range(ranks)]
        assert torch.equal(by_sample(list(itertools.chain(*parts))), expected[0])


def test_datasets_of_datasets_are_seeded_sample_by_sample(expected):
    subset = Subset(Augmented(), range(N))
    for dataset in (
        subset,
        Subset(subset, range(N)),
        ConcatDataset([Augmented()]),
        StackDataset(Augmented(), range(N)),
    ):
        seen = passes(dataset, 1, batch_size=5)
        assert torch.equal(by_sample([one if torch.is_tensor(one) else one[0] for one in seen]), expected[0])


def test_samples_seeds_and_epochs_give_different_numbers(expected):
    other_seed = by_sample(passes(Augmented(), 1, seed=18))
    for column in range(1, 6):  # one for each generator, and its Gaussians
        numbers = torch.cat([rows[:, column] for rows in (*expected, other_seed)])
        assert len(numbers.unique()) == 3 * N


def test_torch_and_numpy_do_not_draw_the_same_numbers():
    seed_generators(mixed(1, 2))
    of_torch = torch.rand(50, dtype=torch.float64)
    assert not set(of_torch.tolist()) & set(numpy.random.rand(50).tolist())
    raw = torch.empty(50, dtype=torch.int64).random_(2**32).tolist()
    seed_generators(mixed(1, 2))
    assert set(raw).isdisjoint(numpy.random.randint(0, 2**32, 200, dtype=numpy.uint32).tolist())


def test_indices_need_not_be_integers():
    class Named(Dataset):
        def __getitem__(self, name):
            return draw()[0]

    def drawn(*names):
        return next(iter(SeededLoader(Named(), batch_sampler=[Indices(names, 1, 1)]))).tolist()

    assert drawn("a", ("b", 2)) == drawn(("b", 2), "a")[::-1]
    assert drawn(4, -1) == drawn(numpy.int64(4), torch.tensor(-1))
    assert len({*drawn("a", "b", 4, -1)}) == 4


# Whole batches


def test_a_dataset_that_fetches_batches_is_seeded_for_each_batch(workers):
    seen = passes(Whole(), workers=workers)
    assert equal(seen, passes(Whole()))
    assert equal(seen[2:4], passes(Whole(), 1, begin=2, workers=workers))
    assert len(torch.cat(seen)[:, 3].unique()) == 2 * N


def test_a_dataset_that_fetches_batches_is_called_once_for_each(monkeypatch):
    calls = []
    monkeypatch.setattr(Whole, "__getitems__", lambda self, indices: calls.append(list(indices)) or [0.0])
    passes(Whole(), 1)
    passes(Subset(Whole(), range(N)), 1)
    assert calls == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]] * 2


@pytest.mark.parametrize("dataset", [Augmented(), Whole(), TensorDataset(torch.zeros(N))])
def test_collating_is_seeded(dataset, workers):
    def collate(samples):
        return torch.stack([torch.as_tensor(draw(), dtype=torch.float64) for _ in samples])

    seen = passes(dataset, workers=workers, collate_fn=collate)
    assert equal(seen, passes(dataset, collate_fn=collate))
    assert equal(seen[1:4], passes(dataset, 1, begin=1, workers=workers, collate_fn=collate))
    assert len(torch.cat(seen)[:, 0].unique()) == 2 * N


# The main process


@pytest.mark.parametrize("dataset", [Augmented(), Whole(), Other(), TensorDataset(torch.zeros(N))])
def test_the_random_states_of_the_main_process_are_preserved(dataset, workers):
    manual_seed(3)
    random.gauss(0, 1)
    before = capture_random_state()
    for batch in SeededLoader(dataset, batch_sampler=Batches(), **workers):
        assert same(capture_random_state(), before)
        del batch
    assert same(capture_random_state(), before)


def same(first, second):
    return first["python"] == second["python"] and first["numpy"] == second["numpy"] and equal(*torchs(first, second))


def torchs(*states):
    return [[state["torch"]] for state in states]


def test_the_random_states_are_preserved_after_an_error():
    class Broken(Augmented):
        def __getitem__(self, index):
            draw()
            raise RuntimeError("no such sample")

    before = capture_random_state()
    with pytest.raises(RuntimeError, match="no such sample"):
        next(iter(SeededLoader(Broken(), batch_sampler=Batches())))
    assert same(capture_random_state(), before)


@pytest.mark.parametrize("bit_generator", [numpy.random.PCG64, numpy.random.Philox])
def test_another_bit_generator_of_numpy_is_seeded_and_restored(bit_generator):
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(bit_generator(3))
    try:
        numpy.random.rand()
        state = capture_random_state()
        assert state["numpy"]["bit_generator"] == bit_generator.__name__
        first = list(SeededLoader(Augmented(), batch_sampler=Batches()))
        assert same(capture_random_state(), state)
        manual_seed(1)
        assert equal(
            [batch[:, :4] for batch in SeededLoader(Augmented(), batch_sampler=Batches())], [b[:, :4] for b in first]
        )
    finally:
        numpy.random.set_bit_generator(before)


def test_numpy_may_be_missing(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numpy", None)
        patch.delitem(sys.modules, "numpy.random")
        with preserved_generators():
            seed_generators(5)
            first = random.random(), torch.rand(1)
        with preserved_generators():
            seed_generators(5)
            assert first == (random.random(), torch.rand(1))


FIRST_USE_OF_NUMPY = """
import sys, numpy, torch
from camshaft.data.augmentation import Indices, SeededLoader

class Noise(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return numpy.random.rand()

assert "numpy.random" not in sys.modules, "not imported yet"
loader = SeededLoader(Noise(), batch_sampler=[Indices([0, 1], 17, 1)])
first, second = ([batch.tolist() for batch in loader] for _ in range(2))
assert first == second, (first, second)
"""


def test_the_first_sample_that_uses_numpys_generator_is_seeded():
    subprocess.run([sys.executable, "-c", FIRST_USE_OF_NUMPY], check=True)


# The loader


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_the_loader_yields_the_same(duplicate):
    loader = SeededLoader(Augmented(), batch_sampler=Batches())
    list(loader)
    again = duplicate(loader)
    assert equal(list(again), list(loader))


def test_the_batch_sampler_can_be_replaced(expected):
    loader = update_dataloader(SeededLoader(Augmented(), batch_sampler=Batches()), ReproducibleBatchSampler(Batches(5)))
    assert torch.equal(by_sample(list(loader)), expected[0])


@pytest.mark.parametrize("dataset", [Augmented(), Whole(), Subset(Augmented(), range(N))])
def test_plain_indices_are_fetched_as_by_torch(dataset, workers):
    batches = BatchSampler(range(N), 3, drop_last=False)
    drawn = []
    for loader in (
        update_dataloader(SeededLoader(dataset, batch_sampler=Batches(), **workers), batches),
        DataLoader(dataset, batch_sampler=batches, **workers),
    ):
        manual_seed(3)
        drawn.append([*loader, *loader, torch.tensor(draw())])
    assert equal(*drawn)


def test_other_arguments_are_loaded_as_by_torch():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(draw())

    for options in ({"dataset": Stream()}, {"dataset": Augmented(), "batch_size": None}, {"dataset": Whole()}):
        drawn = []
        for kind in (SeededLoader, DataLoader):
            manual_seed(3)
            loader = kind(**options)
            drawn.append([*loader, torch.tensor(draw())])
        assert equal(*drawn)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_a_worker_is_raised(num_workers):
    class Broken(Augmented):
        def __getitem__(self, index):
            if index == 4:
                raise KeyError("no such sample")
            return index

    iterator = iter(SeededLoader(Broken(), batch_sampler=Batches(), num_workers=num_workers))
    assert next(iterator).tolist() == [0, 1, 2]
    with pytest.raises(KeyError, match="no such sample"):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[6, 7, 8], [9, 10]]


def test_workers_see_the_dataset_of_the_user():
    class Told(Dataset):
        told = None

        def __getitem__(self, index):
            info = get_worker_info()
            return self.told, info.dataset is self, info.id, torch.initial_seed()

    def tell(worker_id):
        get_worker_info().dataset.told = f"by {worker_id}"

    def told(**options):
        loader = SeededLoader(Told(), batch_sampler=Batches(6), num_workers=2, collate_fn=list, **options)
        return [sample[:3] for batch in loader for sample in batch]

    assert told(worker_init_fn=tell) == [("by 0", True, 0)] * 6 + [("by 1", True, 1)] * 5
    assert told() == [(None, True, 0)] * 6 + [(None, True, 1)] * 5


def test_worker_seeds_differ_between_epochs_and_repeat_in_each_run():
    class Started(Dataset):
        def __getitem__(self, index):
            return get_worker_info().seed

    batches = Batches(N)
    loader = SeededLoader(Started(), batch_sampler=batches, num_workers=1)

    def seed_in(epoch):
        batches.set_epoch(epoch)
        return next(iter(loader))[0].item()

    first, second = seed_in(1), seed_in(2)
    assert first != second
    draw()
    assert first == seed_in(1)


def test_a_generator_of_the_user_is_used():
    generator = torch.Generator()
    before = generator.get_state()
    list(SeededLoader(Augmented(), batch_sampler=Batches(), generator=generator))
    assert not torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(
    ("dataset", "ready"),
    [
        ([1], True),
        ((1,), True),
        (range(3), True),
        (torch.zeros(2), True),
        (TensorDataset(torch.zeros(2)), True),
        (Subset(TensorDataset(torch.zeros(2)), [0]), True),
        (ConcatDataset([[1], [2]]), True),
        (Other(), False),
        (type("Mine", (list,), {})([1]), False),
        (Subset(Other(), [0]), False),
        (ConcatDataset([[1], Subset(Other(), [0])]), False),
    ],
)
def test_datasets_that_hold_their_samples_are_left_to_torch(monkeypatch, dataset, ready):
    assert is_ready(dataset) is ready
    iterator = iter(SeededLoader(dataset, batch_sampler=[Indices([0], 1, 1)]))
    assert (iterator._dataset is dataset) is ready


@pytest.mark.parametrize(
    ("dataset", "whole"),
    [
        (Other(), False),
        (Whole(), True),
        (Subset(Other(), [0]), False),
        (Subset(Whole(), [0]), True),
        (StackDataset([1], [2]), False),
        (StackDataset(first=[1], second=[2]), False),
        (StackDataset(Subset(Whole(), [0]), [1]), True),
        (ConcatDataset([Whole()]), False),
        (type("Off", (), {"__getitems__": None})(), False),
    ],
)
def test_which_datasets_fetch_whole_batches(dataset, whole):
    assert fetches_batches(dataset) is whole


@pytest.mark.parametrize("change", [lambda data: data.append(10), lambda data: data.pop()])
def test_a_dataset_that_changes_its_length_is_refused_by_the_next_pass(change):
    data = list(range(10))
    loader = idist.auto_dataloader(data, batch_size=5, shuffle=True)
    position = loader.batch_sampler.position(1)
    assert sorted(torch.cat(list(loader)).tolist()) == data
    change(data)
    with pytest.raises(ValueError, match=rf"one of 10 samples .*, but the dataset has {len(data)}"):
        next(iter(loader))
    with pytest.raises(ValueError, match=rf"one of 10 samples .*, but the dataset has {len(data)}"):
        loader.batch_sampler.seek(position)
