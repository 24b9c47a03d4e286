"""Which process of how many this is, without communication; and what some ranks do before or without the others."""

from __future__ import annotations

import functools
import logging
import operator
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from camshaft.distributed.collectives import barrier
from camshaft.distributed.context import current
from camshaft.distributed.guard import line_of, only

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger("camshaft.distributed.utils")


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
    """Give the number of this node."""
    return current().topology.node_rank


def get_nnodes() -> int:
    """Give the number of nodes."""
    return current().topology.num_nodes


def get_nproc_per_node() -> int:
    """Give the number of processes on this node."""
    return current().topology.local_world_size


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
    """Log where this process stands, in ten records."""
    lines = {
        "distributed configuration": model_name(),
        "backend": backend(),
        "device": device().type,
        "hostname": hostname(),
        "world size": get_world_size(),
        "rank": get_rank(),
        "local rank": get_local_rank(),
        "num processes per_node": get_nproc_per_node(),
        "num nodes": get_nnodes(),
        "node rank": get_node_rank(),
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
        ValueError: ``rank`` is negative.

    >>> @one_rank_only()
    ... def greet(name: str) -> str:
    ...     return f"hello {name}"
    >>> greet("you")
    'hello you'
    """
    rank = _checked_rank(rank)

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        name, line = getattr(function, "__qualname__", repr(function)), line_of(function)

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                if get_rank() != rank:
                    return None
                with only([rank], f"{name}, which is for rank {rank} only", line):
                    return function(*args, **kwargs)
            finally:
                if with_barrier:
                    barrier()

        return wrapper

    return decorate


@contextmanager
def one_rank_first(rank: int = 0, local: bool = False) -> Iterator[None]:
    """Run a block on one rank before the others do, to download something once, say.

    The others go on when that rank is through, also when the block raises there. A collective over all ranks
    in the block raises ``RankDivergenceError``.

    Args:
        rank: the rank that goes first.
        local: ``rank`` is one on each node.

    Raises:
        ValueError: there is no such rank.

    >>> with one_rank_first():
    ...     print("ready")
    ready
    """
    backend = current()
    topology = backend.topology
    mine, size = (topology.local_rank, topology.local_world_size) if local else (topology.rank, topology.world_size)
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}), got {rank}")
    first = mine == rank
    if not first:
        backend.barrier(None)
    try:
        with only([topology.rank], f"the body of one_rank_first(rank={rank}, local={local})", "a with block"):
            yield
    finally:
        if first:
            backend.barrier(None)


def _checked_rank(rank: int) -> int:
    try:
        rank = operator.index(rank)
    except TypeError as error:
        raise TypeError(f"rank must be an integer, got {rank!r}; write @one_rank_only()") from error
    if rank < 0:
        raise ValueError(f"rank must be 0 or more, got {rank}")
    return rank
