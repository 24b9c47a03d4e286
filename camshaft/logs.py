"""Set up a logger, for applications; the library itself only ever gets plain loggers."""

from __future__ import annotations

import logging
from typing import TextIO
from weakref import WeakSet

from camshaft.types import PathLike

DEFAULT_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"

# The root logger exists always and others hang handlers on it, so that only these tell whether we set it up.
_our_handlers: WeakSet[logging.Handler] = WeakSet()


def configure_logger(
    name: str | None,
    *,
    rank: int,
    level: int | str = logging.INFO,
    stream: TextIO | None = None,
    format: str = DEFAULT_FORMAT,
    filepath: PathLike | None = None,
    reset: bool = False,
    encoding: str | None = "utf-8",
) -> logging.Logger:
    """Set up the logger ``name`` on the process ``rank``, and return it.

    On rank 0 it writes to ``stream``, and also to ``filepath`` if given. On the others it is silent: its
    handlers are removed, its level is kept. A named logger stops passing records on to the loggers above it.

    Args:
        name: of the logger; ``None`` for the root logger.
        rank: of this process.
        level: of the logger and its handlers.
        stream: where to write; standard error by default.
        format: of each record.
        filepath: a file to append to.
        reset: set up anew a logger that exists already, instead of returning it as it is. The handlers it had
            are closed.
        encoding: of the file.

    Raises:
        ValueError: ``rank`` is negative, or ``level`` or ``format`` is unknown to ``logging``.
        OSError: ``filepath`` cannot be opened. In both cases the logger is as it was.

    >>> import sys
    >>> logger = configure_logger("my.run", rank=0, stream=sys.stdout, format="%(levelname)s %(message)s")
    >>> logger.info("epoch %d", 1)
    INFO epoch 1
    """
    if rank < 0:
        raise ValueError(f"rank must be 0 or more, got {rank}")
    if rank == 0 and not reset and _is_set_up(name):
        return logging.getLogger(name)
    handlers: list[logging.Handler] = [logging.NullHandler()]
    if rank == 0:
        handlers = _make_handlers(level, stream, format, filepath, encoding)
    logger = logging.getLogger(name)
    _replace_handlers(logger, handlers)
    if rank == 0:
        logger.setLevel(level)
    if name is not None:
        logger.propagate = False
    return logger


def _is_set_up(name: str | None) -> bool:
    """Tell whether somebody has set up the logger, or asked for it by name, before us."""
    if name is None or name == logging.root.name:
        return any(handler in _our_handlers for handler in logging.root.handlers)
    existing = logging.Logger.manager.loggerDict.get(name)
    if not isinstance(existing, logging.Logger):
        return False  # unknown, or a mere placeholder above a logger of longer name
    return not (_is_untouched(existing) and _has_children(name))


def _is_untouched(logger: logging.Logger) -> bool:
    changed = logger.handlers or logger.filters or logger.disabled or not logger.propagate
    return not changed and logger.level == logging.NOTSET


def _has_children(name: str) -> bool:
    return any(other.startswith(f"{name}.") for other in logging.Logger.manager.loggerDict)


def _make_handlers(
    level: int | str, stream: TextIO | None, format: str, filepath: PathLike | None, encoding: str | None
) -> list[logging.Handler]:
    formatter = logging.Formatter(format)
    handlers: list[logging.Handler] = [logging.StreamHandler(stream)]
    handlers[0].setLevel(level)  # an unknown level raises here, before a file is made
    if filepath is not None:
        handlers.append(logging.FileHandler(filepath, encoding=encoding))
    for handler in handlers:
        handler.setLevel(level)
        handler.setFormatter(formatter)
    return handlers


def _replace_handlers(logger: logging.Logger, handlers: list[logging.Handler]) -> None:
    for handler in tuple(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    for handler in handlers:
        logger.addHandler(handler)
    _our_handlers.update(handlers)
