"""The backend that everything talks to: set by the user, found when the user set one up elsewhere, or serial."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from camshaft.distributed import agreement
from camshaft.distributed.backend import Backend
from camshaft.distributed.backends.serial import SerialBackend
from camshaft.distributed.environments import detect, infer
from camshaft.distributed.outbox import pending
from camshaft.distributed.registry import adopted, module_of, nothing_has_begun

_serial = SerialBackend()
_process: Backend = _serial
_initialized = False
_scoped: ContextVar[Backend | None] = ContextVar("camshaft_backend", default=None)
_local_rank: int | None = None


def current() -> Backend:
    """Give the backend of this process, without any communication.

    A process group that somebody else made is found and taken over, and left again when it is gone.
    """
    scoped = _scoped.get()
    if scoped is not None:
        return scoped
    if _initialized or (_process is _serial and nothing_has_begun()):
        return _process
    return _looked_up()


def initialize(backend: str, *, debug: bool | None = None, **kwargs: Any) -> None:
    """Begin to talk to the other processes of this run.

    Args:
        backend: one of :func:`available_backends`.
        debug: compare before each collective what the ranks are about to do; ``None`` asks the environment
            variable ``CAMSHAFT_DEBUG``.
        kwargs: for the backend: ``timeout``, ``init_method``, ``rank``, ``world_size``, ``device`` and what
            ``torch.distributed.init_process_group`` takes, for those of torch.

    Raises:
        ValueError: the backend is not available, or an argument is out of range.
        RuntimeError: a run was begun already, or what the launcher left in the environment contradicts itself.
        TypeError: an argument is not known.
    """
    install(lambda: module_of(backend).create(backend, detect(os.environ), local_rank=_local_rank, **kwargs), debug)


def install(create: Callable[[], Backend], debug: bool | None = None) -> None:
    """Talk through the backend that a function makes, until :func:`finalize`.

    Raises:
        RuntimeError: a run was begun already.
    """
    global _process, _initialized
    if _initialized:
        raise RuntimeError(f"initialize was called already, with {_process.name!r}: call finalize first")
    _process = create()
    _initialized = True
    agreement.enable_if(debug, _process)


def finalize() -> None:
    """End the run, also one that was taken over; does nothing in a single process."""
    try:
        pending(current()).drain()
    finally:
        abandon()


def abandon() -> None:
    """End the run as :func:`finalize` does, but without waiting for anybody: something has failed."""
    global _process, _initialized
    backend = current()
    if backend is _process:
        _process, _initialized = _serial, False
        agreement.enable(None)
    backend.close()


def sync(temporary: bool = False) -> None:
    """Look again for a run that somebody else began, and forget one that is gone.

    Args:
        temporary: of no effect; queries look by themselves.
    """
    if not _initialized:
        _looked_up()


def set_local_rank(index: int) -> None:
    """Tell this process's number on its node, for a run that is begun without the help of a launcher.

    Raises:
        TypeError: ``index`` is not an integer.
        ValueError: it is negative.
    """
    global _local_rank
    if not isinstance(index, int):
        raise TypeError(f"index must be an int, got {index!r}")
    if index < 0:
        raise ValueError(f"index must not be negative, got {index}")
    _local_rank = index


@contextmanager
def use_backend(backend: Backend) -> Iterator[Backend]:
    """Let this thread talk through another backend for a while."""
    token = _scoped.set(backend)
    try:
        yield backend
    finally:
        _scoped.reset(token)


def _looked_up() -> Backend:
    """Give the run that exists, adopting it if it is new, and dropping one that has ended."""
    global _process
    if _process is _serial or not _process.is_alive():
        found = adopted(partial(infer, os.environ, local_rank=_local_rank)) or _serial
        if found is not _process:
            _process = found
            if found is _serial:
                agreement.enable(None)
            elif agreement.patience is None:
                agreement.enable_if(None, found)
    return _process
