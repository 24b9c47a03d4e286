"""Meshes, and the data that the ranks of one process."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import camshaft.distributed as idist
from camshaft.data import ExactBatchSampler, Sequential
from camshaft.engine import Engine, Events
from camshaft.errors import RankDivergenceError
from tests.ranks import on_ranks
from tests.threads import on_threads


class Noise(Dataset):
    """Each sample is its index and a random number."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()).item()])


class Shardable(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)

    def shard(self, num_shards, index):
        return Shardable(self.samples[index::num_shards])


def with_peers(value):
    """Return the values of the ranks by their place in the data, after checking that peers have the same."""
    found = {}
    for place, one in idist.all_gather((idist.get_data_parallel_rank(), value)):
        assert found.setdefault(place, one) == one
    assert sorted(found) == list(range(idist.get_data_parallel_size()))
    return [found[place] for place in sorted(found)]


# --- making meshes ---------------------------------------------------------------------------------------------------


def test_a_single_process_needs_no_mesh():
    assert idist.make_mesh() is None
    assert idist.make_mesh(dp_shard=-1, tp=1) is None
    assert idist.get_mesh() is None
    assert (idist.get_data_parallel_rank(), idist.get_data_parallel_size()) == (0, 1)
    for sizes in ({"dp_shard": 2, "tp": 2}, {"dp_shard": 0}, {"dp_shard": -1, "tp": -1}, {"dp_shard": -1, "tp": 3}):
        with pytest.raises(ValueError, match=r"1, got dp_replicate=1 \* dp_shard=.* tp=.*; one of them may be -1"):
            idist.make_mesh(**sizes)
    with pytest.raises(TypeError, match="tp must be an integer, got 2.0"):
        idist.make_mesh(tp=2.0)


@on_threads(2)
def test_a_backend_without_meshes_says_so():
    for call in (lambda: idist.make_mesh(dp_shard=2), lambda: idist.auto_model(torch.nn.Linear(1, 1), shard=[])):
        with pytest.raises(NotImplementedError, match="does not support device meshes: use gloo or nccl"):
            call()


@on_ranks(4)
def test_a_mesh_divides_the_ranks_along_named_axes():
    rank = idist.get_rank()
    assert (idist.get_data_parallel_rank(), idist.get_data_parallel_size()) == (rank, 4)
    with pytest.raises(ValueError, match=r"4, got dp_replicate=1 \* dp_shard=3 \* cp=1 \* tp=2"):
        idist.make_mesh(dp_shard=3, tp=2)
    assert idist.get_mesh() is None
    for sizes, names, place in (
        ({"dp_shard": -1, "tp": 2}, ("dp_shard", "tp"), (rank // 2, 2)),
        ({"dp_replicate": 2, "tp": 2}, ("dp_replicate", "dp_shard", "tp"), (rank // 2, 2)),
        ({"dp_replicate": 2, "dp_shard": 2}, ("dp_replicate", "dp_shard"), (rank, 4)),
        ({"dp_shard": 2, "cp": 2}, ("dp_shard", "cp"), (rank // 2, 2)),
    ):
        mesh = idist.make_mesh(**sizes)
        assert idist.get_mesh() is mesh
        assert mesh.mesh_dim_names == names
        assert mesh.mesh.flatten().tolist() == [0, 1, 2, 3]
        assert (idist.get_data_parallel_rank(), idist.get_data_parallel_size()) == place
        assert (idist.get_rank(), idist.get_world_size()) == (rank, 4)
    idist.finalize()
    assert idist.get_mesh() is None


@on_ranks(2)
def test_a_mesh_is_made_by_all_ranks():
    with pytest.raises(RankDivergenceError, match="make_mesh") if idist.get_rank() == 0 else nullcontext():
        idist.one_rank_only()(idist.make_mesh)(dp_shard=2)


# --- data ------------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_peers_get_the_same_samples_and_the_same_augmentation():
    torch.manual_seed(idist.get_rank())
    idist.make_mesh(dp_shard=2, tp=2)
    loader = idist.auto_dataloader(Noise(), batch_size=4)
    shares = with_peers([row for batch in loader for row in batch.tolist()])
    assert sorted(int(index) for share in shares for index, _ in share) == list(range(10))
    assert len({noise for share in shares for _, noise in share}) == 10


@on_ranks(4)
def test_without_data_parallelism_all_ranks_get_all_samples_alike():
    torch.manual_seed(idist.get_rank())
    idist.make_mesh(tp=4)
    loader = idist.auto_dataloader(Noise(), batch_size=4)
    assert loader.batch_size == 4
    (share,) = with_peers([batch.tolist() for batch in loader])
    assert sorted(int(index) for batch in share for index, _ in batch) == list(range(10))
    assert [int(index) for batch in share for index, _ in batch] != list(range(10))
    stream = idist.auto_dataloader(Shardable(list(range(7))), batch_size=2)
    assert with_peers([batch.tolist() for batch in stream]) == [[[0, 1], [2, 3], [4, 5], [6]]]
    sampler = torch.utils.data.RandomSampler(range(10))
    (drawn,) = with_peers([batch.tolist() for batch in idist.auto_dataloader(range(10), sampler=sampler, batch_size=3)])
    assert sorted(sample for batch in drawn for sample in batch) == list(range(10))


@on_ranks(4)
def test_a_run_resumes_on_another_mesh_with_each_sample_once():
    seen = []
    engine = Engine(lambda engine, batch: seen.append((batch.tolist(), engine.batch_share)))
    loader = idist.auto_dataloader(range(11), batch_size=4, seed=1)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), engine.interrupt)
    engine.run(loader, max_epochs=1)
    before, state = idist.all_gather(seen[0][0]), engine.state_dict()
    seen.clear()
    idist.make_mesh(dp_shard=2, tp=2)
    resumed = Engine(lambda engine, batch: seen.append((batch.tolist(), engine.batch_share)))
    resumed.load_state_dict(state)
    resumed.run(idist.auto_dataloader(range(11), batch_size=4, seed=1), max_epochs=1)
    shares = with_peers(seen)
    after = [sample for share in shares for batch, _ in share for sample in batch]
    assert sorted([sample for batch in before for sample in batch] + after) == list(range(11))
    assert [share[-1][1] for share in shares] == [2 / 3, 4 / 3]


@on_ranks(4)
def test_samplers_and_streams_take_the_place_in_the_data():
    idist.make_mesh(dp_replicate=2, tp=2)
    place = idist.get_rank() // 2
    stream = idist.auto_dataloader(Shardable(list(range(8))), batch_size=2)
    assert with_peers([batch.tolist() for batch in stream]) == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    assert list(ExactBatchSampler(Sequential(8), 4)) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][place]
    proxy = idist.DistributedProxySampler(torch.utils.data.SequentialSampler(range(4)))
    assert list(proxy) == [[0, 2], [1, 3]][place]
    with pytest.warns(UserWarning, match="but this is rank . of 2, of those that divide the data"):
        idist.auto_dataloader(range(8), sampler=torch.utils.data.DistributedSampler(range(8)))


@on_ranks(2)
def test_peers_that_read_other_data_are_found():
    early = idist.auto_dataloader(range(8), batch_size=2)
    idist.make_mesh(tp=2)
    with pytest.raises(RuntimeError, match=r"created for part . of 2 of the data, .* part 0 of 1: call make_mesh bef"):
        next(iter(early))
    loader, error = idist.auto_dataloader(range(8 + idist.get_rank()), batch_size=2, seed=0), ""
    idist.barrier()
    try:
        list(loader)
    except ValueError as raised:
        error = str(raised)
    assert any("the ranks do not read the same data" in one for one in idist.all_gather(error))
