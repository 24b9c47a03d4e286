"""The watcher: what any rank announces, with one request per second and node, and jobs that cannot proceed."""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import re
import threading
import time
from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

import camshaft.distributed as idist
from benchmarks import watching as watching_benchmark
from camshaft.distributed import run
from camshaft.distributed.coordination import diagnosis
from camshaft.distributed.coordination import watcher as module
from camshaft.distributed.coordination.watcher import Watcher
from camshaft.distributed.record import STACKS, Record, find
from camshaft.distributed.topology import Topology
from camshaft.engine import Engine, Events
from camshaft.errors import RankDivergenceError, RankFailedError
from camshaft.handlers import EarlyStopping, TerminateOnNan, TimeLimit
from tests.distributed.coordination.stand_in import StoreOnly, watching
from tests.guards import outlasting
from tests.ranks import await_watchers, on_ranks

requests: Counter[str] = Counter()


class Counted(PrefixStore):
    """A store that counts the requests of this process."""

    def __getattribute__(self, name):
        if name in ("add", "check", "compare_set", "delete_key", "get", "multi_get", "set"):
            requests[name] += 1
        return super().__getattribute__(name)

    def clone(self):
        return self


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(module, "PERIOD", 0.02)


def ignore():
    return math.inf


# --- announcements -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_one_rank_per_node_sends_one_request_per_second_whatever_is_attached():
    with mock.patch.object(module, "PrefixStore", Counted), mock.patch.object(module, "store_at", counted_store):
        trainer = Engine(lambda engine, batch: time.sleep(0.1) or batch)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit())
        EarlyStopping(3, lambda engine: 1.0, trainer).attach(Engine(lambda engine, batch: None))
        watched = []
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=1), lambda: watched.append(len(run.current().job.find(Watcher)._callbacks))
        )
        rank = idist.get_rank()  # which adopts the group
        await_watchers()
        time.sleep(2.5)  # both ranks know each other
        before, began = requests.total(), time.monotonic()
        trainer.run(range(30))
        seconds = time.monotonic() - began
    assert watched == [3]
    assert len([thread for thread in threading.enumerate() if thread.name == "camshaft-watcher"]) == 1
    assert requests.total() - before <= (1 + seconds if rank == 0 else 0), (requests, before, seconds)
    idist.barrier()


def counted_store(backend, prefix):
    return Counted(prefix, backend.store())


@pytest.mark.usefixtures("fast")
def test_a_topic_reaches_every_watcher_then_or_later():
    store, calls = dist.HashStore(), []

    def note(number):
        return lambda: (calls.append(number), math.inf)[1]

    with watching(store, size=3) as first, watching(store, 1, 3) as second, watching(store, 2, 3) as third:
        for number, watcher in enumerate((first, second)):
            watcher.watch("other", ignore)
            watcher.watch("stop", note(number))
        assert calls == []
        first.announce("stop")
        assert not outlasting(lambda: not {0, 1} <= set(calls))
        third.watch("stop", note(2))
        assert not outlasting(lambda: 2 not in calls)
        second.announce("stop")  # again, which adds nothing
        time.sleep(0.1)
        assert store.num_keys() == 3  # the name of the job, how many know it, and the announcement


def test_a_worker_whose_torchrun_was_killed_raises_and_else_exits(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    backend = StoreOnly(dist.HashStore())
    watcher = Watcher(backend, None, agent=os.getppid())  # without a thread
    watcher.look(0.0)
    assert backend.job.verdict is None
    monkeypatch.setattr(os, "getppid", lambda: -1)  # no process has this id
    watcher.watch("stop", ignore)
    watcher._news["stop"] = None
    watcher.look(1.0)  # the ranks are stopping, and may save
    assert backend.job.verdict is None
    watcher.forget("stop")
    watcher.look(2.0)
    error = backend.job.verdict()
    assert isinstance(error, RankFailedError)
    assert re.fullmatch(r"torchrun \(process \d+\), which had started rank 0, was killed", str(error))
    watcher.look(30.9)
    assert codes == []
    watcher.look(31.0)
    assert codes == [1]
    watcher.close()


def test_the_thread_lives_as_long_as_the_job():
    before = threading.active_count()
    with watching(dist.HashStore()) as watcher:
        assert threading.active_count() == before + 1
        watcher.watch("one", ignore)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_a_round_that_outlasts_the_job_reads_nothing_that_was_opened_meanwhile(monkeypatch):
    monkeypatch.setattr(module, "_TELLING", 0.1)
    monkeypatch.setattr(module, "_ENDING", 0.1)
    is_late, may_end = threading.Event(), threading.Event()

    def look(now):
        is_late.set()
        may_end.wait(30)

    watcher = Watcher(StoreOnly(dist.HashStore()), None)
    monkeypatch.setattr(watcher, "look", look)
    watcher._thread.start()
    assert is_late.wait(30)
    watcher.close()
    opened = [os.pipe() for _ in range(8)]  # the system gives out the lowest numbers that are free
    for _, end in opened:
        os.write(end, b"x")
    may_end.set()
    watcher._thread.join(30)
    assert [os.read(start, 2) for start, _ in opened] == [b"x"] * 8
    for descriptor in itertools.chain(*opened):
        os.close(descriptor)
    assert watcher._woken.fileno() == watcher._wakes.fileno() == -1


def test_a_rank_that_leaves_during_a_round_waits_for_the_next_one():
    written = []

    def write(status):
        written.append(status["left"])
        watcher._left = "has left"  # by the main thread, after the status was made

    watcher = Watcher(StoreOnly(dist.HashStore()), None)  # without a thread
    record = mock.Mock(job="", write_status=write)
    with mock.patch.multiple(watcher, _record=record, _local=lambda with_entries=True: {}):
        watcher.look(0.0)
        has_told = [watcher._has_told.is_set()]
        watcher.look(1.0)
        has_told.append(watcher._has_told.is_set())
    watcher.close()
    assert written == [None, "has left"]
    assert has_told == [False, True]


@pytest.fixture
def two_ranks(tmp_path, monkeypatch):
    """Return watchers without a thread, of ranks that do not know, without a launcher, that they are on one node."""
    monkeypatch.setattr(module, "find", partial(find, folder=tmp_path))
    store = dist.HashStore()
    backends = [StoreOnly(store, rank) for rank in range(2)]
    for rank, backend in enumerate(backends):
        backend.topology = Topology(rank=rank, world_size=2, num_nodes=2, node_rank=rank)
    watchers = [Watcher(backend, Record(rank, 2, tmp_path)) for rank, backend in enumerate(backends)]
    yield watchers
    for watcher in watchers:
        watcher._left = "has left"  # without waiting for a thread
        watcher.close()


def test_rank_0_leaves_its_record_once_all_know_the_name_of_the_job(two_ranks):
    """Its process may serve the store, and only the record then tells how it has left."""
    first, second = two_ranks
    first._connect()
    first._left, first.is_everywhere = "has left", True
    first.look(0.0)
    assert not first._has_told.is_set()
    second._connect()
    first.look(1.0)
    assert first._has_told.is_set()
    first.close()
    assert second._local()[0].status["left"] == "has left"


def test_a_rank_that_seeks_the_cause_of_an_error_searches_for_records_at_once(two_ranks):
    """Rank 0 got its record after the first search, and has left before the next one."""
    first, second = two_ranks
    second._connect()
    second.look(time.monotonic())
    first._connect()
    first._left = "has left"
    first.look(time.monotonic())
    first.close()
    second._store, second._num_waits = None, 1
    begin = partial(second._record.begin, None, range(2), "all_reduce", None, "", None)
    # on one line, where it seems to wait; the first round notes the error, and the third confirms what the second found
    number, *_ = begin(), *(second.look(time.monotonic()) for _ in range(3))
    assert re.match("rank 0 has left; .*; rank 1", str(second._backend.job.verdict()))
    second._record.end(number)


def test_all_callbacks_are_called_once_the_store_is_lost():
    class Gone(dist.Store):
        def check(self, keys):
            raise dist.DistNetworkError("connection closed")

        def compare_set(self, *arguments):
            return b"job"

    called = threading.Event()
    with watching(Gone()) as watcher:
        watcher.watch("stop", lambda: (called.set(), math.inf)[1])
        assert called.wait(10)


@pytest.mark.usefixtures("fast")
def test_a_watcher_connects_again_once_the_host_of_the_store_answers_or_notices_that_its_process_has_ended():
    silence = dist.DistNetworkError("recvValue failed: Connection timed out")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    called, is_served = threading.Event(), module._is_served
    is_elsewhere = mock.patch.object(module, "is_local", return_value=False)
    with is_elsewhere, watching(store) as first, watching(store, 1) as second:
        assert first.has_connected.wait(30)
        assert second.has_connected.wait(30)
        second.watch("stop", lambda: (called.set(), math.inf)[1])
        for watcher in (first, second):
            watcher._lose_store(silence)
        first.announce("stop")
        assert called.wait(30)
        with mock.patch.object(module, "_is_served", return_value=None):  # silent until its process has ended
            second._lose_store(silence)
            began = time.monotonic()
            assert not outlasting(lambda: second._status["time"] < began)  # its last request has ended
            del server
            assert not outlasting(lambda: is_served(store))
            assert not second._is_lost
        assert not outlasting(lambda: not second._is_lost)


def test_a_host_that_serves_the_store_does_not_take_itself_for_lost():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with watching(server) as watcher:
        assert not outlasting(lambda: not watcher._is_beside_store)
        watcher._lose_store(dist.DistNetworkError("recvValue failed: Connection timed out"))
        assert watcher._silent_since == math.inf
        assert watcher._is_lost


@on_ranks(2)
def test_folders_are_not_searched_once_the_records_of_all_ranks_are_known():
    await_watchers()
    watcher = run.current().job.find(Watcher)
    assert not outlasting(lambda: len(watcher._paths) < 2)
    with mock.patch.object(module, "find", side_effect=module.find) as search:
        time.sleep(2.5)
    assert not search.called
    idist.barrier()


def test_a_cluster_sends_one_request_per_second_and_node():
    counted, num_nodes = watching_benchmark.Counted("cluster", dist.HashStore()), 16
    cluster = watching_benchmark.Cluster(counted, num_nodes, ranks_per_node=8)
    cluster.next_second()
    for _ in range(7):
        counted.requests.clear()
        cluster.next_second()
        assert counted.requests == {"check": num_nodes}
    cluster.close()


@pytest.mark.parametrize("rank", [1, 8, 127])
def test_all_ranks_of_a_cluster_learn_of_a_failure_within_three_rounds(rank):
    counted, num_nodes = watching_benchmark.Counted("cluster", dist.HashStore()), 16
    cluster = watching_benchmark.Cluster(counted, num_nodes, ranks_per_node=8)
    cluster.next_second()
    counted.requests.clear()
    cluster.fail(rank)
    for _ in range(3):
        assert cluster.num_ended < 127
        cluster.next_second()
        if cluster.num_ended == 127:
            break
    assert cluster.num_ended == 127  # all but the one that failed
    assert (
        counted.requests.total() <= 4 * num_nodes + 2
    )  # a leader asks twice more to read it, and whether there is more
    counted.requests.clear()
    cluster.next_second()
    assert counted.requests.total() <= 1  # of the one that failed
    cluster.close()


# --- failures ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_failure_ends_the_other_ranks_with_its_traceback_as_the_cause():
    error = ValueError("no data")
    watcher = run.current().job.find(Watcher)
    if idist.get_rank() == 1:
        idist.all_reduce(1)
        assert watcher.fail(error) is error
        return
    idist.all_reduce(1)
    with pytest.raises(RankFailedError, match="rank 1 failed first: ValueError: no data") as caught:
        idist.all_reduce(1)
    assert "ValueError: no data" in str(caught.value.__cause__)
    with pytest.raises(RankFailedError, match="rank 1 failed first"):  # and so does every later one
        idist.barrier()


@on_ranks(2)
def test_an_engine_that_calls_no_collective_ends_too():
    watcher = run.current().job.find(Watcher)
    if idist.get_rank() == 1:
        watcher.fail(ValueError("no data"))
        return
    engine = Engine(lambda engine, batch: time.sleep(0.01))
    with pytest.raises(RankFailedError, match="rank 1 failed first: ValueError: no data"):
        engine.run(range(3000))


@on_ranks(2)
def test_only_the_first_failure_is_published():
    watcher = run.current().job.find(Watcher)
    if idist.get_rank() == 1:
        watcher.fail(LookupError("first"))
        return
    assert not outlasting(lambda: run.current().job.verdict is None)
    victim = RuntimeError("Connection closed by peer")
    found = watcher.fail(victim)
    assert isinstance(found, RankFailedError)
    assert "LookupError: first" in str(found)
    other = ValueError("of its own")
    assert watcher.fail(other) is other
    assert watcher._failure is None


@on_ranks(2)
def test_different_collectives_end_both_ranks():
    with pytest.raises(RankDivergenceError, match=r"rank 0 +all_reduce(.|\n)*rank 1 +barrier"):
        idist.barrier() if idist.get_rank() else idist.all_reduce(torch.ones(2))


@on_ranks(2)
def test_ranks_of_different_nodes_learn_of_each_other_through_the_store():
    def own(watcher, with_entries=True):  # no rank sees the record of another one
        return {watcher._rank: module.read(watcher._record.path)}

    with mock.patch.object(Watcher, "_local", own):
        idist.all_reduce(1)
        with pytest.raises(RankDivergenceError, match=r"rank 0 +all_reduce(.|\n)*rank 1 +barrier"):
            idist.barrier() if idist.get_rank() else idist.all_reduce(torch.ones(2))


@pytest.mark.jobs
@on_ranks(2)
def test_a_node_that_does_not_answer_is_named():
    def own(watcher, with_entries=True):
        return {watcher._rank: module.read(watcher._record.path)}

    with mock.patch.object(Watcher, "_local", own), mock.patch.multiple(module, ANSWER=1.0, LOST=1.0):
        idist.all_reduce(1)
        if idist.get_rank() == 1:
            run.current().job.find(Watcher)._is_closed = True  # nobody answers, and nobody has failed
            time.sleep(8)
            return
        with pytest.raises(RankFailedError, match="rank 1"):
            idist.all_reduce(1)


@on_ranks(2)
def test_different_reductions_are_noticed_although_nobody_waits():
    with mock.patch.object(module, "COMPARISON", 0.1), pytest.raises(RankDivergenceError, match=r"MAX(.|\n)*SUM"):
        idist.all_reduce(torch.ones(2), op="SUM" if idist.get_rank() else "MAX")
        for _ in range(200):
            time.sleep(0.1)
            idist.barrier()


@on_ranks(2)
def test_each_long_wait_is_reported_once_with_what_the_other_rank_does():
    await_watchers()
    run.current().job.find(Watcher)._report_after = 1.5
    idist.all_reduce(1)
    texts = logged()
    for _ in range(2):
        if idist.get_rank() == 1:
            be_busy()
        idist.barrier()
    reports = [text for text in texts if "has been waiting" in text]
    assert len(reports) == (0 if idist.get_rank() else 2), texts
    for text in reports:
        assert "rank 0 has been waiting" in text
        assert "in be_busy" in text


def fsdp():
    from torch.distributed.fsdp import fully_shard

    fully_shard(torch.nn.Linear(4, 4))(torch.ones(2, 4))


@pytest.mark.parametrize("wait", [dist.barrier, pytest.param(fsdp, marks=pytest.mark.jobs)])
@on_ranks(2, limit=60.0)
def test_a_rank_that_waits_in_a_collective_of_torch_itself_diverges_too(wait):
    idist.all_reduce(1)
    with pytest.raises(RankDivergenceError, match=r"rank 0 +(torch.distributed.barrier|FSDP)(.|\n)*rank 1 +all_reduce"):
        Engine(lambda engine, batch: idist.all_reduce(torch.ones(2)) if idist.get_rank() else wait()).run([0])


@pytest.mark.jobs
@on_ranks(2, limit=60.0)
def test_each_long_wait_in_a_collective_of_torch_itself_is_reported_once():
    run.current().job.find(Watcher)._report_after = 2.0
    idist.all_reduce(1)
    texts = logged()
    for _ in range(2):
        if idist.get_rank() == 1:
            be_busy()
            be_busy()
        dist.barrier()
    reports = [text for text in texts if "has been waiting" in text]
    assert len(reports) == (0 if idist.get_rank() else 2), texts
    for text in reports:
        assert "s in torch.distributed.barrier at" in text
        assert "in be_busy" in text


def test_a_second_wait_is_reported_though_nobody_looked_between_the_two():
    watcher, texts, reports = Watcher(StoreOnly(dist.HashStore()), None), logged(), []
    for now, call in ((61, ("barrier", 1)), (100, ("barrier", 1)), (130, ("barrier", 2)), (131, ("barrier", 2))):
        report = diagnosis.Report(str(now), True, [1], call)
        found = {"waited": mock.Mock(return_value=61.0), "hang_report": mock.Mock(return_value=report)}
        with mock.patch.multiple(diagnosis, **found), mock.patch.object(module, "_dumped", return_value=""):
            watcher._report({0: mock.Mock()}, now)
        reports.append(list(texts))
    watcher.close()
    assert reports == [["61"], ["61"], ["61", "130"], ["61", "130"]]


def test_the_last_rank_of_a_job_removes_the_files_of_those_that_were_killed_after_they_had_left(tmp_path):
    first, second = Record(0, 2, tmp_path), Record(1, 2, tmp_path)
    second.write_status({"left": "has left the run without an error"})
    second.close(keep=True)
    for record in (first, second):
        record.path.with_suffix(STACKS).touch()
    watcher = Watcher(StoreOnly(dist.HashStore()), first)
    with mock.patch.object(watcher, "_local", return_value={1: module.read(second.path)}):
        watcher.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.jobs
@on_ranks(2)
def test_a_report_tells_what_a_rank_of_another_node_does():
    def own(watcher, with_entries=True):
        return {watcher._rank: module.read(watcher._record.path)}

    with mock.patch.object(Watcher, "_local", own):
        run.current().job.find(Watcher)._report_after = 9.0
        idist.all_reduce(1)
        if idist.get_rank() == 1:
            for _ in range(3):
                be_busy()
            idist.barrier()
            return
        texts = logged()
        idist.barrier()
    assert "in be_busy" in "\n".join(texts), texts


def test_a_collective_that_all_ranks_have_begun_may_take_as_long_as_a_rank_that_is_late():
    watcher, texts, reports = Watcher(StoreOnly(dist.HashStore()), None), logged(), []
    for now, missing in ((1, []), (59, [1]), (60.5, []), (118, []), (120, []), (130, [])):
        report = diagnosis.Report(str(now), True, missing)
        found = {"waited": mock.Mock(return_value=now), "hang_report": mock.Mock(return_value=report)}
        with mock.patch.multiple(diagnosis, **found), mock.patch.object(module, "_dumped", return_value=""):
            watcher._report({0: mock.Mock()}, now)
        reports.append(list(texts))
    watcher.close()
    assert reports == [[], [], [], [], ["120"], ["120"]]


def logged() -> list[str]:
    """Return the list of the messages that this process logs from now on."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("camshaft.distributed").addHandler(handler)
    return texts


def be_busy():
    time.sleep(4)


@on_ranks(2)
def test_the_stack_of_a_process_is_reported_also_if_no_python_runs_there():
    with mock.patch.object(diagnosis, "_STALE", 1.0):
        await_watchers()
        run.current().job.find(Watcher)._report_after = 3.0
        idist.all_reduce(1)
        time.sleep(2)  # the ranks learn of each other
        if idist.get_rank() == 1:
            hold_the_gil()
            idist.barrier()
            idist.barrier()
            return
        texts = logged()
        idist.barrier()
        assert not outlasting(lambda: not texts)  # the signal that asks for the stack interrupts the call
        idist.barrier()
        assert re.search(r"the stack of rank 1:(.|\n)* in hold_the_gil", "\n".join(texts)), texts


def hold_the_gil():
    ctypes.PyDLL(None).sleep(8)  # keeps the GIL
