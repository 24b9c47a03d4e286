"""Ranks stop after the same step, whichever of them wants to stop."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from camshaft.distributed.agreement import stop as stop_module
from camshaft.distributed.agreement.stop import StopInStore
from tests.distributed.failures.stand_in import CountingStore
from tests.limits import HANG, wait_until


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr("camshaft.distributed.failures.board.PERIOD", 0.02)


@pytest.mark.parametrize("wants", [[5, None, None], [None, 3, 4], [2, 2, 2]])
def test_all_stop_after_the_furthest_step_for_one_reason_and_leave_no_keys(wants, board_at):
    store, size = dist.HashStore(), len(wants)

    def run(rank):
        stop = StopInStore(board_at(store, rank, size), "stop", PrefixStore("stop", store), rank, size, 0)
        all_have_begun.wait(HANG)  # for one that has not, the others wait ten seconds only
        step = 0
        while stop.may_begin(step + 1):
            step += 1
            time.sleep(0.001 * (1 + 3 * rank))
            if step == wants[rank]:
                wanted[10 + rank] = step
                stop.want(10 + rank)
        reason = stop.settle()
        stop.leave()
        return step, reason

    all_have_begun = threading.Barrier(size)
    wanted = {}  # the requests, by reason; a stop may come first
    with ThreadPoolExecutor(size) as pool:
        ((last, reason),) = set(pool.map(run, range(size), timeout=HANG))
    assert last >= max(wanted.values())
    assert reason in wanted
    wait_until(lambda: store.num_keys() == 7, store.num_keys)  # six of the board, and the announcement


def test_a_stop_that_is_wanted_after_the_store_or_the_watcher_was_lost_stops_this_rank(board_at, monkeypatch):
    store = dist.HashStore()
    stop = StopInStore(board_at(store, 0, 2), "stop", PrefixStore("stop", store), 0, 2, 0)
    with mock.patch.object(stop, "_report", side_effect=dist.DistNetworkError("lost")):
        stop._agree()
    assert stop.may_begin(1)
    stop.want()
    assert not stop.may_begin(2)
    stop.leave()
    monkeypatch.setattr(stop_module, "_PATIENCE", 0.01)
    stop = StopInStore(Still(), "stop", dist.HashStore(), 0, 2, 3)
    stop.want()
    assert not stop.may_begin(4)
    assert stop.settle() == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_no_rank_has_a_reason_if_one_had_ended_before_it_knew(is_first, board_at):
    store = dist.HashStore()
    one, other = (
        StopInStore(board_at(store, rank, 2), "stop", PrefixStore("stop", store), rank, 2, 0) for rank in range(2)
    )
    assert one.may_begin(3)
    assert other.may_begin(3)
    if is_first:
        assert one.settle() == 0
        one.leave()
    other.want(7)
    assert not other.may_begin(4)  # waits for the answer of the watcher, or finds that of the rank
    assert other.settle() == (0 if is_first else 7)
    other.leave()
    if not is_first:
        assert one.settle() == 7  # although its run has ended by itself meanwhile
        one.leave()
    wait_until(lambda: store.num_keys() == 7, store.num_keys)  # the watchers may announce the stop only now


class Still:
    """A watcher without a thread."""

    def __init__(self):
        self.callbacks = {}

    def watch(self, topic, callback):
        self.callbacks[topic] = callback

    def forget(self, topic):
        self.callbacks.pop(topic, None)

    def announce(self, topic):
        pass


@pytest.mark.parametrize(("size", "absent"), [(2, 1), (1024, 0)])
def test_a_stop_costs_a_rank_a_few_requests_among_any_number_of_ranks(size, absent, monkeypatch):
    store, watchers, now = CountingStore(), [Still() for _ in range(size)], [0.0]
    monkeypatch.setattr("camshaft.distributed.agreement.stop.time", mock.Mock(monotonic=lambda: now[0]))
    stops = [StopInStore(watchers[rank], "stop", store, rank, size, 0) for rank in range(size - absent)]
    assert all(stop.may_begin(3 + rank % 2) for rank, stop in enumerate(stops))
    stops[0].want(7)
    for watcher, _ in zip(watchers, stops, strict=False):
        watcher.callbacks["stop"]()
    now[0] = stop_module._PATIENCE
    assert [watcher.callbacks["stop"]() for watcher, _ in zip(watchers, stops, strict=False)] == [math.inf] * len(stops)
    last = 4 if len(stops) > 1 else 3
    assert [(stop.may_begin(last), stop.may_begin(last + 1)) for stop in stops] == [(True, False)] * len(stops)
    assert [stop.settle() for stop in stops] == [7] * len(stops)
    for stop in stops:
        stop.leave()
    assert absent or store.num_keys() == 0
    assert sum(store.requests.values()) <= 8 * size + 10


def test_a_rank_that_has_begun_the_run_is_waited_for_however_slow_it_is(monkeypatch):
    now, watchers = [0.0], [Still(), Still()]
    monkeypatch.setattr("camshaft.distributed.agreement.stop.time", mock.Mock(monotonic=lambda: now[0]))
    store = dist.HashStore()
    fast, slow = (StopInStore(watchers[rank], "stop", store, rank, 3, 0) for rank in range(2))  # rank 2 never does
    assert fast.may_begin(3)
    fast.want(7)
    for now[0] in range(0, 100 * int(stop_module._PATIENCE), int(stop_module._PATIENCE)):
        assert watchers[0].callbacks["stop"]() < math.inf
        assert slow.may_begin(4)  # nothing runs there that could have told it
    assert watchers[1].callbacks["stop"]() < math.inf
    assert watchers[0].callbacks["stop"]() == math.inf
    assert watchers[1].callbacks["stop"]() == math.inf
    assert [(stop.may_begin(4), stop.may_begin(5), stop.settle()) for stop in (fast, slow)] == [(True, False, 7)] * 2


def test_ranks_that_agree_together_make_a_limited_number_of_requests(monkeypatch):
    now, pauses = [0.0], []
    monkeypatch.setattr("camshaft.distributed.agreement.stop.time", mock.Mock(monotonic=lambda: now[0]))
    stop = StopInStore(Still(), "stop", dist.HashStore(), 0, 1024, 0)
    stop.want()
    while (pause := stop._agree()) < math.inf:
        pauses.append(pause)
        now[0] += pause
    assert len(pauses) < 4 * stop_module._PATIENCE + 20
