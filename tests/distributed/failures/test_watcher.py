"""The watcher: failures, hangs, and divergence of real ranks, and what becomes of errors."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import camshaft.distributed as idist
from camshaft.distributed import job
from camshaft.distributed.backends import torch_distributed as native
from camshaft.distributed.failures import record, status, trace, translate, watch
from camshaft.distributed.failures import watcher as module
from camshaft.distributed.failures.record import Node, Record
from camshaft.distributed.failures.watcher import Watcher
from camshaft.engine import Engine
from camshaft.errors import RankDivergenceError, RankFailedError
from tests.distributed.failures.stand_in import StoreOnly, needs_recorder, snapshot, waiting, watching
from tests.guards import outlasting
from tests.limits import HANG
from tests.ranks import await_watchers, on_ranks


def own_watcher() -> Watcher:
    return job.current().job.resource(Watcher)


def logged(name: str = "camshaft.distributed") -> list[str]:
    """Return the list of the messages that this process logs from now on."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda entry: texts.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    return texts


# --- the life of the threads -----------------------------------------------------------------------------------------


def test_the_threads_live_as_long_as_the_job() -> None:
    before = threading.active_count()
    with watching(dist.HashStore()):
        assert threading.active_count() == before + 2
    assert not outlasting(lambda: threading.active_count() > before)


@pytest.mark.parametrize("missing", ["open", "fcntl"])
def test_the_watcher_works_without_descriptors_and_without_locks(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "open":
        monkeypatch.setattr(record.os, "open", mock.Mock(side_effect=OSError(24, "Too many open files")))
    else:
        monkeypatch.setattr(record, "fcntl", None)
    with closing((backend := StoreOnly(dist.HashStore())).job):
        watch(backend).board.decide({"kind": "failed", "text": "rank 1 failed", "traceback": ""})
        assert not outlasting(lambda: backend.job.verdict is None)


def test_an_error_in_a_round_is_logged_once_and_does_not_end_the_thread(caplog: Any) -> None:
    look = mock.Mock(side_effect=ZeroDivisionError)
    fast, broken = mock.patch.object(module, "PERIOD", 0.01), mock.patch.object(Watcher, "look", look)
    with fast, broken, watching(dist.HashStore()) as watcher:
        watcher._left = "has left"  # without waiting for a round
        assert not outlasting(lambda: look.call_count < 3)
    assert [one.levelname for one in caplog.records if "could not look" in one.message][:2] == ["WARNING"]


def test_a_worker_whose_torchrun_was_killed_raises_and_else_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", leave := mock.Mock())
    backend = StoreOnly(dist.HashStore())
    watcher = Watcher(backend, None, agent=os.getppid())  # without a thread
    watcher.look(0.0)
    monkeypatch.setattr(os, "getppid", lambda: -1)  # no process has this id
    with mock.patch.object(watcher.board, "is_watched", return_value=True):
        watcher.look(1.0)  # the ranks are stopping, and may save
    assert backend.job.verdict is None
    watcher.look(2.0)
    assert backend.job.verdict is not None
    assert re.match(r"torchrun \(process \d+\), which had started rank 0, was killed", str(backend.job.verdict()))
    watcher.look(30.9)
    assert not leave.called
    watcher.look(31.0)
    leave.assert_called_once_with(1)


def test_the_last_rank_of_a_job_removes_the_files_of_those_that_were_killed_after_they_had_left(tmp_path: Path) -> None:
    records = [Record(rank, 2, tmp_path) for rank in range(2)]
    for one in records:
        one.job = "job"
    records[1].write_status({"left": "has left the run"})
    records[1].close(keep=True)
    watcher = Watcher(StoreOnly(None), records[0])
    watcher._node = Node(records[0], 2, tmp_path)
    watcher.close()
    assert list(tmp_path.iterdir()) == []


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["collectives", "an engine"])
@on_ranks(2)
def test_a_failure_ends_the_other_ranks_with_its_traceback_as_the_cause(how: str) -> None:
    """It is reported once, and an engine ends, too, that calls no collective."""
    error, texts = ValueError("no data\n" + "x" * 1000), logged("camshaft")
    await_watchers()
    if idist.get_rank() == 1:
        assert own_watcher().fail(error) is error
        return
    engine = Engine(lambda engine, batch: time.sleep(0.01))
    with pytest.raises(RankFailedError, match="rank 1 failed first: ValueError: no data xxx") as caught:
        idist.all_reduce(1) if how == "collectives" else engine.run(range(10**9))
    assert str(caught.value).count("x") < 400
    assert "ValueError: no data" in str(caught.value.__cause__)
    assert texts == []
    with pytest.raises(RankFailedError, match="rank 1 failed first"):  # and so does every later one
        idist.barrier()
    other = ValueError("of its own")
    assert own_watcher().fail(other) is other
    assert own_watcher()._failure is None  # only the first one is published


@needs_recorder
@on_ranks(2)
def test_a_rank_that_leaves_is_named_by_the_one_that_waits_for_it_also_within_backward() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    await_watchers()
    if idist.get_rank() == 1:
        job.finalize()
        return
    engine = Engine(lambda engine, batch: model(torch.ones(1, 2)).sum().backward())
    with pytest.raises(RankFailedError, match="rank 1 has left the run without an error"):
        engine.run(range(3000))


@needs_recorder
@on_ranks(2)
def test_a_rank_that_leaves_is_named_also_if_the_watcher_has_looked_since_the_operation_failed() -> None:
    """torch then lists the operation as completed."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    await_watchers()
    if idist.get_rank() == 1:
        job.finalize()
        return
    with mock.patch.object(status, "PATIENCE", HANG):
        with pytest.raises(RuntimeError) as caught:
            while True:
                model(torch.ones(1, 2)).sum().backward()
        assert not outlasting(own_watcher()._trace.unfinished)
        then = time.monotonic()
        assert not outlasting(lambda: own_watcher()._observer._last[0] < then)
        assert "rank 1 has left the run without an error" in str(translate(caught.value, job.current()))


@pytest.mark.parametrize("status", [{}, {"final": {"kind": "diverged", "text": "the ranks differ", "traceback": ""}}])
def test_an_operation_may_fail_because_the_rank_that_gave_the_verdict_has_raised_it_already(status: Any) -> None:
    """That rank closes its connections, maybe before this one has looked for a verdict."""
    watcher = Watcher(StoreOnly(dist.HashStore()), None)  # without a thread
    watcher._node = mock.Mock(**{"read.return_value": {1: snapshot(1, **status)}})
    lost = {"ranks": "0-1", "key": ("0", 27), "operation": "all_reduce", "value": "", "line": "", "via": "", "what": ""}
    assert watcher._is_in_trouble(lost, frozenset((0, 1))) == bool(status)


def test_a_rank_that_is_gone_is_judged_by_what_was_read_after_it_was_found_gone() -> None:
    """Its last calls may explain its end, and a round takes its own status before it reads those of others."""
    watcher = Watcher(StoreOnly(dist.HashStore()), None)  # without a thread
    watcher._observer = mock.Mock(**{"describe.return_value": {}})
    now, gone = time.monotonic(), snapshot(1, is_alive=False)
    assert not watcher._is_fresh({0: snapshot(0, time=time.monotonic()), 1: gone}, now)
    watcher._status((None, None), now)
    assert watcher._observer.describe.call_args.args[1]  # with the calls, however often they were read
    assert watcher._is_fresh({0: snapshot(0, time=time.monotonic()), 1: gone}, now)


def test_after_a_verdict_a_rank_no_longer_looks_in_haste_for_the_calls_of_one_that_is_gone() -> None:
    """It may save for minutes."""
    watcher = Watcher(StoreOnly(dist.HashStore()), None)  # without a thread
    watcher._is_fresh({1: snapshot(1, is_alive=False)}, time.monotonic())
    watcher._final = {"kind": "failed", "text": "rank 1 failed", "traceback": ""}
    watcher.look(time.monotonic())
    assert watcher._gone_since == math.inf


def test_other_nodes_are_asked_sooner_once_it_is_urgent() -> None:
    board = mock.Mock(query=None)
    nodes = module._OtherNodes(board, 0, 2)
    counts = []
    for now, pause in ((100.0, 15.0), (101.0, 15.0), (101.5, 1.0), (102.4, 1.0), (102.5, 1.0), (102.6, 1.0)):
        nodes.ask({}, [], pause, now)
        counts.append(board.submit.call_count)
    assert counts == [1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("records", sorted({False, trace.RECORDS_GLOO}))
@on_ranks(2)
def test_different_collectives_end_both_ranks_with_a_table(records: bool) -> None:
    """Also where torch does not record them; one that is not sent does not count."""
    with mock.patch.object(trace, "RECORDS_GLOO", records), mock.patch.object(native, "RECORDS_GLOO", records):
        await_watchers()
        for _ in range(3):
            idist.barrier()
            if idist.get_rank() == 0:
                with pytest.raises(ValueError, match="src"):
                    idist.broadcast(torch.ones(1), src=7)
        with pytest.raises(RankDivergenceError, match=r"rank 0 +all_reduce +torch.float32 \[2\](.|\n)*rank 1 +barrier"):
            idist.all_reduce(torch.ones(2)) if idist.get_rank() == 0 else idist.barrier()


@on_ranks(2)
def test_a_call_that_has_completed_is_shown_with_its_line() -> None:
    await_watchers()
    with pytest.raises(RankDivergenceError) as caught:
        idist.all_reduce(torch.ones(3 if idist.get_rank() else 4))
        idist.barrier()
    looked_up = "" if trace.RECORDS_GLOO else r"(?:\(completed; then at )?"
    pattern = rf"rank (\d) .*all_reduce +torch.float32 \[(\d)\] +{looked_up}\S+test_watcher.py:\d+ in"
    rows = re.findall(pattern, str(caught.value))
    assert rows == [("0", "4"), ("1", "3")]


@needs_recorder
@on_ranks(2)
def test_ranks_that_wait_for_each_other_in_two_groups_of_torch_end() -> None:
    await_watchers()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    with pytest.raises((RankDivergenceError, RuntimeError)) as caught:
        for group in groups[:: 1 - 2 * idist.get_rank()]:
            dist.barrier(group)
    found = translate(caught.value, job.current())
    assert isinstance(found, RankDivergenceError)
    assert re.search(r"wait for each other(.|\n)*rank 0 +0-1 +torch.distributed.barrier .* rank 1", str(found))


@on_ranks(2)
def test_a_long_wait_is_reported_once_with_what_the_other_rank_does() -> None:
    await_watchers()
    own_watcher()._hangs.after = 1.0
    texts = logged()
    if idist.get_rank() == 1:
        idist.recv(0)  # until it was reported
        idist.barrier()
        return
    assert not outlasting(lambda: " in recv" not in str(own_watcher()._local.get(1)))
    thread = threading.Thread(target=lambda: (outlasting(lambda: not texts), idist.send(1, 1)))
    thread.start()
    idist.barrier()
    thread.join()
    (text,) = texts
    assert re.match(r"rank 0 has been waiting for \d+ s in barrier at .*test_watcher.py:\d+ in ", text)
    assert re.search(r"rank 1 is at .*test_watcher.py:\d+ in ", text)


def test_a_hang_is_reported_once_both_ranks_have_waited_for_long_by_the_first_rank_whose_watcher_runs() -> None:
    hangs, texts, counts = module._Hangs(0, 60.0), logged(), []
    for now, missing in ((91, False), (149, True), (150.5, False), (208, False), (211, False), (221, False)):
        other = {"begun": {"0": 4}} if missing else waiting("0", 5, "barrier", "0-1")
        local = {0: snapshot(0, **waiting("0", 5, "barrier", "0-1")), 1: snapshot(1, **other)}
        hangs.report(local, local, now)
        counts.append(len(texts))
    assert counts == [0, 0, 0, 0, 1, 1]
    hangs, texts[:] = module._Hangs(1, 60.0), []
    stopped = snapshot(0, **{**waiting("0", 4, "barrier", "0-1"), "time": 92.0})
    ranks = {0: stopped, 1: snapshot(1, **waiting("0", 5, "barrier", "0-1"))}
    hangs.report(ranks, ranks, 95)
    assert not texts
    hangs.report(ranks, ranks, 152)
    assert "rank 0 has not run any Python for 60 s" in texts[0]


@needs_recorder
@on_ranks(2)
def test_what_one_rank_has_sent_in_code_for_it_alone_is_named_with_the_divergence_that_follows() -> None:
    """As a sharded model does that a handler of one rank calls: its calls meet those of the next step."""

    @idist.one_rank_only()
    def evaluate() -> None:
        dist.all_reduce(torch.ones(2))

    await_watchers()
    evaluate()
    with pytest.raises((RankDivergenceError, RuntimeError)) as caught:
        if idist.get_rank() == 1:
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(2))
        idist.barrier()
    found = translate(caught.value, job.current())
    assert isinstance(found, RankDivergenceError)
    assert re.search(r"rank 0 sent 1 collective of ranks 0-1 in \S*evaluate, which is for rank 0 only", str(found))


# --- errors ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_errors_of_users_are_neither_delayed_nor_replaced_whatever_they_say() -> None:
    await_watchers()
    watcher = own_watcher()
    if idist.get_rank() == 1:
        job.finalize()
        return
    assert not outlasting(lambda: not any(one.status.get("left") for one in watcher._local.values()))
    then = time.monotonic()
    assert not outlasting(lambda: watcher._observer._last[0] < then)  # it has seen that no call was running
    then = time.monotonic() + status.PATIENCE
    assert not outlasting(lambda: watcher._observer._last[0] < then)  # and that none can have failed lately
    errors: list[BaseException] = []

    def look_up() -> None:
        raise RuntimeError("no samples left in the buffer: connection closed by peer, nccl timed out")

    for fail in (
        look_up,
        lambda: torch.ones(2) @ torch.ones(3),
        lambda: dist.HashStore().wait(["nothing"], timedelta(milliseconds=1)),
        lambda: dist.broadcast(torch.ones(1), 7),
    ):
        try:
            fail()
        except Exception as error:
            errors.append(error)
    with mock.patch.object(watcher._has_verdict, "wait", side_effect=AssertionError):
        assert [watcher.translate(error) for error in errors] == errors
    assert len(errors) == 4
    assert job.current().job.verdict is None


@on_ranks(2)
def test_a_message_that_cannot_even_be_sent_names_the_rank_that_has_left() -> None:
    await_watchers()
    if idist.get_rank() == 1:
        assert idist.recv(0) == 0
        job.finalize()
        return
    idist.send(0, 1)
    assert not outlasting(lambda: not any(one.status.get("left") for one in own_watcher()._local.values()))
    with pytest.raises(RankFailedError, match="rank 1 has left the run without an error"):
        while True:  # the connection is closed a moment later
            idist.send(1, 1)


# --- many nodes ------------------------------------------------------------------------------------------------------


def be_on_a_node_of_its_own() -> None:
    """Make each rank the only one on its node, where the others do not see its record."""

    def own(node: Node, is_urgent: bool = False) -> Any:
        one = record.read(node._record.path)
        return {} if one is None else {one.rank: one}

    Node.read = own  # type: ignore[method-assign]  # the process of a rank ends with the test
    idist.set_local_rank(0)
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    await_watchers()
    own_watcher().is_everywhere = True
    assert job.current().topology.local_world_size == 1


@pytest.mark.parametrize("how", ["failed first: ValueError: no data", "barrier"])
@on_ranks(3)
def test_ranks_of_other_nodes_learn_what_one_does_through_the_store(how: str) -> None:
    be_on_a_node_of_its_own()
    if idist.get_rank() == 1 and how != "barrier":
        own_watcher().fail(ValueError("no data"))
        return
    with pytest.raises((RankFailedError, RankDivergenceError), match=f"rank 1 +{how}"):
        idist.barrier() if idist.get_rank() == 1 else idist.all_reduce(1)


@on_ranks(3)
def test_a_long_wait_over_several_nodes_is_reported_once_when_the_late_rank_has_answered() -> None:
    be_on_a_node_of_its_own()
    own_watcher()._hangs.after = 4.0
    texts, rank, store = logged(), idist.get_rank(), dist.distributed_c10d._get_default_store()

    def tell() -> None:
        outlasting(lambda: not own_watcher()._local[0].status.get("waits"))
        store.set("rank 0 waits", "")
        outlasting(lambda: not texts)
        store.set("reported", "")

    if rank == 2:
        store.wait(["reported"])
        time.sleep(3 * module.PERIOD)  # in which another rank would report, too
        idist.barrier()
    else:
        if rank == 0:
            threading.Thread(target=tell, daemon=True).start()
        else:
            store.wait(["rank 0 waits"])  # else, this rank might be the first to wait for long
        idist.barrier()
    found = [text for one in idist.all_gather(texts) for text in one]
    assert len(found) == 1
    assert re.match(r"rank 0 has been waiting for \d+ s in barrier at .*, for rank 2:\n  rank 2 is at ", found[0])


@on_ranks(2)
def test_rank_0_stays_until_the_ranks_of_other_nodes_know_why_the_job_fails() -> None:
    be_on_a_node_of_its_own()
    store = own_watcher().board.usable_store
    if idist.get_rank() == 0:
        own_watcher().fail(ValueError("no data"))
        job.finalize()
        assert store.add("informed", 0) == 2
    else:
        assert not outlasting(lambda: job.current().job.verdict is None)
