"""What ranks tell each other through the store, and what it costs with a thousand of them."""

from __future__ import annotations

import math
import threading
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from camshaft.distributed.failures import board as module
from camshaft.distributed.failures.board import Board
from camshaft.distributed.failures.watcher import Watcher
from tests.distributed.failures.stand_in import CountingStore, StoreOnly, snapshot, waiting
from tests.guards import outlasting
from tests.limits import HANG

SIZE, LOCAL = 1024, 8
KEYS = 6  # of a board without news


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.02)


def connected(store: Any, rank: int = 0, size: int = SIZE) -> Board:
    """Return the board of a rank without a thread."""
    with mock.patch.object(module, "store_at", return_value=store):
        board = Board(StoreOnly(store, rank, size, min(LOCAL, size)))
        board.look()
    return board


@pytest.mark.usefixtures("fast")
def test_a_topic_reaches_every_rank_then_or_later(board_at: Any) -> None:
    store, calls = dist.HashStore(), [mock.Mock(return_value=math.inf) for _ in range(3)]
    boards = [board_at(store, rank, 3) for rank in range(3)]
    for board, call in zip(boards[:2], calls, strict=False):
        board.watch("other", lambda: math.inf)
        board.watch("stop", call)
    boards[0].announce("stop")
    assert not outlasting(lambda: not (calls[0].called and calls[1].called))
    boards[2].watch("stop", calls[2])
    assert not outlasting(lambda: not calls[2].called)
    boards[1].announce("stop")  # again, which adds nothing
    boards[1].announce("last")
    assert not outlasting(lambda: len(boards[2]._news) < 2)
    assert boards[2]._news == ["stop", "last"]
    assert store.num_keys() == KEYS + 2


@pytest.mark.parametrize("is_lost_before", [False, True])
def test_nobody_waits_for_a_task_that_a_lost_store_prevents(is_lost_before: bool) -> None:
    board = connected(CountingStore())
    board.is_lost = is_lost_before
    done = board.submit(lambda store: store.set("key", "value"))
    board.is_lost = True
    board._work()
    assert done.is_set()


@pytest.mark.usefixtures("fast")
def test_an_error_in_a_callback_is_logged_and_does_not_end_the_thread(board_at: Any, caplog: Any) -> None:
    board, failing = board_at(dist.HashStore()), mock.Mock(side_effect=ZeroDivisionError)
    board.watch("stop", failing)
    board.announce("stop")
    assert not outlasting(lambda: failing.call_count < 3)  # it is called again
    board.watch("other", other := mock.Mock(return_value=math.inf))
    board.announce("other")
    assert not outlasting(lambda: not other.called)
    assert "ZeroDivisionError" in caplog.text
    board.forget("stop")


def test_all_callbacks_are_called_once_the_store_is_lost(board_at: Any) -> None:
    class Gone(dist.Store):
        def compare_set(self, *arguments: str) -> bytes:
            raise dist.DistNetworkError("connection closed")

    called = threading.Event()
    board_at(Gone()).watch("stop", lambda: (called.set(), math.inf)[1])
    assert called.wait(HANG)


@pytest.mark.parametrize(
    ("what", "most", "num_new_keys", "final"),
    [
        (lambda rank, board: None, SIZE, 0, None),
        # the key is for how many ranks know it
        (lambda rank, board: board.decide({"text": f"rank {rank} failed"}), 3 * SIZE, 1, {"text": "rank 0 failed"}),
        (lambda rank, board: board.announce("stop"), 3 * SIZE, 1, None),
    ],
    ids=["a second", "all fail", "all announce a topic"],
)
def test_each_of_1024_ranks_sends_few_requests(what: Any, most: int, num_new_keys: int, final: Any) -> None:
    store = CountingStore()
    boards = [connected(store, rank) for rank in range(SIZE)]
    store.requests.clear()
    for rank, board in enumerate(boards):
        what(rank, board)
        board.look()
    assert store.requests.total() <= most
    assert store.num_keys() == KEYS + num_new_keys
    assert all(board.final == final for board in boards)


def test_questions_and_answers_leave_one_key_per_rank() -> None:
    """All ranks answer one that waits; questions and answers replace earlier ones."""
    store, nodes = CountingStore(), []
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
        num_keys.add(store.num_keys())
        assert store.requests.total() <= len(nodes) * (3 * (now - began) + 3) + 20
        now += 60
    assert num_keys == {KEYS + 1 + SIZE}  # the number of places, and a place for each rank
    assert len(store.get("answer/2")) < 2_000


def test_a_host_that_does_not_answer_is_asked_again() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = Board(StoreOnly(dist.TCPStore("127.0.0.1", server.port, is_master=False)))
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
    assert (board.silent_since, board.usable_store is None) == (math.inf, False)
    board._connection.close()  # type: ignore[union-attr]


def test_the_end_of_the_process_that_serves_the_store_is_noticed_without_a_request(capfd: Any) -> None:
    """torch would print a stack of C++ where a request fails."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = Board(StoreOnly(dist.TCPStore("127.0.0.1", server.port, is_master=False)))
    for _ in range(2):
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


def test_rank_0_compares_the_values_of_all_nodes() -> None:
    store, seen = CountingStore(), list[dict[int, float]]()
    watchers = [Watcher(StoreOnly(store, rank, 3, 1), None) for rank in range(3)]
    for rank, watcher in enumerate(watchers):
        watcher._sharing._board = connected(store, rank, 3)
        watcher.share("times", lambda values, rank=rank: (seen.append({rank: 0.5 + rank, **values}), 0.5 + rank)[1])
    for now in (0, 1, 20, 40, 41):
        for rank, watcher in enumerate(watchers):
            watcher._sharing.exchange({rank: snapshot(rank, 3, shared=watcher._sharing.own)}, now)
            watcher._sharing._board.look()
    assert seen[0] == {0: 0.5}
    assert {0: 0.5, 1: 1.5, 2: 2.5} in seen
    watchers[0].unshare("times")
    assert watchers[0]._sharing.exchanges == {}
