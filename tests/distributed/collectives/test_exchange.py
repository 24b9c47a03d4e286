"""Collectives at the edges: whatever one rank cannot send or read, all learn of, and nobody waits."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import camshaft.distributed as idist
from tests.ranks import on_ranks

LONG = "x" * 5000


class Vanishing:
    """What can be pickled anywhere and unpickled on rank 0 alone."""

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        return appear, (self.rank,)


def appear(rank):
    if dist.get_rank() != rank:
        raise ImportError("no such module here")
    return "here"


def raised(call):
    """Return the error that a call raises, as its kind and text with notes."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return type(error), f"{error} {error.__notes__}"
    return None, ""


@on_ranks(3)
def test_a_value_that_cannot_be_pickled_on_one_rank_raises_on_all():
    rank, unpicklable = idist.get_rank(), lambda: 1
    for good in ("short", LONG):
        mine = unpicklable if rank == 1 else good
        for call in (
            lambda mine=mine: idist.all_gather(mine),
            lambda mine=mine: idist.gather(mine, dst=2),
            lambda mine=mine: idist.broadcast(mine, src=1),
            lambda mine=mine: idist.broadcast(mine, src=1, safe_mode=True),
            lambda good=good: idist.scatter([good, unpicklable, good] if rank == 1 else None, src=1),
            lambda good=good: idist.all_to_all([good, good, unpicklable] if rank == 1 else [good] * 3),
        ):
            kind, text = raised(call)
            assert issubclass(kind, TypeError)
            assert "must be picklable, got <function" in text
            assert rank == 1 or "rank 1 cannot take part" in text
        assert idist.all_gather(rank) == [0, 1, 2]  # and all are in step


@on_ranks(2)
def test_what_one_rank_cannot_send_raises_on_all():
    rank = idist.get_rank()
    meta, large_meta = torch.ones(2, device="meta"), torch.ones(999, device="meta")
    for call, error, shown in (
        (lambda: idist.scatter([1, 2, 3] if rank == 0 else None), ValueError, ""),
        (lambda: idist.scatter(None), ValueError, ""),
        (lambda: idist.scatter(5 if rank == 0 else None), ValueError, ""),
        (lambda: idist.scatter(torch.tensor(1) if rank == 0 else None), ValueError, ""),
        (lambda: idist.all_to_all((one for one in (1, 2)) if rank == 0 else [1, 2]), ValueError, ""),
        (lambda: idist.all_to_all([1, 2][: 2 - rank]), ValueError, ""),
        (lambda: idist.broadcast(None, safe_mode=True), ValueError, ""),
        (lambda: idist.broadcast(meta if rank == 0 else None, safe_mode=True), TypeError, "hold values"),
        (lambda: idist.broadcast(large_meta if rank == 0 else None, safe_mode=True), TypeError, "hold values"),
        (lambda: idist.scatter([meta, 1] if rank == 0 else None), TypeError, "hold values"),
        (lambda: idist.all_reduce("3" if rank == 0 else 3), TypeError, "type str|numbers of the same kind"),
        (lambda: idist.reduce([1.0] if rank == 0 else 1.0), TypeError, "type list|numbers of the same kind"),
        (lambda: idist.all_reduce("3" if rank == 0 else 3, "MAX"), TypeError, "got '3' of type str"),
        (lambda: idist.all_reduce("3" if rank == 0 else 3, "OR"), TypeError, "got '3' of type str"),
    ):
        kind, text = raised(call)
        assert issubclass(kind, error)
        assert re.search(shown, text), text
        if error is TypeError:
            assert rank == 0 or "rank 0 cannot take part" in text or "of the same kind" in text
        assert idist.all_gather(rank) == [0, 1]  # and all are in step


@on_ranks(2)
def test_what_is_rejected_before_anything_is_sent_raises_on_this_rank_only():
    """The others may have tensors, which gloo could only abort the processes for."""
    if idist.get_rank() == 0:
        with pytest.raises(TypeError, match="tensor must be a tensor or a number, got None"):
            idist.all_reduce(None)
        with pytest.raises(ValueError, match="src must be") as caught:
            idist.broadcast(1, src=7)
        assert caught.value.__notes__ == ["in broadcast on rank 0, among the ranks [0, 1]"]
        for call in (idist.all_reduce, idist.broadcast):
            with pytest.raises(
                ValueError, match=r"its own memory for each element, got one that was expanded to \(3, 2"
            ):
                call(torch.ones(2).expand(3, 2))
    assert idist.all_reduce(torch.ones(1000)).sum() == 2000
    assert idist.all_gather(torch.ones(1).expand(3)).tolist() == [1.0] * 6
    assert idist.reduce(torch.ones(1).expand(3), dst=1) is None or idist.get_rank() == 1


@on_ranks(2)
def test_only_safe_mode_takes_tensors_that_are_not_dense():
    here = idist.get_rank() == 0
    sparse = torch.eye(3).to_sparse()
    assert idist.broadcast(sparse if here else None, safe_mode=True).to_dense().equal(torch.eye(3))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(300)], layout=torch.jagged)
    assert [len(one) for one in idist.broadcast(nested if here else None, safe_mode=True).unbind()] == [2, 300]
    for tensor, kind in ((sparse, "sparse_coo"), (torch.ones(2, device="meta"), "strided"), (nested, "jagged")):
        for call in (idist.all_reduce, idist.all_gather, idist.broadcast, idist.reduce, idist.gather):
            with pytest.raises(TypeError, match=f"tensor must be dense and hold values, got a {kind} one"):
                call(tensor)
    with pytest.raises(TypeError, match="tensor must be dense and hold values, got a sparse_coo one"):
        idist.all_gather_tensors_with_shapes(sparse, [sparse.shape] * 2)


@on_ranks(2)
def test_a_value_that_cannot_be_unpickled_raises_there_and_names_its_rank():
    rank = idist.get_rank()
    kind, text = raised(lambda: idist.all_gather(Vanishing(0) if rank == 1 else "fine"))
    assert (kind is TypeError) is (rank == 1)
    assert rank == 0 or "the value is that of rank 1" in text
    assert idist.all_reduce(1) == 2


@on_ranks(2)
def test_tensors_of_any_layout_are_changed_in_place():
    rank = idist.get_rank()
    whole = torch.full((4, 4), float(rank))
    with torch.inference_mode():
        inferred = torch.full((2, 2), float(rank))
    for tensor, wanted in (
        (nn.Parameter(torch.full((2,), float(rank))), 1.0),
        (nn.Parameter(torch.full((2, 3), float(rank))).t(), 1.0),
        (whole[:, 1], 1.0),
        (whole[2:3, 2:], 1.0),
        (torch.full((1, 2, 3, 4), float(rank)).contiguous(memory_format=torch.channels_last), 1.0),
        (inferred.t(), 1.0),
        (torch.full((2,), complex(rank, 1)).conj(), 1 - 2j),
        (torch.tensor(rank), 1),
    ):
        pointer, stride = tensor.data_ptr(), tensor.stride()
        assert idist.all_reduce(tensor) is tensor
        assert (tensor.data_ptr(), tensor.stride()) == (pointer, stride)
        assert tensor.detach().eq(wanted).all(), tensor
    assert whole[0].tolist() == [rank, 1.0, rank, rank]
    with torch.no_grad():
        leaf = torch.ones(2, requires_grad=True)
        idist.broadcast(leaf.t(), src=1)
    assert leaf.is_leaf


@on_ranks(2)
def test_large_values_of_different_lengths():
    rank = idist.get_rank()
    values = [LONG, "short", {"k": torch.ones(1000), "l": LONG}, torch.arange(3000.0)]
    for mine, theirs in itertools.product(values, values):
        sent = [mine, theirs][:: 1 - 2 * rank]
        assert list(map(type, idist.all_to_all(sent))) == list(map(type, sent))
        assert type(idist.scatter([mine, theirs] if rank == 0 else None)) is type((mine, theirs)[rank])
    assert idist.gather(LONG * (rank + 1), dst=1) == (None if rank == 0 else [LONG, LONG * 2])
    assert idist.scatter(torch.arange(2) if rank == 0 else None) == rank  # along its first dimension
    assert idist.all_to_all(torch.arange(2)) == [rank, rank]
