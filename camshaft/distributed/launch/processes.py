"""The processes of a run, seen from the one that started them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException, ProcessRaisedException

from camshaft.distributed.launch.parent_watchdog import GRACE

_SETTLE = 0.3  # seconds in which a failure and what follows from it in other processes may come in any order
_LOOK = 1.0  # seconds, at most, between two looks for exit codes
_PAUSE = 0.02  # the same where a process has closed the descriptor that would tell of its end

# Those that run, and the store that they meet at, live on when nobody holds them: join=False
_running: set[Processes] = set()


@dataclass(frozen=True, order=True)
class Report:
    """How a process says that it fails.

    Args:
        when: the time, of a clock that all processes share.
        code: its exit code, if it asks to exit; ``None`` for an exception.
        text: the traceback.
    """

    when: float
    code: int | None
    text: str


class Processes:
    """Processes that end together, and the store that they meet at."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self._listener: socket.socket | None = None
        self._store: Store | None = None
        self._connections: dict[Any, int] = {}
        self._reports: dict[int, Report] = {}
        self._silent: set[Any] = set()  # sentinels that have nothing more to tell
        self._failure: Callable[[], ProcessException] | None = None
        self._over = False
        _running.add(self)

    def listen(self) -> tuple[str, int]:
        """Reserve an address on this machine for the store, which :meth:`open_store` then opens there."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
        host, port = self._listener.getsockname()
        return host, port

    def open_store(self) -> None:
        """Open the store, if an address was reserved; all processes have been started.

        A TCPStore has a thread, which does not exist in a forked process, and whoever destroys the copy there waits
        for that thread forever. So nothing is forked while the store of these processes exists, only :meth:`end` has
        to let go of it, and no other name may refer to it: the traceback of a failure would keep it alive.
        """
        if self._listener is not None:
            host, port = self._listener.getsockname()
            number = self._listener.detach()
            try:
                self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=number)
            except BaseException:
                with suppress(OSError):  # the store may have taken it over, and closed it
                    os.close(number)
                raise

    def start(self, context: Any, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        """Start one more, which calls ``target(local_rank, connection, *args)``; it sends a report if it fails."""
        local_rank = len(self.processes)
        ours, theirs = context.Pipe(duplex=False)
        self._connections[ours] = local_rank
        arguments = (local_rank, theirs, *args)
        if context.get_start_method() == "fork":
            target, arguments = _run_forked, (self._listener, target, *arguments)
        try:
            process = context.Process(target=target, args=arguments, daemon=daemon)
            process.start()
        finally:
            theirs.close()
        self.processes.append(process)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all have ended; when one fails, or this is interrupted, end the others.

        Args:
            timeout: seconds to wait at most; ``None`` waits for ever.

        Returns:
            Whether all have ended.

        Raises:
            ProcessRaisedException: one raised an exception, the first that did is told, with its traceback.
            ProcessExitedException: one was killed, or exited with another code than 0.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._over:
                left = None if limit is None else max(0.0, limit - time.monotonic())
                self._look(left)
                if self._has_failed():
                    self._settle()
                elif not self._alive():
                    self.end()
                elif left == 0:
                    return False
        except BaseException:
            self.end()
            raise
        if self._failure is not None:
            raise self._failure()  # a new one: with its traceback, one that was kept would refer to itself
        return True

    def end(self, spared: BaseProcess | None = None) -> None:
        """End those that still run: all but the spared one are asked to, and none has more than a few seconds."""
        for process in self._alive():
            if process is not spared:
                process.terminate()
        deadline = time.monotonic() + GRACE
        while self._alive() and (left := deadline - time.monotonic()) > 0:
            self._look(left)
        for process in self._alive():
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        if self._listener is not None:
            self._listener.close()  # of no effect if the store has taken it over
        self._store = None
        self._over = True
        _running.discard(self)

    def _alive(self) -> list[BaseProcess]:
        return [process for process in self.processes if not self._has_ended(process)]

    def _has_ended(self, process: BaseProcess) -> bool:
        if process.exitcode is not None:
            return True
        if process.sentinel not in self._silent:
            return False
        try:
            os.kill(process.pid or 0, 0)
        except ProcessLookupError:  # the exit code went to somebody else, to nobody where SIGCHLD is ignored
            return True
        return False

    def _look(self, seconds: float | None) -> None:
        """Wait until a process has ended or sent something, but never longer than for the given time.

        A sentinel is ready once all that hold its other end have closed it. A process may do so long before it ends,
        and is then looked for from time to time; its own children may do so long after.
        """
        alive = self._alive()
        watched = [process.sentinel for process in alive if process.sentinel not in self._silent]
        longest = _LOOK if len(watched) == len(alive) else _PAUSE
        longest = longest if seconds is None else min(seconds, longest)
        for ready in wait([*watched, *self._connections], longest if alive else 0):
            if ready in self._connections:
                self._receive(ready)
            else:
                self._silent.add(ready)

    def _receive(self, connection: Any) -> None:
        local_rank = self._connections.pop(connection)
        try:
            self._reports[local_rank] = connection.recv()
        except EOFError:  # it has ended
            pass
        finally:
            connection.close()

    def _has_failed(self) -> bool:
        return bool(self._reports) or any(process.exitcode for process in self.processes)

    def _settle(self) -> None:
        """Find the cause, and end all."""
        deadline = time.monotonic() + _SETTLE
        while self._alive() and (left := deadline - time.monotonic()) > 0:
            self._look(left)
        self._look(0)
        codes = {rank: process.exitcode for rank, process in enumerate(self.processes) if process.exitcode}
        ended = [rank for rank, process in enumerate(self.processes) if process.exitcode == 0]
        silent = sorted(codes.keys() - self._reports.keys())
        if silent:  # the others could only notice
            self._failure = self._exited(silent[0], codes[silent[0]])
            self.end()
        else:
            rank = min(self._reports, key=lambda rank: self._reports[rank])
            self._failure = self._reported(rank, self._reports[rank], ended)
            self.end(spared=self.processes[rank])  # it may have something to write before it ends

    def _exited(self, rank: int, code: int) -> Callable[[], ProcessException]:
        name = next((number.name for number in signal.Signals if number == -code), None)
        how = (
            f"was ended by {name or f'signal {-code}'}" if code < 0 else f"exited with code {code} without an exception"
        )
        return partial(ProcessExitedException, f"process {rank} {how}", rank, self._pid(rank), code, name)

    def _reported(self, rank: int, report: Report, ended: list[int]) -> Callable[[], ProcessException]:
        """Describe a failure, and which processes had exited with code 0 by then; the failure may be a consequence."""
        text = "".join([report.text, *(f"\n-- process {other} had exited with code 0 before" for other in ended)])
        if report.code is not None:
            text = f"process {rank} exited with code {report.code}:\n{text}"
            return partial(ProcessExitedException, text, rank, self._pid(rank), report.code)
        return partial(ProcessRaisedException, f"\n\n-- process {rank} failed:\n{text}", rank, self._pid(rank))

    def _pid(self, rank: int) -> int:
        return self.processes[rank].pid or 0


def _run_forked(listener: socket.socket | None, target: Callable[..., None], *args: Any) -> None:
    """Call ``target(*args)`` in a process that was forked, without what cannot be used there.

    The threads of OpenMP, which torch computes with, do not exist here if the parent has used them, and the first
    parallel operation would wait for them forever. DataLoader workers compute with one thread for the same reason.
    """
    if listener is not None:
        listener.close()
    torch.set_num_threads(1)
    target(*args)
