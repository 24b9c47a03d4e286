"""The current backend: initialized by the user, adopted from an existing process group, or serial."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import count
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

from camshaft.distributed.backend import Backend, Observer
from camshaft.distributed.backends.serial import SerialBackend
from camshaft.distributed.coordination import collective_check
from camshaft.distributed.coordination.watcher import Watcher
from camshaft.distributed.environments import detect, infer, torchrun_agent
from camshaft.distributed.record import Record
from camshaft.distributed.registry import adopt, module_of, nothing_to_adopt
from camshaft.errors import check_type

logger = logging.getLogger("camshaft.distributed")
_serial = SerialBackend()
_process: Backend = _serial
_initialized = False
_scoped: ContextVar[Backend | None] = ContextVar("camshaft_backend", default=None)
_local_rank: int | None = None
_job_numbers = count(1)
_previous_hook = sys.__excepthook__
_finalizer: Finalize | None = None
_CONNECTING = 10.0  # seconds that the watcher has to connect


def current() -> Backend:
    """Return the backend of this process, without any communication.

    A process group that the user created is adopted, and dropped when it has been destroyed.
    """
    scoped = _scoped.get()
    if scoped is not None:
        return scoped
    if _initialized or (_process is _serial and nothing_to_adopt()):
        return _process
    return _detected()


def initialize(backend: str, *, debug: bool | None = None, hang_report_after: float = 60.0, **kwargs: Any) -> None:
    """Join the other processes of this job.

    Args:
        backend: one of :func:`available_backends`.
        debug: compare the calls of the ranks before each collective; ``None`` reads the environment
            variable ``CAMSHAFT_DEBUG``.
        hang_report_after: seconds that a rank waits in a collective until the log names the ranks that have not
            arrived, and what they are doing.
        kwargs: for the backend: ``timeout``, ``init_method``, ``rank``, ``world_size``, ``device`` and, for backends of
            torch, further arguments of ``torch.distributed.init_process_group``.

    Raises:
        ValueError: the backend is not available, or an argument is out of range.
        RuntimeError: already initialized, or the launcher's environment variables contradict each other.
        TypeError: unknown argument.
    """
    install(
        lambda: module_of(backend).create(backend, detect(os.environ), local_rank=_local_rank, **kwargs),
        debug,
        hang_report_after,
    )


def install(create: Callable[[], Backend], debug: bool | None = None, hang_report_after: float = 60.0) -> None:
    """Make the backend that a function creates the current one, until :func:`finalize`.

    Raises:
        RuntimeError: already initialized.
    """
    global _process, _initialized
    if _initialized:
        raise RuntimeError(f"already initialized with backend {_process.name!r}: call finalize first")
    check_type("hang_report_after", hang_report_after, (int, float), "a number of seconds")
    if not hang_report_after > 0:
        raise ValueError(f"hang_report_after must be above 0, got {hang_report_after}")
    _process = create()
    _initialized = True
    _start(_process, debug, hang_report_after)


def finalize() -> None:
    """Leave the job, whether it was initialized or adopted; does nothing in a single process."""
    try:
        current().job.finish()
    finally:
        abandon()


def abandon() -> None:
    """Leave the job as :func:`finalize` does, but without waiting for messages in flight: something has failed."""
    global _process, _initialized
    backend = current()
    if backend is _process:
        _process, _initialized = _serial, False
    backend.job.close()
    backend.close()


def sync(temporary: bool = False) -> None:
    """Adopt a process group that exists by now, and drop one that has been destroyed.

    Args:
        temporary: without effect; every query does this by itself.
    """
    if not _initialized:
        _detected()


def set_local_rank(index: int) -> None:
    """Set the local rank of this process, for jobs that no launcher started.

    Raises:
        TypeError: ``index`` is not an integer.
        ValueError: ``index`` is negative.
    """
    global _local_rank
    if not isinstance(index, int):
        raise TypeError(f"index must be an int, got {index!r}")
    if index < 0:
        raise ValueError(f"index must not be negative, got {index}")
    _local_rank = index


@contextmanager
def use_backend(backend: Backend) -> Iterator[Backend]:
    """Make ``backend`` the current one in this thread, for the length of a block."""
    token = _scoped.set(backend)
    try:
        yield backend
    finally:
        _scoped.reset(token)


def _detected() -> Backend:
    """Return the job that exists; adopt it if it is new, drop it if it has ended."""
    global _process
    if _process is _serial or not _process.is_alive():
        found = adopt(partial(infer, os.environ, local_rank=_local_rank)) or _serial
        if found is not _process:
            _process.job.close()
            _process = found
            if found is not _serial:
                _start(found, None)
    return _process


def _start(backend: Backend, debug: bool | None, hang_report_after: float = 60.0) -> None:
    job, topology = backend.job, backend.topology
    job.number = next(_job_numbers)  # here, which all ranks reach, not where a rank first needs it
    if topology.world_size > 1:
        try:
            job.record = Record(topology.rank, topology.world_size)
        except OSError as error:
            logger.warning("rank %d has no flight record: %s", topology.rank, error)
        watcher = Watcher.of(backend, job.record, hang_report_after, torchrun_agent(os.environ))
        if _initialized:  # a group that is adopted must not wait for its store
            watcher.is_everywhere = True
            watcher.has_connected.wait(_CONNECTING)
            if (record := job.record) is not None:  # all ranks begin to count here
                backend.observe(Observer(record.begin_in_torch, record.end, watcher.explained))
        if sys.excepthook is not _on_uncaught:
            global _previous_hook
            _previous_hook, sys.excepthook = sys.excepthook, _on_uncaught
    collective_check.enable_if(debug, backend)
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit)  # registered last, called first: before a backend waits there for the other ranks
    global _finalizer
    if _finalizer is None or not _finalizer.still_active():  # a forked process has lost that of its parent
        # processes of multiprocessing end without a call of the former
        _finalizer = Finalize(None, _close_at_exit, exitpriority=1)


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Publish an error that ends this process before its traceback is written."""
    watcher = _process.job.find(Watcher)
    found = error if watcher is None else watcher.fail(error)
    _previous_hook(type(found), found, found.__traceback__)


def _close_at_exit() -> None:
    if watcher := _process.job.find(Watcher):
        watcher.leave("has exited: it returned, or called sys.exit()")
    _process.job.close()
