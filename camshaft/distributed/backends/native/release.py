"""Making the operations of this process fail, from another thread, when a rank that they wait for will not arrive.

gloo has no call for that: ``abort`` and ``shutdown`` leave the waiting threads where they are. They fail when their
connections are shut down, which gloo does not reveal. They are what remains of the TCP connections of the process
without those that Python objects own and those of stores. Libraries that open connections outside of Python lose them
too.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_PATIENCE = 1.0  # seconds for a store to answer, if no thread waits in it
_FOLDER = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_world: Any = dist.distributed_c10d._world

Addresses = tuple[Any, Any]
"""The local and the remote address of a connection, whose second items are the ports."""


def release_groups(store: Store | None, connections: Collection[Addresses]) -> None:
    """Make the operations of all process groups fail, and the making of new ones.

    Args:
        store: of the job, if it has one. If it does not answer, a thread waits in it, such as for the members of a new
            group.
        connections: of the store; shut down in that case, so that other connections to its server last.
    """
    groups = {group: dist.get_backend_config(group) for group in list(_world.pg_map)}
    for group, config in groups.items():
        if isinstance(group, dist.ProcessGroup) and "nccl" in config:
            _in_thread(group._get_backend(torch.device("cuda")).abort)
        elif hasattr(group, "release"):  # over mpi4py
            group.release()
    kinds = ",".join(groups.values())
    if "gloo" in kinds and "mpi" not in kinds:  # MPI has connections of its own, and ends the process without them
        ports = {_port(other) for _, other in list(_world.pg_map.values())} | {_port(store)}
        _shut_down(lambda local, remote: not {local[1], remote[1]} & ports)
    asking = _in_thread(lambda: store is not None and store.check(["camshaft"]))
    asking.join(_PATIENCE)
    if asking.is_alive():
        _shut_down(lambda *addresses: addresses in connections)


def connections_to(store: Store | None) -> frozenset[Addresses]:
    """Return the connections of this process to the server of a store; none if it is not a ``TCPStore``."""
    port = _port(store)
    return frozenset(addresses for _, _, addresses in _connections() if addresses[1][1] == port)


def _shut_down(is_meant: Callable[[Any, Any], bool]) -> None:
    """Shut down the connections whose addresses are meant, except for those that Python objects own."""
    found = {descriptor: addresses for descriptor, _, addresses in _connections()}
    owned = _owned_by_python()  # also those that were opened while the others were listed
    for descriptor, connection, addresses in _connections():
        if found.get(descriptor) == addresses and descriptor not in owned and is_meant(*addresses):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[tuple[int, socket.socket, Addresses]]:
    """Yield the TCP connections of this process: file descriptor, a duplicate for the time being, and addresses."""
    for descriptor in map(int, os.listdir(_FOLDER) if os.path.isdir(_FOLDER) else ()):
        with suppress(OSError), ExitStack() as stack:  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            blocks = os.get_blocking(descriptor)
            connection = stack.enter_context(socket.socket(fileno=os.dup(descriptor)))
            os.set_blocking(descriptor, blocks)  # which socket.setdefaulttimeout may have changed
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                yield descriptor, connection, (connection.getsockname(), connection.getpeername())


def _owned_by_python() -> frozenset[int]:
    """Return the file descriptors that Python objects close."""
    owned = set()
    for one in gc.get_objects():
        if issubclass(type(one), (socket.socket, Connection)):  # isinstance would ask the object, which may warn
            with suppress(OSError):  # it is closed
                owned.add(one.fileno())
    return frozenset(owned)


def _port(store: Store | None) -> int | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else None


def _in_thread(call: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        with suppress(RuntimeError):
            call()

    thread = threading.Thread(target=run, name="camshaft-release", daemon=True)
    thread.start()
    return thread
