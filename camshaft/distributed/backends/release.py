"""Making the operations of this process fail, from another thread, when a rank that they wait for will not arrive.

gloo has no call for that: ``abort`` and ``shutdown`` leave the waiting threads where they are. They fail when their
connections are shut down, which gloo does not reveal. They are those of which one end is an address that gloo has
published for the other ranks; all others, such as those of a database, are left alone.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from camshaft.distributed.backends import gloo_network
from camshaft.distributed.connections import Addresses, connections

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
            gloo_network.in_thread(group._get_backend(torch.device("cuda")).abort, "camshaft-release")
        elif hasattr(group, "release"):  # over mpi4py
            group.release()
    over_gloo = [group for group, config in groups.items() if "gloo" in config]
    if over_gloo:
        _shut_down(_is_between(gloo_network.known_addresses()))

    def ask() -> None:
        for group in over_gloo:  # also those that the user has made
            _shut_down(_is_between(gloo_network.addresses_of(group)))
        if store is not None:
            store.check(["camshaft"])

    asking = gloo_network.in_thread(ask, "camshaft-release")
    asking.join(_PATIENCE)
    if asking.is_alive():
        _shut_down(lambda addresses: addresses in own)


def _is_between(published: bytes) -> Callable[[Addresses], bool]:
    return lambda addresses: any(gloo_network.packed(address) in published for address in addresses)


def _shut_down(is_meant: Callable[[Addresses], bool]) -> None:
    """Shut down the connections whose addresses are meant."""
    for _, connection, addresses in connections():
        if is_meant(addresses):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
