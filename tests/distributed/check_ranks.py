"""Where the ranks stand, and what some do before or without the others."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import camshaft.distributed as idist
from camshaft.errors import RankDivergenceError
from tests.distributed.checking import check, equal, folder, place

COLLECTIVES = (idist.barrier, lambda: idist.all_reduce(1), lambda: idist.all_gather("x"), lambda: idist.broadcast(1))


@check
def the_numbers_on_the_nodes_agree_with_each_other() -> None:
    _, size = place()
    node = (idist.get_node_rank(), idist.get_nproc_per_node(), idist.hostname())
    nodes: dict[tuple[int, int, str], list[int]] = {}
    for other, local_rank in idist.all_gather((node, idist.get_local_rank())):
        nodes.setdefault(other, []).append(local_rank)
    equal(sorted(number for number, _, _ in nodes), list(range(idist.get_nnodes())))
    for (_, count, _), local_ranks in nodes.items():
        equal(sorted(local_ranks), list(range(count)))
    equal(idist.all_gather(idist.get_nnodes()), [len(nodes)] * size)


@check
def all_ranks_name_the_same_backend_and_their_own_device() -> None:
    _, size = place()
    equal(idist.all_gather((idist.backend(), idist.model_name())), [(idist.backend(), idist.model_name())] * size)
    assert isinstance(idist.device(), torch.device)
    assert (idist.backend() is None) == (idist.model_name() == "serial")
    assert isinstance(idist.available_backends(), tuple)


@check
def one_rank_only_runs_a_function_there_and_gives_its_value() -> None:
    rank, size = place()
    for chosen in range(size):
        for with_barrier in (False, True):
            ran: list[int] = []
            name = idist.one_rank_only(chosen, with_barrier)(lambda ran=ran: (ran.append(rank), f"of {rank}")[1])
            equal(name(), f"of {chosen}" if rank == chosen else None)
            equal(ran, [chosen] if rank == chosen else [])


@check
def one_rank_only_lets_the_others_go_on_when_it_fails_or_calls_a_collective_over_all_ranks() -> None:
    rank, size = place()

    def fail() -> None:
        raise OSError("disk full")

    for function in (fail, *(COLLECTIVES if size > 1 else ())):
        call = idist.one_rank_only(size - 1, with_barrier=True)(function)
        if rank == size - 1:
            with pytest.raises((OSError, RankDivergenceError), match=f"disk full|rank {rank} waits for ranks"):
                call()
        else:
            call()
    equal(idist.all_reduce(1), size)


@check
def one_rank_only_with_barrier_lets_the_others_wait() -> None:
    rank, size = place()
    for chosen in range(size):
        nodes = idist.all_gather(idist.get_node_rank())
        with folder(chosen) as path:

            @idist.one_rank_only(chosen, with_barrier=True)
            def mark(path: Path = path) -> None:
                time.sleep(0.02)  # who does not wait is through by then
                (path / "mark").touch()

            mark()
            assert (path / "mark").exists() or nodes[rank] != nodes[chosen]


@check
def one_rank_first_lets_that_rank_go_first() -> None:
    rank, size = place()
    for first in range(size):
        nodes = idist.all_gather(idist.get_node_rank())
        with folder(first) as path, idist.one_rank_first(first):
            if rank == first:
                assert not (path / "mark").exists()
                (path / "mark").touch()
            assert (path / "mark").exists() or nodes[rank] != nodes[first]


@check
def one_rank_first_lets_the_others_go_on_when_it_fails() -> None:
    rank, size = place()
    for first in (0, size - 1):
        for local in (False, True):
            mine = idist.get_local_rank() if local else rank
            chosen = min(first, idist.get_nproc_per_node() - 1) if local else first
            went_on = False
            try:
                with idist.one_rank_first(chosen, local):
                    if mine == chosen:
                        raise OSError("no network")
                went_on = True
            except OSError:
                assert mine == chosen
            assert went_on is (mine != chosen)
    equal(idist.all_reduce(1), size)


@check
def no_collective_over_all_ranks_is_for_one_rank_first() -> None:
    rank, size = place()
    for collective in COLLECTIVES if size > 1 else ():
        with pytest.raises(RankDivergenceError, match=f"rank {rank} waits for ranks"), idist.one_rank_first(size - 1):
            collective()
    with idist.one_rank_first():
        equal(idist.all_reduce(1, group=[0]) if size == 1 else 1, 1)
    equal(idist.all_reduce(1), size)


@check
def a_rank_that_is_not_there_cannot_go_first_or_alone() -> None:
    _, size = place()
    for rank, local in ((-1, False), (size, False), (idist.get_nproc_per_node(), True)):
        with pytest.raises(ValueError, match="rank must be at least 0"), idist.one_rank_first(rank, local):
            pass
    for with_barrier in (False, True):
        with pytest.raises(ValueError, match=f"rank must be at least 0 and below {size}, the number of processes, got"):
            idist.one_rank_only(size, with_barrier)(pytest.fail)("it ran")
    with pytest.raises(TypeError, match=r"as in @one_rank_only\(\)"):
        idist.one_rank_only(print)  # type: ignore[arg-type]  # the parentheses are forgotten
