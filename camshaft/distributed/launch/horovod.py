"""Starting the processes of a run of Horovod."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from camshaft.distributed.ranks import get_local_rank
from camshaft.distributed.run import finalize, initialize

_OURS = ("func", "args", "kwargs", "num_proc", "np")
_EXIT = re.compile(r"Process name: (\d+)\s+Exit code: (\d+)")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 2.0  # seconds
pickler: Any = partial(import_module, "cloudpickle")
rendezvous: Any = partial(import_module, "horovod.runner.gloo_run")


def launcher() -> Any:
    """Return ``horovod.run``."""
    return import_module("horovod").run


@dataclass(frozen=True)
class Task:
    """What each process does.

    Args:
        work: the pickled function, its arguments, and those of ``initialize``.
        path: where modules are found.
        folder: where a process on this machine leaves its traceback when it fails.
    """

    work: bytes
    path: list[str]
    folder: str

    def __call__(self) -> None:
        """Initialize, call the function, finalize."""
        sys.path[:] = self.path  # that of the parent, which Horovod does not hand on
        try:
            function, args, kwargs, options = pickle.loads(self.work)
            initialize("horovod", **options)
            function(get_local_rank(), *args, **kwargs)
            finalize()
        except SystemExit as error:
            if error.code:
                raise
        except Exception as error:
            follows = type(error).__name__ == "HorovodInternalError"  # from the end of another process
            self._tell(follows)
            if follows:
                time.sleep(_PATIENCE)  # Horovod takes the first to exit for the cause
            raise

    def _tell(self, follows: bool) -> None:
        if os.path.isdir(self.folder):  # elsewhere there is what Horovod shows of standard error
            name = f"{int(follows)} {os.environ['HOROVOD_RANK']} {os.getpid()}"
            Path(self.folder, name).write_text(traceback.format_exc())


def spawn(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nproc_per_node: int = 1,
    hosts: str | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    timeout: timedelta | None = None,
    debug: bool | None = None,
    **options: Any,
) -> None:
    """Start the processes with ``horovod.run``, and wait for them; see :func:`camshaft.distributed.spawn`.

    Args:
        name: ``"horovod"``.
        function: called as ``function(local_rank, *args, **kwargs)`` in each process.
        args: for the function.
        kwargs: for the function.
        nproc_per_node: number of processes; with ``hosts``, of those on all of them.
        hosts: ``"name:processes,..."``; only this one if ``None``.
        nnodes: 1, as Horovod starts the processes of all nodes from one.
        node_rank: 0.
        timeout: how long an operation may take, as for ``initialize``.
        debug: argument of ``initialize``.
        options: for ``horovod.run``.

    Raises:
        RuntimeError: there are more nodes, or this is not the main thread.
    """
    if nnodes > 1 or node_rank > 0:
        raise RuntimeError(
            "nnodes and node_rank must be 1 and 0, as Horovod starts the processes of all nodes from one: give "
            f"hosts='name:processes,...' instead, got nnodes={nnodes} and node_rank={node_rank}"
        )
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("Horovod handles signals while its processes run: call spawn in the main thread")
    run = launcher()
    known = frozenset(inspect.signature(run).parameters).difference(_OURS)
    if unknown := sorted(set(options) - known):
        raise TypeError(f"{unknown} are not known to horovod.run, but {sorted(known)} are")
    try:
        work = pickler().dumps((function, args, kwargs, {"timeout": timeout, "debug": debug}))
    except Exception as error:
        raise TypeError(f"fn and its arguments must be picklable, got {function!r}, {args!r}, {kwargs!r}") from error
    with _signals_kept(), _servers_ended(), tempfile.TemporaryDirectory(prefix="camshaft-") as folder:
        try:
            run(Task(work, sys.path, folder), num_proc=nproc_per_node, hosts=hosts, **options)
        except RuntimeError as error:
            _raise_failure(folder, error)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Put the handlers back that Horovod replaces, and hand them the signals that ended the processes meanwhile."""
    reading, writing = socket.socketpair()
    with reading, writing:
        for end in (reading, writing):
            end.setblocking(False)
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            try:
                received = reading.recv(4096)
            except BlockingIOError:
                received = b""
            for number in set(_SIGNALS).intersection(received):
                signal.raise_signal(number)


@contextmanager
def _servers_ended() -> Iterator[None]:
    """End the servers at which the processes met; Horovod leaves them to the end of this process."""
    module = rendezvous()
    kind, made = module.RendezvousServer, []

    def make(*args: Any) -> Any:
        made.append(kind(*args))
        return made[-1]

    module.RendezvousServer = make
    try:
        yield
    finally:
        module.RendezvousServer = kind
        for server in made:
            server.stop()
            server._httpd.server_close()


def _raise_failure(folder: str, error: RuntimeError) -> NoReturn:
    """Tell the cause: an exception of a process, else how the first one ended."""
    left = sorted(Path(folder).iterdir(), key=lambda path: (path.name[0], path.stat().st_mtime_ns))
    if left and left[0].name[0] == "0":
        rank, pid = map(int, left[0].name.split()[1:])
        raise ProcessRaisedException(f"\n\n-- process {rank} failed:\n{left[0].read_text()}", rank, pid) from error
    if found := _EXIT.search(str(error)):
        rank, code = map(int, found.groups())
        how = f"was ended by signal {code - 128}" if code > 128 else f"exited with code {code}"
        raise ProcessExitedException(f"process {rank} {how}", rank, 0, code) from error
    raise error
