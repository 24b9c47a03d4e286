"""Services that loggers talk to: are they there, and calls that nobody waits for."""

from __future__ import annotations

import http.client
import queue
import ssl
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

SECONDS = 10.0
_END: Any = object()


def answers(url: str, seconds: float = SECONDS) -> bool:
    """Say whether anything answers at an address of the web, be it with an error, or a certificate of its own."""
    try:
        urllib.request.urlopen(url, timeout=seconds).close()
    except urllib.error.HTTPError as error:
        error.close()
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False
    except http.client.HTTPException:
        return True
    return True


class Outbox:
    """Calls functions one after the other in a thread, so that a slow service does not hold up a run.

    The first error is told by a warning, at the next call to :meth:`put` or :meth:`close`; what comes later is
    tried all the same. When more than ``capacity`` calls wait, the newest is lost, which is told too.

    Args:
        name: of the service, for warnings.
        capacity: how many calls may wait.
        patience: seconds that :meth:`close` waits for the calls that are left.

    >>> outbox, sent = Outbox("the service"), []
    >>> outbox.put(sent.append, 1)
    >>> outbox.close()
    >>> sent
    [1]
    """

    def __init__(self, name: str, capacity: int = 10_000, patience: float = 60.0) -> None:
        self._name = name
        self._patience = patience
        self._calls: queue.Queue[Any] = queue.Queue(capacity)
        self._problem: str | None = None
        self._told = False
        self._thread: threading.Thread | None = None

    def put(self, function: Callable[..., object], *args: Any) -> None:
        """Let the thread call a function soon."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="camshaft-log", daemon=True)
            self._thread.start()
        try:
            self._calls.put_nowait((function, args))
        except queue.Full:
            self._problem = self._problem or f"more than {self._calls.maxsize} calls wait"
        self._tell()

    def close(self) -> None:
        """Wait for the calls that are left, and end the thread; one put later begins another."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with suppress(queue.Full):
                self._calls.put(_END, timeout=self._patience)
            thread.join(self._patience)
            if thread.is_alive():
                self._problem = self._problem or f"about {self._calls.qsize()} calls were still waiting at the end"
        self._tell()

    def _work(self) -> None:
        while (call := self._calls.get()) is not _END:
            function, args = call
            try:
                function(*args)
            except Exception as error:
                self._problem = self._problem or f"{type(error).__name__}: {error}"

    def _tell(self) -> None:
        if self._problem is not None and not self._told:
            self._told = True
            warnings.warn(f"values may be missing in {self._name}: {self._problem}", stacklevel=4)
