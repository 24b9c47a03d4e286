"""The TCP connections of this process, also those that libraries have opened without Python, and those of stores."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_FOLDER = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"

Addresses = tuple[Any, Any]
"""The local and the remote address of a connection, whose second items are the ports."""


def connections() -> Iterator[tuple[int, socket.socket, Addresses]]:
    """Yield the TCP connections of this process: file descriptor, a duplicate for the time being, and addresses."""
    descriptors: list[str] = []
    with suppress(OSError):  # there is no such folder, or no descriptor left to read it
        descriptors = os.listdir(_FOLDER)
    for descriptor in map(int, descriptors):
        with suppress(OSError), ExitStack() as stack:  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            blocks = os.get_blocking(descriptor)
            connection = stack.enter_context(socket.socket(fileno=os.dup(descriptor)))
            os.set_blocking(descriptor, blocks)  # which socket.setdefaulttimeout may have changed
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                yield descriptor, connection, (connection.getsockname(), connection.getpeername())


def server_of(store: Store | None) -> TCPStore | None:
    """Return what knows host and port of the server of a store; ``None`` if the store has no server."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def connections_to(store: Store | None) -> frozenset[Addresses]:
    """Return the connections of this process to the server of a store; none if it is not a ``TCPStore``."""
    server = server_of(store)
    return frozenset(
        addresses for _, _, addresses in connections() if server is not None and addresses[1][1] == server.port
    )


def fail_if_silent(addresses: Addresses, seconds: float) -> None:
    """Make requests on a connection fail if the other host does not acknowledge anything for a time.

    The kernel of the other host acknowledges what it receives, even while the process there is busy or stopped. By
    default, this host would repeat a request for a quarter of an hour, and wait forever for an answer.

    Args:
        addresses: of the connection.
        seconds: until a request fails; without effect on systems other than Linux.
    """
    for _, connection, found in connections():
        if found == addresses and hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # if the host had received the request
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(seconds)))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)


def is_local(addresses: Addresses) -> bool:
    """Return True if a connection certainly ends on this host."""
    local, remote = (str(address[0]).removeprefix("::ffff:") for address in addresses)
    return local == remote or remote.startswith("127.")
