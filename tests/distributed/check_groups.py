"""Some of the ranks among themselves. All ranks of a run know the group; members come in the order of their ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import camshaft.distributed as idist
from camshaft.errors import RankDivergenceError
from tests.distributed.checking import check, equal, here, place, same


def some_ranks() -> list[list[int]]:
    """Return lists of ranks: one, the last, the odd ones, all, and some out of order."""
    size = idist.get_world_size()
    odd = list(range(1, size, 2)) or [0]
    return [[0], [size - 1], odd, list(range(size)), list(range(size))[::-1], [size - 1, 0] if size > 1 else [0]]


def made() -> list[tuple[list[int], Any]]:
    """Yield sorted ranks, with the group that new_group made of them."""
    return [(sorted(ranks), idist.new_group(ranks)) for ranks in some_ranks()]


def groups() -> list[tuple[list[int], Any]]:
    """Yield sorted ranks, with what names their group: the list, or the group that new_group made of it."""
    return [(sorted(ranks), ranks) for ranks in some_ranks()] + made()


@check
def barrier_lets_every_rank_through() -> None:
    for _ in range(3):
        idist.barrier()
    for ranks, group in groups():
        idist.barrier(group=group)
        assert ranks


@check
def a_group_reduces_over_its_members_only() -> None:
    rank, _ = place()
    for ranks, group in groups():
        tensor = here(torch.tensor([rank + 1.0, 2.0]))
        assert idist.all_reduce(tensor, group=group) is tensor
        member = rank in ranks
        wanted = [sum(ranks) + len(ranks), 2.0 * len(ranks)] if member else [rank + 1, 2.0]
        same(tensor, torch.tensor(wanted, dtype=torch.float32))
        equal(idist.all_reduce(rank + 1, "MAX", group=group), ranks[-1] + 1 if member else rank + 1)


@check
def in_one_process_no_ranks_are_a_group_too() -> None:
    _, size = place()
    for ranks in ([], (), range(1, 1)):
        if size > 1:
            with pytest.raises(ValueError, match="must be a non-empty list of int"):
                idist.new_group(ranks)
            continue
        for group in (ranks, idist.new_group(ranks)):
            equal(idist.all_reduce(3, group=group), 3)
            equal(idist.broadcast("text", group=group), "text")
            idist.barrier(group=group)
            with pytest.raises(RankDivergenceError, match="which is not in its group"):
                idist.reduce(1, 0, group=group)


@check
def whatever_counts_as_an_integer_in_any_sequence_names_a_group_as_a_list_does() -> None:
    rank, size = place()
    every: list[Any] = [tuple(range(size)), range(size), [torch.tensor(other) for other in range(size)]]
    for ranks in (*every, (0,), range(size - 1, -1, -1)):
        equal(idist.all_reduce(1, group=ranks), len(ranks) if rank in ranks else 1)
        equal(idist.all_reduce(1, group=idist.new_group(ranks)), len(ranks) if rank in ranks else 1)
        idist.barrier(group=ranks)


@check
def a_group_gathers_from_its_members_in_the_order_of_their_ranks() -> None:
    rank, _ = place()
    for ranks, group in groups():
        if rank in ranks:
            same(idist.all_gather(here(torch.tensor([rank])), group=group), torch.tensor(ranks))
            equal(idist.all_gather(rank, group=group), ranks)
            equal(idist.all_gather("ü" * 500 * rank, group=group), ["ü" * 500 * other for other in ranks])
            shapes = [(other + 1, 2) for other in ranks]
            tensors = idist.all_gather_tensors_with_shapes(torch.full((rank + 1, 2), rank), shapes, group=group)
            equal([(tuple(one.shape), int(one[0, 0])) for one in tensors], list(zip(shapes, ranks, strict=True)))
        else:
            for value in (here(torch.tensor([rank])), rank, 0.5, "text", [rank], None):
                assert idist.all_gather(value, group=group) is value
            mine = torch.ones(3)
            assert idist.all_gather_tensors_with_shapes(mine, [(1,)] * len(ranks), group=group)[0] is mine


@check
def a_group_broadcasts_from_each_of_its_members() -> None:
    rank, _ = place()
    for ranks, group in groups():
        for src in ranks:
            tensor = here(torch.tensor([rank]))
            assert idist.broadcast(tensor, src, group=group) is tensor
            same(tensor, torch.tensor([src if rank in ranks else rank]))
            equal(idist.broadcast(f"of {rank}", src, group=group), f"of {src if rank in ranks else rank}")
            got = idist.broadcast(src if rank == src else None, src, safe_mode=True, group=group)
            equal(got, src if rank in ranks else None)


@check
def a_group_gathers_on_and_scatters_from_each_of_its_members() -> None:
    rank, _ = place()
    for ranks, group in made():
        for root in ranks if rank in ranks else ():
            equal(idist.reduce(rank, root, group=group), sum(ranks) if rank == root else None)
            equal(idist.gather(f"of {rank}", root, group=group), [f"of {k}" for k in ranks] if rank == root else None)
            tensors = idist.gather(torch.tensor([rank]), root, group=group)
            assert tensors is None if rank != root else tensors.tolist() == ranks
    for ranks, group in made():
        for root in ranks if rank in ranks else ():
            values = [f"to {other}" for other in ranks] if rank == root else None
            equal(idist.scatter(values, root, group=group), f"to {rank}")


@check
def a_group_exchanges_among_its_members() -> None:
    rank, _ = place()
    for ranks, group in made():
        if rank in ranks:
            got = idist.reduce_scatter(here(torch.tensor(ranks) + rank), group=group)
            same(got, torch.tensor([len(ranks) * rank + sum(ranks)]))
            values = [f"{rank} to {other}" for other in ranks]
            equal(idist.all_to_all(values, group=group), [f"{other} to {rank}" for other in ranks])


@check
def a_collective_for_members_refuses_the_other_ranks() -> None:
    rank, size = place()
    group = idist.new_group([size - 1])
    if rank == size - 1:
        return
    for call in (
        lambda: idist.reduce(1, size - 1, group=group),
        lambda: idist.gather(1, size - 1, group=group),
        lambda: idist.scatter(None, size - 1, group=group),
        lambda: idist.reduce_scatter(torch.ones(1), group=group),
        lambda: idist.all_to_all([1], group=group),
    ):
        with pytest.raises(RankDivergenceError, match=f"rank {rank}, which is not in its group"):
            call()


@check
def what_is_no_rank_of_the_group_can_be_no_source_or_destination() -> None:
    rank, size = place()
    own = idist.new_group([0])
    roots: list[tuple[str, Callable[..., Any]]] = [
        *(("src", call) for call in (idist.broadcast, idist.scatter)),
        *(("dst", call) for call in (idist.reduce, idist.gather)),
    ]
    impossible: list[tuple[type[Exception], Any]] = [
        *((ValueError, other) for other in (-1, size)),
        *((TypeError, other) for other in ("0", 0.5, None, [0])),
    ]
    for group in (None, own) if rank == 0 else (None,):
        for name, call in roots:
            for error, other in impossible:
                with pytest.raises(error, match=f"{name} must be (an integer|a rank of the group .*), got"):
                    call(1, other, group=group)
    equal(idist.broadcast(rank, torch.tensor(size - 1)), size - 1)  # type: ignore[arg-type]  # it counts as an integer


@check
def what_is_no_group_is_refused() -> None:
    size = idist.get_world_size()
    for group in (3, "world", {0}, 0.5, torch.arange(size)):
        for call in (idist.all_reduce, idist.all_gather, idist.broadcast):
            with pytest.raises(ValueError, match="group must be"):
                call(1, group=group)
        with pytest.raises(ValueError, match="group must be"):
            idist.barrier(group=group)
    lists: list[Any] = [[size], [-1], [0, 0], [0.0], ["0"], [None], [[0, 0]], [False]]
    for ranks in (*lists, (0, 0), range(size, size + 1)):
        with pytest.raises(ValueError, match="ranks must be"):
            idist.all_reduce(1, group=ranks)
    for ranks in (*lists, (0, 0), 0, None, {0}, torch.arange(size)):
        with pytest.raises(ValueError, match="ranks must be"):
            idist.new_group(ranks)


@check
def options_that_no_group_has_are_refused() -> None:
    with pytest.raises(TypeError, match=r"foo"):
        idist.new_group([0], foo=1)
