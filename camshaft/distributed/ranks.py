"""Which rank this process is, without communication; what runs on some ranks only; and what collectives check first."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import socket
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from camshaft.distributed.backend import Backend, Group
from camshaft.distributed.coordination import collective_check
from camshaft.distributed.run import current
from camshaft.errors import RankDivergenceError, annotate, line_of_caller

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger("camshaft.distributed.utils")
_ASSUMED = {
    "local_world_size": "the number of processes on this node",
    "num_nodes": "the number of nodes",
    "node_rank": "the number of this node",
}
_OUR_OWN = (RankDivergenceError, NotImplementedError)
_HINT = "set CAMSHAFT_DEBUG=1 to compare the calls of the ranks first, and see which rank called what from which line"

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
    """Log the distributed configuration in ten records; ``unknown`` where a query would raise."""
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


def _known(number: str) -> int:
    """Return a number of the topology unless it is only assumed: other ranks may assume another value."""
    backend = current()
    if number in backend.assumed:
        raise RuntimeError(
            f"{_ASSUMED[number]} is not known: the script created the process group itself, no environment "
            "variable says how its ranks are distributed over nodes, and a query must not communicate. Set "
            "LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE as torchrun does, or let "
            "camshaft.distributed.initialize create the process group, which compares the hosts of all ranks"
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
        TypeError: ``rank`` is not an integer, as in ``@one_rank_only`` without parentheses.
        ValueError: ``rank`` is negative; or, on every rank and when called, there is no such rank.

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
                    _synchronize(current(), "one_rank_only", rank, is_long=get_rank() != rank)

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
    rank = _plain_rank(rank, "with one_rank_first()")
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
        _synchronize(backend, "one_rank_first", rank, is_long=True)
    _check_exists(rank, size)  # not earlier: nodes that have such a rank wait for this one
    what = f"the body of one_rank_first(rank={rank}, local={local})"
    try:
        with only([topology.rank], what, line_of_caller("distributed"), (rank, local)):
            yield
    finally:
        if is_first:
            _synchronize(backend, "one_rank_first", rank)


def _synchronize(backend: Backend, where: str, rank: int, is_long: bool = False) -> None:
    """Wait for all ranks, patiently if one of them has something to do first."""
    ranks = range(backend.topology.world_size)
    try:
        begin(backend, where, None, ranks, root=rank, is_long=is_long)
        backend.barrier(None)
    except BaseException as error:
        explain(error, backend, where, ranks)
        raise


def _check_exists(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}), got {rank}")


def _plain_rank(rank: int, instead: str) -> int:
    try:
        return operator.index(rank)
    except TypeError as error:
        raise TypeError(f"rank must be an integer, got {rank!r}; write {instead}") from error


# --- the guard ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alone:
    """A block of code that some ranks run and the others do not.

    Args:
        present: the ranks that run it.
        what: the block.
        where: its line.
        turn: in ``one_rank_first``, the rank that goes first and whether it is a local one.
    """

    present: frozenset[int]
    what: str
    where: str
    turn: tuple[int, bool] | None


alone: ContextVar[Alone | None] = ContextVar("camshaft_alone", default=None)
"""What this thread runs at the moment without other ranks; every collective checks it."""


def check_all_present(collective: str, ranks: Sequence[int], rank: int) -> None:
    """Check that all ranks run the current block of code.

    Raises:
        RankDivergenceError: some do not, so the collective would hang.
    """
    here = alone.get()
    if here is None or here.present.issuperset(ranks):
        return
    absent = sorted(set(ranks) - here.present)
    raise RankDivergenceError(
        f"{collective} on rank {rank} waits for ranks {absent}, which do not run {here.what} ({here.where}); "
        f"only {sorted(here.present)} do: move the call out of it, or make it over a group of those"
    )


@contextlib.contextmanager
def only(present: Sequence[int], what: str, where: str, turn: tuple[int, bool] | None = None) -> Iterator[None]:
    """Mark a block as run by some ranks only, for this thread."""
    outer = alone.get()
    here = frozenset(present)
    if outer is not None:
        here, turn = here & outer.present, turn or outer.turn
    token = alone.set(Alone(here, what, where, turn))
    try:
        yield
    finally:
        alone.reset(token)


def begin(
    backend: Backend,
    collective: str,
    group: Group | None,
    ranks: Sequence[int],
    value: Any = None,
    how: str = "",
    root: Any = None,
    is_long: bool = False,
) -> None:
    """Check that a collective can complete: all ranks are present and, in debug mode, call the same.

    Args:
        backend: of this rank.
        collective: its name.
        group: the group, ``None`` for all ranks.
        ranks: the ranks of the group.
        value: a tensor with the same shape and dtype on all ranks; other kinds of values may differ.
        how: what else is the same on all ranks, for example the reduction.
        root: the rank that sends, or that receives the result.
        is_long: ranks may be busy for a long time before they call it.

    Raises:
        RankDivergenceError: it cannot.
    """
    check_all_present(collective, ranks, backend.topology.rank)
    if backend.job.compares_collectives and len(ranks) > 1:
        collective_check.compare(backend, group, ranks, collective, value, how, root, is_long)


# --- errors of the library below ---------------------------------------------------------------------------


def explain(error: BaseException, backend: Backend, collective: str, ranks: Sequence[int]) -> None:
    """Add to the error of a collective where it was raised, and raise a better one if ranks have left the job."""
    among = f", among the ranks {list(ranks)}" if ranks else ""
    where = f"in {collective} on rank {backend.topology.rank}{among}"
    annotate(error, where)
    raise_if_some_left(error, backend, ranks, where)
    if _is_of_library(error) and not backend.job.compares_collectives and len(ranks) > 1:  # the calls may differ
        annotate(error, _HINT)


def raise_if_some_left(error: BaseException, backend: Backend, ranks: Sequence[int], where: str) -> None:
    """Replace the error of a library that only reports a closed connection.

    Raises:
        RankDivergenceError: some of the ranks have left the job; it names them.
    """
    if _is_of_library(error) and (text := _departures(backend, ranks)):
        raise RankDivergenceError(f"{text}, {where}") from error


def annotate_departures(error: BaseException, backend: Backend) -> None:
    """Note on an error from anywhere, for example the backward pass of DDP, which ranks have left the job."""
    if _is_of_library(error) and (text := _departures(backend, range(backend.topology.world_size))):
        annotate(error, text)


def _is_of_library(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and not isinstance(error, _OUR_OWN)


def _departures(backend: Backend, ranks: Sequence[int]) -> str:
    found = "; ".join(f"rank {rank} {how}" for rank, how in backend.left(ranks).items())
    return found and f"{found}; every rank must take part in each collective"
