"""The current backend: initialized by the user, adopted from an existing process group, or serial."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from contextvars import ContextVar
from functools import partial
from io import StringIO
from itertools import count
from multiprocessing.util import Finalize
from threading import RLock
from types import TracebackType
from typing import Any

from torch.utils.data import get_worker_info

from camshaft import activity
from camshaft.arguments import check_type
from camshaft.distributed import cores, failures
from camshaft.distributed.backends.contract import Backend, Job, Resource
from camshaft.distributed.backends.registry import adopt, joined, module_of, nothing_to_adopt
from camshaft.distributed.backends.serial import SerialBackend
from camshaft.distributed.environments import detect, infer, torchrun_agent
from camshaft.distributed.failures import debug as debug_mode
from camshaft.errors import RankDivergenceError, RankFailedError, level_of_caller, line_of_error

logger = logging.getLogger("camshaft.distributed")
_serial = SerialBackend()
_process: Backend = _serial
_initialized = _is_joining = False
_lock = RLock()  # of these three, while one of them changes
# What the process that forked this one had joined. It can be queried here, but this process is none of its ranks. A
# data loader worker may be the first to import this module.
_inherited: tuple[Any, ...] = () if get_worker_info() is None else joined()
_scoped: ContextVar[Backend | None] = ContextVar("camshaft_backend", default=None)
_local_rank: int | None = None
_job_numbers = count(1)
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


def data_place(
    backend: Backend | None = None, mesh: Any = None, axes: Sequence[str] = ("dp_replicate", "dp_shard")
) -> tuple[int, int]:
    """Return the index of the share of the data that this rank processes, and the number of shares.

    Args:
        backend: the current one by default.
        mesh: that of the job by default. Without any, each rank has a share of its own.
        axes: of the mesh, along which the shares differ.
    """
    backend = backend or current()
    mesh = backend.job.mesh if mesh is None else mesh
    if mesh is None:
        return backend.topology.rank, backend.topology.world_size
    place, total = 0, 1
    for name, size, index in zip(mesh.mesh_dim_names or (), mesh.shape, mesh.get_coordinate() or (), strict=False):
        if name in axes:
            place, total = place * size + index, total * size
    return place, total


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
    global _process, _initialized, _is_joining
    with _lock:
        if _initialized:
            raise RuntimeError(f"already initialized with backend {_process.name!r}: call finalize first")
        if _is_joining:
            raise RuntimeError("initialize is already running in another thread: call it in one thread only")
        check_type("hang_report_after", hang_report_after, (int, float), "a number of seconds")
        if not hang_report_after > 0:
            raise ValueError(f"hang_report_after must be above 0, got {hang_report_after}")
        _is_joining = True  # until it is complete, no thread adopts what this one makes
    try:
        backend = create()
        _start(backend, debug, hang_report_after, is_everywhere=True)
        _process, _initialized = backend, True
    finally:
        _is_joining = False


def warn_if_one_of_many(problem: str, remedy: str) -> None:
    """Warn that processes of a launcher do not know each other: they may write the same files."""
    launch = None
    with suppress(RuntimeError):  # contradictory variables do not matter here
        launch = detect(os.environ)
    if launch is not None and launch.topology.world_size > 1 == current().topology.world_size:
        started = f"a launcher started {launch.topology.world_size} processes"
        text = f"{started}, but {problem}, so each of them runs on its own: {remedy}"
        warnings.warn(text, stacklevel=level_of_caller())


def finalize() -> None:
    """Leave the job, whether it was initialized or adopted.

    Does nothing in a single process, nor in one that was forked from a process of a job, as it is not a rank.
    """
    if (job := current().job).is_ours:
        try:
            job.finish()
        finally:
            abandon()


def abandon() -> None:
    """Leave the job as :func:`finalize` does, but without waiting for messages in flight: something has failed."""
    global _process, _initialized
    backend = current()
    if not backend.job.is_ours:
        return
    with _lock:
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
    if _process is not _serial and _process.is_alive():
        return _process
    with _lock:
        if not _is_joining and (_process is _serial or not _process.is_alive()):
            found = adopt(partial(infer, os.environ, local_rank=_local_rank)) or _serial
            if found is not _process:
                _process.job.close()
                if found is not _serial and joined() != _inherited:
                    _start(found, None)
                elif found is not _serial:
                    found.job.process = None
                _process = found
        return _process


def _start(backend: Backend, debug: bool | None, hang_report_after: float = 60.0, is_everywhere: bool = False) -> None:
    job, topology = backend.job, backend.topology
    job.number = next(_job_numbers)  # here, which all ranks reach, not where a rank first needs it
    backend.enter()
    if is_everywhere and topology.local_world_size > 1:
        cores.limit(cores.share(topology.local_world_size, os.cpu_count() or 1))
    if topology.world_size > 1:
        watcher = failures.watch(backend, hang_report_after, torchrun_agent(os.environ))
        if is_everywhere:  # a group that is adopted must not wait for its store
            watcher.is_everywhere = True
            watcher.board.has_connected.wait(_CONNECTING)
        job.resource(ExceptHook, job, topology.rank, watcher)
    debug_mode.enable_if(debug, backend)
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit)  # registered last, called first: before a backend waits there for the other ranks
    global _finalizer
    if _finalizer is None or not _finalizer.still_active():  # a forked process has lost that of its parent
        # processes of multiprocessing end without a call of the former
        _finalizer = Finalize(None, _close_at_exit, exitpriority=1)


class ExceptHook(Resource):
    """Publishes an error that ends this process before its traceback is written, as long as the job lasts.

    What ends all processes of a job is reported once per machine, and by the others in a line: the tracebacks of ranks
    that only learned of it are of no use. Nor are those of Ctrl-C, which gets a line of rank 0.

    Other hooks, such as torch's of the next job, may refer to this one for longer, so it only passes errors on then.

    Args:
        job: of this rank; ``None`` in a process that has started others.
        rank: the rank.
        watcher: of the job.
    """

    def __init__(self, job: Job | None, rank: int = 0, watcher: failures.Watcher | None = None) -> None:
        self._job, self._rank, self._watcher = job, rank, watcher
        self._closed_by: int | None = None  # the error that was on its way then, without what it refers to; 0 for none
        self._previous, sys.excepthook = sys.excepthook, self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Publish the error, and pass on what is to be reported in its place."""
        if self._closed_by not in (None, id(error), id(error.__context__)):  # it may have been replaced since
            self._previous(kind, error, trace)
            return
        watcher = self._watcher if self._job is not None and self._job.is_ours else None
        found = error if watcher is None else watcher.fail(error)
        place = f"at {line_of_error(found)}"
        with ExitStack() as stack:
            line = None
            if isinstance(found, KeyboardInterrupt):
                where = ", ".join([activity.summary(found), *getattr(found, "__notes__", ()), place])
                line = f"{where}\n" if self._rank == 0 else ""
            elif watcher is not None and isinstance(found, (RankDivergenceError, RankFailedError)):
                reporter = stack.enter_context(watcher.reported_by())
                if reporter is not None:
                    what, name = str(found).partition("\n")[0].rstrip(":"), type(found).__name__
                    line = f"rank {self._rank}, {place}: {name}: {what}; see the report of rank {reporter}\n"
            if line is not None:
                sys.stderr.write(line)
                stack.enter_context(redirect_stderr(StringIO()))  # other hooks do not only print
            self._previous(type(found), found, found.__traceback__)

    def close(self) -> None:
        """Remove the hook, unless another one was set on top of it, or an error is on its way to the end."""
        error = sys.exc_info()[1]
        self._closed_by = 0 if error is None else id(error)
        if sys.excepthook is self and error is None:
            sys.excepthook = self._previous


def _close_at_exit() -> None:
    if watcher := _process.job.find(failures.Watcher):
        watcher.leave("has exited: it returned, or called sys.exit()")
    _process.job.close()


def _forget_parent() -> None:
    """Make this process, which was forked from another one, a rank of nothing that its parent has joined."""
    global _lock, _inherited, _is_joining
    _lock, _is_joining = RLock(), False  # a thread that is not here may hold it
    _inherited = joined()
    activity.explainers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
