"""What loggers over third-party libraries share: forwarding, silence on other ranks, and calls that do not block."""

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
from typing import Any, ClassVar

from camshaft.handlers.base_logger import BaseLogger

_END: Any = object()


class ServiceLogger(BaseLogger):
    """A logger that looks up unknown attributes on an object of the library that it writes to.

    Private names are never looked up there, so that copying, unpickling and half-initialized loggers raise
    ``AttributeError`` as usual.
    """

    _forwards_to: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        target = self.__dict__.get(self._forwards_to)
        if name.startswith("_") or target is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(target, name)


class Silence:
    """Replaces the library on ranks that do not write: accepts any call and does nothing."""

    def __getattr__(self, name: str) -> Silence:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Silence:
        """Do nothing."""
        return self


def answers(url: str, seconds: float = 10.0) -> bool:
    """Return whether a server answers at a URL, even if with an error or an untrusted certificate."""
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
    """Runs calls in order in a background thread, so that a slow service does not block the run.

    The first error is reported by a warning at the next :meth:`put` or :meth:`close`; later calls still run. A full
    queue drops the newest call, which is reported too. The thread is a daemon: it does not delay the exit of a process
    that crashed, as a thread of ``concurrent.futures`` would.

    Args:
        name: the name of the service, for warnings.
        capacity: the maximum number of waiting calls.
        patience: the number of seconds that :meth:`close` waits for remaining calls.

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
        self._has_warned = False
        self._thread: threading.Thread | None = None

    def put(self, function: Callable[..., object], *args: Any) -> None:
        """Schedule a call."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="camshaft-log", daemon=True)
            self._thread.start()
        try:
            self._calls.put_nowait((function, args))
        except queue.Full:
            self._problem = self._problem or f"more than {self._calls.maxsize} calls are waiting"
        self._warn()

    def close(self) -> None:
        """Wait for the remaining calls and end the thread; a later :meth:`put` starts another."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with suppress(queue.Full):
                self._calls.put(_END, timeout=self._patience)
            thread.join(self._patience)
            if thread.is_alive():
                self._problem = self._problem or f"about {self._calls.qsize()} calls were still waiting at the end"
        self._warn()

    def _work(self) -> None:
        while (call := self._calls.get()) is not _END:
            function, args = call
            try:
                function(*args)
            except Exception as error:
                self._problem = self._problem or f"{type(error).__name__}: {error}"

    def _warn(self) -> None:
        if self._problem is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"values may be missing in {self._name}: {self._problem}", stacklevel=4)
