"""Test the queue of MLflowLogger, which does not block; tests/loggers has the tests with MLflow."""

from __future__ import annotations

import threading

import pytest

from camshaft.handlers.mlflow_logger import Outbox


def test_calls_run_in_order_without_blocking_also_after_close():
    done, go = [], threading.Event()
    outbox = Outbox()
    outbox.put(go.wait)
    for number in range(100):
        outbox.put(done.append, number)
    assert done == []
    go.set()
    outbox.close()
    assert done == list(range(100))
    outbox.put(done.append, 100)
    outbox.close()
    assert done[-1] == 100


def test_a_full_queue_and_calls_that_last_too_long_raise():
    """Then the thread still ends after the last call, or this test leaves it behind."""
    begun, go = threading.Event(), threading.Event()
    outbox = Outbox(capacity=2, patience=0.1)
    outbox.put(lambda: begun.set() or go.wait())
    begun.wait()
    for _ in range(2):
        outbox.put(go.wait)
    with pytest.raises(TimeoutError, match="2 calls are waiting"):
        outbox.put(go.wait)
    with pytest.raises(TimeoutError, match="calls were still waiting at the end"):
        outbox.close()
    go.set()
