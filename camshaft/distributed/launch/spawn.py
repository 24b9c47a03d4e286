"""``spawn``: start the processes of a job from within Python, with any backend."""

from __future__ import annotations

import inspect
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from camshaft.arguments import check_known, check_takes, check_type
from camshaft.distributed import cores, environments, failures
from camshaft.distributed.backends.contract import Backend
from camshaft.distributed.backends.registry import module_of
from camshaft.distributed.job import ExceptHook, abandon
from camshaft.distributed.launch import work
from camshaft.distributed.launch.commands import spawn_horovod, spawn_mpi
from camshaft.distributed.topology import Launch, Topology

_LAUNCHERS = {
    "openmpi": "mpirun",
    "mpich": "mpirun",
    "slurm": "srun",
    "torchrun": "torchrun",
    "horovodrun": "horovodrun",
}

# With join=False, processes and their store outlive the last reference that the caller holds.
_running: set[Processes] = set()


def spawn(
    backend: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs_dict: dict[str, Any] | None = None,
    nproc_per_node: int = 1,
    **kwargs: Any,
) -> Any:
    """Start processes on this machine; each initializes the backend, calls a function, and finalizes.

    If a process fails, the others are terminated, and the error here contains its traceback. The processes end with
    this one, however it ends.

    Args:
        backend: one of :func:`available_backends`.
        fn: called as ``fn(local_rank, *args, **kwargs_dict)``; it must be importable by new processes.
        args: arguments of ``fn``.
        kwargs_dict: keyword arguments of ``fn``.
        nproc_per_node: number of processes.
        kwargs: depend on the backend. For those of torch: ``nnodes``, ``node_rank``, ``master_addr`` and
            ``master_port`` (by default a free port, on one node), ``init_method``, the options of :func:`initialize`,
            and for the processes ``join``, ``daemon`` and ``start_method``: by default ``"forkserver"``, ``"spawn"``
            where no fork server can be used, as on Windows and macOS, and ``"fork"`` in a notebook, where each process
            then computes with one thread, as the threads of the parent do not survive a fork. ``"mpi"``: ``timeout``
            and ``device``. ``"horovod"``: ``hosts``, ``timeout`` and the options of ``horovod.run``. ``"xla-tpu"``:
            ``start_method`` and ``spmd``. All accept ``debug`` and ``hang_report_after``, as :func:`initialize` does.

    Returns:
        ``None``; with ``join=False`` an object whose ``join(timeout=None)`` waits for the processes.

    Raises:
        ValueError: the backend is not available, or a number of nodes or processes is out of range.
        RuntimeError: a launcher has already started several processes, each of which would start its own.
        TypeError: an argument is unknown, or ``fn`` and its arguments cannot be pickled.
        torch.multiprocessing.ProcessRaisedException: ``fn`` raised in a process.
        torch.multiprocessing.ProcessExitedException: a process was killed, or exited with another code than 0.
    """
    module_of(backend)  # raises if it is not available
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        error = RuntimeError(
            f"{sys.argv[0]} starts processes when it is imported, and each of them imports it: put its main code under "
            "if __name__ == '__main__':"
        )
        if not os.path.isabs(process.name):  # started by something else, or it reports what is raised here
            raise error
        folder, rank = os.path.split(process.name)
        work.Failure.of(error, int(rank), time.monotonic()).save(folder)
        sys.exit(1)
    check_not_launched(kwargs.get("nnodes"))
    check_type("args", args, (tuple, list), "a tuple")
    check_takes("fn", fn, "(local_rank, *args, **kwargs_dict)", (0, *args), kwargs_dict or {})
    check_positive("nproc_per_node", nproc_per_node)
    start = _starter_of(backend)
    common = {name: kwargs.pop(name) for name in ("debug", "hang_report_after") if name in kwargs}
    return start(backend, (fn, tuple(args), dict(kwargs_dict or {}), common), nproc_per_node, **kwargs)


def _starter_of(backend: str) -> Any:
    starters = {"mpi": spawn_mpi, "horovod": spawn_horovod, "xla-tpu": _spawn_xla}
    return starters.get(backend, _spawn)


def check_options(backend: str, options: Iterable[str], nproc_per_node: int | None) -> None:
    """Reject options of :class:`Parallel` that ``initialize`` or, with ``nproc_per_node``, ``spawn`` does not know.

    Raises:
        ValueError: the backend is not available.
        TypeError: an option is unknown.
    """
    known = {*module_of(backend).OPTIONS, "debug", "hang_report_after", "nproc_per_node"}
    if nproc_per_node is not None:
        start = _starter_of(backend)
        functions = [start, import_module("horovod").run] if start is spawn_horovod else [start]
        parameters = [one for function in functions for one in inspect.signature(function).parameters.values()]
        known |= {one.name for one in parameters if one.default is not one.empty}
    check_known(options, known, f"Parallel on backend {backend!r}")


# --- backends of torch.distributed -----------------------------------------------------------------------------------


def _spawn(
    name: str,
    task: work.Task,
    nproc_per_node: int,
    nnodes: int = 1,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | str | None = None,
    init_method: str | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str | None = None,
    **options: Any,
) -> Processes | None:
    """Start the processes of a backend of torch.distributed on this node, and wait for them."""
    check_nodes(nnodes, node_rank, master_addr, master_port, init_method)
    if own := {"rank", "world_size"} & set(options):
        raise TypeError(
            f"{sorted(own)} are computed from nproc_per_node, nnodes and node_rank: do not pass them to spawn"
        )
    module_of(name).check_options(name, options)
    method = start_method or _start_method_for(task[0])
    if method == "forkserver" and not _has_server() and start_method is None:
        method = "spawn"
    context: Any = multiprocessing.get_context(method)
    target = _run_forked_rank if method == "fork" else _run_rank
    by_address = init_method is None or init_method.startswith("env://")
    hosts_store = by_address and nnodes == 1 and master_port is None
    node_rank, world_size = node_rank or 0, nnodes * nproc_per_node
    threads = cores.share(nproc_per_node, cores.available())
    place = master_addr, master_port
    processes = Processes()
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN) as server:
            if hosts_store:
                master_addr, master_port = server.getsockname()
            for index in range(nproc_per_node):
                rank = node_rank * nproc_per_node + index
                launch = Launch(
                    "spawn",
                    Topology(rank, world_size, index, nproc_per_node, node_rank, nnodes),
                    (master_addr or "127.0.0.1") if by_address else None,
                    None if master_port is None else int(master_port),
                    agent_store=hosts_store,
                )
                environ = {**os.environ, **environments.torch_variables(launch)}  # also for other readers of it
                whole_task = (*task, {"init_method": init_method, **options})
                arguments = (environ, threads, name, launch, whole_task, processes.folder.name)
                # While a process imports the main module, it knows only its name, so this says where to report.
                place_of_reports = os.path.join(processes.folder.name, str(index))
                process = context.Process(target=target, args=arguments, daemon=daemon, name=place_of_reports)
                processes.start(process)
            if hosts_store:
                # The thread of a store does not exist in a forked process, where destroying the copy of the store
                # would wait for it forever. So nothing is forked while it exists.
                processes.store = TCPStore(
                    "127.0.0.1",
                    int(str(master_port)),
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=server.detach(),
                )
    except BaseException as error:
        is_first = not processes.processes
        processes.end()
        if isinstance(error, ValueError) and is_first and method == "forkserver" and start_method is None:
            # A server takes the descriptors of at most about 250 tensors that processes share.
            options |= {"init_method": init_method, "join": join, "daemon": daemon, "start_method": "spawn"}
            return _spawn(name, task, nproc_per_node, nnodes, node_rank, *place, **options)
        if isinstance(error, (AttributeError, TypeError, pickle.PicklingError)):
            raise work.not_picklable(task, error) from error
        raise
    return None if join and processes.join() else processes


def _run_forked_rank(*args: Any) -> None:
    # OpenMP's threads, if the parent has used any, do not survive the fork, and the first parallel operation would wait
    # for them forever. Workers of a DataLoader use a single thread for the same reason.
    torch.set_num_threads(1)
    _run_rank(*args)


def _run_rank(environ: dict[str, str], threads: int | None, name: str, launch: Launch, task: Any, folder: str) -> None:
    """Run in each process, whose environment until here may be that of a fork server."""
    multiprocessing.current_process().name = f"rank {launch.topology.rank}"
    chosen = environ.get(cores.VARIABLE, "")
    if chosen.isdecimal() and int(chosen) > 0 and chosen != os.environ.get(cores.VARIABLE):
        torch.set_num_threads(int(chosen))  # torch reads the variable when it is imported
    os.environ.clear()
    os.environ.update(environ)
    cores.limit(threads)
    if threads is not None:
        os.environ[cores.VARIABLE] = str(threads)  # for libraries that are imported from here on, and for children
    parent = multiprocessing.parent_process()
    assert parent is not None, "multiprocessing started this process"
    work.end_with_parent(parent.sentinel, parent.pid or 0)
    try:
        create = partial(module_of(name).create, name, launch)
        work.run(launch.topology.local_rank, lambda: task, create, partial(work.Failure.save, folder=folder))
    except BaseException as error:
        abandon()
        sys.exit(work.exit_code(error))


def _start_method_for(function: Callable[..., Any]) -> str:
    """Return how to start processes by default.

    What was entered in a notebook or piped into Python is in no file that another process could import, so it needs a
    fork. Otherwise, it is what Python uses by default (since 3.14): a fork server, but not on macOS.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)  # "<stdin>" is none
    has_file = main.__spec__ is not None or os.path.exists(file or "")
    is_entered = not has_file and (file is not None or getattr(function, "__module__", None) == "__main__")
    if hasattr(os, "fork") and (is_entered or hasattr(sys, "ps1") or "ipykernel" in sys.modules):
        return "fork"
    return "spawn" if sys.platform in ("win32", "darwin") else "forkserver"


def _has_server() -> bool:
    """Start the fork server, which imports torch and camshaft, unless it runs; return whether it can be used.

    All processes of multiprocessing share it, so if the user has chosen what it imports, that is not changed. It cannot
    be used where the folder for temporary files can hold no socket, as when its path is too long, or by a process that
    was forked from the one that started the server.
    """
    server: Any = import_module("multiprocessing.forkserver")  # not on Windows
    if server._forkserver._preload_modules == ["__main__"]:  # the default
        server.set_forkserver_preload(
            ["torch", "camshaft.distributed.backends.gloo_network", "camshaft.distributed.launch.server"]
        )
    try:
        server.ensure_running()
    except OSError:
        return False
    return True


def check_nodes(
    nnodes: Any = None,
    node_rank: Any = None,
    master_addr: str | None = None,
    master_port: int | str | None = None,
    init_method: str | None = None,
) -> None:
    """Check the number of nodes, and how their processes find each other; ``None`` is an argument that is not given.

    Raises:
        ValueError: a number is out of range, or something is missing or given twice.
    """
    nnodes = 1 if nnodes is None else nnodes
    check_positive("nnodes", nnodes)
    if nnodes > 1 and node_rank is None:
        raise ValueError(f"node_rank must be given with nnodes={nnodes}")
    if node_rank is not None and not (_is_integer(node_rank) and 0 <= node_rank < nnodes):
        raise ValueError(f"node_rank must be an integer in [0, {nnodes}), got {node_rank!r}")
    if not isinstance(init_method, str | None):
        raise ValueError(f"init_method must be 'env://', 'file://...' or 'tcp://...', got {init_method!r}")
    address = f"got {master_addr!r} and {master_port!r}"
    if init_method is not None and not init_method.startswith("env://"):
        if (master_addr, master_port) != (None, None):
            raise ValueError(f"master_addr and master_port must not be given with {init_method=}, {address}")
    elif nnodes > 1 and (master_addr is None or master_port is None):
        raise ValueError(f"master_addr and master_port, or init_method, must be given with nnodes={nnodes}, {address}")
    if master_port is not None and not (str(master_port).isdecimal() and 0 < int(master_port) < 65536):
        raise ValueError(f"master_port must be a number in [1, 65535], got {master_port!r}")


def check_not_launched(nnodes: int | None) -> None:
    """Check that no launcher has already started the processes.

    A launcher may have started one on each of several nodes, if there are as many.

    Raises:
        RuntimeError: it has.
    """
    launch = None
    with suppress(RuntimeError):  # contradictory variables do not matter here
        launch = environments.detect(os.environ)
    name = None if launch is None else _LAUNCHERS.get(launch.launcher)
    if launch is None or name is None or launch.topology.world_size == 1:
        return
    if launch.topology.local_world_size == 1 and nnodes == launch.topology.num_nodes:
        return
    if name == "torchrun" and environments.torchrun_agent(os.environ) is None:  # a worker of torchrun started this one
        return
    raise RuntimeError(
        f"{name} has already started {launch.topology.world_size} processes: omit nproc_per_node; if it did not start "
        f"this process, unset the variables that say so: {', '.join(launch.sources.values())}"
    )


def check_positive(name: str, count: Any) -> None:
    """Raise ValueError if a number of processes or nodes is not a positive integer."""
    if not _is_integer(count) or count < 1:
        raise ValueError(f"{name} must be a positive integer, got {count!r}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Processes:
    """Processes that end together, the store they connect to, and the folder to which they write failures."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.folder = tempfile.TemporaryDirectory(prefix="camshaft-")
        self.store: Store | None = None  # only this object refers to it: the traceback of a failure would keep it alive
        self._cause: work.Failure | None = None
        self._alive: dict[int, BaseProcess] = {}  # by what becomes readable when one has ended
        _running.add(self)

    def start(self, process: BaseProcess) -> None:
        """Start a process."""
        process.start()
        self.processes.append(process)
        self._alive[_watched(process)] = process

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all processes have ended; if one fails, or this is interrupted, terminate the others.

        Args:
            timeout: seconds to wait at most; ``None`` waits forever.

        Returns:
            Whether all have ended.

        Raises:
            ProcessRaisedException: a process raised an exception; contains the traceback of the first one.
            ProcessExitedException: a process was killed, or exited with another code than 0.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while self in _running:
                self._cause = self._find_cause()
                if self._cause is not None:
                    self._wait_for_all(work.GRACE)
                    self._cause = self._find_cause()  # with what the others have reported since
                if self._cause is not None or not self._alive:
                    self.end()
                elif (left := deadline - time.monotonic()) <= 0:
                    return False
                else:  # and look for failures in between
                    self._collect(min(left, work.INTERVAL))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not isinstance(sys.excepthook, ExceptHook):
                ExceptHook(None)
            self.end()
            raise
        if self._cause is not None:
            raise self._cause.exception()  # a new one: its traceback refers to this object
        return True

    def end(self) -> None:
        """Terminate the processes that still run, and kill those that have not ended after a few seconds."""
        for is_patient in (True, False):
            for watched, process in tuple(self._alive.items()):
                if watched == process.sentinel:
                    (process.terminate if is_patient else process.kill)()
                else:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(watched, signal.SIGTERM if is_patient else signal.SIGKILL)
            self._wait_for_all(work.GRACE)
        self.store = None
        self.folder.cleanup()
        _running.discard(self)

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._alive and (left := deadline - time.monotonic()) > 0:
            self._collect(left)

    def _collect(self, seconds: float) -> None:
        """Wait until a process has ended, and learn how."""
        ready = wait(self._alive, seconds)
        for watched, process in tuple(self._alive.items()):
            has_sentinel = watched == process.sentinel  # which a child of the process may hold
            if watched in ready or (has_sentinel and process.exitcode is not None):
                del self._alive[watched]
                process.join()  # a fork server may be slow to report the exit code
                if not has_sentinel:
                    os.close(watched)

    def _find_cause(self) -> work.Failure | None:
        """Return the first failure; other processes could only fail in consequence of one that ended silently."""
        alive = self._alive.values()
        codes = [None if process in alive else process.exitcode for process in self.processes]  # before their reports
        reports = work.Failure.all_in(self.folder.name)
        reported = {failure.rank for failure in reports}
        for index, (process, code) in enumerate(zip(self.processes, codes, strict=True)):
            if code and index not in reported:
                pids = [one.pid for one in self.processes]
                text = failures.explain_end(process.pid, pids) if code < 0 else ""
                return work.Failure(0.0, index, process.pid or 0, code, text)
        if not reports:
            return None
        left = [index for index, code in enumerate(codes) if code == 0]
        notes = "".join(f"\n-- process {index} had exited with code 0 before" for index in left)
        return reports[0]._replace(text=reports[0].text + notes)


def _watched(process: BaseProcess) -> int:
    """Return what becomes readable when a process has ended.

    That is a descriptor of the process itself where there are such. Its sentinel tells less: a child of it may hold
    the sentinel, the process may close it, and that of a fork server ends with the server.
    """
    with suppress(AttributeError, OSError):  # not on Linux
        return os.pidfd_open(process.pid or 0)
    return process.sentinel


# --- XLA -------------------------------------------------------------------------------------------------------------


def _spawn_xla(
    name: str,
    task: work.Task,
    nproc_per_node: int,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | str | None = None,
    start_method: str = "fork",
    spmd: bool = False,
    **unknown: Any,
) -> None:
    """Start one process, which is this one, or one per device of this machine; see :func:`camshaft.distributed.spawn`.

    The runtime finds other nodes by itself: ``node_rank``, ``master_addr`` and ``master_port`` have no effect.
    """
    check_known(unknown, ("debug", "hang_report_after", "spmd", "start_method"), f"spawn on backend {name!r}")
    import torch_xla.distributed.xla_multiprocessing as xla_multiprocessing
    import torch_xla.runtime as runtime

    if nproc_per_node > 1 and (spmd or runtime.device_type() == "CPU"):
        raise ValueError(
            f"nproc_per_node must be 1 {'with spmd=True' if spmd else 'on CPUs'}, got {nproc_per_node}; spmd=True "
            "makes one process use all devices"
        )
    arguments = (name, (*task, {"spmd": spmd}), (nproc_per_node, nnodes))
    if spmd:
        _run_xla_rank(0, *arguments)
    else:
        count = 1 if nproc_per_node == 1 else None
        xla_multiprocessing.spawn(_run_xla_rank, arguments, nprocs=count, start_method=start_method)


def _run_xla_rank(rank: int, name: str, task: Any, expected: tuple[int, int]) -> None:
    """Run in each process; torch_xla reports failures."""

    def create(**options: Any) -> Backend:
        backend: Backend = module_of(name).create(name, None, **options)
        found = backend.topology.local_world_size, backend.topology.num_nodes
        if found != expected:
            backend.close()
            raise ValueError(
                f"nproc_per_node must be 1 or {found[0]}, and nnodes {found[1]}, to match the devices that XLA found, "
                f"got {expected[0]} and {expected[1]}"
            )
        return backend

    try:
        work.run(rank, lambda: task, create, lambda failure: None)
    except BaseException:
        abandon()
        raise
