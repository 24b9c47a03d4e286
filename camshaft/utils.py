"""Utilities for user code, where imports written for the API look for them."""

from __future__ import annotations

import logging
from typing import TextIO

from camshaft.deprecation import deprecated
from camshaft.distributed import get_rank
from camshaft.files import hash_checkpoint
from camshaft.logs import DEFAULT_FORMAT, configure_logger
from camshaft.seeding import manual_seed
from camshaft.text import to_str_list
from camshaft.tree import apply_to_tensor, apply_to_type, convert_tensor, to_onehot
from camshaft.types import PathLike

__all__ = [
    "apply_to_tensor",
    "apply_to_type",
    "convert_tensor",
    "deprecated",
    "hash_checkpoint",
    "manual_seed",
    "setup_logger",
    "to_onehot",
]

_to_str_list = to_str_list


def setup_logger(
    name: str | None = "camshaft",
    level: int | str = logging.INFO,
    stream: TextIO | None = None,
    format: str = DEFAULT_FORMAT,
    filepath: PathLike | None = None,
    distributed_rank: int | None = None,
    reset: bool = False,
    encoding: str | None = "utf-8",
) -> logging.Logger:
    """Set up the logger ``name``, which writes on rank 0 only, and return it.

    Args:
        name: of the logger; ``None`` for the root logger.
        level: of the logger and its handlers.
        stream: where to write; standard error by default.
        format: of each record.
        filepath: a file to append to as well.
        distributed_rank: of this process; asked from torch by default, without communication. On ranks above
            0 the logger has no handlers but a ``NullHandler``.
        reset: set up anew a logger that exists already, instead of returning it as it is.
        encoding: of the file.

    Raises:
        ValueError: ``distributed_rank`` is negative, or ``level`` or ``format`` is unknown to ``logging``.
        OSError: ``filepath`` cannot be opened.

    >>> import sys
    >>> logger = setup_logger("my.trainer", stream=sys.stdout, format="%(name)s: %(message)s")
    >>> logger.info("started")
    my.trainer: started
    """
    return configure_logger(
        name,
        rank=get_rank() if distributed_rank is None else distributed_rank,
        level=level,
        stream=stream,
        format=format,
        filepath=filepath,
        reset=reset,
        encoding=encoding,
    )
