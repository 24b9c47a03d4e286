"""Starting the processes of a run over MPI on this machine: ``mpiexec`` starts Python, which calls the function.

All that ``mpiexec`` hands on are words. So what is to be called lies in a folder for the time of the run, where the
process that fails first leaves its traceback. And as ``mpiexec`` does not end when the process that started it is
killed, each process holds a connection to that one.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from camshaft.distributed.launch.parent_watchdog import GRACE, end_with_parent
from camshaft.distributed.run import current, finalize, initialize

_OPTIONS = ("debug", "device", "timeout")
# Within a job of Slurm the mpiexec of MPICH would use srun, which waits for the step that this process is in, and
# that of Open MPI the nodes of the job. What the user has set counts first.
_ON_THIS_MACHINE = {"HYDRA_LAUNCHER": "fork", "PRTE_MCA_ras": "^slurm"}
_LOOK = 1.0  # seconds between two looks whether a process has failed
_PATIENCE = 10.0  # seconds that one which failed, and mpiexec, get to end all by themselves
_START = "import sys; sys.path[:] = {path}; from {module} import run; run({folder!r}, {port})"


def spawn(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nproc_per_node: int = 1,
    nnodes: int = 1,
    node_rank: int = 0,
    **options: Any,
) -> None:
    """Start processes and wait for them; see :func:`camshaft.distributed.spawn`.

    Args:
        name: ``"mpi"``.
        function: called as ``function(local_rank, *args, **kwargs)``.
        args: for the function.
        kwargs: for the function.
        nproc_per_node: number of processes.
        nnodes: 1.
        node_rank: 0.
        options: ``timeout``, ``device`` and ``debug``, for ``initialize``.

    Raises:
        TypeError: an option is not known, or the function and its arguments cannot be pickled.
        ValueError: ``nnodes`` is above 1.
        RuntimeError: there is no ``mpiexec``, or a new process got here while it imported the main module.
        ProcessRaisedException: the function raised in a process.
        ProcessExitedException: a process was killed, or exited in another way than by an exception, or ``mpiexec``
            failed.
    """
    if nnodes > 1:
        raise ValueError(
            f"nnodes must be 1 for backend {name!r}, got {nnodes}: to use several nodes, start the script with mpiexec "
            "and a host file, and give no nproc_per_node"
        )
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise TypeError(f"{unknown} are not known for backend {name!r}, but {list(_OPTIONS)} are")
    mpiexec, task = _find_mpiexec(), _pickled(function, args, kwargs, options)
    with (
        tempfile.TemporaryDirectory(prefix="camshaft-mpi-") as folder,
        socket.create_server(("127.0.0.1", 0), backlog=nproc_per_node) as lifeline,
    ):
        Path(folder, "task").write_bytes(task)
        start = _START.format(
            path=[*map(str, sys.path)], module=__name__, folder=folder, port=lifeline.getsockname()[1]
        )
        command = [mpiexec, "-n", str(nproc_per_node), sys.executable, "-c", start]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**_ON_THIS_MACHINE, **os.environ})
        failure = Path(folder, "failure")
        code = _wait(process, failure)
        _raise_failure(failure, process.pid, code)


def run(folder: str, port: int) -> None:
    """What each process does, until its end or that of the process that listens on the port."""
    end_with_parent(socket.create_connection(("127.0.0.1", port)))
    local_rank = 0
    try:
        function, args, kwargs, options = _unpickled(Path(folder, "task").read_bytes())
        initialize("mpi", **options)
        local_rank = current().topology.local_rank
        function(local_rank, *args, **kwargs)
        finalize()
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        _tell(Path(folder), local_rank)
        sys.excepthook(*sys.exc_info())  # of a run over MPI it ends all processes, once this one has ended
        if not dist.is_initialized():
            sys.stdout.flush()
            os._exit(1)  # at its end MPI would wait for the others, and they may wait for this process
        sys.exit(1)


def _find_mpiexec() -> str:
    """Look for the one of the MPI library in this environment, then for any."""
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    if (found := shutil.which("mpiexec", path=places)) is None:
        raise RuntimeError(
            "backend 'mpi' needs mpiexec to start processes, and there is none beside Python or in PATH: "
            "pip install 'camshaft[mpi]'"
        )
    return found


def _pickled(*task: Any) -> bytes:
    """Pickle a task, and before it what makes the main module of a new process that of this one."""
    preparation = multiprocessing.spawn.get_preparation_data("MPI process")
    del preparation["authkey"]  # it is secret
    try:
        return pickle.dumps(preparation) + pickle.dumps(task)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        function, args, kwargs, _ = task
        raise TypeError(
            f"fn and its arguments must be importable and picklable to be handed to new processes, got {function!r} "
            f"with {args!r} and {kwargs!r}: {error}"
        ) from error


def _unpickled(data: bytes) -> Any:
    stream = io.BytesIO(data)
    process = multiprocessing.current_process()
    process._inheriting = True  # type: ignore[attr-defined]  # so a main module that starts processes is refused
    try:
        multiprocessing.spawn.prepare(pickle.load(stream))
        return pickle.load(stream)
    finally:
        del process._inheriting  # type: ignore[attr-defined]


def _wait(process: subprocess.Popen[bytes], failure: Path) -> int:
    """Wait for the end; bring it about when interrupted, or when ``mpiexec`` does not see that a process failed."""
    try:
        while not failure.exists():
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_LOOK)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_PATIENCE)
        return _end(process)
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> int:
    """End ``mpiexec``, which ends the processes that it started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    process.kill()
    return process.wait()


def _tell(folder: Path, local_rank: int) -> None:
    """Leave the traceback of the error that is being handled, unless another process has failed before."""
    mine = folder / f"failure-{os.getpid()}"
    mine.write_text(json.dumps([local_rank, os.getpid(), traceback.format_exc()]))
    with suppress(FileExistsError):
        os.link(mine, folder / "failure")  # whole at once, as this process may be ended in between


def _raise_failure(failure: Path, pid: int, code: int) -> None:
    if failure.exists():
        rank, pid, text = json.loads(failure.read_text())
        raise ProcessRaisedException(f"\n\n-- process {rank} failed:\n{text}", rank, pid)
    if code:
        raise ProcessExitedException(
            f"mpiexec exited with code {code}, and no process said why: one was killed or ended itself, or mpiexec "
            "could not start them, which it has written above",
            error_index=-1,  # mpiexec does not tell which
            error_pid=pid,
            exit_code=code,
        )
