"""The rendezvous of a run: all ranks open one store, meet there, and later publish in it how they left the run."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import TypeVar
from urllib.parse import urlsplit

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.rendezvous import rendezvous

from camshaft.distributed.topology import Launch

REPORT_AFTER = 10.0  # seconds until the log names the ranks that are missing
_MEETING = "camshaft/meeting"
_CONFIRMED, _COMPLETE = "confirmed", "all ranks have joined"
_LONGEST_PAUSE = 0.5
_MOST_NAMED = 10  # ranks in a message
_LINGER = 5.0  # seconds that rank 0 waits for more ranks once one was told another size
_PATIENCE = 2.0  # seconds for a store that does not answer, perhaps because its machine is gone
_DIFFERENT = "rank %d was told that there are %d processes (world_size), but rank 0 meets ranks that were told %s"

_DEFAULT_PORT = 15000
_last = ""  # the last meeting of this process
T = TypeVar("T")
logger = logging.getLogger("camshaft.distributed.utils")


class StaleStore(Exception):
    """The store is that of this process's last meeting, and rank 0 has closed it meanwhile: it will open a new one."""


def open_store(launch: Launch | None, method: str | None, rank: int, size: int, timeout: timedelta) -> Store:
    """Open the store of a run, wait there for all ranks, and return a part of it that is new.

    Args:
        launch: how this process was started, ``None`` if no launcher started it.
        method: ``init_method``; ``None`` is ``"env://"``.
        rank: of this process.
        size: the number of processes.
        timeout: how long to wait.

    Raises:
        TypeError: ``timeout`` is not a ``timedelta``.
        ValueError: ``method`` is not valid.
        DistNetworkError: the port is in use, no server responds there, or the store was lost while the ranks met.
        DistStoreError: not all ranks connected in time.
    """
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}")
    method = method or "env://"
    if size == 1 and method.startswith("env://"):
        return HashStore()  # no other rank, so no port is needed
    global _last
    seconds = timeout.total_seconds()
    deadline = time.monotonic() + seconds
    while True:
        store, place = _open(launch, method, rank, size, timedelta(seconds=max(0.0, deadline - time.monotonic())))
        try:
            where = f"to {place} within {seconds:g} s"
            if rank == 0:
                _last = open_meeting(store, size, deadline, where)
            else:
                _last = join_meeting(store, rank, size, deadline, where)
            break
        except StaleStore:
            del store
        except DistStoreError:
            raise
        except RuntimeError as error:
            raise DistNetworkError(
                f"rank {rank} lost the connection to {place} while waiting: the process that hosts it has ended"
            ) from error
    if isinstance(store, FileStore):
        path = Path(store.path)  # type: ignore[attr-defined]  # torch's stubs
        del store  # a file that rank 0 removes meanwhile, closing it would create again
        store = _new_file(path, _last, rank, size, deadline)
    store.set_timeout(timeout)
    return PrefixStore(f"camshaft/{_last}", store)


def _open(launch: Launch | None, method: str, rank: int, size: int, timeout: timedelta) -> tuple[Store, str]:
    """Open the store, and return it with its name for error messages."""
    scheme = method.partition("://")[0]
    if scheme == "file":
        path = Path(urlsplit(method).path)
        if not path.name or path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"init_method must be file:///FOLDER/FILE, in a folder that exists, got {method!r}")
        return FileStore(str(path), -1), f"the file {path} (init_method)"
    has_agent = launch is not None and launch.agent_store
    if scheme == "env":
        (host, port), source = _from_environment(launch), "MASTER_ADDR and MASTER_PORT"
    elif scheme == "tcp":
        (host, port), source = _host_and_port(method), "init_method"
        has_agent = launch is not None and has_agent and launch.master_port == port
    else:
        return next(rendezvous(method, rank, size, timeout=timeout))[0], f"init_method={method!r}"
    place = f"the store at {host}:{port} ({source})"
    return _connect(host, port, place, has_agent, rank, size, timeout), place


def _from_environment(launch: Launch | None) -> tuple[str, int]:
    if launch is not None:
        return launch.master_addr or "127.0.0.1", launch.master_port or _DEFAULT_PORT
    port = os.environ.get("MASTER_PORT") or str(_DEFAULT_PORT)  # as torch's own env:// does
    if not port.isdecimal():
        raise RuntimeError(f"environment variable MASTER_PORT must be an integer, got {port!r}")
    return os.environ.get("MASTER_ADDR") or "127.0.0.1", int(port)


def _host_and_port(method: str) -> tuple[str, int]:
    url = urlsplit(method)
    with suppress(ValueError):  # the port is not a number
        if url.hostname and url.port:
            return url.hostname, url.port
    raise ValueError(f"init_method must be tcp://HOST:PORT, got {method!r}")


def _new_file(path: Path, name: str, rank: int, size: int, deadline: float) -> Store:
    """Open a second file, beside that of the meeting, which rank 0 then removes.

    torch removes a file when as many processes as it was told have closed it. One that already opens it again, for the
    next run, would be left with a file that is gone; this one has a name that is never used again.
    """
    # torch counts what is open and what was closed in two steps: told the size, it keeps the file if two processes
    # close it at once. Told 1, it removes it with the last, and nobody closes it before all have opened it.
    store = FileStore(f"{path}.{name}", 1)
    store.add("opened", 1)
    for _ in _attempts(deadline):
        if store.add("opened", 0) == size:
            break
    if rank == 0:
        path.unlink(missing_ok=True)
    return store


def _connect(host: str, port: int, place: str, has_agent: bool, rank: int, size: int, timeout: timedelta) -> Store:
    """Listen on rank 0, unless the agent of the launcher does; elsewhere connect."""
    listens = rank == 0 and not has_agent
    limit = timeout.total_seconds()
    # in a thread, as torch waits forever for the answer of a program that is not a store
    opened = _in_thread(lambda: TCPStore(host, port, size, listens, timeout, wait_for_workers=False, multi_tenant=True))
    try:
        if limit > REPORT_AFTER:
            concurrent.futures.wait([opened], REPORT_AFTER)
            if not opened.done():
                why = _why_unreachable(host, port)
                logger.warning("rank %d has waited %g s for %s: %s", rank, REPORT_AFTER, place, why)
                limit -= REPORT_AFTER
        return opened.result(limit)
    except Exception as error:
        if "EADDRINUSE" in str(error):
            what = f"cannot open {place}: the port is in use; choose another one"
        else:
            seconds = round(timeout.total_seconds(), 1)
            what = f"got no answer from {place} within {seconds:g} s: {_why_unreachable(host, port)}"
        raise DistNetworkError(f"rank {rank} {what}") from error


def _why_unreachable(host: str, port: int) -> str:
    """Return why a store cannot be used, as far as this process can tell."""
    try:
        socket.create_connection((host, port), _PATIENCE).close()
    except (socket.gaierror, UnicodeError) as error:
        return f"the name {host!r} cannot be resolved ({error})"
    except ConnectionRefusedError:
        return "no process listens there: rank 0 has not reached initialize, or this is not its address"
    except OSError as error:
        return f"that address cannot be reached ({error})"
    return "another program uses the port"


def open_meeting(store: Store, size: int, deadline: float, where: str) -> str:
    """Open a meeting on rank 0, wait for the others, and confirm it; return its name, which has never been used.

    A store may outlive the processes that used it: a file after a crash, that of torchrun when it restarts the workers;
    and none of the numbers that these get then is both new and the same on all nodes. So rank 0 opens a meeting with a
    unique name. The others join the one that they find, unless it was confirmed before they came: then it is that of
    processes that are gone, and they wait for the next.

    Args:
        store: reached by all ranks.
        size: the number of processes.
        deadline: how long to wait, as a time of ``time.monotonic``.
        where: the store and the time limit, for the error: ``"to FILE within 5 s"``.

    Raises:
        DistStoreError: not all ranks connected, or they were told different sizes; it lists the ranks.
    """
    name = uuid.uuid4().hex
    meeting = PrefixStore(f"camshaft/{name}", store)
    store.set(_MEETING, f"{name} {size}")
    awaited = list(range(1, size))

    def report() -> None:
        missing = _listed(_absent(meeting, size))
        logger.warning("rank 0 has waited %g s for ranks that have not reached initialize: %s", REPORT_AFTER, missing)

    for _ in _attempts(deadline, report):
        while awaited and meeting.check([str(awaited[-1])]):
            awaited.pop()
        if not awaited:
            meeting.set(_CONFIRMED, _COMPLETE)
            return name
        if meeting.check(["others"]):
            break
    others = list[list[str]]()
    if meeting.check(["others"]):  # ranks that were told another size
        for _ in _attempts(time.monotonic() + _LINGER):  # let all ranks learn of it that come at about the same time
            others = [one.split() for one in meeting.get("others").decode().split(",")[:-1]]
            if size - len(_absent(meeting, size)) + len(others) >= max(size, *(int(told) for _, told in others)):
                break
    absent = _absent(meeting, size)
    if not absent and not others:  # the last one has come in the last moment
        meeting.set(_CONFIRMED, _COMPLETE)
        return name
    problem = _incomplete(absent, size, where)
    if others:
        believed = ", ".join(f"rank {rank} {told}" for rank, told in others[:_MOST_NAMED])
        problem = f"the ranks were told different numbers of processes (world_size): rank 0 {size}, {believed}"
    meeting.set(_CONFIRMED, problem)
    for _ in _attempts(time.monotonic() + 2 * _LONGEST_PAUSE):  # the store may go away with this process
        if meeting.add("told", 0) >= size - 1 - len(absent) + len(others):
            break
    raise DistStoreError(problem)


def join_meeting(store: Store, rank: int, size: int, deadline: float, where: str) -> str:
    """Join the meeting that rank 0 has opened, wait until it is confirmed, and return its name.

    Raises:
        DistStoreError: not all ranks connected, or they were told different sizes.
        StaleStore: rank 0 has not opened the store of this run yet.
    """
    found = name = told = ""
    meeting = store
    is_open = is_same = False

    def report() -> None:
        if told not in ("", str(size)):  # of this run, or of an earlier one in the same store
            logger.warning(_DIFFERENT, rank, size, told)
        elif not name or not _absent(meeting, size):  # else rank 0 is there, and reports who is not
            text = "rank %d has waited %g s for rank 0, which has not reached initialize"
            logger.warning(text, rank, REPORT_AFTER)

    for _ in _attempts(deadline, report):
        try:
            if store.check([_MEETING]) and (latest := store.get(_MEETING).decode()) != found:
                found = latest
                name, _, told = found.partition(" ")
                meeting, is_same = PrefixStore(f"camshaft/{name}", store), told in ("", str(size))
                is_open = not meeting.check([_CONFIRMED])
                if is_open and is_same:
                    meeting.set(str(rank), "here")
                elif is_open:
                    meeting.append("others", f"{rank} {size},")  # type: ignore[attr-defined]  # torch's stubs
            answer = meeting.get(_CONFIRMED).decode() if is_open and meeting.check([_CONFIRMED]) else ""
        except RuntimeError as error:
            if _last and name in ("", _last):
                raise StaleStore from error
            raise
        if answer == _COMPLETE and is_same:
            return name
        if answer not in ("", _COMPLETE):  # complete without this rank, which was told another size
            meeting.add("told", 1)
            raise DistStoreError(answer)
    if name and not is_same:
        raise DistStoreError(_DIFFERENT % (rank, size, told))
    if name and (absent := _absent(meeting, size)):
        raise DistStoreError(_incomplete(absent, size, where))
    late = f", or another process has joined as rank {rank}" if name and not is_open else ""
    raise DistStoreError(f"rank 0 did not connect {where}{late}")


def _in_thread(function: Callable[[], T]) -> Future[T]:
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except Exception as error:
            result.set_exception(error)

    thread = Thread(target=run, name="camshaft-store", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12.0 and 3.12.1 start no threads in atexit handlers
        run()
    return result


def _attempts(deadline: float, report: Callable[[], None] | None = None) -> Iterator[None]:
    """Yield with ever longer pauses in between; a wait of the store's own that expires prints a warning.

    Args:
        deadline: when to end, as a time of ``time.monotonic``; there is one attempt in any case.
        report: called once if the attempts take long.
    """
    begin = time.monotonic()
    while True:
        yield
        now = time.monotonic()
        if now >= deadline:
            return
        if report is not None and now - begin >= REPORT_AFTER:
            report()
            report = None
        time.sleep(min(0.001 + (now - begin) / 10, _LONGEST_PAUSE, deadline - now))


def _absent(meeting: Store, size: int) -> list[int]:
    return [rank for rank in range(1, size) if not meeting.check([str(rank)])]


def _incomplete(absent: Sequence[int], size: int, where: str) -> str:
    return f"{size - len(absent)} of {size} ranks connected {where}; missing: {_listed(absent)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + (", ..." if len(ranks) > _MOST_NAMED else "")
