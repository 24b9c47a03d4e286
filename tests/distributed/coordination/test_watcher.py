"""The watcher learns what any rank announces, with one request per second whatever is attached."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from unittest import mock

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

import camshaft.distributed as idist
from camshaft.distributed import run
from camshaft.distributed.coordination.watcher import Watcher
from camshaft.engine import Engine, Events
from camshaft.handlers import EarlyStopping, TerminateOnNan, TimeLimit
from tests.guards import outlasting
from tests.ranks import on_ranks

requests: Counter[str] = Counter()


class Counted(PrefixStore):
    """A store that counts the requests of this process."""

    def __getattribute__(self, name):
        if name in ("add", "check", "compare_set", "delete_key", "get", "multi_get", "set"):
            requests[name] += 1
        return super().__getattribute__(name)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr("camshaft.distributed.coordination.watcher.PERIOD", 0.02)


def ignore():
    return math.inf


@on_ranks(2)
def test_a_rank_sends_one_request_per_second_whatever_is_attached():
    with mock.patch("camshaft.distributed.coordination.stop.PrefixStore", Counted):
        trainer = Engine(lambda engine, batch: time.sleep(0.1))
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit())
        EarlyStopping(3, lambda engine: 1.0, trainer).attach(Engine(lambda engine, batch: None))
        seen, watched = [], []

        @trainer.on(Events.ITERATION_COMPLETED(every=10))
        def count():
            seen.append(requests.total())
            watched.append(len(run.current().job.resource(Watcher)._callbacks))

        began = time.monotonic()
        trainer.run(range(30))
        seconds = time.monotonic() - began
    assert len([thread for thread in threading.enumerate() if thread.name == "camshaft-watcher"]) == 0
    assert watched[-1] == 3
    assert 1 <= seen[-1] <= 1 + seconds, (seen, seconds)
    idist.barrier()


@pytest.mark.usefixtures("fast")
def test_a_topic_reaches_every_watcher_then_or_later():
    store, calls = dist.HashStore(), []
    watchers = [Watcher(store) for _ in range(3)]

    def note(number):
        return lambda: (calls.append(number), math.inf)[1]

    for number, watcher in enumerate(watchers[:2]):
        watcher.watch("other", ignore)
        watcher.watch("stop", note(number))
    assert calls == []
    watchers[0].announce("stop")
    assert not outlasting(lambda: not {0, 1} <= set(calls))
    watchers[2].watch("stop", note(2))
    assert not outlasting(lambda: 2 not in calls)
    watchers[1].announce("stop")  # again, which adds nothing
    assert store.num_keys() == 1
    for watcher in watchers:
        watcher.close()


@pytest.mark.usefixtures("fast")
def test_the_thread_lives_as_long_as_something_is_watched():
    watcher = Watcher(dist.HashStore())
    before = threading.active_count()
    for _ in range(2):
        watcher.watch("one", ignore)
        watcher.watch("two", ignore)
        assert threading.active_count() == before + 1
        watcher.forget("one")
        assert threading.active_count() == before + 1
        watcher.forget("two")
        assert threading.active_count() == before


def test_all_callbacks_are_called_once_the_store_is_lost():
    class Gone:
        def check(self, keys):
            raise dist.DistNetworkError("connection closed")

    watcher, called = Watcher(Gone()), threading.Event()
    watcher.watch("stop", lambda: (called.set(), math.inf)[1])
    assert called.wait(10)
    watcher.close()
