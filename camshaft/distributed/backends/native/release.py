"""Making the operations of this process fail, from another thread, when a rank that they wait for will not arrive.

gloo has no call for that: ``abort`` and ``shutdown`` leave the waiting threads where they are. They fail when their
connections are shut down, which gloo does not reveal. They are what remains of the TCP connections of the process
without those that Python objects own and those of stores. Libraries that open connections outside of Python lose them
too.
"""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from camshaft.distributed.connections import Addresses, connections, server_of

_PATIENCE = 1.0  # seconds for a store to answer, if no thread waits in it
_world: Any = dist.distributed_c10d._world


def release_groups(store: Store | None, own: Collection[Addresses]) -> None:
    """Make the operations of all process groups fail, and the making of new ones.

    Args:
        store: of the job, if it has one. If it does not answer, a thread waits in it, such as for the members of a new
            group.
        own: connections to the store; shut down in that case, so that other connections to its server last.
    """
    groups = {group: dist.get_backend_config(group) for group in list(_world.pg_map)}
    for group, config in groups.items():
        if isinstance(group, dist.ProcessGroup) and "nccl" in config:
            _in_thread(group._get_backend(torch.device("cuda")).abort)
        elif hasattr(group, "release"):  # over mpi4py
            group.release()
    kinds = ",".join(groups.values())
    if "gloo" in kinds and "mpi" not in kinds:  # MPI has connections of its own, and ends the process without them
        servers = [server_of(other) for other in (store, *(other for _, other in list(_world.pg_map.values())))]
        ports = {server.port for server in servers if server is not None}
        _shut_down(lambda local, remote: not {local[1], remote[1]} & ports)
    asking = _in_thread(lambda: store is not None and store.check(["camshaft"]))
    asking.join(_PATIENCE)
    if asking.is_alive():
        _shut_down(lambda *addresses: addresses in own)


def _shut_down(is_meant: Callable[[Any, Any], bool]) -> None:
    """Shut down the connections whose addresses are meant, except for those that Python objects own."""
    found = {descriptor: addresses for descriptor, _, addresses in connections()}
    owned = _owned_by_python()  # also those that were opened while the others were listed
    for descriptor, connection, addresses in connections():
        if found.get(descriptor) == addresses and descriptor not in owned and is_meant(*addresses):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _owned_by_python() -> frozenset[int]:
    """Return the file descriptors that Python objects close.

    They are found as referrers of their classes. A list of all objects would refer to a tuple that another thread is
    making, which that thread would fail to resize, with a ``SystemError``.
    """
    kinds: list[type] = [socket.socket, Connection]
    for kind in kinds:
        kinds += kind.__subclasses__()
    owned = set()
    for one in gc.get_referrers(*kinds):
        if issubclass(type(one), (socket.socket, Connection)):  # isinstance would ask the object, which may warn
            with suppress(OSError):  # it is closed
                owned.add(one.fileno())
    return frozenset(owned)


def _in_thread(call: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        with suppress(RuntimeError):
            call()

    thread = threading.Thread(target=run, name="camshaft-release", daemon=True)
    thread.start()
    return thread
