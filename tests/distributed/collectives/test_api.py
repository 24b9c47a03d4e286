"""How often a collective calls the backend for each kind of value: once where that is enough, at most twice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import camshaft.distributed as idist
from camshaft.distributed.collectives.call import Call
from camshaft.distributed.failures import debug, watcher
from camshaft.distributed.job import current
from camshaft.errors import RankDivergenceError
from tests.limits import HANG
from tests.ranks import await_watchers, on_ranks

MOVES = (
    "all_reduce", "all_gather", "all_gather_into", "broadcast", "barrier", "reduce", "gather", "scatter",
    "reduce_scatter", "all_to_all", "send", "receive", "new_group", "store",
)  # fmt: skip

TENSOR, LARGE_TENSOR = torch.ones(2), torch.ones(2, 1000)
ONE = (3, 2.5, True, -0.0, 2**70, "short", "größer" * 40, None, {"k": [1, None]}, torch.float32)  # fit into a row
TWO = ("long" * 1000, {"k": "long" * 1000}, list(range(1000)))
TO_EACH_ONE = (3, "short", {"k": 1}, TENSOR)
TO_EACH_TWO = ("long" * 1000, LARGE_TENSOR)


@contextmanager
def counted():
    """Note what is asked of the backend."""
    backend = current()
    calls: list[str] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (calls.append(name), call(*args, **kwargs))[1]

    for name in MOVES:
        setattr(backend, name, noting(name, getattr(backend, name)))
    try:
        yield calls
    finally:
        for name in MOVES:
            delattr(backend, name)


def expect(calls: list[str], call: Callable[[], object]) -> None:
    with counted() as made:
        call()
    made = [name for name in made if name != "store"]  # of the watcher's thread
    assert made == calls, (made, calls)


@on_ranks(2)
def test_tensors_and_numbers_take_one_call():
    for calls, call in (
        ("all_reduce", lambda: idist.all_reduce(LARGE_TENSOR.clone())),
        ("all_reduce", lambda: idist.all_reduce(LARGE_TENSOR.clone().t())),
        ("all_gather_into", lambda: idist.all_gather(LARGE_TENSOR)),
        ("all_gather_into", lambda: idist.all_gather(torch.tensor(1.0))),
        ("all_gather", lambda: idist.all_gather_tensors_with_shapes(TENSOR, [(2,), (2,)])),
        ("broadcast", lambda: idist.broadcast(LARGE_TENSOR.clone())),
        ("reduce", lambda: idist.reduce(LARGE_TENSOR)),
        ("gather", lambda: idist.gather(LARGE_TENSOR)),
        ("reduce_scatter", lambda: idist.reduce_scatter(LARGE_TENSOR)),
        *(("all_reduce", lambda number=number: idist.all_reduce(number)) for number in (3, 2.5, True)),
        ("all_reduce", lambda: idist.reduce(3)),
        *(("all_gather_into", lambda op=op: idist.all_reduce(2.5, op)) for op in ("MIN", "MAX", "PRODUCT")),
        ("all_reduce all_reduce", lambda: idist.all_reduce(2j)),
    ):
        expect(calls.split(), call)


@on_ranks(2)
def test_other_values_take_one_call_or_two_if_long():
    rank = idist.get_rank()
    for values, times in ((ONE, 1), (TWO, 2)):
        for value in values:
            expect(["all_gather_into"] * times, lambda value=value: idist.all_gather(value))
            expect(["all_gather_into", "gather"][:times], lambda value=value: idist.gather(value, dst=1))
            if value is not None:
                expect(["broadcast"] * times, lambda value=value: idist.broadcast(value))
                for other in (None, "anything"):
                    mine = value if rank == 1 else other
                    expect(["broadcast"] * times, lambda mine=mine: idist.broadcast(mine, src=1, safe_mode=True))
    for values, times in ((TO_EACH_ONE, 1), (TO_EACH_TWO, 2)):
        for value in values:
            expect(["scatter"] * times, lambda value=value: idist.scatter([value, value] if rank == 0 else None))
            expect(["all_to_all"] * times, lambda value=value: idist.all_to_all([value, 1] if rank == 0 else [1, 1]))
    one_is_long = "long" * 1000 if rank else 1
    expect(["all_gather_into"] * 2, lambda: idist.all_gather(one_is_long))  # all send twice
    for tensor, times in ((TENSOR, 1), (torch.tensor(1), 1), (torch.ones(0, 3), 1), (LARGE_TENSOR, 2)):
        mine = tensor if rank == 0 else None
        expect(["broadcast"] * times, lambda mine=mine: idist.broadcast(mine, safe_mode=True))


@on_ranks(2)
def test_queries_and_ranks_outside_the_group_make_no_call():
    rank, group = idist.get_rank(), idist.new_group([0])
    for call, name in (
        (lambda: idist.all_reduce(1, group=group), "all_reduce"),
        (lambda: idist.all_gather(1, group=group), "all_gather_into"),
        (lambda: idist.broadcast(1, group=group), "broadcast"),
        (lambda: idist.barrier(group), "barrier"),
    ):
        expect([name] if rank == 0 else [], call)
    if rank == 0:  # the others do not ask
        for query in (
            idist.get_rank, idist.get_local_rank, idist.get_node_rank, idist.get_world_size, idist.get_nnodes,
            idist.get_nproc_per_node, idist.backend, idist.device, idist.model_name, idist.hostname,
            idist.show_config, idist.sync, idist.available_backends,
        ):  # fmt: skip
            expect([], query)

    def take_turns():
        with idist.one_rank_first(), idist.one_rank_first():
            pass

    expect(["barrier"], take_turns)
    expect(["barrier"], idist.one_rank_only(with_barrier=True)(lambda: None))
    expect([], idist.one_rank_only()(lambda: None))


def test_queries_import_nothing():
    before = set(sys.modules)
    assert (idist.get_rank(), idist.backend()) == (0, None)
    assert set(sys.modules) == before


@on_ranks(2)
def test_errors_of_torch_are_explained_by_the_calls_of_the_ranks():
    await_watchers()
    watcher._LEARNING = HANG  # for the watcher, which may stand still
    if idist.get_rank() == 0:
        idist.all_reduce(torch.ones(2))  # gloo does not notice, and this rank ends
        return
    with pytest.raises(RankDivergenceError, match="rank 0 .*float32 \\[2\\](.|\n)*rank 1 .*float32 \\[3\\]"):
        idist.all_reduce(torch.ones(3))


@on_ranks(2)
def test_only_errors_of_torch_point_to_the_debug_mode():
    for error, is_told in ((RuntimeError, True), (ValueError, False), (NotImplementedError, False)):
        with pytest.raises(error) as caught, Call("barrier", current(), None):
            raise error("here")
        assert any("CAMSHAFT_DEBUG=1" in note for note in caught.value.__notes__) is is_told
    debug.enable(current())
    with pytest.raises(RuntimeError) as caught, Call("barrier", current(), None):
        raise RuntimeError("the comparison is on already")
    assert len(caught.value.__notes__) == 1


@on_ranks(2)
def test_gathered_tensors_have_no_gradient_and_a_warning_says_so():
    x = torch.ones(2, 1, requires_grad=True)
    for call in (idist.all_gather, lambda one: idist.all_gather_tensors_with_shapes(one, [(2, 1)] * 2)):
        with pytest.warns(UserWarning, match="returns values without gradients"):
            call(2 * x)
        call(x), call((2 * x).detach())
        with torch.no_grad():
            call(2 * x)
    idist.all_reduce(2 * x)  # which changes its argument
