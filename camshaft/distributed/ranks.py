"""Which rank this process is, without communication, and what runs on some ranks only or first."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import socket
from collections.abc import Callable, Iterator
from typing import ParamSpec, SupportsIndex, TypeVar

import torch

from camshaft.arguments import check_type
from camshaft.distributed.backends.contract import Backend
from camshaft.distributed.collectives.call import Call
from camshaft.distributed.failures.alone import alone, check_all_present, only
from camshaft.distributed.job import current
from camshaft.errors import line_of_caller

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger("camshaft.distributed.utils")

# --- queries -----------------------------------------------------------------------------------------------


def get_rank() -> int:
    """Return the rank of this process, 0 for a single process.

    >>> get_rank()
    0
    """
    return current().topology.rank


def get_world_size() -> int:
    """Return the number of processes.

    >>> get_world_size()
    1
    """
    return current().topology.world_size


def get_local_rank() -> int:
    """Return the rank of this process on its node."""
    return current().topology.local_rank


def get_node_rank() -> int:
    """Return the number of this node.

    Raises:
        RuntimeError: as for :func:`get_nnodes`.
    """
    return _known("node_rank")


def get_nnodes() -> int:
    """Return the number of nodes.

    Raises:
        RuntimeError: the script created the process group itself, and no environment variable holds the number.
    """
    return _known("num_nodes")


def get_nproc_per_node() -> int:
    """Return the number of processes on this node.

    Raises:
        RuntimeError: as for :func:`get_nnodes`.
    """
    return _known("local_world_size")


def device() -> torch.device:
    """Return the device of this process."""
    return current().device


def backend() -> str | None:
    """Return the name of the backend, ``None`` for a single process."""
    return current().name


def model_name() -> str:
    """Return the kind of backend: ``"serial"``, ``"native-dist"``, ``"horovod-dist"`` or ``"xla-dist"``."""
    return current().model_name


def hostname() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def show_config() -> None:
    """Log the distributed configuration in ten records, with aligned values; ``unknown`` where a query would raise."""
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
        logger.info("%-26s %s", f"{name}:", value)


def _known(number: str) -> int:
    """Return a number of the topology unless it is only assumed: other ranks may assume another value."""
    backend = current()
    if number in backend.assumed:
        raise RuntimeError(
            f"{number} is unknown: the script created the process group itself, no environment variable describes how "
            "its ranks are placed on nodes, and queries do not communicate. Set LOCAL_WORLD_SIZE, GROUP_RANK and "
            "GROUP_WORLD_SIZE as torchrun does, or create the process group with camshaft.distributed.initialize, "
            "which compares the hosts of all ranks"
        )
    known: int = getattr(backend.topology, number)
    return known


# --- code for some ranks -----------------------------------------------------------------------------------


def one_rank_only(rank: int = 0, with_barrier: bool = False) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Return a decorator: the function runs on one rank, and the call returns ``None`` on the others.

    A collective inside the function raises ``RankDivergenceError``, since the other ranks would not take part.

    Args:
        rank: the rank that runs the function.
        with_barrier: all ranks synchronize after the call, also if the function raises.

    Raises:
        TypeError: ``rank`` is not an integer, as in ``@one_rank_only`` without parentheses; or the function is a
            generator or a coroutine.
        ValueError: on every rank, when called: there is no such rank.

    >>> @one_rank_only()
    ... def greet(name: str) -> str:
    ...     return f"hello {name}"
    >>> greet("you")
    'hello you'
    """
    check_type("rank", rank, SupportsIndex, "an integer, as in @one_rank_only()")

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(is_kind(inspect.unwrap(function)) for is_kind in kinds):  # they run after the guard has exited
            raise TypeError(f"one_rank_only does not support generators and coroutines, got {function!r}")
        name = getattr(function, "__qualname__", repr(function))
        code = getattr(inspect.unwrap(function), "__code__", None)
        line = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "a builtin"

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
            _check_exists(rank, get_world_size())  # not earlier: decorators run before initialize
            try:
                if get_rank() != rank:
                    return None
                with only([rank], f"{name}, which is for rank {rank} only", line):
                    return function(*args, **kwargs)
            finally:
                if with_barrier:
                    _synchronize(current(), "one_rank_only", rank)

        return wrapper

    return decorate


@contextlib.contextmanager
def one_rank_first(rank: int = 0, local: bool = False) -> Iterator[None]:
    """Run a block on one rank before the others run it, for example to download a file once.

    The others follow when that rank has left the block, also if it raises there. A collective over all ranks in the
    block raises ``RankDivergenceError``. Inside a block with the same arguments nothing is waited for again.

    Args:
        rank: the rank that goes first.
        local: ``rank`` is a local rank, one on each node.

    Raises:
        TypeError: ``rank`` is not an integer.
        ValueError: there is no such rank; with ``local``, on this node.

    >>> with one_rank_first():
    ...     print("ready")
    ready
    """
    check_type("rank", rank, SupportsIndex, "an integer, as in one_rank_first()")
    here = alone.get()
    if here is not None and here.turn == (rank, local):
        yield
        return
    backend = current()
    topology = backend.topology
    check_all_present("one_rank_first", range(topology.world_size), topology.rank)
    mine, size = (topology.local_rank, topology.local_world_size) if local else (topology.rank, topology.world_size)
    is_first = mine == rank
    if not is_first:
        _synchronize(backend, "one_rank_first", rank)
    # not earlier: nodes that have such a rank wait for this one
    _check_exists(rank, size, " on this node" if local else "")
    what = f"the body of one_rank_first(rank={rank}, local={local})"
    try:
        with only([topology.rank], what, line_of_caller("distributed"), (rank, local)):
            yield
    finally:
        if is_first:
            _synchronize(backend, "one_rank_first", rank)


def _synchronize(backend: Backend, where: str, rank: int) -> None:
    """Wait for all ranks."""
    with Call(where, backend, None) as call:
        call.begin(root=rank)
        backend.barrier(None)


def _check_exists(rank: int, size: int, where: str = "") -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank must be at least 0 and below {size}, the number of processes{where}, got {rank}")
