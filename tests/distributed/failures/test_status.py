"""What a rank says of itself, though its other threads go on meanwhile."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread, get_ident
from unittest import mock

import pytest

from camshaft import activity
from camshaft.distributed.failures import status
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


def test_what_happened_before_a_call_that_is_shown_is_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may begin while the status is taken; the reason why it differs from those of other ranks came before."""
    monkeypatch.setattr(status, "strays", strays := list[str]())
    monkeypatch.setattr(activity, "early_ends", ends := list[activity.RunEnd]())

    def read(now: float, is_urgent: bool) -> Found:
        strays.append("sent 1 collective")
        ends.append(activity.RunEnd("train.py:1", 1, "terminate()", 2, 3, now))
        return Found()

    observer = Observer(mock.Mock(unfinished=list, read=read), get_ident())
    with ThreadPoolExecutor(1) as watcher:
        found = watcher.submit(observer.describe, is_asked=True).result()
    assert found["strays"] == ["sent 1 collective"]
    assert [end["iteration"] for end in found["ended"]] == [3]


def test_a_call_may_have_failed_until_the_watcher_has_looked_a_while_after_the_call_ended() -> None:
    done = Call("world", 1, "barrier", "", "", 9.0, True, get_ident(), "gloo")
    unfinished, found = mock.Mock(), []
    observer = Observer(mock.Mock(unfinished=unfinished, read=mock.Mock(return_value=None)), get_ident())
    with ThreadPoolExecutor(1) as watcher:
        for now, running in ((5.0, []), (10.0, ["world"]), (20.0, ["world"]), (21.0, []), (23.9, []), (24.1, [])):
            unfinished.return_value = running
            with mock.patch.object(status, "time", mock.Mock(wraps=time, monotonic=lambda now=now: now)):
                watcher.submit(observer.describe).result()
            found.append(observer.may_have_failed(done))
    assert found == [True, True, True, True, True, False]
    assert observer.may_have_failed(done._replace(is_done=False))
    assert observer.may_have_failed(done._replace(began=25.0))
