"""Utilities for user code, under the names of PyTorch-Ignite."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import ParamSpec, TextIO, TypeVar
from weakref import WeakSet

from camshaft.distributed import get_rank
from camshaft.files import hash_checkpoint
from camshaft.seeding import manual_seed
from camshaft.text import GREEN, RED, YELLOW, Look, to_str_list
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

P = ParamSpec("P")
R = TypeVar("R")

_STYLES = ((logging.ERROR, RED), (logging.WARNING, YELLOW), (logging.INFO, GREEN))  # by the least level

# The root logger always exists, and others add handlers to it: only these show whether it was set up here.
_our_handlers: WeakSet[logging.Handler] = WeakSet()


def setup_logger(
    name: str | None = "camshaft",
    level: int | str = logging.INFO,
    stream: TextIO | None = None,
    format: str = "%(asctime)s %(name)s %(levelname)s: %(message)s",
    filepath: PathLike | None = None,
    distributed_rank: int | None = None,
    reset: bool = False,
    encoding: str | None = "utf-8",
) -> logging.Logger:
    """Set up and return a logger that writes on rank 0 only.

    On other ranks its handlers are replaced by a ``NullHandler``. A named logger stops propagating to its parents. On a
    terminal, the names of levels have colors.

    Args:
        name: name of the logger; ``None`` for the root logger.
        level: level of the logger and its handlers.
        stream: stream to write to; standard error by default.
        format: format of each record.
        filepath: file to also append to.
        distributed_rank: rank of this process; by default that of the current job, without communication.
        reset: whether to set up a logger again that exists already, instead of returning it unchanged.
        encoding: encoding of the file.

    Raises:
        ValueError: ``distributed_rank`` is negative, or ``level`` or ``format`` is unknown to ``logging``.
        OSError: ``filepath`` cannot be opened. In both cases the logger is unchanged.

    >>> import sys
    >>> logger = setup_logger("my.trainer", stream=sys.stdout, format="%(name)s: %(message)s")
    >>> logger.info("started")
    my.trainer: started
    """
    rank = get_rank() if distributed_rank is None else distributed_rank
    if rank < 0:
        raise ValueError(f"distributed_rank must be 0 or more, got {rank}")
    if rank == 0 and not reset and _is_set_up(name):
        return logging.getLogger(name)
    handlers: list[logging.Handler] = [logging.NullHandler()]
    if rank == 0:
        formatter = logging.Formatter(format)
        handlers = [logging.StreamHandler(stream)]
        handlers[0].setLevel(level)  # an unknown level raises here, before a file is created
        if filepath is not None:
            handlers.append(logging.FileHandler(filepath, encoding=encoding))
        for handler in handlers:
            handler.setLevel(level)
            handler.setFormatter(formatter)
        if Look.of(sys.stderr if stream is None else stream).has_colors:
            handlers[0].setFormatter(_ColoredFormatter(format))
    logger = logging.getLogger(name)
    for handler in tuple(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    for handler in handlers:
        logger.addHandler(handler)
    _our_handlers.update(handlers)
    if rank == 0:
        logger.setLevel(level)
    if name is not None:
        logger.propagate = False
    return logger


class _ColoredFormatter(logging.Formatter):
    """Formats records for a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        plain, style = record.levelname, next((style for level, style in _STYLES if record.levelno >= level), None)
        record.levelname = Look(has_colors=True).styled(plain, style)
        try:
            return super().formatMessage(record)
        finally:
            record.levelname = plain  # other handlers get the same record


def _is_set_up(name: str | None) -> bool:
    """Return whether a logger was set up, or requested by name, before."""
    if name is None or name == logging.root.name:
        return any(handler in _our_handlers for handler in logging.root.handlers)
    existing = logging.Logger.manager.loggerDict.get(name)
    if not isinstance(existing, logging.Logger):
        return False  # unknown, or a placeholder above a logger with a longer name
    changed = existing.handlers or existing.filters or existing.disabled or not existing.propagate or existing.level
    return bool(changed) or not any(other.startswith(f"{name}.") for other in logging.Logger.manager.loggerDict)


def deprecated(
    deprecated_in: str, removed_in: str = "", reasons: Iterable[str] = (), raise_exception: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that marks a function as deprecated, in its docstring and on each call.

    Args:
        deprecated_in: version in which the function is deprecated.
        removed_in: version in which it will be removed.
        reasons: reasons, or what to use instead, one sentence each.
        raise_exception: whether to raise the ``DeprecationWarning`` instead of issuing it.

    >>> @deprecated("0.2.0", removed_in="0.4.0", reasons=["Use new()."], raise_exception=True)
    ... def old():
    ...     "Do it the old way."
    >>> old()
    Traceback (most recent call last):
    DeprecationWarning: old is deprecated since version 0.2.0 and will be removed in version 0.4.0. Use new().
    """
    details = (reasons,) if isinstance(reasons, str) else tuple(reasons)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        removal = f" and will be removed in version {removed_in}" if removed_in else ""
        sentence = f"{function.__name__} is deprecated since version {deprecated_in}{removal}."
        message = " ".join((sentence, *details))

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if raise_exception:
                raise DeprecationWarning(message)
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        # The directive that Sphinx knows, at the end of the docstring.
        directive = "\n".join([f".. deprecated:: {deprecated_in}", *(f"    {line}" for line in (sentence, *details))])
        wrapper.__doc__ = f"{inspect.cleandoc(function.__doc__)}\n\n{directive}" if function.__doc__ else directive
        return wrapper

    return decorate
