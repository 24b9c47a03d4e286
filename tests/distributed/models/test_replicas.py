"""Replicas that drift apart, and ranks that train on the same data, are reported once; healthy jobs are not."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import camshaft.distributed as idist
from camshaft.distributed.job import current
from camshaft.distributed.models.replicas import _checksums, register
from camshaft.engine import Engine, Events, create_supervised_trainer
from camshaft.handlers import Checkpoint
from tests.ranks import on_ranks


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def samples(seed=0, length=12):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(length, 2, generator=generator), torch.randn(length, 1, generator=generator))


def trainer_of(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return create_supervised_trainer(model, optimizer, nn.functional.mse_loss, **options)


def messages_of(run, *args):
    """Return the warnings of a run on each rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(*args)
    return idist.all_gather([str(one.message) for one in caught])


def train_until(trainer, *targets):
    for target in targets:
        trainer.run(idist.auto_dataloader(samples(), batch_size=4), max_epochs=target)


# --- weights -----------------------------------------------------------------------------------------------------


def unfrozen_after_wrapping():
    model = network()
    model[2].requires_grad_(False)
    model = idist.auto_model(model)
    model.module[2].requires_grad_(True)
    return trainer_of(model), "2.weight"


def frozen_as_a_whole():
    model = idist.auto_model(network().requires_grad_(False))
    trainer = trainer_of(model)
    model.requires_grad_(True)
    return trainer, "0.weight"


def called_without_the_wrapper():
    return trainer_of(idist.auto_model(network()), model_fn=lambda model, x: model.module(x)), "0.weight"


def loaded_on_one_rank():
    model = idist.auto_model(network())
    if idist.get_rank() == 1:
        with torch.no_grad():
            model.module[1].bias.add_(1)
    return trainer_of(model), "1.bias"


def compiled():
    model = torch.compile(idist.auto_model(network()), backend="eager")
    return trainer_of(model, model_fn=lambda model, x: model._orig_mod.module(x)), "0.weight"


FORMS = (unfrozen_after_wrapping, frozen_as_a_whole, called_without_the_wrapper, loaded_on_one_rank, compiled)


@on_ranks(2)
def test_replicas_that_drift_apart_are_reported_once_with_the_first_parameter():
    for form in FORMS:
        trainer, name = form()
        (report,) = [message for part in messages_of(train_until, trainer, 3) for message in part]
        assert f"the first of which is {name!r}: unfreeze parameters before auto_model" in report, form
        assert "ranks 0 and 1" in report or "ranks 1 and 0" in report


@on_ranks(2)
def test_replicas_are_compared_when_they_are_saved(tmp_path):
    model = idist.auto_model(network())

    def step(engine, batch):
        with torch.no_grad():
            model.module[2].bias.add_(idist.get_rank())

    trainer = Engine(step)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), Checkpoint({"net": model}, tmp_path))
    messages = messages_of(lambda: trainer.run(range(5), max_epochs=2))
    (report,) = [message for part in messages for message in part]
    assert "the replicas of the model differ when net_2.pt is saved, as 'net': ranks " in report
    assert "the first of which is '2.bias'" in report


@on_ranks(2)
def test_replicas_that_drift_apart_raise_in_debug_mode():
    trainer, errors = called_without_the_wrapper()[0], []
    loader = idist.auto_dataloader(samples(), batch_size=4, seed=0)
    current().job.compares_collectives = True
    trainer.add_event_handler("EXCEPTION_RAISED", lambda engine, error: errors.append(str(error)))
    trainer.run(loader, max_epochs=1)
    current().job.compares_collectives = False
    (error,) = [error for errors in idist.all_gather(errors) for error in errors]
    assert "the replicas of the model differ after epoch 1, in iteration 3: ranks " in error


def accumulating():
    return trainer_of(idist.auto_model(network()), gradient_accumulation_steps=2)


def not_of_one_job():
    torch.manual_seed(idist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that each rank trains a model of its own
        return trainer_of(nn.Linear(2, 1))


def averaging_less_often():
    model = idist.auto_model(network())
    model.register_comm_hook(dist.group.WORLD, allreduce_hook)  # any hook, as that of local SGD
    return trainer_of(model, model_fn=lambda model, x: model.module(x))


def on_other_hardware():
    trainer = called_without_the_wrapper()[0]
    hardware = f"a processor of rank {idist.get_rank()}"
    mock.patch("camshaft.distributed.models.replicas._hardware", return_value=hardware).start()
    return trainer


def in_groups_of_one():
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = nn.parallel.DistributedDataParallel(network(), process_group=groups[idist.get_rank()])
    return trainer_of(model)


HEALTHY = (accumulating, not_of_one_job, averaging_less_often, in_groups_of_one, on_other_hardware)


@on_ranks(2)
def test_healthy_replicas_are_not_reported():
    for form in HEALTHY:
        assert messages_of(train_until, form(), 1, 3) == [[], []], form
    mock.patch.stopall()


@on_ranks(2)
def test_a_comparison_that_one_rank_makes_alone_disturbs_nobody():
    model = idist.auto_model(network())
    replicas, engine = register(model), SimpleNamespace(run_line="train.py:1 in main", run_number=1)
    for number in range(3):
        with torch.no_grad():
            model.module[0].weight.mul_(2)
        if idist.get_rank() == number % 2:
            replicas.compare_weights(engine, f"in a save of one rank, {number}")
        dist.barrier()
        replicas.compare_weights(engine, f"after {number}")
        dist.barrier()


@on_ranks(3)
def test_what_several_ranks_find_is_reported_by_one_of_them():
    model, rank = idist.auto_model(network()), idist.get_rank()
    with torch.no_grad():
        model.module[0].weight.add_(rank)
    replicas, engine = register(model), SimpleNamespace(run_line="train.py:1 in main", run_number=1)

    def compare():
        for turn in (rank == 0, rank > 0):
            if turn:
                replicas.compare_weights(engine, "here")
            dist.barrier()

    assert [len(messages) for messages in messages_of(compare)] in ([0, 1, 0], [0, 0, 1])


@on_ranks(2)
def test_a_comparison_costs_one_request():
    model = idist.auto_model(network())
    replicas, requests = register(model), []
    store = SimpleNamespace(compare_set=lambda *arguments: requests.append(arguments) or arguments[-1].encode())
    with mock.patch("camshaft.distributed.models.replicas.store_at", return_value=store):
        trainer_of(model).run(idist.auto_dataloader(samples(), batch_size=4), max_epochs=3)
    assert len(requests) == 1 + 3
    assert register(model) is register(model.module) is replicas


def test_a_single_process_registers_nothing():
    assert register(idist.auto_model(network()), is_replicated=True) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64, torch.int8, torch.bool])
def test_a_checksum_depends_on_every_element(dtype):
    tensor = torch.zeros(3, 4).to(dtype).t()
    first = _checksums([tensor, torch.zeros(0)])
    tensor[3, 2] = 1
    assert _checksums([tensor, torch.zeros(0)]) != first


# --- data --------------------------------------------------------------------------------------------------------


class Pair:
    """A batch that is none of the usual containers."""

    def __init__(self, some, rank):
        self.parts = [torch.stack(part) + rank for part in zip(*some, strict=True)]

    def __getitem__(self, index):
        return self.parts[index]


def plain(shuffle=False):
    return DataLoader(samples(), batch_size=4, shuffle=shuffle)


DATA = {
    "in order": (plain, True),
    "shuffled": (lambda: plain(shuffle=True), True),
    "distributed": (lambda: DataLoader(samples(), batch_size=2, sampler=DistributedSampler(samples())), False),
    "auto_dataloader": (lambda: idist.auto_dataloader(samples(), batch_size=4), False),
    "own samples": (lambda: DataLoader(samples(idist.get_rank()), batch_size=4), False),
    "own part": (lambda: DataLoader(Subset(samples(), range(idist.get_rank(), 12, 2)), batch_size=4), False),
    "objects": (
        lambda: DataLoader(samples(), batch_size=4, collate_fn=lambda some: Pair(some, idist.get_rank())),
        False,
    ),
    "keys": (lambda: DataLoader([(index, f"{index}.png") for index in range(12)], batch_size=4), False),
    "zeros": (lambda: DataLoader(TensorDataset(torch.zeros(12, 2), torch.zeros(12, 1)), batch_size=4), False),
    "a list": (lambda: [tuple(samples()[:4])] * 3, False),
}


@on_ranks(2)
def test_ranks_that_train_on_the_same_data_are_told_once():
    def prepare(batch, device, non_blocking):
        return (batch[0], batch[1]) if isinstance(batch[1], torch.Tensor) else samples(idist.get_rank())[:4]

    def run(make):
        trainer = trainer_of(idist.auto_model(network()), prepare_batch=prepare)
        torch.manual_seed(1)
        for target in (1, 2):
            trainer.run(make(), max_epochs=target)

    for what, (make, is_same) in DATA.items():
        found = [one for messages in messages_of(run, make) for one in messages]
        assert len(found) == is_same, what
        assert all("train on the same batch, so each of the 2 ranks reads all of the data" in one for one in found)


@on_ranks(2)
def test_peers_along_tp_train_on_the_same_data():
    idist.make_mesh(tp=2)
    replicas = register(idist.auto_model(network()), is_replicated=True)
    assert messages_of(lambda: replicas.compare_data(plain(), next(iter(plain())))) == [[], []]
