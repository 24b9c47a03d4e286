"""`auto_dataloader` gives each rank its share of any dataset, resumes where it stopped, and refuses the rest."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import camshaft.distributed as idist
from camshaft.data import ExactBatchSampler, Sequential, Shuffled, ShuffledWindows, Weighted
from camshaft.distributed.agreement import seed as shared
from camshaft.distributed.topology import Topology
from camshaft.engine import Engine, Events
from tests.distributed.test_ranks import Somewhere, at_rank
from tests.ranks import on_ranks
from tests.threads import on_threads

PLACE = Topology(rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1, num_nodes=2)
LOGGER = "camshaft.distributed.auto.auto_dataloader"


@pytest.fixture(autouse=True)
def no_broadcasts(monkeypatch):
    """Provide a seed to fake contexts; ranks in their own processes are not affected."""
    monkeypatch.setattr(shared, "_from_rank_0", lambda seed: 0)


@pytest.fixture
def on_rank_5_of_8():
    with idist.use_backend(Somewhere(PLACE)) as backend:
        yield backend


# --- what is chosen ----------------------------------------------------------------------------------------------


def test_batch_size_and_workers_are_divided(on_rank_5_of_8):
    for given, got in {8: 1, 9: 1, 15: 1, 16: 2, 64: 8, 7: 7, 1: 1}.items():
        loader = idist.auto_dataloader(range(100), batch_size=given)
        assert (loader.batch_size, loader.batch_sampler.total_batch_size) == (got, given if given >= 8 else 8 * given)
    assert idist.auto_dataloader(range(100)).batch_size == 1, "torch's default"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of more workers than cores
        for given, got in {0: 0, 1: 1, 3: 3, 4: 1, 5: 2, 8: 2, 9: 3}.items():
            assert idist.auto_dataloader(range(100), num_workers=given).num_workers == got


def test_several_ranks_shuffle_by_default_and_it_is_logged(on_rank_5_of_8, caplog):
    caplog.set_level(logging.INFO, logger=LOGGER)
    for given, got in (({}, True), ({"shuffle": None}, True), ({"shuffle": True}, True), ({"shuffle": False}, False)):
        arguments = {"batch_size": 16, "num_workers": 0, **given}
        before = dict(arguments)
        loader = idist.auto_dataloader(range(100), drop_last=True, **arguments)
        assert arguments == before
        assert isinstance(loader.sampler, DistributedSampler)
        assert (loader.sampler.rank, loader.sampler.num_replicas, loader.sampler.shuffle) == (5, 8, got)
        assert (loader.batch_sampler.sampler, loader.drop_last, len(loader)) == (loader.sampler, True, 6)
        chosen, final = (record.getMessage() for record in caplog.records[-2:])
        assert chosen.startswith(f"distributing samples over 8 ranks, with shuffle={got} and seed=torch.initial_seed()")
        assert final.startswith("DataLoader of range with {")
        assert "'batch_size': 2" in final
        assert "'pin_memory': " in final


def test_one_process_does_not_shuffle_by_default():
    loader = idist.auto_dataloader(range(3), batch_size=2, num_workers=0)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2]]
    assert loader.batch_size == 2
    assert loader.sampler.shuffle is False
    assert idist.auto_dataloader(range(3), shuffle=True).sampler.shuffle is True


def test_samplers_are_distributed_and_distributed_ones_and_batch_samplers_used_as_they_are(on_rank_5_of_8):
    for sampler in (SequentialSampler(range(100)), RandomSampler(range(100)), WeightedRandomSampler([1.0], 100)):
        made = idist.auto_dataloader(range(100), sampler=sampler).sampler
        assert isinstance(made, idist.DistributedProxySampler)
        assert (made.sampler, made.rank, made.num_replicas) == (sampler, 5, 8)
    fitting = DistributedSampler(range(100), 8, 5)
    for batch_size, got in ((16, 2), (3, 3), (None, None)):
        loader = idist.auto_dataloader(range(100), sampler=fitting, batch_size=batch_size)
        assert (loader.sampler, loader.batch_size) == (fitting, got)
    assert isinstance(idist.auto_dataloader(range(100), batch_sampler=None).sampler, DistributedSampler)
    for name, sampler, message in (
        ("sampler", DistributedSampler(range(100), 8, 4), "created for rank 4 of 8, but this is rank 5 of 8"),
        ("sampler", DistributedSampler(range(100), 6, 5), "created for rank 5 of 6, but this is rank 5 of 8"),
        ("batch_sampler", BatchSampler(SequentialSampler(range(100)), 3, False), "batch_sampler is used as it is"),
    ):
        with pytest.warns(UserWarning, match=message) as caught:
            assert getattr(idist.auto_dataloader(range(100), **{name: sampler}), name) is sampler
        assert [warning.filename for warning in caught] == [__file__]


class OnGpu(Somewhere):
    device = torch.device("cuda", 0)


class OnXla(Somewhere):
    device = torch.device("xla", 0)

    def wrap_loader(self, loader):
        return [loader]


def test_memory_is_pinned_if_there_is_a_gpu_and_the_backend_wraps_the_loader():
    assert idist.auto_dataloader(range(30)).pin_memory is (idist.device().type == "cuda")
    with idist.use_backend(OnGpu()):
        assert idist.auto_dataloader(range(30)).pin_memory is True
        assert idist.auto_dataloader(range(30), pin_memory=False).pin_memory is False
    with idist.use_backend(OnXla()):
        with pytest.warns(UserWarning, match="pin_memory=True has no effect on XLA") as caught:
            (loader,) = idist.auto_dataloader(range(30), pin_memory=True)
        assert [warning.filename for warning in caught] == [__file__]
        assert isinstance(loader, DataLoader)
        assert loader.pin_memory is False


def test_a_sequence_is_a_sampler_on_any_number_of_ranks():
    parts = []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        with at_rank(rank, size):
            loader = idist.auto_dataloader(range(9), sampler=[7, 6, 1, 1, 3], batch_size=2)
            parts.append([batch.tolist() for batch in loader])
    assert parts == [[[7, 6], [1, 1], [3]], [[7], [1]], [[6], [1, 3]]]


# --- resuming ----------------------------------------------------------------------------------------------------


class Epochs(Sampler):
    """Draws with its own NumPy generator, which set_epoch may seed."""

    def __init__(self, seeded):
        self.seeded, self.generator_of_its_own = seeded, np.random.default_rng(0)

    def __len__(self):
        return 12

    def __iter__(self):
        return iter(self.generator_of_its_own.permutation(12).tolist())

    def set_epoch(self, epoch):
        if self.seeded:
            self.generator_of_its_own = np.random.default_rng(epoch)


class Unsized:
    def __iter__(self):
        return iter(range(12))


def resumed(first, second=None, stop=6):
    """Return the batches of a run after a stop, and those of one that resumes there, maybe over another loader."""
    whole, rest, state = [], [], {}
    engine = Engine(lambda engine, batch: whole.append(torch.as_tensor(batch).tolist()))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda: state.update(engine.state_dict()))
    engine.run(first(), max_epochs=3)
    engine = Engine(lambda engine, batch: rest.append(torch.as_tensor(batch).tolist()))
    engine.load_state_dict(state)
    engine.run((second or first)())
    return whole[stop:], rest


FOURS = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_in_one_process_a_batch_sampler_is_resumed():
    for batches in (FOURS, BatchSampler(RandomSampler(range(12)), 3, False), BatchSampler(Epochs(True), 3, False)):
        wanted, got = resumed(lambda batches=batches: idist.auto_dataloader(range(12), batch_sampler=batches))
        assert got == wanted


SKIPPING = [
    (1, {"batch_size": None}, 14),
    (1, {"batch_size": 3, "sampler": Unsized()}, 6),
    (1, {"batch_size": 3, "sampler": DistributedSampler(range(12), 1, 0)}, 6),
    (2, {"batch_sampler": FOURS}, 6),
]


@pytest.mark.parametrize(("world_size", "options", "stop"), SKIPPING)
def test_a_loader_that_cannot_seek_is_skipped_forward_with_a_warning(world_size, options, stop):
    warnings.filterwarnings("ignore", "batch_sampler is used as it is")
    with at_rank(0, world_size), pytest.warns(UserWarning, match="skipping 2 batches to resume"):
        wanted, got = resumed(lambda: idist.auto_dataloader(range(12), **options), stop=stop)
    assert got == wanted


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sampler_with_another_order_is_refused_within_an_epoch(world_size):
    def over(make):
        return lambda: idist.auto_dataloader(range(24), sampler=make(), batch_size=4)

    with at_rank(0, world_size):
        for make in (lambda: range(12), lambda: Epochs(True)):
            wanted, got = resumed(over(make), stop=4)
            assert got == wanted
        others = over(lambda: list(range(12))), over(lambda: list(range(12, 24)))
        with pytest.raises(ValueError, match="list yields other samples or another order now.*with the same sampler"):
            resumed(*others, stop=4)
        assert len(resumed(*others, stop=3)[1]) == 6, "nothing of the epoch was given"
        with pytest.raises(ValueError, match=r"Epochs yields other samples .*seed its own in set_epoch\("):
            resumed(over(lambda: Epochs(False)), stop=4)


# --- what is refused -----------------------------------------------------------------------------------------------


class Plain(Dataset):
    """Checks nothing."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index


WRONG = [
    ({"sampler": [0, 1, 12, 3]}, "the sampler yielded index 12, but the dataset has 10 samples"),
    ({"sampler": [0, -1, 2, -3]}, "the sampler yielded index -3, but the dataset has 10 samples"),
    ({"sampler": RandomSampler(range(999))}, r"the sampler yielded index \d+, but the dataset has"),
    (
        {"batch_sampler": ExactBatchSampler([[0, 1], [12, 3]], None, num_replicas=1, rank=0)},
        "the sampler yielded index 12, but",
    ),
]


@on_ranks(2)
def test_indices_that_the_dataset_lacks_are_refused_on_all_ranks():
    for options, message in WRONG:
        for dataset in (list(range(10)), torch.arange(10), Plain()):
            loader = idist.auto_dataloader(dataset, **options)
            with pytest.raises(ValueError, match=message):
                list(loader)
            with pytest.raises(ValueError, match=message):
                Engine(lambda engine, batch: None).run(loader)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_order_of_more_or_fewer_samples_than_the_dataset_has_is_refused(world_size):
    orders = Shuffled(12), Sequential(8), ShuffledWindows(11, 2), Weighted([1.0] * 12, 10), Weighted([1.0] * 9, 10)
    with at_rank(0, world_size):
        for order in orders:
            message = rf"the order is one of {order.num_samples} samples \(.*\), but the dataset has 10: create it for"
            with pytest.raises(ValueError, match=message):
                idist.auto_dataloader(Plain(), sampler=order, batch_size=4)
        assert len(idist.auto_dataloader(Plain(), sampler=Weighted([1.0] * 10, 20), batch_size=4)) == 5


def test_other_keys_and_datasets_without_length_are_not_checked():
    class Endless(Dataset):
        def __getitem__(self, index):
            return index

    def first(dataset, sampler):
        return next(iter(idist.auto_dataloader(dataset, sampler=sampler, batch_size=2, collate_fn=list)))

    assert first({"a": 1, "b": 2}, ["b", "a"]) == [2, 1]
    assert first({10: 1, 20: 2}, [20, 10]) == [2, 1]
    assert first(Endless(), [-5, 10**9]) == [-5, 10**9]
    assert first(Endless(), Sequential(3)) == [0, 1]
    growing = list(range(2))
    loader = idist.auto_dataloader(growing, sampler=[1, 2])
    growing.append(2)
    assert [batch.tolist() for batch in loader] == [[1], [2]]


REFUSED = [
    ({"dataset": DataLoader([1, 2], 2)}, TypeError, "got a DataLoader"),
    ({"dataset": []}, ValueError, "dataset"),
    ({"shuffle": "no"}, TypeError, "shuffle"),
    ({"batch_size": "4"}, TypeError, "batch_size"),
    ({"num_workers": None}, TypeError, "num_workers"),
    ({"generator": 3}, TypeError, "generator"),
    ({"seed": 1.5}, TypeError, "seed"),
    ({"seed": "a", "shuffle": False}, TypeError, "seed"),
    ({"in_order": False}, ValueError, "in_order"),
    ({"sampler": 5}, TypeError, "sampler"),
    ({"batch_size": 10, "drop_last": True}, ValueError, "drop_last=True leaves nothing of 9 samples"),
    ({"sampler": [5, 3, 4], "batch_size": 4, "drop_last": True}, ValueError, "drop_last=True leaves nothing of 3"),
    ({"sampler": SequentialSampler([1]), "shuffle": True}, ValueError, "mutually exclusive with shuffle"),
    ({"batches": 3}, TypeError, r"auto_dataloader got unknown options \['batches'\]; it accepts .*'batch_size'"),
]
ON_SEVERAL = [
    ({"sampler": [1, 2]}, ValueError, "2 samples cannot be distributed over 8 ranks"),
    ({"batch_size": None}, ValueError, "batch_size must be a number on several ranks"),
    ({"sampler": Unsized()}, TypeError, "sampler must have a length"),
    ({"batch_sampler": FOURS, "batch_size": 8}, ValueError, "batch_sampler option is mutually exclusive"),
]


def test_invalid_arguments_are_refused():
    warnings.filterwarnings("ignore", "batch_sampler is used as it is")
    for size, cases in ((1, REFUSED), (8, REFUSED + ON_SEVERAL)):
        for arguments, error, message in cases:
            with at_rank(0, size), pytest.raises(error, match=message):
                idist.auto_dataloader(**{"dataset": range(9), **arguments})


# --- streams ---------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Sharded(IterableDataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return iter(self.numbers)

    def shard(self, num_shards, index):
        return Sharded(self.numbers[index::num_shards])


@on_ranks(2)
def test_an_iterable_dataset_without_shard_is_used_as_it_is_and_rank_0_warns():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for dataset in (Stream(), Sharded(range(4))):
            loader = idist.auto_dataloader(dataset, batch_size=16)
            assert loader.batch_size == 8
            assert not isinstance(loader.sampler, DistributedSampler)
    told = [str(warning.message) for warning in caught]
    assert [message.split()[0] for message in told] == [["Stream"], []][idist.get_rank()]
    assert all("each of the 2 ranks and each of its workers" in one for one in told)
    assert {warning.filename for warning in caught} <= {__file__}


@on_ranks(3)
def test_streams_are_sharded_and_all_ranks_end_at_the_same_step():
    rank = idist.get_rank()
    warnings.filterwarnings("ignore", "Stream has no method shard|a pass over the stream ended")
    loader = idist.auto_dataloader(Sharded(range(11)), batch_size=3)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[rank], [rank + 3], [rank + 6]]
    seen = []
    Engine(lambda engine, batch: seen.append(batch.tolist())).run(
        idist.auto_dataloader(Stream() if rank else Sharded(range(4)), batch_size=6), max_epochs=2
    )
    assert len(seen) == 2


@on_threads(2)
def test_a_wrapped_stream_ends_at_the_same_step_too():
    loader = idist.auto_dataloader(Sharded(range(5)), batch_size=2)
    loader.wrap(lambda plain: (-batch for batch in plain))  # as on XLA
    assert [batch.tolist() for batch in loader] == [[-idist.get_rank()], [-2 - idist.get_rank()]]
