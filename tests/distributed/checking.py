"""The table of checks that every backend passes, and what they assert with.

A check runs on every rank, with a context that is there already. It asks who it is, and asserts what this rank
must see; its name says so.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

import camshaft.distributed as idist

T = TypeVar("T")
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add a function to the checks."""
    assert function.__name__ not in CHECKS, f"there are two checks named {function.__name__}"
    CHECKS[function.__name__] = function
    return function


def place() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return idist.get_rank(), idist.get_world_size()


@contextmanager
def folder(owner: int = 0) -> Iterator[Path]:
    """Make a folder on the node of a rank, where all ranks see it, and that goes when all have left it."""
    path = Path(idist.broadcast(tempfile.mkdtemp() if idist.get_rank() == owner else "", owner, safe_mode=True))
    try:
        yield path
    finally:
        idist.barrier()
        if idist.get_rank() == owner:
            shutil.rmtree(path)


def in_turn(values: Iterable[T]) -> Iterator[tuple[int, T]]:
    """Yield each value together with a rank, the ranks in turn."""
    return zip(itertools.cycle(range(idist.get_world_size())), values, strict=False)


def here(tensor: Tensor) -> Tensor:
    """Return a tensor on the device of the backend, where it is reduced and overwritten in place."""
    return tensor.to(idist.device())


def same(got: Tensor, wanted: Tensor) -> None:
    """Assert that two tensors agree in shape, dtype and every value."""
    got = got.detach().cpu()
    if got.dtype != wanted.dtype or not torch.equal(got, wanted):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)  # tells the difference, but takes its time


def equal(got: object, wanted: object) -> None:
    """Assert that two values agree, in their type too."""
    assert got == wanted, f"got {got!r:.200}, wanted {wanted!r:.200}"
    assert type(got) is type(wanted), f"got a {type(got)}, wanted a {type(wanted)}"
