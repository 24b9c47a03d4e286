"""Queries never communicate; what one rank does alone always releases the others, and never hangs in a collective."""

from __future__ import annotations

import inspect
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import camshaft.distributed as idist
from camshaft.distributed.backends.serial import SerialBackend
from camshaft.distributed.topology import Topology
from camshaft.errors import RankDivergenceError

PLACE = Topology(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1, num_nodes=2)


class Somewhere(SerialBackend):
    """A backend that is somewhere in a run, and counts the barriers instead of waiting."""

    name = "somewhere"

    def __init__(self, topology=PLACE):
        self.topology = topology
        self.barriers = []

    def barrier(self, group):
        self.barriers.append(group)

    def new_group(self, ranks, **options):
        return frozenset(ranks)

    def ranks_of(self, group):
        return sorted(group) if isinstance(group, frozenset) else None


@contextmanager
def at_rank(rank, world_size=4):
    topology = Topology(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    with idist.use_backend(Somewhere(topology)) as backend:
        yield backend


def test_queries_answer_from_the_topology_which_by_default_is_that_of_a_single_process():
    queries = idist.get_rank, idist.get_world_size, idist.get_local_rank, idist.get_nproc_per_node
    queries += idist.get_node_rank, idist.get_nnodes, idist.backend
    assert [query() for query in queries] == [0, 1, 0, 1, 0, 1, None]
    with idist.use_backend(Somewhere()):
        assert [query() for query in queries] == [3, 4, 1, 2, 1, 2, "somewhere"]


def test_a_collective_among_the_present_ranks_is_allowed():
    @idist.one_rank_only()
    def alone(group):
        idist.barrier(group=group)

    with at_rank(0) as backend:
        with pytest.raises(RankDivergenceError, match="new_group on rank 0 waits for ranks"):
            alone([0])  # all ranks make a group
        alone(idist.new_group([0]))
        alone([0])
        assert len(backend.barriers) == 2


def test_one_rank_first_nests_only_with_the_same_arguments():
    @idist.one_rank_only(rank=1)
    def first_once_more():
        with idist.one_rank_first(1):
            ran.append("inside")

    ran = []
    with at_rank(1) as backend, idist.one_rank_first(1):
        with idist.one_rank_first(1):
            first_once_more()
        for rank, local in ((0, False), (1, True)):
            with pytest.raises(RankDivergenceError, match="one_rank_first on rank 1 waits"):
                idist.one_rank_first(rank, local).__enter__()
        assert (ran, backend.barriers) == (["inside"], [])
    assert backend.barriers == [None]


@pytest.mark.parametrize(("local_rank", "barriers"), [(0, 1), (1, 1)])
def test_a_node_without_the_local_rank_raises_and_releases_the_others(local_rank, barriers):
    small = Topology(rank=2, world_size=3, local_rank=0, local_world_size=1, node_rank=1, num_nodes=2)
    large = Topology(rank=local_rank, world_size=3, local_rank=local_rank, local_world_size=2, num_nodes=2)
    with idist.use_backend(Somewhere(small)) as backend:
        with pytest.raises(ValueError, match="rank must be at least 0"), idist.one_rank_first(1, local=True):
            pass
        assert len(backend.barriers) == barriers
    with idist.use_backend(Somewhere(large)) as backend:
        with idist.one_rank_first(1, local=True):
            assert len(backend.barriers) == (local_rank != 1)
        assert len(backend.barriers) == barriers


def test_one_rank_only_rejects_generators_and_coroutines():
    async def later():
        pass

    def generate():
        yield

    async def generate_later():
        yield

    for function in (later, generate, generate_later):
        with pytest.raises(TypeError, match="does not support generators and coroutines"):
            idist.one_rank_only()(function)


def test_rank_must_be_an_integer():
    for rank in ("0", None, 0.5):
        with pytest.raises(TypeError, match="rank must be an integer"):
            idist.one_rank_only(rank)
        with pytest.raises(TypeError, match="rank must be an integer"), idist.one_rank_first(rank):
            pass


def test_one_rank_first_decorates_functions_too_and_the_error_names_the_line_of_the_block():
    @idist.one_rank_first(1)
    def download():
        return len(backend.barriers)

    where = r"test_ranks\.py:\d+ in test_one_rank_first"
    with at_rank(0) as backend:
        assert (download(), download()) == (1, 2)
        with pytest.raises(RankDivergenceError, match=where), idist.one_rank_first():
            idist.barrier()
    with at_rank(1) as backend:
        assert (download(), download(), len(backend.barriers)) == (0, 1, 2)


def test_one_rank_only_on_methods_and_other_threads():
    class Saver:
        @idist.one_rank_only()
        def save(self, name, overwrite=False):
            """Save."""
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(waits_for_others).result(), name

    def waits_for_others():
        with idist.use_backend(backend):
            idist.barrier()
        return "through"

    with at_rank(0) as backend:
        assert Saver().save("a") == ("through", "a")
        assert Saver().save(name="b")[1] == "b"
    assert (Saver.save.__name__, Saver.save.__doc__) == ("save", "Save.")
    assert str(inspect.signature(Saver.save)) == "(self, name, overwrite=False)"


def test_show_config_logs_where_the_rank_stands(caplog):
    caplog.set_level(logging.INFO, logger="camshaft.distributed.utils")
    with idist.use_backend(Somewhere()):
        idist.show_config()
    assert len(caplog.messages) == 10
    for name, value in {"backend": "somewhere", "rank": 3, "world size": 4}.items():  # aligned
        assert f"{name + ':':26} {value}" in caplog.messages
