"""What was sent: counted per group, by whichever thread, and only what was really sent."""

from __future__ import annotations

import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import camshaft.distributed as idist
from camshaft.distributed.failures import trace as module
from camshaft.distributed.failures.status import BACKWARD, FSDP, named
from camshaft.distributed.failures.trace import DEBUG, Call, Calls, Trace
from tests.distributed.failures.stand_in import needs_recorder
from tests.guards import outlasting
from tests.ranks import on_ranks

pytestmark = needs_recorder


def calls_of(trace: Trace) -> list[Call]:
    found = trace.read(time.monotonic(), is_urgent=True)
    assert found is not None
    return list(found.calls)


@on_ranks(2)
def test_whatever_calls_it_is_recorded_with_its_size() -> None:
    trace, group = Trace(), dist.new_group([0, 1])
    idist.all_reduce(torch.ones(3, 2))
    dist.broadcast(torch.ones(5, dtype=torch.int64), 0, group=group)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    assert not outlasting(lambda: not all(call.is_done for call in calls_of(trace)))
    calls = calls_of(trace)
    first, second, *_, last = [call for call in calls if call.operation != "barrier"]
    assert (first.operation, first.value, first.size) == ("all_reduce", "torch.float32 [3, 2]", "24 bytes")
    assert (second.operation, second.value) == ("broadcast", "torch.int64 [5]")
    assert (last.operation, last.value) == ("all_reduce", "torch.float32 [3]")
    assert first.group == last.group != second.group
    assert second.sequence == 1
    assert {call.thread for call in calls} == {threading.get_ident()}


@on_ranks(2)
def test_calls_are_in_order_however_often_the_thread_that_reads_them_is_suspended() -> None:
    idist.barrier()
    trace, groups, clock = Trace(), [dist.new_group([0, 1]) for _ in range(4)], iter(range(10**6, 0, -1))
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    with mock.patch.object(module, "time", mock.Mock(time_ns=time.time_ns, monotonic=lambda: float(next(clock)))):
        calls = calls_of(trace)
    assert [call.group.partition("/")[0] for call in calls[-4:]] == [group.group_name for group in groups]


@on_ranks(2)
def test_a_group_that_was_destroyed_is_released() -> None:
    trace, group = Trace(), dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    calls_of(trace)
    known = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    assert not outlasting(lambda: known() is not None)


def test_a_group_that_is_made_anew_under_the_same_name_begins_anew() -> None:
    """torch numbers the groups of a process, but names one after its ranks with ``use_local_synchronization``."""
    entry = {"process_group": ["name", ""], "input_dtypes": [], "input_sizes": [], "time_created_ns": 0}
    entries = [
        {**entry, "retired": True, "pg_id": number, "collective_seq_id": 1, "profiling_name": f"gloo:{operation}"}
        for number, operation in ((1, "all_reduce"), (2, "barrier"))
    ]
    recorded = mock.patch.object(module, "_recorded", lambda has_calls: {"entries": entries if has_calls else []})
    with recorded, mock.patch.object(Trace, "_groups", return_value=[("name", "key", "0-1", 1)]):
        assert [(call.sequence, call.operation) for call in calls_of(Trace())] == [(1, "barrier")]


@on_ranks(2)
def test_what_is_not_completed_is_known_with_its_thread() -> None:
    trace, store = Trace(), dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    idist.barrier()
    assert not outlasting(lambda: bool(trace.unfinished()))
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(4),))
    if dist.get_rank() == 1:
        store.wait(["seen"])
    thread.start()
    if dist.get_rank() == 0:
        found: list[Call] = []  # what begins between two looks at the recorder is listed by the next reading
        assert not outlasting(lambda: not found.extend(one for one in calls_of(trace) if not one.is_done) and not found)
        assert (found[0].value, found[0].thread) == ("torch.float32 [4]", thread.ident)
        assert 0 <= time.monotonic() - found[0].began
        assert trace.unfinished()
        store.set("seen", "")
    thread.join()
    assert not outlasting(lambda: bool(trace.unfinished()))


@on_ranks(2)
def test_a_reading_is_repeated_only_if_something_has_changed_or_is_not_listed_yet() -> None:
    trace = Trace()
    idist.barrier()
    assert not outlasting(lambda: bool(trace.unfinished()))
    listed = module._recorded(True)
    last = {**listed, "entries": listed["entries"][:-1]}
    with mock.patch.object(module, "_recorded", lambda has_calls: last if has_calls else listed):
        before = calls_of(trace)
    newest = max(one["collective_seq_id"] for one in listed["entries"])
    assert calls_of(trace)[-1].sequence == newest > max((one.sequence for one in before), default=0)
    found = trace.read(time.monotonic(), is_urgent=True)
    assert trace.read(0.0) is found
    dist.all_reduce(torch.ones(1))
    assert trace.read(0.0) is None  # it is too early
    assert trace.read(time.monotonic() + 1000) is not found


def test_a_library_that_torch_does_not_record_keeps_its_last_calls() -> None:
    calls = Calls("mpi")
    calls.end(calls.begin("rare", range(2), "barrier"))  # is counted, though it is not kept
    for number in range(100):
        call = calls.begin("all", range(4), "all_reduce", [torch.ones(number)])
        if number < 99:
            calls.end(call)
    trace = Trace(calls)
    assert trace.unfinished() == [("all", 100)]
    found = trace.read(0.0)
    assert found is not None
    assert len(found.calls) == 64
    assert (found.begun, found.members) == ({"rare": 1, "all": 100}, {"rare": "0-1", "all": "0-3"})
    assert found.at_most[DEBUG] == 0
    assert found.calls[-1].value == "torch.float32 [99]"
    assert trace.read(0.0) is found
    calls.end(call)
    assert trace.unfinished() == []


TORCH, OURS = "/l/site-packages/torch", "/x/camshaft/distributed"
AUTOGRAD = f"{TORCH}/autograd/graph.py"
BARRIER, EMA = f"{TORCH}/distributed/distributed_c10d.py:1 in barrier", "/x/camshaft/handlers/ema.py:3 in _update"


@pytest.mark.parametrize(
    ("stack", "what", "via"),
    [
        (["/x/camshaft/activity.py:5 in explained", f"{AUTOGRAD}:1 in _engine_run_backward"], BACKWARD, ""),
        ([BARRIER], "torch.distributed.barrier", ""),
        ([BARRIER, f"{OURS}/ranks.py:3 in _wait", f"{OURS}/ranks.py:2 in one_rank_first"], "one_rank_first", ""),
        ([f"{OURS}/collectives/api.py:2 in gather", EMA, "/x/camshaft/engine/engine.py:4 in run"], "gather", EMA[3:]),
        ([f"{TORCH}/distributed/fsdp/a.py:1 in g", BARRIER], FSDP, ""),
    ],
)
def test_calls_are_named_as_the_user_knows_them(stack: list[str], what: str, via: str) -> None:
    assert named([*stack, "a.py:1 in f"], "all_gather") == {"what": what, "line": "a.py:1 in f", "via": via}
