"""Ranks stop after the same step, whichever of them wants to stop."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from camshaft.distributed.coordination.stop import StopInStore
from tests.distributed.coordination.stand_in import watching


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr("camshaft.distributed.coordination.watcher.PERIOD", 0.02)


def run_until_stopped(store, rank, size, wants_at, pause):
    """Run steps, and return the last one."""
    with watching(store, rank, size) as watcher:
        stop = StopInStore(watcher, "stop", PrefixStore("stop", store), rank, size, 0)
        step = 0
        while stop.may_begin(step + 1):
            step += 1
            time.sleep(pause)
            if step == wants_at:
                stop.want()
        stop.leave()
        return step


@pytest.mark.parametrize("wants", [[5, None, None], [None, 3, 4], [2, 2, 2]])
def test_all_stop_after_the_furthest_step_and_leave_no_keys(wants):
    store, size = dist.HashStore(), len(wants)
    with ThreadPoolExecutor(size) as pool:
        runs = [
            pool.submit(run_until_stopped, store, rank, size, at, 0.001 * (1 + 3 * rank))
            for rank, at in enumerate(wants)
        ]
        last = [run.result(timeout=30) for run in runs]
    assert len(set(last)) == 1
    assert last[0] >= max(at for at in wants if at)
    assert store.num_keys() == 2 + size  # the name of the job, the announcement, and how the ranks left


def test_a_rank_that_has_left_is_not_waited_for():
    store = dist.HashStore()
    with watching(store) as one, watching(store, rank=1) as other:
        stops = [
            StopInStore(watcher, "stop", PrefixStore("stop", store), rank, 2, 0)
            for rank, watcher in enumerate((one, other))
        ]
        assert all(stop.may_begin(3) for stop in stops)
        stops[0].leave()
        began = time.monotonic()
        stops[1].want()
        assert not stops[1].may_begin(4)
        assert time.monotonic() - began < 5
        stops[1].leave()
    assert store.num_keys() == 4  # and how the ranks left
