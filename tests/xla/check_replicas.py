"""Checks for any number of XLA devices, in addition to those of every backend."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch_xla.core.xla_model as xla_model
from torch import nn
from torch_xla.distributed.parallel_loader import MpDeviceLoader

import camshaft.distributed as idist
from camshaft.distributed.backends.xla import adopt
from camshaft.distributed.job import current
from camshaft.engine import create_supervised_trainer
from tests.distributed.check_training import DATA, numbers_of, small_model
from tests.distributed.checking import check, equal, here, place, same


@check
def a_broadcast_ignores_the_values_of_the_other_ranks() -> None:
    rank, size = place()
    sent = torch.tensor([1.5, 0.0, math.inf, 1e-30])
    for src in range(size):
        tensor = here(sent if rank == src else torch.tensor([math.nan, math.inf, -math.inf, 7.0]))
        same(idist.broadcast(tensor, src), sent)


@check
def ranks_can_run_different_programs_between_collectives() -> None:
    rank, size = place()
    value = here(torch.tensor([rank + 1.0]))
    total = idist.all_reduce(value * 2)
    if rank == 0:
        assert (here(torch.ones(3)) * 7 + total).sum().item() > 0  # evaluates a graph that the other ranks do not have
    equal(idist.all_gather(rank), list(range(size)))
    same(total, torch.tensor([size * (size + 1.0)]))


@check
def all_to_all_exchanges_chunks_of_any_length() -> None:
    rank, size = place()
    backend = current()
    for group in (None, idist.new_group(list(range(size)))):
        for dtype in (torch.int64, torch.bool, torch.bfloat16):
            parts = {
                (src, dst): torch.full((2 * src * dst, 3), src + dst).to(dtype)
                for src in range(size)
                for dst in range(size)
            }
            sent = torch.cat([parts[rank, other] for other in range(size)])
            received = torch.cat([parts[other, rank] for other in range(size)])
            lengths = [2 * rank * other for other in range(size)]
            same(backend.all_to_all(here(sent), lengths, lengths, group), received)
        nothing = here(torch.empty(0, 3))
        same(backend.all_to_all(nothing, [0] * size, [0] * size, group), torch.empty(0, 3))


@check
def unsupported_options_are_refused() -> None:
    optimizer = idist.auto_optim(torch.optim.SGD([nn.Parameter(here(torch.zeros(1)))], lr=1.0))
    cases = [
        (lambda: idist.new_group([0], timeout=3), TypeError, r"new_group on backend .* unknown options \['timeout'\]"),
        (lambda: idist.auto_model(nn.Linear(1, 1), unused=True), TypeError, r"got unknown options \['unused'\]"),
        (lambda: optimizer.step(lambda: 1.0), NotImplementedError, r"'xla-tpu' does not support step\(closure\): use"),
    ]
    if idist.get_world_size() > 1:
        sync_bn = partial(idist.auto_model, nn.BatchNorm1d(2), sync_bn=True)
        cases += [
            (sync_bn, ValueError, r"sync_bn must be False on 'xla-tpu' .* backend 'nccl' supports it"),
            (lambda: adopt(None), RuntimeError, r"has \d devices: use initialize\('xla-tpu', spmd=True\)"),
            (lambda: idist.all_reduce(here(torch.ones(2)), "AND"), TypeError, "op 'AND' is for integers and bools"),
        ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    idist.auto_model(nn.Linear(1, 1), find_unused_parameters=True)  # an option of DDP
    total = float(idist.get_world_size())
    same(idist.all_reduce(here(torch.ones(2))), torch.full((2,), total))  # a refused collective leaves nothing behind


@check
def auto_dataloader_returns_a_torch_xla_loader_with_several_processes() -> None:
    rank, size = place()
    loader = idist.auto_dataloader(range(12), batch_size=4 * size, shuffle=False)
    equal(isinstance(loader, MpDeviceLoader), size > 1)
    equal(len(loader), math.ceil(12 / size / 4))
    if size > 1:
        assert (loader.sampler.rank, loader.sampler.num_replicas) == (rank, size)
        assert list(loader.dataset) == list(range(12))
        equal([batch.device for batch in loader], [idist.device()] * len(loader))


@check
def training_on_several_devices_matches_one() -> None:
    rank, size = place()
    whole = [DATA[start : start + 8] for start in range(0, 16, 8)]
    parts = [(inputs[rank::size], targets[rank::size]) for inputs, targets in whole]
    weighed = {"gradient_accumulation_steps": 2, "batch_weight": lambda x, y: len(y)}
    for options in ({}, {"clip_grad_norm": 0.05}, {"clip_grad_value": 0.01}, weighed):
        results = []
        for device, batches in (("cpu", whole), (idist.device(), parts)):
            model = small_model() if device == "cpu" else idist.auto_model(small_model())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer = optimizer if device == "cpu" else idist.auto_optim(optimizer)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            trainer = create_supervised_trainer(model, optimizer, nn.MSELoss(), device, **options)
            trainer.add_event_handler("EPOCH_COMPLETED", lambda engine, scheduler=scheduler: scheduler.step())
            trainer.run(batches, max_epochs=3)
            results.append(numbers_of(model))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@check
def a_model_of_mixed_dtypes_is_broadcast_from_rank_0() -> None:
    rank, _ = place()
    model = nn.Linear(2, 2)
    model.register_buffer("flags", torch.tensor([True, False]))
    model.register_buffer("nothing", torch.empty(0))
    wanted = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*wanted.parameters(), wanted.flags):
            tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) > 0)
        for tensor in (*model.parameters(), model.flags):
            tensor.copy_((torch.arange(tensor.numel()).view_as(tensor) > 0) if rank == 0 else tensor * math.nan)
    for one, other in zip(numbers_of(idist.auto_model(model)), numbers_of(wanted), strict=True):
        same(one, other)
    assert xla_model.is_xla_tensor(model.weight)
