"""The network interface that gloo uses between nodes, where the user has not named it.

gloo listens on the address that the name of this host stands for. On many machines ``/etc/hosts`` makes that a
loopback address, which other nodes cannot reach; ``GLOO_SOCKET_IFNAME`` is torch's remedy. Here the network interface
is found that leads to the other nodes.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

if sys.platform == "linux":
    import fcntl

_VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux
_ANY_PORT = 9  # nothing is sent to it


def find_interface(store: Store, rank: int, world_size: int) -> str | None:
    """Find the network interface that gloo must be told, if any; all ranks call this.

    Args:
        store: where each rank publishes its address.
        rank: of this process.
        world_size: number of processes.

    Returns:
        Its name; ``None`` where gloo itself makes the right choice, or nothing better is known.
    """
    server = store
    while isinstance(server, PrefixStore):
        server = server.underlying_store
    if world_size == 1 or not isinstance(server, TCPStore):
        return None
    address = _address_towards(server.host)
    store.set(_key(rank), address)
    if os.environ.get(_VARIABLE) or not _is_loopback(_address_of_this_host()):
        return None
    if _is_loopback(address):  # the store is on this node, so look towards another one
        published = store.multi_get([_key(other) for other in range(world_size)])
        elsewhere = next((other for other in map(bytes.decode, published) if not _is_loopback(other)), None)
        address = address if elsewhere is None else _address_towards(elsewhere)
    return None if _is_loopback(address) else _interface_with(address)


@contextmanager
def gloo_on(interface: str | None) -> Iterator[None]:
    """Use this interface for process groups created in the block, unless the user has named one.

    torch reads it from the environment and nowhere else, so the variable is set only for the block.
    """
    before = os.environ.get(_VARIABLE)
    if interface is None or before:
        yield
        return
    os.environ[_VARIABLE] = interface
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def _key(rank: int) -> str:
    return f"camshaft/address/{rank}"


def _is_loopback(address: str) -> bool:
    return not address or ip_address(address.partition("%")[0]).is_loopback


def _address_towards(host: str) -> str:
    """Return the address that packets to a host carry as their sender; empty if no route leads there."""
    for family, address in _addresses(host, _ANY_PORT):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


def _address_of_this_host() -> str:
    """Return the address that gloo chooses: the first of this host's name that this host has."""
    for family, address in _addresses(socket.gethostname(), 0):
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
            return str(address[0])
    return ""


def _addresses(host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [(family, (str(address[0]), port)) for family, _, _, _, address in found]


def _interface_with(address: str) -> str | None:
    """Find the interface that has this address; only IPv4 and only on Linux."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("40s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
