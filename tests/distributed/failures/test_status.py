"""What a rank says of itself, though its other threads go on meanwhile."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread, get_ident
from unittest import mock

from camshaft.distributed.failures.status import Observer
from camshaft.distributed.failures.trace import Call, Found


def test_a_call_that_begins_while_the_status_is_taken_is_shown_with_its_line() -> None:
    begins, has_begun, ends = Event(), Event(), Event()

    def call() -> None:
        has_begun.set()
        ends.wait()

    def compute_and_call() -> None:
        begins.wait()
        call()

    def read(now: float, is_urgent: bool) -> Found:
        begins.set()
        has_begun.wait()
        sent = Call("world", 1, "barrier", "", "", time.monotonic(), False, thread.ident or 0, "gloo")
        return Found((sent,), {"world": 1}, {}, {"world": "0-1"}, frozenset({sent.thread}))

    thread = Thread(target=compute_and_call)
    thread.start()
    observer = Observer(mock.Mock(unfinished=list, read=read), get_ident())
    try:
        with ThreadPoolExecutor(1) as watcher:
            (wait,) = watcher.submit(observer.describe, is_asked=True).result()["waits"]
    finally:
        ends.set()
        thread.join()
    assert wait["line"].endswith(" in call")
