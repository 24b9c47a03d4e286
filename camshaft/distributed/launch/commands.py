"""Start the processes of a job with ``mpiexec`` or ``horovod.run``."""

from __future__ import annotations

import inspect
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException

from camshaft.arguments import check_known
from camshaft.distributed import cores, environments
from camshaft.distributed.backends.registry import module_of
from camshaft.distributed.launch import work

_PATIENCE = 20.0  # seconds that the launcher of a failed job has to end it: more than a rank of MPI waits for others
# Within a Slurm job, MPICH would start the processes with srun, which waits for the step of this process, and Open MPI
# on the nodes of the job. The user's own settings take precedence.
_ON_THIS_MACHINE = {"HYDRA_LAUNCHER": "fork", "PRTE_MCA_ras": "^slurm"}


def spawn_mpi(name: str, task: Any, nproc_per_node: int, nnodes: int = 1, node_rank: int = 0, **options: Any) -> None:
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
        raise work.not_picklable(task, error) from error
    _run_command([mpiexec, "-n", str(nproc_per_node)], run_mpi_rank, pickled, nproc_per_node, **_ON_THIS_MACHINE)


def run_mpi_rank(folder: str) -> None:
    """Run in each process that ``mpiexec`` starts."""
    launch = environments.read("mpich", os.environ) or environments.read("openmpi", os.environ)
    create = partial(module_of("mpi").create, "mpi", launch)
    rank = launch.topology.rank if launch else 0
    try:
        work.run(rank, partial(_load, folder), create, partial(work.Failure.save, folder=folder))
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # while the backend is initialized, this ends all processes once this one ends
        code = work.exit_code(error)
        if not dist.is_initialized():
            sys.stdout.flush()
            os._exit(code)  # MPI would wait for the other processes, which may wait for this one
        sys.exit(code)


def _load(folder: str) -> Any:
    """Return the task; the main module of this process becomes that of its parent, as multiprocessing does."""
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # a main module that starts processes is refused
    try:
        with Path(folder, "task").open("rb") as stream:
            multiprocessing.spawn.prepare(pickle.load(stream))
            return pickle.load(stream)
    finally:
        del process._inheriting


def spawn_horovod(
    name: str,
    task: Any,
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
        raise work.not_picklable(task, error) from error
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

    def report(failure: work.Failure) -> None:
        kind = sys.exc_info()[0]
        if kind is None or kind.__name__ != "HorovodInternalError":  # a consequence of the end of another process
            failure.save(folder)

    create = partial(module_of("horovod").create, "horovod", launch)
    work.run(launch.topology.rank if launch else 0, partial(pickle.loads, pickled), create, report)


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
        call = f"start({function.__name__!r}, {folder!r}, {server.getsockname()[1]}, {os.getpid()})"
        python = [sys.executable, "-c", f"import sys; sys.path[:] = {path}; from {__name__} import start; {call}"]
        threads = cores.share(processes, cores.available())
        limits = {} if threads is None else {cores.VARIABLE: str(threads)}
        process = subprocess.Popen([*command, *python], stdin=subprocess.DEVNULL, env=variables | limits | os.environ)
        try:
            while process.poll() is None and not work.Failure.all_in(folder):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(work.INTERVAL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
        finally:
            process.terminate()  # if interrupted, or if it does not notice a failure; it terminates its processes
            with suppress(subprocess.TimeoutExpired):
                process.wait(work.GRACE)
            process.kill()
            process.wait()
        if failures := work.Failure.all_in(folder):
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


def start(function: str, folder: str, port: int, parent: int) -> None:
    """Call a function of this module, and end with the process that listens on the port."""
    work.end_with_parent(socket.create_connection(("127.0.0.1", port)), parent)
    globals()[function](folder)
