"""The store of a run of torch.distributed: where its ranks tell each other their addresses."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.rendezvous import rendezvous

from camshaft.distributed.backends.native import meeting
from camshaft.distributed.backends.native.meeting import Left, attempts, meet
from camshaft.distributed.topology import Launch

_DEFAULT_PORT = 15000


@dataclass(frozen=True)
class Address:
    """Where a store listens.

    Args:
        host: the machine.
        port: the port.
        source: what told the port.
        hosted: rank 0 is to listen there; else somebody does so already.
    """

    host: str
    port: int
    source: str
    hosted: bool

    def __str__(self) -> str:
        return f"the store at {self.host}:{self.port} ({self.source})"


def store_of(launch: Launch | None, method: str | None, rank: int, size: int, timeout: timedelta) -> Store:
    """Open the store of a run, wait there for all its ranks, and give them a part of it that is new.

    Args:
        launch: how this process was started, ``None`` if it stands alone.
        method: ``init_method``; ``None`` is ``"env://"``.
        rank: the number of this process.
        size: the number of processes.
        timeout: how long to wait.

    Raises:
        TypeError: ``timeout`` is no ``timedelta``.
        ValueError: ``method`` names no place.
        DistNetworkError: the port is in use, nobody answers there, or the store was lost while the ranks met.
        DistStoreError: not all ranks came in time.
    """
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}")
    method = method or "env://"
    if size == 1 and method.startswith("env://"):
        return HashStore()  # nobody to meet, so no port to take
    seconds = timeout.total_seconds()
    deadline = time.monotonic() + seconds
    while True:
        store, place = _open(launch, method, rank, size, timedelta(seconds=max(0.0, deadline - time.monotonic())))
        try:
            name = meet(store, rank, size, deadline, f"to {place} within {seconds:g} s")
            break
        except Left:
            del store  # and look for the one that rank 0 opens next
        except DistStoreError:
            raise
        except RuntimeError as error:
            raise DistNetworkError(f"rank {rank} lost {place} while it waited: who kept it has ended") from error
    if method.startswith("file://"):
        store = _file_of_its_own(_path(method), name, rank, size, deadline)
    store.set_timeout(timeout)
    return PrefixStore(f"camshaft/{name}", store)


def _open(launch: Launch | None, method: str, rank: int, size: int, timeout: timedelta) -> tuple[Store, str]:
    """Open the store, and say what users know it by."""
    scheme = method.partition("://")[0]
    if scheme == "file":
        path = _path(method)
        return FileStore(str(path), -1), f"the file {path} (init_method)"
    if scheme in ("env", "tcp"):
        address = _told(launch) if scheme == "env" else _parsed(launch, method)
        return _connect(address, rank, size, timeout), str(address)
    return next(rendezvous(method, rank, size, timeout=timeout))[0], f"init_method={method!r}"


def _path(method: str) -> Path:
    path = Path(urlsplit(method).path)
    if not path.name or path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"init_method must be file:///FOLDER/FILE, in a folder that exists, got {method!r}")
    return path


def _file_of_its_own(path: Path, name: str, rank: int, size: int, deadline: float) -> Store:
    """Open a second file, beside that of the meeting, which rank 0 then removes.

    torch removes a file when as many processes as there are ranks have closed it. One that already opens it again,
    for the next run, would be left with a file that is gone; this one has a name that is never used again.
    """
    store = FileStore(f"{path}.{name}", size)
    store.add("opened", 1)
    for _ in attempts(deadline):
        if rank != 0 or store.add("opened", 0) == size:
            break
    if rank == 0:
        path.unlink(missing_ok=True)
    return store


def _told(launch: Launch | None) -> Address:
    """Find what the launcher or the environment says."""
    source = "MASTER_ADDR and MASTER_PORT"
    if launch is not None:
        host, port = launch.master_addr, launch.master_port
        return Address(host or "127.0.0.1", port or _DEFAULT_PORT, source, hosted=not launch.agent_store)
    text = os.environ.get("MASTER_PORT") or str(_DEFAULT_PORT)  # as torch's own env:// does
    if not text.isdecimal():
        raise RuntimeError(f"environment variable MASTER_PORT must be an integer, got {text!r}")
    return Address(os.environ.get("MASTER_ADDR") or "127.0.0.1", int(text), source, hosted=True)


def _parsed(launch: Launch | None, method: str) -> Address:
    """Read ``tcp://HOST:PORT``; that of torchrun's own store is possible too."""
    try:
        url = urlsplit(method)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ValueError(f"init_method must be tcp://HOST:PORT, got {method!r}: {error}") from error
    if not host or not port:
        raise ValueError(f"init_method must be tcp://HOST:PORT, got {method!r}")
    is_kept = launch is not None and launch.agent_store and launch.master_port == port
    return Address(host, port, "init_method", hosted=not is_kept)


def _connect(address: Address, rank: int, size: int, timeout: timedelta) -> Store:
    """Listen, or find who does; in a thread, as torch waits for ever for an answer of one who is no store."""
    listens = address.hosted and rank == 0
    opened: Future[Store] = Future()

    def open_store() -> None:
        try:
            options = {"wait_for_workers": False, "multi_tenant": True}
            opened.set_result(TCPStore(address.host, address.port, size, listens, timeout, **options))
        except Exception as error:
            opened.set_exception(error)

    threading.Thread(target=open_store, name="camshaft-store", daemon=True).start()
    limit = timeout.total_seconds()
    try:
        if address.hosted and not listens and limit > meeting.REPORT_AFTER:
            wait([opened], meeting.REPORT_AFTER)
            if not opened.done():
                meeting.report_first_missing(rank)
                limit -= meeting.REPORT_AFTER
        return opened.result(limit)
    except Exception as error:
        if "EADDRINUSE" in str(error):
            what = f"cannot open {address}: the port is in use; choose another one"
        else:
            what = f"got no answer from {address} within {round(timeout.total_seconds(), 1):g} s"
            what += "" if listens else ": rank 0 did not come, or the port is another program's"
        raise DistNetworkError(f"rank {rank} {what}") from error
