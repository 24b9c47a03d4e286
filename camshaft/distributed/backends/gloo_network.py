"""What gloo needs beside torch.distributed: groups whose members all stay until they are connected, worker threads
that are drained before the process exits, sends that can be polled, and a network interface that other nodes reach.

The worker threads of a gloo group may hold the last reference to an operation, and to its tensors, for a moment after
``wait`` has returned. To drop a tensor that Python knows they need the GIL. While the interpreter shuts down, Python
ends the threads that ask for it, which C++ answers by ``std::terminate``: a job that has done all its work ends by
SIGABRT. So the threads are drained: :func:`drain` returns when each of them has dropped what it held. This happens
before groups are destroyed, and once more at exit, as a model in ``DistributedDataParallel`` keeps its group alive.
"""

from __future__ import annotations

import atexit
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from ipaddress import ip_address
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from camshaft.distributed.backends.contract import variable_set
from camshaft.distributed.connections import server_of

if sys.platform == "linux":
    import fcntl

_TRIES = 10  # to hold a worker thread in an operation
_PATIENCE = 1.0  # seconds for a worker thread to end an operation that has nothing to do
_VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux
_ANY_PORT = 9  # nothing is sent to it

_world: Any = c10d._world
_known: weakref.WeakSet[Any] = weakref.WeakSet()  # groups that may outlive their end
_addresses: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()  # where the members of groups listen
_unfinished: list[Any] = []  # groups with operations that have not ended, for which their destruction would wait
_owner = 0  # the process whose groups these are; forked children have none of the threads


def connected(group: Any) -> Any:
    """Wait until all members of a new gloo group are connected with each other, and return the group.

    A member returns from the making of the group when it is connected itself. If it then leaves, for example because
    its process ends, members that still connect fail with "Connection closed by peer".
    """
    gloo = None if group == dist.GroupMember.NON_GROUP_MEMBER else _gloo_of(group)
    if gloo is not None:
        gloo.barrier().wait()
        addresses_of(group)
    return group


def addresses_of(group: Any) -> bytes:
    """Return where the members of a gloo group listen, as gloo has published it in the store of the group.

    Once read, it is also known when the process that serves the store has ended. It contains each address as
    :func:`packed` returns it.
    """
    if group not in _addresses and group in _world.pg_map:
        store, keys = _world.pg_map[group][1], [f"cpu//0/{rank}" for rank in range(group.size())]
        if store.check(keys):
            _addresses[group] = b"".join(store.multi_get(keys))
    return _addresses.get(group, b"")


def in_thread(call: Callable[[], object], name: str) -> threading.Thread:
    """Call in a thread, as another one may wait in the store of a group; it may be lost meanwhile."""

    def run() -> None:
        with suppress(RuntimeError):
            call()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def known_addresses() -> bytes:
    """Return the addresses of all groups for which they have been read."""
    return b"".join(_addresses.values())


def packed(address: Any) -> bytes:
    """Return an address of Python as the system has it in memory, without what follows it.

    >>> packed(("127.0.0.1", 258)).hex()
    '020001027f000001'
    """
    host, port, *rest = address
    if not rest:
        return struct.pack("=HH4s", socket.AF_INET, socket.htons(port), socket.inet_aton(host))
    of_host = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return struct.pack("=HHI16s", socket.AF_INET6, socket.htons(port), socket.htonl(rest[0]), of_host)


def drain_at_exit(group: Any) -> None:
    """Drain a group at exit, even if the user destroys it, or references keep it alive."""
    global _owner
    _owner = os.getpid()
    _known.add(group)


def destroy_groups() -> None:
    """Destroy all process groups of this process, without waiting for the other ranks.

    A group that still has operations under way lives until the process exits.
    """
    groups = list(_world.pg_map)
    _known.update(groups)
    _unfinished.extend(group for group in groups if not drain(group))
    dist.destroy_process_group()


def drain(group: Any) -> bool:
    """Wait until no worker thread of a gloo group holds an operation that has ended.

    This needs no other rank: operations on empty tensors pass through a worker thread but communicate nothing. A
    callback holds each thread in such an operation until all threads have arrived, so each has dropped what it held
    before. Then this waits until they have dropped the empty tensor, too. The tensor stays alive meanwhile: a thread
    that drops the last reference to it takes the GIL twice while holding a lock that the group's destructor waits for.

    A callback that is added when its operation has ended runs in this thread instead, so each try takes twice as long
    as the one before. Their number is the same on all ranks: each takes one of the tags by which collectives find each
    other, should a model that outlives the run communicate once more.

    Args:
        group: a process group of torch; one without gloo has nothing to drain.

    Returns:
        ``False`` if threads are still busy with operations that have not ended.
    """
    gloo = _gloo_of(group)
    if gloo is None:
        return True
    caller, size = threading.get_ident(), gloo.options._threads
    all_are_held, called = threading.Event(), threading.Semaphore(0)
    together = threading.Barrier(size, all_are_held.set)

    def hold(_: object) -> None:
        called.release()
        if threading.get_ident() != caller and not all_are_held.is_set():
            with suppress(threading.BrokenBarrierError):
                together.wait()

    tensor = torch.empty(0, device="cpu")
    own = _references(tensor)
    try:
        for number in range(_TRIES + size):
            count = 1 if all_are_held.is_set() else 16 << min(number, _TRIES)
            gloo.allreduce_coalesced([tensor] * count).get_future().add_done_callback(hold)
            if not called.acquire(timeout=_PATIENCE):
                return False
    finally:
        together.abort()  # lets go of threads that are held, now or later
    deadline = time.monotonic() + _PATIENCE
    while _references(tensor) != own:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0001)  # without the GIL
    return all_are_held.is_set()


def _references(tensor: Tensor) -> tuple[int, int]:
    """Return the reference counts of Python and of C++.

    From torch 2.10 on, C++ holds one of Python's references, too. A worker thread takes the GIL to release that, and
    does not need the GIL again. Before, only C++'s own count shows whether it holds the tensor.
    """
    return sys.getrefcount(tensor), tensor._use_count()  # type: ignore[attr-defined]  # torch's stubs


def _gloo_of(group: Any) -> Any:
    """Return what moves the CPU tensors of a group if that is gloo, else ``None``."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # the group is for other devices
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend if isinstance(backend, getattr(dist, "ProcessGroupGloo", ())) else None


@atexit.register
def _drain_at_exit() -> None:
    if _owner == os.getpid():
        all(drain(group) for group in {*_world.pg_map, *_known, *_unfinished})  # up to the first that is busy


class Send:
    """A send over gloo, which reports its completion only to a thread that waits for it.

    Args:
        work: the operation of torch.
        waiter: of the sends to the same rank.
    """

    def __init__(self, work: Any, waiter: SendWaiter) -> None:
        self._work = work
        self._waiter = waiter
        self._result: Future[None] | None = None

    def wait(self) -> None:
        """Wait until the message has left."""
        if self._result is None:
            self._result = Future()
            self.complete()
        self._result.result()

    def is_completed(self) -> bool:
        """Return whether the message has left; from the first call on, a thread waits for it."""
        if self._result is None:
            self._result = Future()
            self._waiter.add(self)
        return self._result.done()

    def complete(self) -> None:
        """Wait for gloo, which is possible once, and set the result for others who wait."""
        assert self._result is not None, "a thread waits"
        try:
            self._work.wait()
        except Exception as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(None)


class SendWaiter:
    """Waits in a thread for the sends to one rank, in their order, as long as there are any."""

    def __init__(self) -> None:
        self._sends: deque[Send] = deque()
        self._lock = threading.Lock()

    def add(self, send: Send) -> None:
        """Wait for one more send."""
        with self._lock:
            self._sends.append(send)
            if len(self._sends) == 1:
                threading.Thread(target=self._run, name="camshaft-sends", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._sends[0].complete()
            with self._lock:
                self._sends.popleft()
                if not self._sends:
                    return


# --- the network interface -------------------------------------------------------------------------------------


def find_interface(store: Store, rank: int, world_size: int) -> str | None:
    """Find the network interface that gloo must be told, if any; all ranks call this.

    gloo listens on the address that the name of this host stands for. On many machines ``/etc/hosts`` makes that a
    loopback address, which other nodes cannot reach; ``GLOO_SOCKET_IFNAME`` is torch's remedy. Here the network
    interface is found that leads to the other nodes.

    Args:
        store: where each rank publishes its address.
        rank: of this process.
        world_size: number of processes.

    Returns:
        Its name; ``None`` where gloo itself makes the right choice, or nothing better is known.
    """
    server = server_of(store)
    if world_size == 1 or server is None:
        return None
    address = _address_towards(server.host)
    store.set(_key(rank), address)
    of_this_host = _address_used(socket.socket.bind, socket.gethostname(), 0)  # the one that gloo chooses
    if os.environ.get(_VARIABLE) or not _is_loopback(of_this_host):
        return None
    if _is_loopback(address):  # the store is on this node, so look towards another one
        published = store.multi_get([_key(other) for other in range(world_size)])
        elsewhere = next((other for other in map(bytes.decode, published) if not _is_loopback(other)), None)
        address = address if elsewhere is None else _address_towards(elsewhere)
    return None if _is_loopback(address) else _interface_with(address)


def using(interface: str | None) -> AbstractContextManager[None]:
    """Use this interface for process groups created in the block, unless the user has named one."""
    if interface is None or os.environ.get(_VARIABLE):
        return nullcontext()
    return variable_set(_VARIABLE, interface)


def _key(rank: int) -> str:
    return f"camshaft/address/{rank}"


def _is_loopback(address: str) -> bool:
    return not address or ip_address(address.partition("%")[0]).is_loopback


def _address_towards(host: str) -> str:
    """Return the address that packets to a host carry as their sender; empty if no route leads there."""
    return _address_used(socket.socket.connect, host, _ANY_PORT)


def _address_used(use: Callable[[socket.socket, Any], None], host: str, port: int) -> str:
    """Use the addresses of a host with a socket, up to the first that works, and return the socket's own address."""
    with suppress(OSError, UnicodeError):  # the host is unknown
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                use(probe, address)
                return str(probe.getsockname()[0])
    return ""


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
