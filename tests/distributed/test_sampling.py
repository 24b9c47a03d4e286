"""`DistributedProxySampler` deals out exactly what the other sampler gives, and leaves the random state alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import camshaft.distributed as idist
from camshaft.distributed import DistributedProxySampler
from tests.distributed.test_ranks import at_rank


class Drawing(Sampler):
    """A sampler that says a length and gives another number of indices, from torch's random numbers."""

    def __init__(self, length, drawn):
        self.length, self.drawn = length, drawn

    def __len__(self):
        return self.length

    def __iter__(self):
        for number in itertools.islice(itertools.count(), self.drawn):
            yield 1000 * number + int(torch.randint(1000, ()))


def seeded(sampler, epoch):
    """Give what a sampler draws under a seed, and after that, without end."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(epoch)
        while drawn := list(sampler):
            yield from drawn


SIZES = st.integers(1, 20)
SAMPLERS = st.one_of(
    SIZES.map(lambda size: SequentialSampler(range(size))),
    SIZES.map(lambda size: RandomSampler(range(size))),
    st.tuples(SIZES, SIZES).map(lambda sizes: RandomSampler(range(sizes[0]), replacement=True, num_samples=sizes[1])),
    st.lists(st.integers(0, 99), min_size=1, max_size=20).map(SubsetRandomSampler),
    st.tuples(st.lists(st.floats(0.1, 1), min_size=1, max_size=20), SIZES).map(
        lambda drawn: WeightedRandomSampler(*drawn)
    ),
    st.tuples(SIZES, SIZES).map(lambda sizes: Drawing(*sizes)),
)


@settings(deadline=None, max_examples=200)
@given(SAMPLERS, st.integers(1, 6), st.integers(0, 2**40))
def test_the_ranks_together_get_what_the_sampler_gives_under_the_epoch_as_seed(sampler, size, epoch):
    ranks = [DistributedProxySampler(sampler, num_replicas=size, rank=rank) for rank in range(size)]
    for one in ranks:
        one.set_epoch(epoch)
    before = torch.get_rng_state()
    parts = [list(one) for one in ranks]
    assert torch.equal(torch.get_rng_state(), before)
    assert [len(part) for part in parts] == [len(one) for one in ranks] == [-(-len(sampler) // size)] * size
    dealt = [index for turn in zip(*parts, strict=True) for index in turn]
    wanted = list(itertools.islice(seeded(sampler, epoch), len(dealt)))
    assert dealt == wanted
    assert parts == [list(one) for one in ranks]


def test_each_epoch_has_an_order_of_its_own_and_the_same_again():
    sampler = DistributedProxySampler(RandomSampler(range(100)), num_replicas=2, rank=0)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]


def test_the_random_state_is_put_back_also_when_the_sampler_fails():
    class Failing(Drawing):
        def __iter__(self):
            torch.rand(3)
            raise OSError("no index")

    before = torch.get_rng_state()
    with pytest.raises(OSError, match="no index"):
        list(DistributedProxySampler(Failing(3, 3), num_replicas=1, rank=0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sampler_that_never_ends_is_cut_at_its_length():
    assert list(DistributedProxySampler(Drawing(5, None), num_replicas=2, rank=1)) != []


def test_what_is_dealt_out_may_be_whole_batches():
    batches = BatchSampler(SequentialSampler(range(7)), batch_size=2, drop_last=False)
    parts = [list(DistributedProxySampler(batches, num_replicas=2, rank=rank)) for rank in (0, 1)]
    assert parts == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_nothing_is_dealt_out_of_nothing():
    assert list(DistributedProxySampler(SequentialSampler([]), num_replicas=2, rank=0)) == []


def test_rank_and_number_of_ranks_are_those_of_the_context():
    with at_rank(2, world_size=4):
        sampler = DistributedProxySampler(SequentialSampler(range(10)))
    assert (sampler.rank, sampler.num_replicas) == (2, 4)
    assert list(sampler) == [2, 6, 0]
    assert list(DistributedProxySampler(SequentialSampler(range(3)))) == [0, 1, 2]
    assert isinstance(sampler, DistributedSampler)
    assert idist.auto.DistributedProxySampler is DistributedProxySampler


class Endless(Sampler):
    def __iter__(self):
        return itertools.count()


class Unsized(Endless):
    def __len__(self):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ([1, 2], r"sampler must be a torch.utils.data.Sampler, got \[1, 2\]"),
        (None, "sampler must be a torch.utils.data.Sampler, got None"),
        (DistributedSampler(range(3), 1, 0), "sampler must not be a DistributedSampler"),
        (DistributedProxySampler(SequentialSampler(range(3)), 1, 0), "sampler must not be a DistributedSampler"),
        (Endless(), "sampler must have a length"),
        (Unsized(), "sampler must have a length"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(sampler, message):
    with pytest.raises(TypeError, match=message):
        DistributedProxySampler(sampler)


def test_ranks_that_are_not_there_and_samplers_that_break_their_word_are_told():
    with pytest.raises(ValueError, match="rank"):
        DistributedProxySampler(SequentialSampler(range(3)), num_replicas=2, rank=2)
    with pytest.raises(ValueError, match="sampler must give 3 indices, as its length says, got none"):
        list(DistributedProxySampler(Drawing(3, 0), num_replicas=1, rank=0))
