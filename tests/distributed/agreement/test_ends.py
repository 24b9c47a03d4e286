"""Ranks report how many batches they have, wait for each other for a limited time, and leave nothing in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from camshaft.distributed.agreement.ends import BatchCount, BatchCounts
from camshaft.errors import RankDivergenceError
from tests.distributed.failures.stand_in import CountingStore
from tests.limits import HANG


def test_a_long_wait_is_logged_once(caplog):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    first, second = (BatchCounts(store, rank, 2, 8) for rank in range(2))
    first.report(BatchCount(8))
    with mock.patch("camshaft.distributed.failures.store.SILENCE", 0.0), pytest.raises(RankDivergenceError):
        first.collect()
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 is waiting up to 0.3 s for ranks [1] in a synchronized pass over the data: they are "
        "still loading a batch, run other code, or have exited"
    ]
    second.report(BatchCount(8))
    assert first.collect() == second.collect() == [BatchCount(8), BatchCount(8)]
    assert len(caplog.records) == 1


def test_rank_0_stays_until_all_have_read_but_not_for_ever():
    store = dist.HashStore()
    first, second = (BatchCounts(store, rank, 2, 8) for rank in range(2))
    for rank in (first, second):
        rank.report(BatchCount(0))
    first.collect()
    first.leave()
    with mock.patch("camshaft.distributed.agreement.ends._FAREWELL", 0.05):
        first.wait_for_readers()
    with mock.patch("camshaft.distributed.agreement.ends._FAREWELL", HANG), ThreadPoolExecutor(1) as thread:
        staying = thread.submit(first.wait_for_readers)
        second.wait_for_readers()  # which does not block
        assert second.collect() == [BatchCount(0), BatchCount(0)]
        assert not staying.done()
        second.leave()
    assert store.num_keys() == 0


@pytest.mark.parametrize("ends", ["all", "one", "one has left"])
def test_a_pass_costs_a_rank_a_few_requests_among_a_thousand_ranks(ends):
    store, size = CountingStore(), 1024
    ranks = [BatchCounts(store, rank, size, 8) for rank in range(size)]
    for rank in ranks:
        rank.report(BatchCount(8))
    assert all(rank.collect() == [BatchCount(8)] * size for rank in ranks[:2])
    last = ranks.pop() if ends == "one has left" else None
    if last is not None:
        last.leave()
    store.requests.clear()
    one_ends = [BatchCount(8), BatchCount(3), *[BatchCount(8)] * (size - 2)]
    for number, rank in enumerate(ranks):
        rank.report(BatchCount(3 if ends == "all" or number == 1 else 8))
    for rank in ranks:
        if last is None:
            assert rank.collect() == ([BatchCount(3)] * size if ends == "all" else one_ends)
        else:
            with pytest.raises(RankDivergenceError, match=rf"but ranks \[{size - 1}\] failed or stopped"):
                rank.collect()
        rank.leave()
    ranks[0].wait_for_readers()
    assert store.num_keys() == 0
    assert sum(store.requests.values()) <= 8 * size + 10  # those that clean up


def test_ranks_that_wait_together_make_a_limited_number_of_requests(monkeypatch):
    """However many they are: each of a thousand asks four times a second at most."""
    pauses = []
    clock = mock.Mock(**{"monotonic.side_effect": lambda: sum(pauses), "sleep.side_effect": pauses.append})
    monkeypatch.setattr("camshaft.distributed.failures.store.time", clock)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=8))
    rank = BatchCounts(store, 0, 1024, 8)
    rank.report(BatchCount(8))
    with pytest.raises(RankDivergenceError, match="timed out after 8 s waiting for ranks"):
        rank.collect()
    assert len(pauses) < 75


def test_a_lost_store_is_reported():
    first = BatchCounts(mock.Mock(**{"add.side_effect": [1, dist.DistNetworkError("gone")]}), 0, 2, 8)
    first.report(BatchCount(1))
    with pytest.raises(RankDivergenceError, match="the process that hosts the store of this job has ended"):
        first.collect()
    first._store.add.side_effect = first._store.check.side_effect = dist.DistNetworkError("gone")
    first.leave()
    first.wait_for_readers()
