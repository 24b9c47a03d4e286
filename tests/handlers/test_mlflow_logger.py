"""Test the queue of MLflowLogger, which does not block; tests/loggers has the tests with MLflow."""

from __future__ import annotations

import threading
import warnings

import pytest

from camshaft.handlers.mlflow_logger import Outbox


def test_calls_run_in_order_without_blocking():
    done, go = [], threading.Event()
    outbox = Outbox("s")
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


def put_all(outbox, function, values):
    for value in values:
        outbox.put(function, value)


def run_all(outbox, *functions):
    for function in functions:
        outbox.put(function)
    outbox.close()


def fail():
    raise OSError("no route")


def test_the_first_error_warns_once_and_later_calls_still_run():
    done = []
    outbox = Outbox("the service")
    with pytest.warns(UserWarning, match="values may be missing in the service: OSError: no route"):
        run_all(outbox, fail, fail, lambda: done.append(1))
    assert done == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_all(outbox, fail)


def test_a_full_queue_drops_calls_with_a_warning():
    done, go = [], threading.Event()
    outbox = Outbox("s", capacity=2)
    outbox.put(go.wait)
    with pytest.warns(UserWarning, match="more than 2 calls are waiting"):
        put_all(outbox, done.append, range(5))
    go.set()
    outbox.close()
    assert done in ([0, 1], [0])


def test_close_stops_waiting_after_the_timeout():
    go = threading.Event()
    outbox = Outbox("s", patience=0.1)
    outbox.put(go.wait)
    outbox.put(fail)
    with pytest.warns(UserWarning, match="calls were still waiting at the end"):
        outbox.close()
    go.set()
