"""Which process of how many this is, without communication; and what some ranks do before or without the others."""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from camshaft.distributed.backend import Backend
from camshaft.distributed.calls import enter
from camshaft.distributed.context import current
from camshaft.distributed.guard import check_all_present, is_turn, line_of, line_of_caller, only

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger("camshaft.distributed.utils")
_NUMBERS = {
    "local_world_size": "the number of processes on this node",
    "num_nodes": "the number of nodes",
    "node_rank": "the number of this node",
}


def get_rank() -> int:
    """Give this process's number among all, 0 if it is alone.

    >>> get_rank()
    0
    """
    return current().topology.rank


def get_world_size() -> int:
    """Give the number of processes.

    >>> get_world_size()
    1
    """
    return current().topology.world_size


def get_local_rank() -> int:
    """Give this process's number on its node."""
    return current().topology.local_rank


def get_node_rank() -> int:
    """Return the number of this node.

    Raises:
        RuntimeError: as for :func:`get_nnodes`.
    """
    return _told("node_rank")


def get_nnodes() -> int:
    """Return the number of nodes.

    Raises:
        RuntimeError: nothing tells it to this rank, of a process group that the script made itself.
    """
    return _told("num_nodes")


def get_nproc_per_node() -> int:
    """Return the number of processes on this node.

    Raises:
        RuntimeError: as for :func:`get_nnodes`.
    """
    return _told("local_world_size")


def device() -> torch.device:
    """Give the device of this process."""
    return current().device


def backend() -> str | None:
    """Give the name of the backend, ``None`` for a single process."""
    return current().name


def model_name() -> str:
    """Give the kind of run: ``"serial"``, ``"native-dist"``, ``"horovod-dist"`` or ``"xla-dist"``."""
    return current().model_name


def hostname() -> str:
    """Give the name of this machine."""
    return socket.gethostname()


def show_config() -> None:
    """Log where this process stands, in ten records; ``unknown`` where a query would raise."""
    topology, assumed = current().topology, current().assumed
    known = {name: "unknown" if name in assumed else value for name, value in vars(topology).items()}
    lines = {
        "distributed configuration": model_name(),
        "backend": backend(),
        "device": device().type,
        "hostname": hostname(),
        "world size": get_world_size(),
        "rank": get_rank(),
        "local rank": get_local_rank(),
        "num processes per_node": known["local_world_size"],
        "num nodes": known["num_nodes"],
        "node rank": known["node_rank"],
    }
    for name, value in lines.items():
        logger.info("%s: %s", name, value)


def one_rank_only(rank: int = 0, with_barrier: bool = False) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Make a decorator: the function runs on one rank; on the others the call returns ``None``.

    A collective in the function raises ``RankDivergenceError``, since the other ranks would not take part.

    Args:
        rank: where it runs.
        with_barrier: all ranks wait for each other after the call, also when the function raises.

    Raises:
        TypeError: ``rank`` is not an integer, as when the parentheses of ``@one_rank_only()`` were forgotten.
        ValueError: ``rank`` is negative; or, on every rank and from the call, there is no such rank.

    >>> @one_rank_only()
    ... def greet(name: str) -> str:
    ...     return f"hello {name}"
    >>> greet("you")
    'hello you'
    """
    rank = _plain_rank(rank, "@one_rank_only()")
    if rank < 0:
        raise ValueError(f"rank must be 0 or more, got {rank}")

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        _check_runs_in_call(function)
        name, line = getattr(function, "__qualname__", repr(function)), line_of(function)

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
            _check_exists(rank, get_world_size())  # not earlier: decorators run before the run begins
            try:
                if get_rank() != rank:
                    return None
                with only([rank], f"{name}, which is for rank {rank} only", line):
                    return function(*args, **kwargs)
            finally:
                if with_barrier:
                    _meet(current(), "one_rank_only", rank, is_long=get_rank() != rank)

        return wrapper

    return decorate


@contextmanager
def one_rank_first(rank: int = 0, local: bool = False) -> Iterator[None]:
    """Run a block on one rank before the others do, to download something once, say.

    The others go on when that rank is through, also when the block raises there. A collective over all ranks
    in the block raises ``RankDivergenceError``. In a block where the ranks take turns in this order already, nobody
    waits again.

    Args:
        rank: the rank that goes first.
        local: ``rank`` is one on each node.

    Raises:
        TypeError: ``rank`` is not an integer.
        ValueError: there is no such rank; ``local``, on this node.

    >>> with one_rank_first():
    ...     print("ready")
    ready
    """
    rank = _plain_rank(rank, "with one_rank_first()")
    if is_turn((rank, local)):
        yield
        return
    backend = current()
    topology = backend.topology
    check_all_present("one_rank_first", range(topology.world_size), topology.rank)
    mine, size = (topology.local_rank, topology.local_world_size) if local else (topology.rank, topology.world_size)
    is_first = mine == rank
    if not is_first:
        _meet(backend, "one_rank_first", rank, is_long=True)
    _check_exists(rank, size)  # now, since nodes that have such a rank wait for this one
    try:
        with only(
            [topology.rank], f"the body of one_rank_first(rank={rank}, local={local})", line_of_caller(), (rank, local)
        ):
            yield
    finally:
        if is_first:
            _meet(backend, "one_rank_first", rank)


def _told(number: str) -> int:
    """Return a number of the topology, unless it is only assumed: other ranks may assume another one."""
    backend = current()
    if number in backend.assumed:
        raise RuntimeError(
            f"{_NUMBERS[number]} is not known: the script made the process group itself, no environment "
            "variable says how its ranks are distributed over nodes, and a query must not wait for other ranks. Set "
            "LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE as torchrun does, or let "
            "camshaft.distributed.initialize make the process group, which compares the hosts of all ranks"
        )
    told: int = getattr(backend.topology, number)
    return told


def _meet(backend: Backend, where: str, rank: int, is_long: bool = False) -> None:
    """Let all ranks wait for each other, for long if one of them has something to do first."""
    with enter(where, backend, None, root=rank, is_long=is_long):
        backend.barrier(None)


def _check_runs_in_call(function: Callable[..., Any]) -> None:
    """Refuse functions whose body runs when nobody watches over it any more."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_kind(inspect.unwrap(function)) for is_kind in kinds):
        raise TypeError(
            f"one_rank_only is for functions that run when called, no generators or coroutines: {function!r}"
        )


def _check_exists(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}), got {rank}")


def _plain_rank(rank: int, instead: str) -> int:
    try:
        return operator.index(rank)
    except TypeError as error:
        raise TypeError(f"rank must be an integer, got {rank!r}; write {instead}") from error
