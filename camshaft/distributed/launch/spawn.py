"""``spawn``: start the processes of a job from within Python, with any backend.

Processes report failures in a folder, as a launcher like ``mpiexec`` passes on only output; the first failure is
the cause of the others. All end when the process that started them does, however it ends.
"""

from __future__ import annotations

import inspect
import io
import json
import math
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException, ProcessRaisedException

from camshaft.distributed import cores, environments, failures
from camshaft.distributed.backends.contract import Backend, check_known, variable_set
from camshaft.distributed.backends.registry import module_of
from camshaft.distributed.job import ExceptHook, abandon, current, finalize, install
from camshaft.distributed.ranks import get_local_rank
from camshaft.distributed.topology import Launch, Topology
from camshaft.errors import check_takes, check_type

GRACE = 5.0
"""Seconds a process has to exit after SIGTERM before it is killed."""

_INTERVAL = 1.0  # seconds, at most, between checks for failures, exit codes, and the end of the parent
_SETTLE = 1.0  # seconds in which other processes may learn of a failure, and fail in consequence, before they are ended
_PAUSE = 0.02  # seconds between checks of a process that has closed its sentinel and not ended
_PATIENCE = 10.0  # seconds that the launcher of a failed job has to end it
# Within a Slurm job, MPICH would start the processes with srun, which waits for the step of this process, and Open MPI
# on the nodes of the job. The user's own settings take precedence.
_ON_THIS_MACHINE = {"HYDRA_LAUNCHER": "fork", "PRTE_MCA_ras": "^slurm"}

_LAUNCHERS = {
    "openmpi": "mpirun",
    "mpich": "mpirun",
    "slurm": "srun",
    "torchrun": "torchrun",
    "horovodrun": "horovodrun",
}

Task: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], dict[str, Any]]
"""A function, its arguments, and the options of `install`."""

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
            and for the processes ``join``, ``daemon`` and ``start_method``: ``"fork"`` by default in a notebook, where
            each process then computes with one thread, as the threads of the parent do not survive a fork. ``"mpi"``:
            ``timeout`` and ``device``. ``"horovod"``: ``hosts``, ``timeout`` and the options of ``horovod.run``.
            ``"xla-tpu"``: ``start_method`` and ``spmd``. All accept ``debug`` and ``hang_report_after``, as
            :func:`initialize` does.

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
    check_not_launched(kwargs.get("nnodes"))
    check_type("args", args, (tuple, list), "a tuple")
    check_takes("fn", fn, "(local_rank, *args, **kwargs_dict)", (0, *args), kwargs_dict or {})
    check_positive("nproc_per_node", nproc_per_node)
    start = _starter_of(backend)
    common = {name: kwargs.pop(name) for name in ("debug", "hang_report_after") if name in kwargs}
    return start(backend, (fn, tuple(args), dict(kwargs_dict or {}), common), nproc_per_node, **kwargs)


def _starter_of(backend: str) -> Any:
    starters = {"mpi": _spawn_mpi, "horovod": _spawn_horovod, "xla-tpu": _spawn_xla}
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
        functions = [start, import_module("horovod").run] if start is _spawn_horovod else [start]
        parameters = [one for function in functions for one in inspect.signature(function).parameters.values()]
        known |= {one.name for one in parameters if one.default is not one.empty}
    check_known(options, known, f"Parallel on backend {backend!r}")


# --- what each process does ------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """How a process failed; the first one is the cause of the others.

    Args:
        when: time of a clock that all processes share; 0 for a process that could not report.
        rank: rank of the process among those that were started.
        pid: process id.
        code: exit code, negative for a signal; ``None`` for an exception.
        text: traceback, if any.
    """

    when: float
    rank: int
    pid: int
    code: int | None = None
    text: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int, when: float) -> Failure:
        """Describe an exception that was raised at a time."""
        notes = getattr(error, "__notes__", ()) if sys.version_info < (3, 11) else ()
        text = "".join([*traceback.format_exception(error), *(f"{note}\n" for note in notes)])
        code = exit_code(error) if isinstance(error, SystemExit) else None
        return cls(when, rank, os.getpid(), code, text)

    def exception(self) -> ProcessException:
        """Return the error to raise in the parent."""
        if self.code is None:
            return ProcessRaisedException(f"\n\n-- process {self.rank} failed:\n{self.text}", self.rank, self.pid)
        name = next((number.name for number in signal.Signals if number == -self.code), None)
        unknown = " without reporting an exception: check its standard error"
        if self.code < 0:
            how = f"was terminated by {name or f'signal {-self.code}'}" + (f"; {self.text}" if self.text else "")
        else:
            how = f"exited with code {self.code}" + (f":\n{self.text}" if self.text else unknown)
        return ProcessExitedException(f"process {self.rank} {how}", self.rank, self.pid, self.code, name)

    def save(self, folder: str) -> None:
        """Write to a folder of the parent, complete at once; where that fails, as on another machine, print."""
        path = Path(folder, f"failure-{self.rank}")
        try:
            path.with_suffix(".new").write_text(json.dumps(self))
            path.with_suffix(".new").rename(path)
        except OSError as error:
            what = f"process {self.rank} failed, and could not report it to the process that started it: {error}"
            sys.stderr.write(f"{what}\n{self.text}")
            sys.stderr.flush()

    @classmethod
    def all_in(cls, folder: str) -> list[Failure]:
        """Return the failures that processes have saved, the cause first."""
        return sorted(cls(*json.loads(file.read_text())) for file in Path(folder).glob("failure-*[0-9]"))


def work(
    rank: int,
    load: Callable[[], Any],
    create: Callable[..., Backend],
    report: Callable[[Failure], None],
) -> None:
    """Call a function within a backend; ``sys.exit()`` in it is a return.

    Args:
        rank: rank to report.
        load: returns a task, followed by the options of the backend.
        create: called with these options.
        report: called with a failure before the exception propagates, so before it has any consequences.
    """
    try:
        function, args, kwargs, common, options = load()
        install(lambda: create(**options), **common)
        try:
            function(get_local_rank(), *args, **kwargs)
        except SystemExit as error:
            if exit_code(error):
                raise
        finalize()
    except BaseException as error:  # KeyboardInterrupt, too
        when = time.monotonic()  # before other ranks learn of it, and fail in consequence
        try:
            found = failures.publish(error, current())
            report(Failure.of(found, rank, when if found is error else time.monotonic()))
        except BaseException as later:  # torch's handler of SIGCHLD raises anywhere if a data loader worker was killed
            report(Failure.of(later, rank, when))
            raise
        if found is error:
            raise
        raise found from found.__cause__


def exit_code(error: SystemExit) -> int:
    """Return the exit code that Python uses for this exception."""
    return error.code if isinstance(error.code, int) else 0 if error.code is None else 1


def not_picklable(task: Task, error: Exception) -> TypeError:
    """Return the error for a task that cannot be sent to new processes."""
    return TypeError(
        "fn and its arguments must be importable and picklable to be sent to new processes, got "
        f"{task[0]!r} with {task[1]!r} and {task[2]!r}: {error}"
    )


def end_with_parent(sentinel: Any) -> None:
    """Terminate this process when its parent is gone, even if it was killed.

    Args:
        sentinel: becomes readable then: the sentinel of ``multiprocessing.parent_process()``, or a connection of which
            only the parent holds the other end.
    """
    threading.Thread(target=_watch, args=(sentinel, os.getppid()), name="camshaft-parent-watchdog", daemon=True).start()


def _watch(sentinel: Any, parent: int) -> None:
    # Processes forked later inherit the other end, so the parent's process id is checked as well.
    while not wait([sentinel], _INTERVAL) and os.getppid() == parent:
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # the user's handler may save something
    time.sleep(GRACE)
    os._exit(1)  # the main thread may never return to Python, for example from a collective


# --- backends of torch.distributed -----------------------------------------------------------------------------------


def _spawn(
    name: str,
    task: Task,
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
    if start_method is None:
        start_method = "fork" if hasattr(sys, "ps1") or "ipykernel" in sys.modules else "spawn"
    context: Any = multiprocessing.get_context(start_method)
    by_address = init_method is None or init_method.startswith("env://")
    hosts_store = by_address and nnodes == 1 and master_port is None
    node_rank, world_size = node_rank or 0, nnodes * nproc_per_node
    all_options = {"init_method": init_method, **options}
    processes = Processes()
    threads = cores.share(nproc_per_node, cores.available())
    # torch and other libraries read the variable when they are imported, which is before a process can set it
    limited = nullcontext() if threads is None else variable_set(cores.VARIABLE, str(threads))
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN) as server, limited:
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
                whole_task = (*task, all_options)
                arguments = (index, name, launch, whole_task, processes.folder.name, start_method, threads)
                process = context.Process(target=_run_rank, args=arguments, daemon=daemon)
                process.start()
                processes.processes.append(process)
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
        processes.end()
        if isinstance(error, (AttributeError, TypeError, pickle.PicklingError)):
            raise not_picklable(task, error) from error
        raise
    return None if join and processes.join() else processes


def _run_rank(
    index: int, name: str, launch: Launch, task: tuple[Any, ...], folder: str, start_method: str, threads: int | None
) -> None:
    """Run in each process."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "multiprocessing started this process"
    end_with_parent(parent.sentinel)
    cores.limit(threads)  # a forkserver may have imported torch before there was a limit
    if start_method == "fork":
        # OpenMP's threads, if the parent has used any, do not survive the fork, and the first parallel operation would
        # wait for them forever. Workers of a DataLoader use a single thread for the same reason.
        torch.set_num_threads(1)
    os.environ.update(environments.torch_variables(launch))  # for other readers of the environment
    try:
        create = partial(module_of(name).create, name, launch)
        work(index, lambda: task, create, partial(Failure.save, folder=folder))
    except BaseException as error:
        abandon()
        sys.exit(exit_code(error) if isinstance(error, SystemExit) else 1)


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
    """Check that no launcher has already started the processes that this one is about to start.

    It may have started one on each of several nodes, if there are as many.

    Raises:
        RuntimeError: it has.
    """
    launch = None
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return  # the main module starts processes where it is imported, which is refused with the reason
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
        self._cause: Failure | None = None
        _running.add(self)

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
                alive = self._alive()  # first: a failure is saved before the process ends
                self._cause = self._find_cause()
                if self._cause is not None:
                    self._wait_for_all(_SETTLE)
                    self._cause = self._find_cause()
                if self._cause is not None or not alive:
                    self.end()
                elif not self._wait_until(deadline):
                    return False
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
        for index, process in enumerate(self.processes):
            if self._cause is None or index != self._cause.rank:  # that one may have something to save before it ends
                process.terminate()
        self._wait_for_all(GRACE)
        for process in self._alive():
            process.kill()
            process.join()
        self.store = None
        self.folder.cleanup()
        _running.discard(self)

    def _alive(self) -> list[BaseProcess]:
        return [process for process in self.processes if process.exitcode is None and _exists(process)]

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._alive() and self._wait_until(deadline):
            pass

    def _wait_until(self, deadline: float) -> bool:
        """Wait until a process ends, or a moment; return False if the deadline has passed before."""
        left = deadline - time.monotonic()
        # Its children may hold the sentinel of a process that has ended, so exit codes are checked in between. And a
        # process may close its sentinel long before it ends, which must not make this a busy loop.
        alive = self._alive()
        ready = wait([process.sentinel for process in alive], min(max(left, 0.0), _INTERVAL))
        if any(process.sentinel in ready and process.exitcode is None for process in alive):
            time.sleep(_PAUSE)
        return left > 0

    def _find_cause(self) -> Failure | None:
        """Return the first failure; other processes could only fail in consequence of one that ended silently."""
        codes = [process.exitcode for process in self.processes]  # also before the failures are read
        failures = Failure.all_in(self.folder.name)
        reported = {failure.rank for failure in failures}
        for index, (process, code) in enumerate(zip(self.processes, codes, strict=True)):
            if code and index not in reported:
                return Failure(0.0, index, process.pid or 0, code, self._last_words(index) if code < 0 else "")
        if not failures:
            return None
        left = [index for index, code in enumerate(codes) if code == 0]
        notes = "".join(f"\n-- process {index} had exited with code 0 before" for index in left)
        return failures[0]._replace(text=failures[0].text + notes)

    def _last_words(self, index: int) -> str:
        """Return what the records say of a process that was killed or crashed."""
        return failures.explain_end(self.processes[index].pid, [process.pid for process in self.processes])


def _exists(process: BaseProcess) -> bool:
    """Return False also if the exit code was collected elsewhere, or discarded because SIGCHLD is ignored."""
    try:
        os.kill(process.pid or 0, 0)
    except ProcessLookupError:
        process.join(_INTERVAL)  # a forkserver collects the exit code, and passes it on a moment later
        return False
    return True


# --- mpiexec and horovod.run -----------------------------------------------------------------------------------------


def _spawn_mpi(name: str, task: Task, nproc_per_node: int, nnodes: int = 1, node_rank: int = 0, **options: Any) -> None:
    """Start processes with ``mpiexec``, and wait for them; see :func:`camshaft.distributed.spawn`."""
    if nnodes > 1:
        raise ValueError(
            f"nnodes must be 1 for backend {name!r}, got {nnodes}: to use several nodes, start the script with mpiexec "
            "and a host file, without nproc_per_node"
        )
    check_known(options, ("debug", "device", "hang_report_after", "timeout"), f"spawn on backend {name!r}")
    # That of the MPI library in this environment comes first.
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    if (mpiexec := shutil.which("mpiexec", path=places)) is None:
        raise RuntimeError(
            "backend 'mpi' needs mpiexec to start processes, and none was found next to Python or in PATH: "
            "pip install 'camshaft[mpi]'"
        )
    preparation = multiprocessing.spawn.get_preparation_data("MPI process")
    del preparation["authkey"]  # it is secret
    try:
        pickled = pickle.dumps(preparation) + pickle.dumps((*task, options))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise not_picklable(task, error) from error
    _run_command([mpiexec, "-n", str(nproc_per_node)], run_mpi_rank, pickled, nproc_per_node, **_ON_THIS_MACHINE)


def run_mpi_rank(folder: str) -> None:
    """Run in each process that ``mpiexec`` starts."""
    launch = environments.read("mpich", os.environ) or environments.read("openmpi", os.environ)
    create = partial(module_of("mpi").create, "mpi", launch)
    rank = launch.topology.rank if launch else 0
    try:
        work(rank, partial(_load, folder), create, partial(Failure.save, folder=folder))
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # while the backend is initialized, this ends all processes once this one ends
        code = exit_code(error) if isinstance(error, SystemExit) else 1
        if not dist.is_initialized():
            sys.stdout.flush()
            os._exit(code)  # MPI would wait for the other processes, which may wait for this one
        sys.exit(code)


def _load(folder: str) -> Any:
    """Return the task; the main module of this process becomes that of its parent, as multiprocessing does."""
    stream = io.BytesIO(Path(folder, "task").read_bytes())
    process = multiprocessing.current_process()
    process._inheriting = True  # type: ignore[attr-defined]  # a main module that starts processes is refused
    try:
        multiprocessing.spawn.prepare(pickle.load(stream))
        return pickle.load(stream)
    finally:
        del process._inheriting  # type: ignore[attr-defined]


def _spawn_horovod(
    name: str,
    task: Task,
    nproc_per_node: int,
    nnodes: int = 1,
    node_rank: int = 0,
    timeout: timedelta | None = None,
    **options: Any,
) -> None:
    """Start processes with ``horovod.run``, and wait for them; see :func:`camshaft.distributed.spawn`.

    Horovod starts the processes of all nodes from one: with ``hosts="name:processes,..."``, ``nproc_per_node`` is the
    number of processes on all of them.
    """
    if nnodes > 1 or node_rank > 0:
        raise RuntimeError(
            "nnodes and node_rank must be 1 and 0, as Horovod starts the processes of all nodes from one: use "
            f"hosts='name:processes,...' instead, got nnodes={nnodes} and node_rank={node_rank}"
        )
    # raises for unknown options
    inspect.signature(import_module("horovod").run).bind(print, num_proc=nproc_per_node, **options)
    try:  # with cloudpickle, as Horovod itself does: it accepts functions of the main module
        pickled = import_module("cloudpickle").dumps((*task, {"timeout": timeout}))
    except Exception as error:
        raise not_picklable(task, error) from error
    # In a process of its own, as it replaces signal handlers and leaves servers running.
    whole_task = pickle.dumps((pickled, {"num_proc": nproc_per_node, **options}))
    _run_command([], run_horovod, whole_task, nproc_per_node)


def run_horovod(folder: str) -> None:
    """Call ``horovod.run``."""
    pickled, options = pickle.loads(Path(folder, "task").read_bytes())
    import_module("horovod").run(partial(run_horovod_rank, pickled, sys.path, folder), **options)


def run_horovod_rank(pickled: bytes, path: list[str], folder: str) -> None:
    """Run in each process that Horovod starts."""
    sys.path[:] = path  # Horovod does not pass it on
    launch = environments.read("horovodrun", os.environ)

    def report(failure: Failure) -> None:
        kind = sys.exc_info()[0]
        if kind is None or kind.__name__ != "HorovodInternalError":  # a consequence of the end of another process
            failure.save(folder)

    create = partial(module_of("horovod").create, "horovod", launch)
    work(launch.topology.rank if launch else 0, partial(pickle.loads, pickled), create, report)


def _run_command(
    command: list[str], function: Callable[[str], None], task: bytes, processes: int, **variables: str
) -> None:
    """Run Python with a command, call a function of this module there with the folder of the task, and wait for it."""
    with (
        tempfile.TemporaryDirectory(prefix="camshaft-") as folder,
        socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN) as server,
    ):
        Path(folder, "task").write_bytes(task)
        path = [*map(str, sys.path)]
        call = f"start({function.__name__!r}, {folder!r}, {server.getsockname()[1]})"
        python = [sys.executable, "-c", f"import sys; sys.path[:] = {path}; from {__name__} import start; {call}"]
        threads = cores.share(processes, cores.available())
        limits = {} if threads is None else {cores.VARIABLE: str(threads)}
        process = subprocess.Popen([*command, *python], stdin=subprocess.DEVNULL, env=variables | limits | os.environ)
        try:
            while process.poll() is None and not Failure.all_in(folder):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_INTERVAL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
        finally:
            process.terminate()  # if interrupted, or if it does not notice a failure; it terminates its processes
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            process.kill()
            process.wait()
        if failures := Failure.all_in(folder):
            raise failures[0].exception()
    if process.returncode:
        name = Path(command[0]).name if command else "horovod.run"
        raise ProcessExitedException(
            f"{name} exited with code {process.returncode}, and no process reported a failure: one was killed or "
            f"exited, or {name} could not start them; see its output above",
            error_index=-1,  # unknown
            error_pid=process.pid,
            exit_code=process.returncode,
        )


def start(function: str, folder: str, port: int) -> None:
    """Call a function of this module, and end with the process that listens on the port."""
    end_with_parent(socket.create_connection(("127.0.0.1", port)))
    globals()[function](folder)


# --- XLA -------------------------------------------------------------------------------------------------------------


def _spawn_xla(
    name: str,
    task: Task,
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
        work(rank, lambda: task, create, lambda failure: None)
    except BaseException:
        abandon()
        raise
