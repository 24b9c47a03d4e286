"""Messages on their way through gloo, which tells that one has left only to somebody who waits for it."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any


class Sending:
    """One message.

    Args:
        work: of torch.
        watcher: of the messages to the same rank.
    """

    def __init__(self, work: Any, watcher: Watcher) -> None:
        self._work = work
        self._watcher = watcher
        self._end: Future[None] | None = None

    def wait(self) -> None:
        """Wait until it has left."""
        if self._end is None:
            self._end = Future()
            self.finish()
        self._end.result()

    def is_completed(self) -> bool:
        """Say whether it has left; from the first time that this is asked on, it is watched."""
        if self._end is None:
            self._end = Future()
            self._watcher.watch(self)
        return self._end.done()

    def finish(self) -> None:
        """Wait, which gloo allows once, and tell the others who wait."""
        assert self._end is not None, "somebody waits"
        try:
            self._work.wait()
        except Exception as error:
            self._end.set_exception(error)
        else:
            self._end.set_result(None)


class Watcher:
    """Waits in a thread for the messages to one rank, in their order, as long as there are any."""

    def __init__(self) -> None:
        self._watched: deque[Sending] = deque()
        self._lock = threading.Lock()
        self._runs = False

    def watch(self, sending: Sending) -> None:
        """Wait for one more message."""
        with self._lock:
            self._watched.append(sending)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="camshaft-sending", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._watched:
                    self._runs = False
                    return
                sending = self._watched.popleft()
            sending.finish()
            del sending  # it must not live until the next one comes
