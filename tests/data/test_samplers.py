"""Each sample of an epoch comes once, for any length, batch size and number of ranks, also across resumes."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from camshaft.data import ExactBatchSampler, Sequential, Shuffled, ShuffledWindows
from camshaft.distributed import DistributedProxySampler, auto
from camshaft.engine.sources import exact_batches
from tests.distributed.test_ranks import at_rank

RANKS = st.integers(1, 5)


def samplers(source, batch_size, ranks, **options):
    return [ExactBatchSampler(source, batch_size, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def passes(made):
    """Run one pass on each rank; return its steps: for each, the batches of the ranks."""
    drawn = [list(one) for one in made]
    assert len({len(batches) for batches in drawn}) == 1, "every rank makes the same number of batches"
    return list(zip(*drawn, strict=True))


def samples(steps):
    return [index for step in steps for batch in step for index in batch]


@st.composite
def settings_of_a_run(draw, smallest=1):
    ranks = draw(RANKS)
    return draw(st.integers(max(ranks, smallest), 60)), draw(st.integers(ranks, 4 * ranks + 3)), ranks


# --- one epoch ---------------------------------------------------------------------------------------------------


@given(settings_of_a_run(), st.sampled_from([Sequential, Shuffled, lambda n: ShuffledWindows(n, 7)]), st.integers(0, 3))
def test_every_sample_comes_once_and_every_rank_has_a_sample_in_each_step(run, order, epoch):
    length, batch_size, ranks = run
    made = samplers(order(length), batch_size, ranks)
    for one in made:
        one.set_epoch(epoch)
    steps = passes(made)
    assert sorted(samples(steps)) == list(range(length))
    assert len(steps) == len(made[0])
    for step in steps:
        sizes = [len(batch) for batch in step]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
    assert [len(one.sampler) for one in made] == [sum(len(step[rank]) for step in steps) for rank in range(ranks)]
    assert made[0].sampler.total_size == length


@given(settings_of_a_run())
def test_drop_last_drops_the_tail_of_the_whole(run):
    length, batch_size, ranks = run
    steps = passes(samplers(Shuffled(length), batch_size, ranks, drop_last=True))
    distributed = samples(steps)
    assert len(distributed) == len(set(distributed)) == length // batch_size * batch_size
    assert all(sum(map(len, step)) == batch_size for step in steps)


@given(st.integers(7, 80), st.integers(7, 20), st.integers(0, 5), st.integers(0, 2**70))
def test_steps_do_not_depend_on_the_number_of_ranks(length, batch_size, epoch, seed):
    wanted = None
    for ranks in (1, 2, 3, 4, (batch_size + 1) // 2):
        if ranks > length:
            continue
        made = samplers(Shuffled(length), batch_size, ranks, seed=seed)
        for one in made:
            one.set_epoch(epoch)
        steps = [list(itertools.chain(*step)) for step in passes(made)]
        wanted = wanted or steps
        assert steps == wanted


@pytest.mark.parametrize(
    ("length", "sizes"), [(16, [8, 8]), (17, [8, 5, 4]), (19, [8, 6, 5]), (20, [8, 8, 4]), (9, [5, 4]), (3, [3])]
)
def test_a_small_last_step_is_balanced_with_the_one_before_or_joins_it_if_smaller_than_the_ranks(length, sizes):
    for ranks in range(1, min(length, 8) + 1):
        steps = [sum(map(len, step)) for step in passes(samplers(Sequential(length), 8, ranks))]
        assert steps == (sizes if sizes[-1] >= ranks else [*sizes[:-2], sum(sizes[-2:])])


@given(settings_of_a_run())
def test_shares_weight_the_means_of_ranks_to_the_mean_of_the_step(run):
    length, batch_size, ranks = run
    made = samplers(Shuffled(length), batch_size, ranks)
    value = torch.arange(length, dtype=torch.float64) ** 2
    for number, step in enumerate(passes(made)):
        parts = [one.share(number) * value[batch].mean() for one, batch in zip(made, step, strict=True)]
        everything = value[list(itertools.chain(*step))].mean()
        torch.testing.assert_close(sum(parts) / ranks, everything)


def test_an_order_is_read_in_blocks_that_fit_together_and_a_huge_one_starts_at_once():
    made = samplers(Shuffled(200_001), 10, 2)
    assert sorted(samples(passes(made))) == list(range(200_001))
    (one,) = samplers(Shuffled(10**15), 64, 1)
    assert len(next(iter(one))) == 64
    assert len(one) == 10**15 // 64
    assert len(one.sampler) == 10**15


# --- several epochs ----------------------------------------------------------------------------------------------


def test_each_epoch_has_its_own_reproducible_order():
    made = samplers(Shuffled(30), 6, 2)
    drawn = []
    for epoch in (0, 1, 0):
        for one in made:
            one.sampler.set_epoch(epoch)
        drawn.append(passes(made))
    assert drawn[0] == drawn[2] != drawn[1]
    assert passes(made) == drawn[0], "on several ranks, a pass without a number repeats the epoch"
    (one,) = samplers(Shuffled(30), 30, 1)
    first, second = list(one), list(one)
    assert first != second, "in one process, it is the next one"
    one.set_epoch(1)
    assert list(one) == second


# --- resuming, also on another number of ranks -------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_each_sample_comes_once_across_any_resumes(data):
    length = data.draw(st.integers(5, 50))
    seed = data.draw(st.integers(0, 100))
    source = data.draw(st.sampled_from([Shuffled(length), Sequential(length), ShuffledWindows(length, 4)]))
    seen = {0: [], 1: [], 2: []}
    position = None
    for _ in range(200):
        ranks = data.draw(RANKS)
        made = samplers(source, data.draw(st.integers(ranks, 3 * ranks)), ranks, seed=seed)
        if position is not None:
            left = length - position["consumed"]
            if left < ranks:
                with pytest.raises(ValueError, match=rf"{left} samples? cannot be distributed over {ranks} ranks"):
                    made[0].seek(position)
                continue
            places = {one.seek(pickle.loads(pickle.dumps(position))) for one in made}
            assert len(places) == 1
        epoch = made[0].epoch
        if epoch > 2:
            break
        steps = passes(made)
        stop = data.draw(st.integers(0, len(steps)))
        seen[epoch] += samples(steps[:stop])
        left_out = made[0].seek(position)[1] if position else 0
        fresh = samplers(source, made[0].total_batch_size, ranks, seed=seed)
        if position:
            fresh[0].seek(position)
        next(iter(fresh[0]))
        position = fresh[0].position(left_out + stop)
    assert all(sorted(distributed) == list(range(length)) for number, distributed in seen.items() if number < epoch)


def test_a_position_is_the_same_on_all_ranks_and_belongs_to_its_pass():
    one, other = samplers(Shuffled(10), 4, 2)
    iter(one), next(iter(one)), next(iter(other))
    assert one.position(1) == other.position(1)
    one.set_epoch(5)
    for batches, over, place in ((0, False, (0, 0)), (1, False, (0, 4)), (3, False, (1, 0)), (1, True, (1, 0))):
        position = one.position(batches, over=over)
        assert (position["epoch"], position["consumed"]) == place


def test_the_default_seed_is_torchs_or_that_of_the_position():
    drawn = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        (one,) = samplers(Shuffled(30), 4, 1, seed=None)
        assert one.seed == seed
        drawn.append(list(one))
    assert drawn[0] == drawn[2] != drawn[1]
    position = one.position(3)
    torch.manual_seed(7)
    for source in (Shuffled(30), RandomSampler(range(30))):
        (other,) = samplers(source, 4, 1, seed=None)
        len(other)  # draws for the seed of now
        with pytest.raises(ValueError, match="must contain the integers epoch, consumed and seed, got"):
            other.seek({**position, "order": other._describe(), "seed": None})
        with pytest.raises(ValueError, match="saved with other data"):
            other.seek({**position, "order": "another"})
        assert other.seed == 7
        assert other.seek({**position, "order": other._describe()}) == (0, 3)
        assert other.seed == 1
        (same,) = samplers(source, 4, 1, seed=1)
        assert list(other) == list(same)[3:]
        assert list(other) == list(same)


def test_with_drop_last_too_few_samples_left_start_the_next_epoch():
    (one,) = samplers(Shuffled(10), 4, 1, drop_last=True)
    assert one.seek({**one.position(0), "consumed": 8}) == (1, 0)
    assert (one.epoch, len(list(one))) == (1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "saved with seed 1, the loader has seed 0"),
        ({"order": "Shuffled(length=11), version 1"}, "saved with other data"),
        ({"epoch": "1"}, "position must contain the integers epoch"),
        ({"consumed": None}, "position must contain the integers epoch"),
        ({"consumed": 9}, "1 sample cannot be distributed over 2 ranks"),
    ],
)
def test_a_position_of_other_data_is_refused_and_changes_nothing(change, message):
    one, _ = samplers(Shuffled(10), 4, 2)
    with pytest.raises(ValueError, match=message):
        one.seek({**one.position(0), **change})
    assert list(one) == list(samplers(Shuffled(10), 4, 2)[0])


# --- user samplers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "batch_size"),
    [
        (lambda: RandomSampler(range(17)), 6),
        (lambda: RandomSampler(range(17), generator=torch.Generator().manual_seed(3)), 6),
        (lambda: SequentialSampler(range(17)), 6),
        (lambda: BatchSampler(RandomSampler(range(17)), 6, drop_last=False), None),
    ],
)
def test_a_sampler_is_drawn_alike_on_all_ranks_and_each_index_comes_once(make, batch_size):
    made = [ExactBatchSampler(make(), batch_size, num_replicas=3, rank=rank) for rank in range(3)]
    before = torch.get_rng_state()
    steps = passes(made)
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(samples(steps)) == list(range(17))
    assert [sum(map(len, step)) for step in steps] == [6, 6, 5]
    for one in made:
        one.set_epoch(1)
    again = passes(made)
    assert sorted(samples(again)) == list(range(17))
    assert (again == steps) == isinstance(made[0].source, SequentialSampler)


class Failing(RandomSampler):
    """Draws from its own generator and from those of the process, and fails."""

    def __iter__(self):
        next(super().__iter__())
        torch.rand(1)
        raise OSError("no index")


def test_generators_are_restored_after_a_sampler_raised():
    generator = torch.Generator().manual_seed(3)
    failing = Failing(range(9), generator=generator), Failing(range(9))
    proxy = DistributedProxySampler(failing[1], num_replicas=1, rank=0)
    for one in (samplers(failing[0], 3, 1)[0], proxy):
        before = generator.get_state(), torch.get_rng_state()
        with pytest.raises(OSError, match="no index"):
            list(one)
        assert all(map(torch.equal, before, (generator.get_state(), torch.get_rng_state())))


def test_a_small_batch_of_a_batch_sampler_joins_the_one_before():
    made = samplers(BatchSampler(SequentialSampler(range(9)), 4, drop_last=False), None, 2)
    assert passes(made) == [([0, 1], [2, 3]), ([4, 5], [6, 7, 8])]
    assert len(made[0]) == 2


def test_seeking_with_another_sampler_raises_and_changes_nothing():
    (one,) = samplers(list(range(8)), 2, 1)
    position = next(one.position(2) for _ in one)
    (other,) = samplers(list(range(8, 16)), 2, 1)
    other.set_epoch(3)
    with pytest.raises(ValueError, match="list yields other samples or another order now"):
        other.seek(position)
    assert other.epoch == 3
    assert len(list(other)) == 4
    assert other.seek({name: value for name, value in position.items() if name != "drawn"}) == (0, 2), "of old states"


class Turned(SequentialSampler):
    """Starts elsewhere in each epoch, from a state of its own that advances when it is drawn."""

    def __init__(self, first):
        super().__init__(range(8))
        self.first, self.begin = first, 7

    def set_epoch(self, epoch):
        self.begin = self.first + epoch

    def __iter__(self):
        self.begin += 1
        return iter([(self.begin + place) % 8 for place in range(8)])


def test_a_sampler_is_drawn_again_after_the_epoch_was_announced():
    for source, size in ((Turned(0), 2), (BatchSampler(Turned(0), 2, drop_last=False), None)):
        (one,) = samplers(source, size, 1)
        assert len(one) == 4
        one.set_epoch(0)
        assert next(iter(one)) == [1, 2]
    one, same, other = (samplers(Turned(first), 2, 1)[0] for first in (0, 0, 1))
    one.set_epoch(3)
    position = next(one.position(2) for _ in one)
    assert same.seek(position) == (3, 2)
    assert next(iter(same)) == [0, 1]
    with pytest.raises(ValueError, match="Turned yields other samples or another order now"):
        other.seek(position)


def test_the_sampler_attribute_is_a_distributed_sampler():
    one, _ = samplers(Shuffled(10), 4, 2)
    assert isinstance(one.sampler, (DistributedSampler, DistributedProxySampler))
    assert (one.sampler.num_replicas, one.sampler.rank, one.sampler.shuffle) == (2, 0, True)
    assert list(one.sampler) == samples([list(one)])


# --- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "ranks", "error", "message"),
    [
        ((Shuffled(3), 4), 4, ValueError, "3 samples cannot be .*at most 3 processes"),
        ((Shuffled(9), 3), 4, ValueError, "batch_size counts .* at least their number, 4"),
        ((Shuffled(9), 0), 1, ValueError, "batch_size"),
        ((Shuffled(9), None), 1, ValueError, "batch_size"),
        ((Shuffled(9), 2.0), 1, TypeError, "batch_size"),
        ((iter([1]), 1), 1, TypeError, "must"),
    ],
)
def test_invalid_arguments_are_refused(arguments, ranks, error, message):
    with pytest.raises(error, match=message):
        ExactBatchSampler(*arguments, num_replicas=ranks, rank=0)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 4\), got 4"):
        ExactBatchSampler(Shuffled(9), 4, num_replicas=4, rank=4)
    with pytest.raises(TypeError, match="seed"):
        ExactBatchSampler(Shuffled(9), 4, seed="1")


# --- DistributedProxySampler ------------------------------------------------------------------------------------------


class Drawing(Sampler):
    """A sampler whose number of indices, drawn from torch's generator, differs from its length."""

    def __init__(self, length, drawn):
        self.length, self.drawn = length, drawn

    def __len__(self):
        return self.length

    def __iter__(self):
        for number in itertools.islice(itertools.count(), self.drawn):
            yield 1000 * number + int(torch.randint(1000, ()))


def seeded(sampler, epoch):
    """Yield what a sampler draws under a seed, repeatedly and without end."""
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
def test_a_proxy_distributes_what_the_sampler_yields_seeded_with_the_epoch(sampler, size, epoch):
    ranks = [DistributedProxySampler(sampler, num_replicas=size, rank=rank) for rank in range(size)]
    for one in ranks:
        one.set_epoch(epoch)
    before = torch.get_rng_state()
    parts = [list(one) for one in ranks]
    assert torch.equal(torch.get_rng_state(), before)
    assert [len(part) for part in parts] == [len(one) for one in ranks] == [-(-len(sampler) // size)] * size
    distributed = [index for turn in zip(*parts, strict=True) for index in turn]
    wanted = list(itertools.islice(seeded(sampler, epoch), len(distributed)))
    assert distributed == wanted
    assert parts == [list(one) for one in ranks]


def test_a_proxy_ends_after_its_length_whatever_the_sampler_yields():
    batches = BatchSampler(SequentialSampler(range(7)), batch_size=2, drop_last=False)
    for sampler, wanted in (
        (batches, [[2, 3], [6]]),
        (SequentialSampler([]), []),
        (SequentialSampler(range(3)), [1, 0]),
    ):
        assert list(DistributedProxySampler(sampler, num_replicas=2, rank=1)) == wanted
    assert len(list(DistributedProxySampler(Drawing(5, None), num_replicas=2, rank=1))) == 3
    with pytest.raises(ValueError, match="sampler must yield 3 indices, as its length says, got none"):
        list(DistributedProxySampler(Drawing(3, 0), num_replicas=1, rank=0))


def test_rank_and_number_of_ranks_are_those_of_the_context():
    with at_rank(2, world_size=4):
        sampler = DistributedProxySampler(SequentialSampler(range(10)))
    assert (sampler.rank, sampler.num_replicas) == (2, 4)
    assert list(sampler) == [2, 6, 0]
    assert list(DistributedProxySampler(SequentialSampler(range(3)))) == [0, 1, 2]
    assert isinstance(sampler, DistributedSampler)
    assert auto.DistributedProxySampler is DistributedProxySampler


class EndlessSampler(Sampler):
    def __iter__(self):
        return itertools.count()


@pytest.mark.parametrize(
    "sampler",
    [
        [1, 2],
        EndlessSampler(),
        *(one(SequentialSampler(range(3)), 1, 0) for one in (DistributedSampler, DistributedProxySampler)),
    ],
)
def test_a_proxy_of_something_else_is_refused(sampler):
    with pytest.raises(TypeError, match="sampler must"):
        DistributedProxySampler(sampler)


def test_batches_that_come_out_of_order_have_no_position():
    for in_order in (True, False):
        loader = DataLoader(range(4), batch_sampler=ExactBatchSampler(Shuffled(4), 2), in_order=in_order)
        assert (exact_batches(loader) is not None) == in_order
