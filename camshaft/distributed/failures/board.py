"""What the ranks of a job tell each other through its store, on a thread of its own, as the store may block.

Each process sends one request per second. A failure, or a verdict, is kept by the first rank that writes it. Topics
form a list, to which ranks append. What a rank answers to a question, or shares, has one key that it overwrites.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any, TypeAlias

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from camshaft.distributed.backends.contract import Backend
from camshaft.distributed.connections import connections, fail_if_silent, is_local, server_of
from camshaft.distributed.failures.store import store_at

PERIOD = 1.0  # seconds between two requests
SILENCE = 5.0  # seconds without a packet from the host of the store after which a request fails
_PROBE = 2.0  # seconds to find out whether the store is served
_ENDING = 2.0  # seconds that the thread has to end
_INFORMING = 5.0  # seconds that rank 0 stays at most until the ranks know why the job fails: some may have been killed
_PAUSE = 0.05  # seconds until rank 0, which leaves, asks again whether the others know the name of the job
_FINAL, _NEWS, _QUERY, _HOST = "final", "news", "query", "host"
_READ = (_FINAL, _NEWS, _QUERY, _HOST)

Callback: TypeAlias = Callable[[], float]
"""Runs on the board's thread and returns the seconds until it wants to run again; infinity for never."""

logger = logging.getLogger("camshaft.distributed")


def _ignore(*_: object) -> None:
    pass


class Board:
    """The connection of this process to the store of a job.

    If the store is lost, all callbacks are called once more, and their own requests to the store fail.

    Args:
        backend: of the job.
        on_change: called on the board's thread when something is new.
        on_job: called there with the name of the job, once that is known.

    Attributes:
        final: the failure or the verdict that ends the job.
        query: the last question to all ranks, with its number; ``None`` if there was none.
        host: a rank on the host of the store, if the job has several nodes.
        is_lost: whether the store was lost.
        silent_since: since when the host of the store does not answer, else infinity.
        has_connected: set once the name of the job is known, or there is no store.
    """

    def __init__(
        self,
        backend: Backend,
        on_change: Callable[[], object] = _ignore,
        on_job: Callable[[str], object] = _ignore,
    ) -> None:
        self._backend, self._on_change, self._on_job = backend, on_change, on_job
        self.final: dict[str, Any] | None = None
        self.query: dict[str, Any] | None = None
        self.host: int | None = None
        self.is_lost = False
        self.silent_since = math.inf
        self.has_connected = Event()
        self._answered_at = 0.0
        self.job = ""
        self._store: Store | None = None
        self._connection: socket.socket | None = None
        self._news: list[str] = []  # topics, as far as they were read
        self._callbacks: dict[str, Callback] = {}
        self._tasks: deque[tuple[Callable[[Store], object], Event]] = deque()
        self._places: dict[str, str] = {}  # of this rank, by what is written there
        self._lock, self._wake = Lock(), Event()
        self._is_closed = False
        self.thread = Thread(target=self._run, name="camshaft-board", daemon=True)

    # --- for other threads -------------------------------------------------------------------------------------

    def watch(self, topic: str, callback: Callback) -> None:
        """Call back once a topic has been announced, by any rank, also if that was before."""
        self._callbacks[topic] = callback
        self._wake.set()

    def forget(self, topic: str) -> None:
        """Do not call back any more; a call that is in progress ends first."""
        with self._lock:
            self._callbacks.pop(topic, None)

    def is_watched(self) -> bool:
        """Return whether something was announced that this process acts on."""
        return any(topic in self._callbacks for topic in tuple(self._news))

    def announce(self, topic: str) -> None:
        """Announce a topic to all ranks, including this one."""

        def append(store: Store) -> None:
            while topic not in self._news:
                found = store.compare_set(f"{_NEWS}/{len(self._news)}", "", topic).decode()
                self._news.append(found)
                store.set(_NEWS, str(len(self._news)))

        self.submit(append)

    def decide(self, final: dict[str, Any]) -> Event:
        """End the job with a failure or a verdict, unless there is one; return an event that is set once it is known.

        Args:
            final: ``{"kind": ..., "text": ..., "traceback": ...}``.
        """
        if self._store is None or self.is_lost:
            self.final = self.final or final
        return self.submit(lambda store: self._take_final(store, store.compare_set(_FINAL, "-", json.dumps(final))))

    def submit(self, task: Callable[[Store], object]) -> Event:
        """Run a function of the store on the board's thread; return an event that is set when that is over."""
        done = Event()
        self._tasks.append((task, done))
        if self._has_none:
            done.set()
        self._wake.set()
        return done

    def write_place(self, kind: str, content: Any) -> None:
        """Write what this rank has of a kind, in place of what it wrote before."""
        data = json.dumps(content, default=str)

        def write(store: Store) -> None:
            if kind not in self._places:
                self._places[kind] = str(store.add(f"{kind}/places", 1))
            store.set(f"{kind}/{self._places[kind]}", data)

        self.submit(write)

    def read_places(self, kind: str, receive: Callable[[list[Any]], None]) -> None:
        """Pass what the ranks wrote of a kind to a function, which runs on the board's thread, and report a change."""

        def fetch(store: Store) -> None:
            keys = [f"{kind}/{number}" for number in range(1, 1 + store.add(f"{kind}/places", 0))]
            if not keys or not store.check(keys):  # one is counted before it is written
                keys = [key for key in keys if store.check([key])]
            receive([json.loads(found) for found in _get_all(store, keys)])
            self._on_change()

        self.submit(fetch)

    def say_farewell(self, rank: int, num_known: int, until: float) -> None:
        """Wait until what this rank has written is in the store, and the store is no longer needed.

        With rank 0, the store may end. Before it leaves, the others must know the name of the job, without which they
        do not find its record, and those of other nodes must know what has ended the job.

        Args:
            rank: of this process.
            num_known: of ranks that must know the name of the job.
            until: when to stop waiting.
        """

        def wait(store: Store) -> None:
            informing = min(until, time.monotonic() + _INFORMING) if self.final and self._has_others else 0.0
            while rank == 0 and time.monotonic() < until:
                num_connected = store.add("connected", 0)
                is_over = time.monotonic() >= informing or store.add("informed", 0) >= num_connected
                if num_connected >= num_known and is_over:
                    break
                time.sleep(_PAUSE)

        if self.responds:
            self.submit(wait).wait(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End the thread, unless the store blocks it."""
        self._is_closed = True
        self._wake.set()
        if self.thread.ident is not None:
            self.thread.join(_ENDING)
        self._on_change, self._on_job = _ignore, _ignore  # a cycle of references would keep the store open

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            due = 0.0
            while not self._is_closed:
                now = time.monotonic()
                if now >= due:
                    due = now + PERIOD
                    self.look()
                self._work()
                pause = min(due - time.monotonic(), self._call_back())
                self._wake.wait(max(0.0, pause))
                self._wake.clear()
            self._work()  # what a rank that leaves has to say
        finally:
            self.is_lost = True
            self._work()
            self._store = None
            if self._connection is not None:
                self._connection.close()

    def look(self) -> None:
        """Connect, or do what other threads have asked for and read what is new, with one request: one round."""
        if not self.has_connected.is_set():
            self._guard(self._connect)
            self.has_connected.set()
        self._work()
        self._guard(self._look)

    def _work(self) -> None:
        while self._tasks and ((store := self.usable_store) is not None or self._has_none):
            task, done = self._tasks.popleft()
            if store is not None:
                self._guard(task, store)
            done.set()

    @property
    def responds(self) -> bool:
        """Whether the store has answered lately: else, it is no use to wait for it."""
        return self.usable_store is not None and time.monotonic() - self._answered_at < SILENCE

    @property
    def _has_others(self) -> bool:
        """Whether the job has other nodes."""
        return self._backend.topology.local_world_size < self._backend.topology.world_size

    @property
    def _has_none(self) -> bool:
        """Whether there is no store, or none any more."""
        return self.is_lost or (self._store is None and self.has_connected.is_set())

    @property
    def usable_store(self) -> Store | None:
        """The store, as long as it answers."""
        return None if self.is_lost or self.silent_since < math.inf else self._store

    def _guard(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function; an error must end neither the thread nor the job."""
        try:
            function(*arguments)
        except dist.DistError as error:
            self._lose(error)
        except Exception:
            logger.warning("rank %d could not use the store", self._backend.topology.rank, exc_info=True)

    def _call_back(self) -> float:
        pause = math.inf
        with self._lock:
            for topic in [topic for topic in self._callbacks if topic in self._news or self.is_lost]:
                try:
                    pause = min(pause, self._callbacks[topic]())
                except Exception:
                    logger.warning("what waits for %s failed", topic, exc_info=True)
        return pause

    def _connect(self) -> None:
        """Open a connection of this thread's own, and learn the name of the job; again after the host was silent."""
        backend, topology = self._backend, self._backend.topology
        store = store_at(backend, f"camshaft/{backend.job.number}/watcher")
        if store is None:
            return
        is_beside = True
        if server_of(store) is not None:
            before = {addresses for _, _, addresses in connections()}
            store = store.clone()  # type: ignore[attr-defined]  # torch's stubs
            is_beside = self._keep_connection(store, before)
        if not self.job:
            for key in _READ:
                store.compare_set(key, "", "-")
            self.job = store.compare_set("job", "", uuid.uuid4().hex).decode()
            self._on_job(self.job)
            store.add("connected", 1)
            if is_beside and self._has_others:
                store.compare_set(_HOST, "-", str(topology.rank))
        self._store = store
        self._on_change()

    def _keep_connection(self, store: Store, before: set[Any]) -> bool:
        """Keep the socket that was opened, to see when it is closed; return whether it ends on this host."""
        server = server_of(store)
        for descriptor, _, addresses in connections():
            if server is not None and addresses not in before and addresses[1][1] == server.port:
                if self._connection is not None:
                    self._connection.close()
                with suppress(OSError):
                    self._connection = socket.socket(fileno=os.dup(descriptor))
                if not is_local(addresses):
                    fail_if_silent(addresses, SILENCE)
                return is_local(addresses)
        return False

    def _look(self) -> None:
        """Read what is new, with one request."""
        if self.silent_since < math.inf:
            self._reconnect()
        if self.usable_store is not None and self._connection is not None and _is_closed(self._connection):
            self._lose(ConnectionError("the process that serves the store has ended"))  # torch would print a stack
        store = self.usable_store
        if store is None:
            return
        final, news, query, host = _get_all(store, _READ)
        self._answered_at = time.monotonic()
        if final != b"-" and self.final is None:
            self._take_final(store, final)
        if host != b"-":
            self.host = int(host)
        if query != b"-" and (found := json.loads(query)) != self.query:
            self.query = found
            self._on_change()
        count = 0 if news == b"-" else int(news)
        if count > len(self._news):
            keys = [f"{_NEWS}/{number}" for number in range(len(self._news), count)]
            self._news += [found.decode() for found in _get_all(store, keys)]

    def _take_final(self, store: Store, data: bytes) -> None:
        is_first, self.final = self.final is None, json.loads(data)
        self._on_change()
        if is_first and self._has_others:
            store.add("informed", 1)

    def _lose(self, error: Exception) -> None:
        store, server = self._store, server_of(self._store)
        is_served = True if store is None or server is None else _is_served(server)
        logger.info("rank %d lost the store of the job: %s", self._backend.topology.rank, error)
        if is_served is None:
            self.silent_since = time.monotonic() - SILENCE
        else:
            self.is_lost = True
        self._on_change()

    def _reconnect(self) -> None:
        """Connect to the store again if its host answers again."""
        server = server_of(self._store)
        if server is not None and (is_served := _is_served(server)) is not None:
            self.silent_since, self.is_lost = math.inf, not is_served
            if is_served:
                self._connect()


def _get_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Return the values of keys, which exist, with one request where the store can do that."""
    if not keys:
        return []
    if store.has_extended_api():  # type: ignore[attr-defined]  # torch's stubs
        return list(store.multi_get(list(keys)))
    return [store.get(key) for key in keys]


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the other end of a connection was closed."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _is_served(server: Any) -> bool | None:
    """Return whether a process serves a store; ``None`` if its host does not answer."""
    try:
        socket.create_connection((server.host, server.port), _PROBE).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return False
    except OSError:  # it timed out, for example, or the name of the host could not be resolved
        return None
    return True
