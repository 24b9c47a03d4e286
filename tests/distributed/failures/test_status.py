from __future__ import annotations

import threading
import time
from typing import Any

from camshaft.distributed.failures.status import Observer
from camshaft.distributed.failures.trace import Call, Found


class CallsLate:
    """A trace in which another thread goes on to a call while the status of the process is taken."""

    def __init__(self) -> None:
        self.begins, self.has_begun, self.ends = threading.Event(), threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.compute_and_call)
        self.thread.start()

    def compute_and_call(self) -> None:
        self.begins.wait()
        self.call()

    def call(self) -> None:
        self.has_begun.set()
        self.ends.wait()

    def unfinished(self) -> list[Any]:
        return []

    def read(self, now: float, is_urgent: bool) -> Found:
        self.begins.set()
        self.has_begun.wait()
        call = Call("world", 1, "barrier", "", "", time.monotonic(), False, self.thread.ident or 0, "gloo")
        return Found((call,), {"world": 1}, {}, {"world": "0-1"}, frozenset({call.thread}))


def test_a_call_that_begins_while_the_status_is_taken_is_shown_with_its_line() -> None:
    trace = CallsLate()
    observer = Observer(trace, threading.get_ident())  # type: ignore[arg-type]  # which needs only these methods
    try:
        (wait,) = observed_by_another_thread(observer)["waits"]
    finally:
        trace.ends.set()
        trace.thread.join()
    assert wait["line"].endswith(" in call")


def observed_by_another_thread(observer: Observer) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(observer.describe(is_asked=True)))
    thread.start()
    thread.join()
    return found[0]
