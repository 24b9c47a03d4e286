"""The watcher of a job: one thread per process that learns what other ranks announce outside of collectives.

Announcements are a list in the store of the job. While something is watched, the thread makes one request per second,
which asks whether there is another entry; however many topics are watched, and however many ranks there are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Lock, Thread, current_thread
from typing import TypeAlias

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from camshaft.distributed.backend import Resource

PERIOD = 1.0  # seconds between two requests

Callback: TypeAlias = Callable[[], float]
"""Runs on the watcher's thread and returns the seconds until it wants to run again; infinity for never."""

logger = logging.getLogger(__name__)


class Watcher(Resource):
    """Calls back when a rank has announced a topic, on every rank that watches it at that time or later.

    If the store is lost, all callbacks are called once more, and their own requests to the store fail.

    Args:
        store: for the watchers of this job alone.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._callbacks: dict[str, Callback] = {}
        self._announced: set[str] = set()
        self._num_read = 0
        self._lock = Lock()  # of the callbacks and the thread
        self._wake = Event()
        self._thread: Thread | None = None

    def watch(self, topic: str, callback: Callback) -> None:
        """Call back once a topic has been announced, by any rank, also if that was before."""
        with self._lock:
            self._callbacks[topic] = callback
            if self._thread is None:
                self._thread = Thread(target=self._run, name="camshaft-watcher", daemon=True)
                self._thread.start()
        if topic in self._announced:
            self._wake.set()

    def forget(self, topic: str) -> None:
        """Remove the callback of a topic; the thread ends with the last one."""
        with self._lock:
            self._callbacks.pop(topic, None)
            if self._callbacks:
                return
            thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None:
            thread.join()

    def announce(self, topic: str) -> None:
        """Announce a topic to all ranks, including this one, which learns of it at once.

        Raises:
            torch.distributed.DistError: the store is unreachable.
        """
        number = self._num_read
        while topic not in self._announced and self._store.compare_set(str(number), "", topic).decode() != topic:
            number += 1
        self._wake.set()

    def close(self) -> None:
        """End the thread."""
        for topic in tuple(self._callbacks):
            self.forget(topic)

    def _run(self) -> None:
        while self._thread is current_thread():
            pause = self._poll()
            if pause < 0:
                return
            self._wake.wait(min(pause, PERIOD))
            self._wake.clear()

    def _poll(self) -> float:
        """Read what was announced, and call back; return the seconds until the next poll, or a negative number."""
        is_lost = False
        try:
            while self._store.check([str(self._num_read)]):
                self._announced.add(self._store.get(str(self._num_read)).decode())
                self._num_read += 1
        except dist.DistError as error:  # the process that serves the store has ended
            logger.info("announcements are no longer possible: %s", error)
            is_lost = True
        callbacks = tuple(self._callbacks.items())
        pauses = [callback() for topic, callback in callbacks if is_lost or topic in self._announced]
        return -1.0 if is_lost else min(pauses, default=PERIOD)
