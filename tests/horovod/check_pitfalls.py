"""Differences between Horovod and the other backends that users must not notice."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import camshaft.distributed as idist
from camshaft.distributed.backends.horovod import create
from camshaft.distributed.job import current
from tests.distributed.checking import check, equal, place, same


@check
def collectives_work_after_an_uneven_join() -> None:
    """After different numbers of operations per rank, numbered names would never match again."""
    rank, size = place()
    for _ in range(1 + 2 * rank):
        idist.all_reduce(torch.ones(2))
    hvd.join()
    equal(idist.all_gather(rank), list(range(size)))
    equal(idist.all_reduce(1), size)
    equal(idist.broadcast(rank, src=size - 1), size - 1)


@check
def every_operation_has_a_name() -> None:
    """Horovod names the others after a per-process counter."""
    seen = []
    library = hvd.mpi_ops.mpi_lib

    class Recording:
        def __getattr__(self, name: str) -> Any:
            function = getattr(library, name)
            if "_async_" not in name:
                return function

            def call(*arguments: Any) -> Any:
                seen.append((name, *[value for value in arguments if isinstance(value, (bytes, str))]))
                return function(*arguments)

            return call

    hvd.mpi_ops.mpi_lib = Recording()
    try:
        _, size = place()
        tensor = torch.ones(size, 2)
        for collective in (idist.all_reduce, idist.all_gather, idist.broadcast, idist.scatter, idist.all_to_all):
            collective([1] * size if collective in (idist.scatter, idist.all_to_all) else tensor)  # type: ignore[operator]
        idist.reduce_scatter(tensor)
        model = idist.auto_model(nn.Linear(2, 1))
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    finally:
        hvd.mpi_ops.mpi_lib = library
    assert len(seen) >= 12
    for call in seen:
        assert call[1].startswith(b"camshaft."), call


@check
def reductions_of_small_integers_wrap_around() -> None:
    _, size = place()
    for dtype, value in ((torch.int8, 100), (torch.uint8, 200), (torch.int16, 30_000)):
        tensor = torch.tensor([value, 1], dtype=dtype)
        same(idist.all_reduce(tensor.clone()), torch.stack([tensor] * size).sum(0, dtype=torch.int64).to(dtype))
        same(idist.all_reduce(tensor.clone(), "MAX"), tensor)
        same(idist.all_reduce(tensor.clone(), "AVERAGE"), tensor)


@check
def uint64_tensors_are_reduced() -> None:
    rank, size = place()
    mine = torch.tensor([2**64 - 1 - rank, rank, 2**63], dtype=torch.uint64)
    for op, wanted in (
        ("SUM", [size * 2**64 - size - sum(range(size)), sum(range(size)), size * 2**63]),
        ("MIN", [2**64 - size, 0, 2**63]),
        ("MAX", [2**64 - 1, size - 1, 2**63]),
    ):
        got = idist.all_reduce(mine.clone(), op)
        equal((got.dtype, got.tolist()), (torch.uint64, [number % 2**64 for number in wanted]))


@check
def averages_of_integers_are_exact_and_truncated() -> None:
    rank, size = place()
    same(idist.all_reduce(torch.tensor([2**53 + 1]), "AVERAGE"), torch.tensor([2**53 + 1]))
    equal(idist.all_reduce(rank, "AVERAGE"), sum(range(size)) // size)
    equal(idist.all_reduce(-rank, "AVERAGE"), -(sum(range(size)) // size))
    equal(idist.all_reduce(float(rank), "AVERAGE"), sum(range(size)) / size)


@check
def complex_tensors_are_gathered_and_summed() -> None:
    rank, size = place()
    value = torch.tensor([rank + 1j, 2.0])
    same(idist.all_gather(value), torch.tensor([part for other in range(size) for part in (other + 1j, 2.0)]))
    same(idist.all_reduce(value.clone()), torch.tensor([sum(range(size)) + size * 1j, 2.0 * size]))
    equal(idist.all_reduce(1 + 1j * rank), size + 1j * sum(range(size)))
    with pytest.raises(TypeError, match="op 'MAX' is not supported for complex numbers"):
        idist.all_reduce(value, "MAX")


@check
def unsupported_options_are_refused_before_communicating() -> None:
    _, size = place()
    model, batch_norm = nn.Linear(1, 1), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "ADASUM" in current().reductions
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (
            lambda: idist.all_reduce(torch.ones(2), "ADASUM"),
            NotImplementedError,
            "does not support ADASUM over gloo: build Horovod with MPI",
        ),
        (lambda: idist.auto_optim(sgd, op=hvd.Adasum), NotImplementedError, "does not support ADASUM over gloo"),
        (
            lambda: idist.auto_optim(sgd, colour=1),
            TypeError,
            r"Horovod's DistributedOptimizer got unknown options \['colour'\]; it accepts .*'groups'",
        ),
        (lambda: idist.auto_model(model, colour=1), TypeError, r"auto_model got unknown options \['colour'\]"),
        (
            lambda: idist.new_group([0], timeout=3),
            TypeError,
            r"new_group on backend 'horovod' got unknown options \['timeout'\]",
        ),
        (
            lambda: create("horovod", None, colour=1),
            TypeError,
            r"backend 'horovod' got unknown options \['colour'\]; it accepts \['comm', .*'timeout'\]",
        ),
        (lambda: create("horovod", None, timeout=30), TypeError, "timeout must be a datetime.timedelta, got 30"),
        (lambda: create("horovod", None), RuntimeError, "already initialized and is used automatically"),
    ]
    if size > 1:
        message = "sync_bn must be False on 'horovod'; backend 'nccl' "
        cases.append((lambda: idist.auto_model(batch_norm, sync_bn=True), ValueError, message))
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    assert idist.auto_model(model, find_unused_parameters=True) is model  # an option of DDP
    assert type(batch_norm[1]) is nn.BatchNorm1d
    equal(idist.all_reduce(1), size)


@check
def groups_of_the_same_ranks_share_one_process_set() -> None:
    rank, size = place()
    for _ in range(2):  # Horovod rejects a second process set of the same ranks
        for ranks in (list(range(size)), [size - 1]):
            group = idist.new_group(ranks)
            equal(idist.all_reduce(1, group=group), len(ranks) if rank in ranks else 1)
    equal(idist.all_reduce(1, group=hvd.global_process_set), size)
    known = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    assert len(known) == len({tuple(ranks) for ranks in known.values()})


@check
def process_sets_created_by_the_user_are_groups() -> None:
    rank, _ = place()
    known = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    mine = hvd.ProcessSet([0])
    if [0] not in known.values():
        mine = hvd.add_process_set(mine)
        equal(idist.all_reduce(5, group=mine), 5)
        if rank == 0:
            equal(idist.all_gather("a", group=mine), ["a"])
        equal(list(idist.new_group([0]).ranks), [0])
    with pytest.raises(ValueError, match="group must be None, a list of ranks, or an existing group from new_group"):
        idist.all_reduce(1, group=hvd.ProcessSet([0]))  # not registered with Horovod


@check
def the_environment_is_unchanged() -> None:
    assert "HOROVOD_DYNAMIC_PROCESS_SETS" not in os.environ
