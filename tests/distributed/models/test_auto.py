"""A script for one process trains the same on many with `auto_model`, `auto_optim` and `auto_dataloader`."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
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
from camshaft.distributed.agreement import data as shared_data
from camshaft.distributed.topology import Topology
from camshaft.engine import Engine, Events
from tests.distributed.test_ranks import Somewhere, at_rank
from tests.ranks import on_ranks
from tests.threads import on_threads

INPUTS = torch.linspace(-2, 2, 32).sin().view(8, 4)
TARGETS = INPUTS.sum(1, keepdim=True).tanh()


class Net(nn.Module):
    """A model with parameters that are shared, frozen, or not always used, and with batch norm."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm1d(4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.last = nn.Linear(4, 1)
            self.spare = nn.Linear(4, 1)

    def forward(self, x, spare=False):
        x = self.frozen(self.second(self.first(x).tanh()).tanh())
        return (self.spare if spare else self.last)(x)


def trained(model, inputs, targets, steps=4, **options):
    optimizer = idist.auto_optim(SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs, **options), targets).backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in model.parameters()]


def mine(tensor):
    return tensor[idist.get_rank() :: idist.get_world_size()]


def close(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# --- auto_model on real ranks ------------------------------------------------------------------------------------


@on_ranks(2)
def test_shared_frozen_and_unused_parameters_train_as_in_one_process():
    alone = trained(Net(), INPUTS, TARGETS)
    model = idist.auto_model(Net(), find_unused_parameters=True)
    assert isinstance(model, DistributedDataParallel)
    assert model.find_unused_parameters
    weights = trained(model, mine(INPUTS), mine(TARGETS))
    close(weights, alone)
    assert all(torch.equal(*pair) for pair in zip(*idist.all_gather(weights), strict=True))
    assert set(model.state_dict()) == {f"module.{name}" for name in Net().state_dict()}


@on_ranks(2)
def test_a_compiled_model_trains_as_in_one_process_whichever_comes_first():
    alone = trained(Net(), INPUTS, TARGETS)
    compiled = torch.compile(Net(), backend="eager")
    first = idist.auto_model(compiled, find_unused_parameters=True)
    assert isinstance(first, DistributedDataParallel)
    close(trained(first, mine(INPUTS), mine(TARGETS)), alone)
    second = torch.compile(idist.auto_model(Net(), find_unused_parameters=True), backend="eager")
    assert idist.auto_model(second) is second
    close(trained(second, mine(INPUTS), mine(TARGETS)), alone)


@on_ranks(2)
def test_a_wrapped_model_is_returned_unchanged():
    from torch.distributed.fsdp import fully_shard

    model = idist.auto_model(nn.Linear(4, 1))
    assert idist.auto_model(model) is model
    sharded = nn.Linear(4, 1)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    assert idist.auto_model(sharded) is sharded


@on_ranks(2)
def test_two_models_train_each_with_its_optimizer():
    def played(generator, critic, inputs):
        teach, judge = SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)
        teach, judge = idist.auto_optim(teach), idist.auto_optim(judge)
        for _ in range(3):
            judge.zero_grad()
            (critic(generator(inputs).detach()) - critic(inputs)).mean().backward()
            judge.step()
            teach.zero_grad()
            (-critic(generator(inputs))).mean().backward()
            teach.step()
        return [tensor.detach().clone() for model in (generator, critic) for tensor in model.parameters()]

    def models():
        return nn.Sequential(Net().first, nn.Tanh()), nn.Sequential(Net().second, nn.Tanh(), Net().last)

    alone = played(*models(), INPUTS)
    close(played(*map(idist.auto_model, models()), mine(INPUTS)), alone)


@on_ranks(2)
def test_a_frozen_model_gets_the_weights_of_the_first_rank_whatever_their_layout():
    rank = idist.get_rank()
    model = nn.Sequential(nn.Conv2d(3, 2, 2), nn.BatchNorm2d(2)).requires_grad_(False)
    model.to(memory_format=torch.channels_last)
    model.register_buffer("wide", torch.tensor([rank, 5]).expand(3, 2))
    model[0].weight.copy_(torch.arange(24.0).view(2, 3, 2, 2) + 100 * rank)
    model[1].running_mean.fill_(rank)
    assert not model[0].weight.is_contiguous()
    assert idist.auto_model(model) is model
    assert torch.equal(model[0].weight, torch.arange(24.0).view(2, 3, 2, 2))
    assert model[1].running_mean.tolist() == [0, 0]
    assert model.wide.tolist() == [[0, 5]] * 3


@on_ranks(2)
def test_errors_of_torch_are_not_changed():
    with pytest.raises(TypeError, match="unexpected keyword argument 'buckets'"):
        idist.auto_model(nn.Linear(1, 1), buckets=3)
    with pytest.raises(RuntimeError, match="uninitialized parameters"):
        idist.auto_model(nn.LazyLinear(1))


@on_ranks(1)
def test_a_run_of_one_process_wraps_nothing():
    model = Net()
    assert idist.backend() == "gloo"
    assert idist.auto_model(model, sync_bn=True, find_unused_parameters=True) is model
    assert type(model.norm) is nn.BatchNorm1d


# --- auto_model without ranks ------------------------------------------------------------------------------------


class OnMeta(Somewhere):
    """A backend on the meta device."""

    device = torch.device("meta")

    def __init__(self):
        super().__init__(Topology())


@pytest.mark.parametrize("buffers_only", [True, False])
def test_a_model_is_moved_with_parameters_and_buffers(buffers_only):
    model = nn.Module() if buffers_only else nn.Linear(2, 2, device="meta")
    model.register_buffer("table", torch.ones(2))
    with idist.use_backend(OnMeta()):
        assert idist.auto_model(model) is model
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


def test_a_model_on_the_device_is_not_moved(monkeypatch):
    model = Net()
    monkeypatch.setattr(model, "to", pytest.fail)
    assert idist.auto_model(model) is model


def test_without_a_context_all_gpus_are_used_and_it_is_logged(monkeypatch, caplog):
    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(nn, "DataParallel", Wrapped)
    caplog.set_level(logging.INFO, logger="camshaft.distributed.auto.auto_model")
    model = nn.Identity()
    wrapped = idist.auto_model(model)
    assert isinstance(wrapped, Wrapped)
    assert wrapped.module is model
    assert idist.auto_model(wrapped) is wrapped
    assert [record.getMessage() for record in caplog.records] == ["the model is wrapped in DataParallel over 2 GPUs"]


@pytest.mark.parametrize("thing", ["model", None, nn.Linear, SGD])
def test_other_objects_than_models_and_optimizers_are_refused(thing):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got"):
        idist.auto_model(thing)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got"):
        idist.auto_optim(thing)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loader_is_refused_where_a_dataset_is_expected(world_size):
    with at_rank(0, world_size):
        for loader in (DataLoader([1, 2], 2), idist.auto_dataloader([1, 2])):
            with pytest.raises(TypeError, match=r"got a DataLoader: pass loader\.dataset, and the arguments"):
                idist.auto_dataloader(loader)


def test_an_optimizer_is_returned_unchanged():
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    assert idist.auto_optim(optimizer) is optimizer
    with at_rank(0):
        assert idist.auto_optim(optimizer, unknown=3) is optimizer


# --- auto_dataloader ---------------------------------------------------------------------------------------------

PLACE = Topology(rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1, num_nodes=2)
LOGGER = "camshaft.distributed.auto.auto_dataloader"


@pytest.fixture(autouse=True)
def no_broadcasts(monkeypatch):
    """Provide a seed to fake contexts; ranks in their own processes are not affected."""
    monkeypatch.setattr(shared_data, "_from_rank_0", lambda seed: 0)


@pytest.fixture
def on_rank_5_of_8():
    with idist.use_backend(Somewhere(PLACE)) as backend:
        yield backend


@pytest.mark.parametrize(("given", "got"), [(8, 1), (9, 1), (15, 1), (16, 2), (64, 8), (7, 7), (1, 1)])
def test_the_batch_size_is_divided_by_the_number_of_ranks(on_rank_5_of_8, given, got):
    assert idist.auto_dataloader(range(100), batch_size=given).batch_size == got


def test_the_default_batch_size_is_torchs(on_rank_5_of_8):
    assert idist.auto_dataloader(range(100)).batch_size == 1


@pytest.mark.parametrize(("given", "got"), [(0, 0), (1, 1), (3, 3), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_the_workers_are_divided_by_the_processes_of_the_node_and_rounded_up(on_rank_5_of_8, given, got):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of more workers than cores
        assert idist.auto_dataloader(range(100), num_workers=given).num_workers == got


@pytest.mark.parametrize(
    ("given", "got"), [({}, True), ({"shuffle": None}, True), ({"shuffle": True}, True), ({"shuffle": False}, False)]
)
def test_several_ranks_shuffle_by_default_and_it_is_logged(on_rank_5_of_8, caplog, given, got):
    caplog.set_level(logging.INFO, logger=LOGGER)
    sampler = idist.auto_dataloader(range(100), **given).sampler
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.rank, sampler.num_replicas, sampler.shuffle) == (5, 8, got)
    assert f"with shuffle={got}" in caplog.text


def test_one_process_does_not_shuffle_by_default():
    loader = idist.auto_dataloader(range(3), batch_size=2, num_workers=0)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2]]
    assert loader.batch_size == 2
    assert loader.sampler.shuffle is False
    assert idist.auto_dataloader(range(3), shuffle=True).sampler.shuffle is True


@pytest.mark.parametrize(
    "sampler", [SequentialSampler(range(100)), RandomSampler(range(100)), WeightedRandomSampler([1.0], 100)]
)
def test_another_sampler_is_distributed(on_rank_5_of_8, sampler):
    made = idist.auto_dataloader(range(100), sampler=sampler).sampler
    assert isinstance(made, idist.DistributedProxySampler)
    assert made.sampler is sampler
    assert (made.rank, made.num_replicas) == (5, 8)


def test_a_distributed_sampler_is_used_as_it_is_and_must_fit(on_rank_5_of_8):
    fitting = DistributedSampler(range(100), 8, 5)
    assert idist.auto_dataloader(range(100), sampler=fitting).sampler is fitting
    for wrong in (DistributedSampler(range(100), 8, 4), DistributedSampler(range(100), 6, 5)):
        with pytest.warns(
            UserWarning, match=f"created for rank {wrong.rank} of {wrong.num_replicas}, but this is rank 5 of 8"
        ) as caught:
            assert idist.auto_dataloader(range(100), sampler=wrong).sampler is wrong
        assert [warning.filename for warning in caught] == [__file__]


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


@pytest.mark.parametrize(
    "batches",
    [lambda: FOURS, lambda: BatchSampler(RandomSampler(range(12)), 3, False)]
    + [lambda: BatchSampler(Epochs(seeded=True), 3, False)],
)
def test_in_one_process_a_batch_sampler_is_resumed(batches):
    wanted, got = resumed(lambda: idist.auto_dataloader(range(12), batch_sampler=batches()))
    assert got == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": None},
        {"batch_size": 3, "sampler": Unsized()},
        {"batch_size": 3, "sampler": DistributedSampler(range(12), 1, 0)},
    ],
)
def test_a_loader_that_cannot_seek_is_skipped_forward_with_a_warning(options):
    with pytest.warns(UserWarning, match="skipping 2 batches to resume"):
        wanted, got = resumed(
            lambda: idist.auto_dataloader(range(12), **options), stop=14 if options["batch_size"] is None else 6
        )
    assert got == wanted


@on_ranks(2)
def test_on_several_ranks_a_batch_sampler_is_skipped_forward_with_a_warning():
    with pytest.warns(UserWarning, match="batch_sampler is used as it is|skipping . batches to resume") as caught:
        wanted, got = resumed(lambda: idist.auto_dataloader(range(12), batch_sampler=FOURS))
    assert got == wanted
    assert "skipping 2 batches to resume" in str(caught[-1].message)


def test_a_sampler_with_another_order_is_refused_within_an_epoch():
    def over(sampler):
        return lambda: idist.auto_dataloader(range(16), sampler=sampler, batch_size=2)

    wanted, got = resumed(over(range(8)), over(range(8)))
    assert got == wanted
    with pytest.raises(ValueError, match="list yields other samples or another order now.*with the same sampler"):
        resumed(over(list(range(8))), over(list(range(8, 16))))
    assert resumed(over(list(range(8))), over(list(range(8, 16))), stop=8)[1][0] == [8, 9], "nothing of it was given"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sampler_with_its_own_generator_is_resumed_if_it_seeds_it(world_size):
    def over(seeded):
        return lambda: idist.auto_dataloader(range(12), sampler=Epochs(seeded), batch_size=4)

    with at_rank(0, world_size):
        wanted, got = resumed(over(seeded=True), stop=4)
        assert got == wanted
        with pytest.raises(ValueError, match=r"Epochs yields other samples .*seed its own in set_epoch\("):
            resumed(over(seeded=False), stop=4)
        assert len(resumed(over(seeded=False), stop=3)[1]) == 6


WRONG = {
    "list": ({"sampler": [0, 1, 12, 3]}, "the sampler yielded index 12, but the dataset has 10 samples"),
    "negative": (
        {"sampler": [0, -1, 2, -3]},
        "the sampler yielded index -3, but the dataset has 10 samples",
    ),
    "sampler": (
        {"sampler": RandomSampler(range(999))},
        r"the sampler yielded index \d+, but the dataset has",
    ),
    "batches": (
        {"batch_sampler": ExactBatchSampler([[0, 1], [12, 3]], None, num_replicas=1, rank=0)},
        "the sampler yielded index 12, but",
    ),
}


@on_ranks(2)
def is_refused_on_all_ranks(what):
    options, message = WRONG[what]
    for dataset in (list(range(10)), torch.arange(10), Plain()):
        loader = idist.auto_dataloader(dataset, **options)
        with pytest.raises(ValueError, match=message):
            list(loader)
        with pytest.raises(ValueError, match=message):
            Engine(lambda engine, batch: None).run(loader)


class Plain(Dataset):
    """Checks nothing."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("what", WRONG)
def test_indices_that_the_dataset_lacks_are_refused_on_all_ranks(what):
    is_refused_on_all_ranks(what)


def test_in_one_process_a_batch_sampler_is_checked_too():
    with pytest.raises(ValueError, match="the sampler yielded index -3, but the dataset has 10 samples"):
        list(idist.auto_dataloader(Plain(), batch_sampler=[[0, 1], [2, -3]]))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "order", [Shuffled(12), Sequential(8), ShuffledWindows(11, 2), Weighted([1.0] * 12, 10), Weighted([1.0] * 9, 10)]
)
def test_an_order_of_more_or_fewer_samples_than_the_dataset_has_is_refused(world_size, order):
    message = rf"the order is one of {order.num_samples} samples \(.*\), but the dataset has 10: create it for as many"
    with at_rank(0, world_size):
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


def test_a_batch_sampler_is_used_as_it_is(on_rank_5_of_8):
    batches = BatchSampler(SequentialSampler(range(100)), 3, False)
    with pytest.warns(UserWarning, match="batch_sampler is used as it is") as caught:
        loader = idist.auto_dataloader(range(100), batch_sampler=batches)
    assert [warning.filename for warning in caught] == [__file__]
    assert loader.batch_sampler is batches
    assert isinstance(loader.sampler, SequentialSampler)
    assert isinstance(idist.auto_dataloader(range(100), batch_sampler=None).sampler, DistributedSampler)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_an_iterable_dataset_is_used_as_it_is_and_it_is_logged(on_rank_5_of_8, caplog):
    caplog.set_level(logging.INFO, logger=LOGGER)
    loader = idist.auto_dataloader(Stream(), batch_size=16)
    assert isinstance(loader, DataLoader)
    assert loader.batch_size == 2
    assert not isinstance(loader.sampler, DistributedSampler)
    assert "it must yield different samples on each rank" in caplog.text


@on_ranks(2)
def test_rank_0_warns_of_an_iterable_dataset_without_shard():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for dataset in (Stream(), Sharded(range(4))):
            idist.auto_dataloader(dataset, batch_size=2)
    told = [str(warning.message) for warning in caught]
    assert [message.split()[0] for message in told] == [["Stream"], []][idist.get_rank()]
    assert all(
        "each of the 2 ranks and each of its workers" in one and "islice(samples, index, None, num_shards)" in one
        for one in told
    )
    assert {warning.filename for warning in caught} <= {__file__}


def test_one_process_reads_a_stream_without_a_warning():
    assert len(list(idist.auto_dataloader(Stream()))) == 10


class Sharded(IterableDataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return iter(self.numbers)

    def shard(self, num_shards, index):
        return Sharded(self.numbers[index::num_shards])


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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sampler": SequentialSampler(range(9)), "shuffle": True}, ValueError, "mutually exclusive with shuffle"),
        ({"batch_size": -1}, ValueError, "batch_size should be a positive integer value"),
        ({"batches": 3}, TypeError, "unexpected keyword argument 'batches'"),
        ({"sampler": [1, 2]}, ValueError, "2 samples cannot be distributed over 8 ranks"),
    ],
)
def test_contradictory_arguments_raise_as_in_torch(on_rank_5_of_8, arguments, error, message):
    with pytest.raises(error, match=message):
        idist.auto_dataloader(range(9), **arguments)


def test_a_batch_size_with_a_batch_sampler_is_refused_also_if_it_is_the_number_of_ranks(on_rank_5_of_8):
    batches = BatchSampler(SequentialSampler(range(9)), 3, False)
    error = "batch_sampler option is mutually exclusive"
    with pytest.warns(UserWarning, match="batch_sampler is used"), pytest.raises(ValueError, match=error):
        idist.auto_dataloader(range(9), batch_sampler=batches, batch_size=8)


def test_the_arguments_of_the_caller_are_not_changed(on_rank_5_of_8):
    arguments = {"batch_size": 16, "num_workers": 0, "shuffle": False, "drop_last": True}
    before = dict(arguments)
    idist.auto_dataloader(range(100), **arguments)
    assert arguments == before


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_log_has_the_final_arguments(caplog, world_size):
    caplog.set_level(logging.INFO, logger=LOGGER)
    with at_rank(0, world_size):
        idist.auto_dataloader(range(10), batch_size=4)
    last = caplog.records[-1]
    assert last.name == LOGGER
    assert last.getMessage().startswith("DataLoader of range with {")
    assert f"'batch_size': {4 // world_size}" in last.getMessage()
    assert "'pin_memory': " in last.getMessage()


class OnGpu(Somewhere):
    device = torch.device("cuda", 0)


class OnXla(Somewhere):
    device = torch.device("xla", 0)

    def wrap_loader(self, loader):
        return [loader]


def test_memory_is_pinned_by_default_if_there_is_a_gpu():
    assert idist.auto_dataloader(range(30)).pin_memory is (idist.device().type == "cuda")
    with idist.use_backend(OnGpu()):
        assert idist.auto_dataloader(range(30)).pin_memory is True
        assert idist.auto_dataloader(range(30), pin_memory=False).pin_memory is False


def test_on_xla_memory_is_not_pinned_and_the_backend_wraps_the_loader():
    with idist.use_backend(OnXla()):
        with pytest.warns(UserWarning, match="pin_memory=True has no effect on XLA") as caught:
            (loader,) = idist.auto_dataloader(range(30), pin_memory=True)
        assert [warning.filename for warning in caught] == [__file__]
        assert isinstance(loader, DataLoader)
        assert loader.pin_memory is False


@on_ranks(3)
def test_the_ranks_together_see_all_of_the_data_once():
    for count, sampler in ((12, None), (13, None), (13, "random"), (4, None)):
        options = {"sampler": RandomSampler(range(count))} if sampler else {}
        loader = idist.auto_dataloader(range(count), batch_size=6, **options)
        for epoch in (0, 1):
            loader.sampler.set_epoch(epoch)
            parts = idist.all_gather([batch.tolist() for batch in loader])
            assert {len(part) for part in parts} == {len(loader)}
            assert sorted(number for part in parts for batch in part for number in batch) == list(range(count))


@on_ranks(3)
def test_fewer_samples_than_ranks_are_refused():
    with pytest.raises(ValueError, match="2 samples cannot be distributed over 3 ranks.*at most 2 .*or more samples"):
        idist.auto_dataloader(range(2), batch_size=6)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dataset": []}, ValueError, "dataset must have at least one sample, got an empty list"),
        ({"dataset": range(9), "shuffle": "no"}, TypeError, "shuffle must be True, False or None, got 'no'"),
        ({"dataset": range(9), "num_workers": None}, TypeError, "num_workers must be an integer, got None"),
        ({"dataset": range(9), "generator": 3}, TypeError, r"generator must be a torch\.Generator or None, got 3"),
        ({"dataset": range(9), "seed": 1.5}, TypeError, "seed must be an integer, got 1.5 of type float"),
        (
            {"dataset": range(9), "seed": "a", "shuffle": False},
            TypeError,
            "seed must be an integer, got 'a' of type str",
        ),
        ({"dataset": range(9), "in_order": False}, ValueError, "in_order must be True, got False: a run resumes after"),
        ({"dataset": range(9), "sampler": 5}, TypeError, "sampler must be a sampler, an order or a sequence .*, got 5"),
        (
            {"dataset": range(9), "batch_size": 10, "drop_last": True},
            ValueError,
            "drop_last=True leaves nothing of 9 samples, as one batch of all ranks takes 10: pass a smaller batch_size",
        ),
        (
            {"dataset": range(99), "sampler": [5, 3, 4], "batch_size": 4, "drop_last": True},
            ValueError,
            "drop_last=True leaves nothing of 3 samples",
        ),
    ],
)
def test_invalid_arguments_are_refused(world_size, arguments, error, message):
    with at_rank(0, world_size), pytest.raises(error, match=message):
        idist.auto_dataloader(**arguments)


def test_a_sequence_is_a_sampler_on_any_number_of_ranks():
    given = [7, 6, 1, 1, 3]
    assert [batch.tolist() for batch in idist.auto_dataloader(range(9), sampler=given, batch_size=2)] == [
        [7, 6],
        [1, 1],
        [3],
    ]
    parts = []
    for rank in range(2):
        with at_rank(rank, 2):
            parts.append([batch.tolist() for batch in idist.auto_dataloader(range(9), sampler=given, batch_size=2)])
    assert parts == [[[7], [1]], [[6], [1, 3]]]
    with at_rank(1, 2), pytest.warns(UserWarning, match="some are repeated"):
        assert list(idist.auto_dataloader(range(9), sampler=SequentialSampler(given), batch_size=None)) == [1, 3, 0]


@on_ranks(2)
def test_samples_without_batches_are_distributed_and_padded():
    with pytest.warns(UserWarning, match="some are repeated; pass a batch_size"):
        loader = idist.auto_dataloader(range(5), batch_size=None, shuffle=False)
    assert idist.all_gather(list(loader)) == [[0, 2, 4], [1, 3, 0]]
