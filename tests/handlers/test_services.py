"""Test whether services answer, and calls that do not block."""

from __future__ import annotations

import socket
import socketserver
import threading
import warnings
from contextlib import contextmanager

import pytest

from camshaft.handlers.services import Outbox, answers


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def serving(send):
    """Serve connections with a function of the socket until the block ends."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1000)
            send(self.request)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "scheme"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n", "http"),
        (b"HTTP/1.0 401 Unauthorized\r\n\r\n", "http"),
        (b"hello\r\n", "http"),
        (b"no TLS here", "https"),
    ],
)
def test_any_response_counts_as_an_answer(monkeypatch, answer, scheme):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(lambda connection: connection.sendall(answer)) as address:
        assert answers(f"{scheme}://{address}/")


def test_a_closed_or_silent_port_does_not_answer(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert not answers(f"http://127.0.0.1:{free_port()}/")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not answers(f"http://127.0.0.1:{silent.getsockname()[1]}/", seconds=0.1)


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


def fail():
    raise OSError("no route")


def test_the_first_error_warns_once_and_later_calls_still_run():
    done = []
    outbox = Outbox("the service")
    outbox.put(fail)
    outbox.put(fail)
    outbox.put(done.append, 1)
    with pytest.warns(UserWarning, match="values may be missing in the service: OSError: no route"):
        outbox.close()
    assert done == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outbox.put(fail)
        outbox.close()


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
