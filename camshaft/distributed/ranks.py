"""Ask for this process's place, without communication, and run a function on one rank only."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch.distributed

P = ParamSpec("P")
R = TypeVar("R")


def get_rank() -> int:
    """Return this process's rank in the default process group, 0 without one.

    >>> get_rank()
    0
    """
    return torch.distributed.get_rank() if _is_initialized() else 0


def get_world_size() -> int:
    """Return how many processes the default process group has, 1 without one.

    >>> get_world_size()
    1
    """
    return torch.distributed.get_world_size() if _is_initialized() else 1


def get_local_rank() -> int:
    """Return this process's rank on its machine, 0 without a default process group.

    It is what the launcher wrote to ``LOCAL_RANK``; else it follows from ``LOCAL_WORLD_SIZE``, and without
    that all ranks are taken to be on one machine.

    >>> get_local_rank()
    0
    """
    if not _is_initialized():
        return 0
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return get_rank() % int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))


def one_rank_only(rank: int = 0, with_barrier: bool = False) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Make a decorator: the function runs on one rank; on the others the call returns ``None``.

    Args:
        rank: where it runs.
        with_barrier: all ranks wait for each other after the call, also when the function raises.

    Raises:
        TypeError: ``rank`` is not an integer, as when the parentheses of ``@one_rank_only()`` were forgotten.
        ValueError: ``rank`` is negative.

    >>> @one_rank_only()
    ... def greet(name):
    ...     return f"hello {name}"
    >>> greet("you")
    'hello you'
    """
    try:
        rank = operator.index(rank)
    except TypeError as error:
        raise TypeError(f"rank must be an integer, got {rank!r}; write @one_rank_only()") from error
    if rank < 0:
        raise ValueError(f"rank must be 0 or more, got {rank}")

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return function(*args, **kwargs) if get_rank() == rank else None
            finally:
                if with_barrier and _is_initialized():
                    torch.distributed.barrier()

        return wrapper

    return decorate


def _is_initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
