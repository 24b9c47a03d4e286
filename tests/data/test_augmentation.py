"""Samples with random augmentation follow from seed, epoch and index, whoever loads them."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import subprocess
import sys
from contextlib import nullcontext, suppress

import numpy.random
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
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
    _SeededFetching,
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


DRAWS = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: numpy.random.rand(),
    "randn": lambda: numpy.random.randn(),
    "torch": lambda: torch.rand(1, dtype=torch.float64).item(),
    "seed of torch": lambda: float(torch.initial_seed()),
}


class Sometimes(Augmented):
    """Samples that each draw from some generators, if any, in some epochs; an error in one may depend on a draw."""

    def __init__(self, plan):
        self.plan, self.epoch, self.seeded = plan, 1, False

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        if self.seeded:
            seed_generators(mixed(key_of(17, self.epoch), index))
        drawn = [DRAWS[name]() for name in self.plan.get((self.epoch, index), ())]
        if not self.seeded and drawn and drawn not in self.expected:
            raise ValueError("a sample with other numbers than those of its seed")
        return [index, *drawn]


def planned():
    names = st.lists(st.sampled_from(sorted(DRAWS)), max_size=3)
    return st.dictionaries(st.tuples(st.integers(1, 3), st.integers(0, N - 1)), names, max_size=12)


@settings(deadline=None)
@given(planned(), st.integers(1, 5), st.integers(0, 2), st.integers(1, 3))
@example({(3, 9): ["numpy"]}, 4, 0, 1)  # late first draws
@example({(1, 0): ["torch"], (2, 10): ["randn", "gauss"], (3, 1): ["random"]}, 5, 0, 1)
def test_samples_follow_from_their_seeds_whichever_draw_first(plan, batch_size, begin, ranks):
    dataset = Sometimes(plan)
    with preserved_generators():
        dataset.seeded = True
        wanted = {}
        for epoch in (1, 2, 3):
            dataset.set_epoch(epoch)
            wanted |= {(epoch, index): dataset[index] for index in range(N)}
        dataset.seeded = False
    dataset.expected = [sample[1:] for sample in wanted.values()]
    for rank in range(ranks):
        batches = Batches(batch_size, begin=begin, rank=rank, ranks=ranks)
        fetching = _SeededFetching(dataset, list)  # one for all epochs, as in a persistent worker
        for epoch in (1, 2, 3):
            dataset.set_epoch(epoch)
            batches.set_epoch(epoch)
            for indices in filter(None, batches):
                assert fetching.__getitems__(indices) == [wanted[epoch, index] for index in indices]
                draw()


def test_only_samples_that_may_have_drawn_from_a_generator_without_a_seed_are_fetched_again():
    class Counted(Augmented):
        def __getitem__(self, index):
            fetched.append(index)
            return DRAWS[name]()

    for name, again in (("torch", []), ("seed of torch", []), ("random", [0]), ("randn", [0])):
        fetched = []
        list(SeededLoader(Counted(), batch_sampler=Batches()))
        assert sorted(fetched) == sorted([*range(N), *again]), name


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


def collate(samples):
    return torch.stack([torch.as_tensor(draw(), dtype=torch.float64) for _ in samples])


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Whole(), {}),
        *((dataset, {"collate_fn": collate}) for dataset in (Augmented(), Whole(), TensorDataset(torch.zeros(N)))),
    ],
)
def test_fetching_and_collating_a_whole_batch_are_seeded_for_each_batch(dataset, options, workers):
    seen = passes(dataset, workers=workers, **options)
    assert equal(seen, passes(dataset, **options))
    assert equal(seen[2:4], passes(dataset, 1, begin=2, workers=workers, **options))
    assert len(torch.cat(seen)[:, -1].unique()) == 2 * N


def test_a_dataset_that_fetches_batches_is_called_once_for_each(monkeypatch):
    calls = []
    monkeypatch.setattr(Whole, "__getitems__", lambda self, indices: calls.append(list(indices)) or [0.0])
    stacked = StackDataset(Subset(Whole(), range(N)), [0.0] * N)
    for dataset in (Whole(), Subset(Whole(), range(N)), stacked):
        loader = SeededLoader(dataset, batch_sampler=Batches(N), collate_fn=list)
        with suppress(ValueError) if dataset is stacked else nullcontext():  # what is given here does not match
            list(loader)
    assert calls == [list(range(N))] * 3


# The main process


class Broken(Augmented):
    def __getitem__(self, index):
        draw()
        if index == 4:
            raise KeyError("no such sample")
        return index


@pytest.mark.parametrize("dataset", [Augmented(), Whole(), TensorDataset(torch.zeros(N)), Broken()])
def test_the_random_states_of_the_main_process_are_preserved_also_after_an_error(dataset, workers):
    if isinstance(dataset, Broken):  # the error would keep workers alive that persist
        workers = {**workers, "persistent_workers": False}
    manual_seed(3)
    random.gauss(0, 1)
    before = capture_random_state()
    iterator = iter(SeededLoader(dataset, batch_sampler=Batches(), **workers))
    for number in range(4):
        if number == 1 and isinstance(dataset, Broken):
            with pytest.raises(KeyError, match="no such sample"):
                next(iterator)
        else:
            next(iterator)
        assert same(capture_random_state(), before)
    assert next(iterator, None) is None


def same(first, second):
    torchs = [[state["torch"]] for state in (first, second)]
    return first["python"] == second["python"] and first["numpy"] == second["numpy"] and equal(*torchs)


def test_another_bit_generator_of_numpy_is_seeded_and_restored():
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    try:
        state = capture_random_state()
        first, second = (next(iter(SeededLoader(Augmented(), batch_sampler=Batches()))) for _ in range(2))
        assert same(capture_random_state(), state)
        assert torch.equal(first, second)
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


@pytest.mark.jobs
def test_the_first_sample_that_uses_numpys_generator_is_seeded():
    subprocess.run([sys.executable, "-c", FIRST_USE_OF_NUMPY], check=True)


# The loader


def test_a_copy_of_the_loader_yields_the_same():
    loader = SeededLoader(Augmented(), batch_sampler=Batches())
    for again in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
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


READY = [[1], (1,), range(3), torch.zeros(2), TensorDataset(torch.zeros(2)), ConcatDataset([[1], Subset([2], [0])])]
NOT_READY = [Augmented(), type("Mine", (list,), {})([1]), ConcatDataset([[1], Subset(Augmented(), [0])])]


def test_datasets_that_hold_their_samples_are_left_to_torch():
    for dataset in (*READY, *NOT_READY):
        iterator = iter(SeededLoader(dataset, batch_sampler=[Indices([0], 1, 1)]))
        assert (iterator._dataset is dataset) is any(dataset is one for one in READY)


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
