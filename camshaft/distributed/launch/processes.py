"""Start the processes of a backend of torch.distributed on this node, and supervise them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from camshaft.distributed.environments import torch_variables
from camshaft.distributed.launch.worker import GRACE, Failure, Task, end_with_parent, exit_code, not_picklable, work
from camshaft.distributed.registry import module_of
from camshaft.distributed.run import abandon
from camshaft.distributed.topology import Launch, Topology

_SETTLE = 0.3  # seconds in which a failure and its consequences in other processes may arrive in any order
_INTERVAL = 1.0  # seconds, at most, between checks of exit codes
_PAUSE = 0.02  # seconds between checks of a process that has closed its sentinel and not ended

# With join=False, processes and their store outlive the last reference that the caller holds.
_running: set[Processes] = set()


def spawn(
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
    debug: bool | None = None,
    **options: Any,
) -> Processes | None:
    """Start the processes of this node, and wait for them; see :func:`camshaft.distributed.spawn`."""
    check_nodes(nnodes, node_rank, master_addr, master_port, init_method)
    if own := {"rank", "world_size"} & set(options):
        raise TypeError(f"{sorted(own)} follow from nproc_per_node, nnodes and node_rank; do not pass them to spawn")
    module_of(name).check_options(name, options)
    if start_method is None:
        start_method = "fork" if hasattr(sys, "ps1") or "ipykernel" in sys.modules else "spawn"
    processes_of = multiprocessing.get_context(start_method)
    is_importable = getattr(task[0], "__module__", None) != "__main__" or hasattr(sys.modules["__main__"], "__file__")
    if start_method != "fork" and not is_importable:
        raise TypeError(
            f"fn must be importable by new processes, but {task[0]!r} was typed in: put it into a file, or use "
            "start_method='fork'"
        )
    by_address = init_method is None or init_method.startswith("env://")
    hosts_store = by_address and nnodes == 1 and master_port is None
    all_options = {"init_method": init_method, "debug": debug, **options}
    processes = Processes()
    try:
        for _ in range(nproc_per_node):
            processes.start(processes_of, _run, (name, (*task, all_options), start_method == "fork"), daemon)
        if hosts_store:
            master_addr, master_port = "127.0.0.1", processes.host_store()
        launch = Launch(
            "spawn",
            Topology(world_size=nnodes * nproc_per_node, local_world_size=nproc_per_node, num_nodes=nnodes),
            (master_addr or "127.0.0.1") if by_address else None,
            None if master_port is None else int(master_port),
            agent_store=hosts_store,
        )
        processes.send(launch, node_rank or 0)
    except BaseException as error:
        processes.end()
        if isinstance(error, (AttributeError, TypeError, pickle.PicklingError)):
            raise not_picklable(task, error) from error
        raise
    return None if join and processes.join() else processes


def _run(rank: int, connection: Connection, name: str, task: tuple[Any, ...], is_forked: bool) -> None:
    """Run in each process."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "multiprocessing started this process"
    end_with_parent(parent.sentinel)
    if is_forked:
        # OpenMP's threads, if the parent has used any, do not survive the fork, and the first parallel operation would
        # wait for them forever. Workers of a DataLoader use a single thread for the same reason.
        torch.set_num_threads(1)
    launch: Launch = connection.recv()
    os.environ.update(torch_variables(launch))  # for other readers of the environment
    try:
        work(rank, lambda: task, partial(module_of(name).create, name, launch), connection.send)
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
    if init_method is not None and not isinstance(init_method, str):
        raise ValueError(f"init_method must be 'env://', 'file://...' or 'tcp://...', got {init_method!r}")
    address = f"got {master_addr!r} and {master_port!r}"
    if init_method is not None and not init_method.startswith("env://"):
        if master_addr is not None or master_port is not None:
            raise ValueError(
                f"master_addr and master_port must not be given with init_method={init_method!r}, {address}"
            )
    elif nnodes > 1 and (master_addr is None or master_port is None):
        raise ValueError(f"master_addr and master_port, or init_method, must be given with nnodes={nnodes}, {address}")
    if master_port is not None and not (str(master_port).isdecimal() and 0 < int(master_port) < 65536):
        raise ValueError(f"master_port must be a number in [1, 65535], got {master_port!r}")


def check_positive(name: str, count: Any) -> None:
    """Raise ValueError if a number of processes or nodes is not a positive integer."""
    if not _is_integer(count) or count < 1:
        raise ValueError(f"{name} must be a positive integer, got {count!r}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Processes:
    """Processes that end together, and the store they connect to."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self._connections: list[Any] = []
        self._store: Store | None = None
        self._failures: list[Failure] = []
        self._cause: Failure | None = None
        self._over = False
        _running.add(self)

    def start(self, context: Any, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        """Start a process that calls ``target(index, connection, *args)``, and may send a :class:`Failure`."""
        ours, theirs = context.Pipe()
        self._connections.append(ours)
        try:
            process = context.Process(target=target, args=(len(self.processes), theirs, *args), daemon=daemon)
            process.start()
        finally:
            theirs.close()
        self.processes.append(process)

    def host_store(self) -> int:
        """Open a store on a free port, once all processes are started, and return the port.

        The thread of a TCPStore does not exist in a forked process, where destroying the copy of the store would wait
        for it forever. So nothing is forked while the store exists, and only this object refers to it: the traceback of
        a failure would keep it alive.
        """
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def send(self, launch: Launch, node_rank: int) -> None:
        """Send each process its launch."""
        size = len(self.processes)
        for index, connection in enumerate(self._connections):
            place = {"rank": node_rank * size + index, "local_rank": index, "node_rank": node_rank}
            with suppress(OSError):  # it has ended, which join() reports
                connection.send(replace(launch, topology=replace(launch.topology, **place)))

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
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._over:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                self._wait(left)
                if self._failures or any(process.exitcode for process in self.processes):
                    self._fail()
                elif not self._alive():
                    self.end()
                elif left == 0:
                    return False
        except BaseException:
            self.end()
            raise
        if self._cause is not None:
            raise self._cause.exception()  # a new one: its traceback refers to this object
        return True

    def end(self, spared: BaseProcess | None = None) -> None:
        """Terminate the processes that still run, and kill those that have not ended after a few seconds.

        Args:
            spared: gets the same time, but no SIGTERM.
        """
        for process in self._alive():
            if process is not spared:
                process.terminate()
        self._wait_until(time.monotonic() + GRACE)
        for process in self._alive():
            process.kill()
            process.join()
        while self._connections:
            self._connections.pop().close()
        self._store = None
        self._over = True
        _running.discard(self)

    def _alive(self) -> list[BaseProcess]:
        return [process for process in self.processes if process.exitcode is None and _exists(process)]

    def _wait_until(self, deadline: float) -> None:
        while self._alive() and (left := deadline - time.monotonic()) > 0:
            self._wait(left)

    def _wait(self, seconds: float | None) -> None:
        """Wait until a process ends or sends a failure, or the time is over; may return early."""
        alive = self._alive()
        limit = _INTERVAL if seconds is None else min(seconds, _INTERVAL)
        ready = wait([*(process.sentinel for process in alive), *self._connections], limit if alive else 0)
        for connection in [connection for connection in self._connections if connection in ready]:
            with suppress(EOFError, OSError):  # it has ended without one
                self._failures.append(connection.recv())
            connection.close()
            self._connections.remove(connection)
        # A sentinel is ready when the last process that holds its other end has closed it: the child may do that long
        # before it ends, and the child's own children long after.
        if any(process.sentinel in ready and process.exitcode is None for process in alive):
            time.sleep(_PAUSE)

    def _fail(self) -> None:
        """Find the cause, and end all processes."""
        self._wait_until(time.monotonic() + _SETTLE)
        self._wait(0)
        reported = {failure.rank for failure in self._failures}
        silent = [
            Failure(False, 0.0, rank, process.pid or 0, process.exitcode)
            for rank, process in enumerate(self.processes)
            if process.exitcode and rank not in reported
        ]
        self._cause = min([*silent, *self._failures])  # others could only fail in consequence of a silent end
        if not silent:
            left = [rank for rank, process in enumerate(self.processes) if process.exitcode == 0]
            notes = "".join(f"\n-- process {rank} had exited with code 0 before" for rank in left)
            self._cause = replace(self._cause, text=self._cause.text + notes)
        self.end(spared=self.processes[self._cause.rank])  # it may have something to save before it ends


def _exists(process: BaseProcess) -> bool:
    """Return False also if the exit code was collected elsewhere, or discarded because SIGCHLD is ignored."""
    try:
        os.kill(process.pid or 0, 0)
    except ProcessLookupError:
        return False
    return True
