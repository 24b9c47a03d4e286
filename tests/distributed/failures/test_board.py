"""What ranks tell each other through the store, and what it costs with a thousand of them."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from camshaft.distributed.failures import board as module
from camshaft.distributed.failures.board import Board
from camshaft.distributed.failures.watcher import Watcher
from tests.distributed.failures.stand_in import StoreOnly, snapshot, waiting
from tests.guards import outlasting
from tests.limits import HANG

SIZE, LOCAL = 1024, 8
KEYS = 6  # of a board without news


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.02)


class Counted(dist.Store):
    """A store in memory that counts its requests, by the rank that is looking."""

    def __init__(self) -> None:
        super().__init__()
        self.data: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: Any) -> None:
        self.requests["set"] += 1
        self.data[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return self.data[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests["multi_get"] += 1
        return [self.data[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return all(key in self.data for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.requests["add"] += 1
        self.data[key] = str(number := int(self.data.get(key, b"0")) + amount).encode()
        return number

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.requests["compare_set"] += 1
        if self.data.get(key, b"").decode() == expected:
            self.data[key] = value.encode()
        return self.data[key]


def connected(store: Any, rank: int = 0, size: int = SIZE) -> Board:
    """Return the board of a rank without a thread."""
    with mock.patch.object(module, "store_at", return_value=store):
        board = Board(StoreOnly(store, rank, size, min(LOCAL, size)))
        board.look()
    return board


@pytest.mark.usefixtures("fast")
def test_a_topic_reaches_every_rank_then_or_later(board_at: Any) -> None:
    store, calls = dist.HashStore(), list[int]()

    def note(number: int) -> Any:
        return lambda: (calls.append(number), math.inf)[1]

    boards = [board_at(store, rank, 3) for rank in range(3)]
    for number, board in enumerate(boards[:2]):
        board.watch("other", lambda: math.inf)
        board.watch("stop", note(number))
    boards[0].announce("stop")
    assert not outlasting(lambda: not {0, 1} <= set(calls))
    boards[2].watch("stop", note(2))
    assert not outlasting(lambda: 2 not in calls)
    boards[1].announce("stop")  # again, which adds nothing
    boards[1].announce("last")
    assert not outlasting(lambda: len(boards[2]._news) < 2)
    assert boards[2]._news == ["stop", "last"]
    assert store.num_keys() == KEYS + 2


@pytest.mark.parametrize("is_lost_before", [False, True])
def test_nobody_waits_for_a_task_that_a_lost_store_prevents(is_lost_before: bool) -> None:
    board = connected(Counted())
    board.is_lost = is_lost_before
    done = board.submit(lambda store: store.set("key", "value"))
    board.is_lost = True
    board._work()
    assert done.is_set()


@pytest.mark.usefixtures("fast")
def test_an_error_in_a_callback_is_logged_and_does_not_end_the_thread(board_at: Any, caplog: Any) -> None:
    board, calls = board_at(dist.HashStore()), []

    def fail() -> float:
        calls.append("fail")
        raise ZeroDivisionError

    board.watch("stop", fail)
    board.announce("stop")
    assert not outlasting(lambda: len(calls) < 3)  # it is called again
    board.watch("other", lambda: (calls.append("other"), math.inf)[1])
    board.announce("other")
    assert not outlasting(lambda: "other" not in calls)
    assert "ZeroDivisionError" in caplog.text
    board.forget("stop")


def test_all_callbacks_are_called_once_the_store_is_lost(board_at: Any) -> None:
    class Gone(dist.Store):
        def compare_set(self, *arguments: str) -> bytes:
            raise dist.DistNetworkError("connection closed")

    called = threading.Event()
    board_at(Gone()).watch("stop", lambda: (called.set(), math.inf)[1])
    assert called.wait(HANG)


def test_each_process_sends_one_request_per_second() -> None:
    store = Counted()
    boards = [connected(store, rank) for rank in range(0, SIZE, 64)]
    for _ in range(5):
        store.requests.clear()
        for board in boards:
            board.look()
        assert store.requests == {"multi_get": len(boards)}


def test_if_all_ranks_fail_at_once_each_sends_one_request_and_all_agree_on_the_first() -> None:
    store = Counted()
    boards = [connected(store, rank) for rank in range(SIZE)]
    store.requests.clear()
    for rank, board in enumerate(boards):
        board.decide({"kind": "failed", "text": f"rank {rank} failed", "traceback": ""})
        board._work()
    assert store.requests == {"compare_set": SIZE, "add": SIZE}
    assert {(board.final or {})["text"] for board in boards} == {"rank 0 failed"}
    assert len(store.data) == KEYS + 1  # the number of ranks that know it


def test_if_all_ranks_announce_the_same_at_once_each_sends_a_few_requests() -> None:
    store = Counted()
    boards = [connected(store, rank) for rank in range(SIZE)]
    store.requests.clear()
    for board in boards:
        board.announce("stop")
        board._work()
    assert store.requests.total() <= 2 * SIZE
    assert len(store.data) == KEYS + 1


def test_questions_and_answers_leave_one_key_per_rank() -> None:
    """All ranks answer one that waits; questions and answers replace earlier ones."""
    store, nodes = Counted(), []
    for rank in range(SIZE):
        watcher = Watcher(StoreOnly(store, rank, SIZE, LOCAL), None)
        watcher.board = watcher._nodes._board = connected(store, rank)
        nodes.append((watcher, {rank: snapshot(rank, SIZE, begun={"0": 4}, calls=[], stack=["x.py:1 in f"] * 30)}))
    asker, local = nodes[0]
    local[0] = snapshot(0, SIZE, **waiting("0", 5, "barrier", "0-1023"))
    num_keys, now = set(), 100.0
    for _ in range(4):
        store.requests.clear()
        began, found = now, None
        while found is None:
            now += 1
            found = asker._nodes.ask(local, [("0", 5)], 5.0, now)
            for watcher, ranks in nodes:
                watcher.board.look()
                watcher._nodes.is_asked(now)
                watcher._nodes.answer(ranks, now)
                watcher.board.look()
        assert len(found) == SIZE
        num_keys.add(len(store.data))
        assert store.requests.total() <= len(nodes) * (3 * (now - began) + 3) + 20
        now += 60
    assert num_keys == {KEYS + 1 + SIZE}  # the number of places, and a place for each rank
    assert len(store.data["answer/2"]) < 2_000


def test_a_host_that_does_not_answer_is_asked_again() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    board = Board(StoreOnly(store))
    board.look()
    with mock.patch.object(module, "_is_served", return_value=None):
        board._lose(dist.DistNetworkError("recvValue failed: Connection timed out"))
        board.look()
        since = board.silent_since
        with mock.patch.object(module, "_is_closed", return_value=True):  # as it is once the host was silent for long
            board.look()
    assert board.silent_since == since < math.inf
    assert board.usable_store is None
    board.look()
    assert board.silent_since == math.inf
    assert board.usable_store is not None
    board._connection.close()  # type: ignore[union-attr]


def test_the_end_of_the_process_that_serves_the_store_is_noticed_without_a_request(capfd: Any) -> None:
    """torch would print a stack of C++ where a request fails."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    board = Board(StoreOnly(store))
    board.look()
    board.look()
    assert not board.is_lost
    del server
    connection = board._connection
    assert connection is not None
    assert not outlasting(lambda: not module._is_closed(connection))
    with mock.patch.object(module, "_get_all", side_effect=AssertionError):
        board.look()
    assert board.is_lost
    assert "frame #" not in capfd.readouterr().err
    connection.close()


def test_what_a_board_writes_is_json() -> None:
    store = Counted()
    board = connected(store)
    board.write_place("shared", [[0, {"a": 1.5}]])
    received = list[Any]()
    board.read_places("shared", received.extend)
    board.look()
    assert received == [[[0, {"a": 1.5}]]]
    assert json.loads(store.data["shared/1"]) == [[0, {"a": 1.5}]]
