"""The flight record: what it says, also of processes that were killed, and what it refuses to read."""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from camshaft.distributed import record as module
from camshaft.distributed.record import STACKS, Entry, Record, Snapshot, find, read
from tests.ranks import run_on_ranks

ALL = range(2)


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    record = Record(1, 2, tmp_path)
    yield record
    record.close()


def snapshot(record: Record) -> Snapshot:
    found = read(record.path)
    assert found is not None
    return found


def line_here() -> str:
    frame = sys._getframe(1)
    return f"{__file__}:{frame.f_lineno} in {frame.f_code.co_name}"


# --- what it says ----------------------------------------------------------------------------------------------


def test_a_collective_is_recorded_with_its_line_while_it_runs(record: Record) -> None:
    before = time.monotonic()
    number, line = record.begin(None, ALL, "all_reduce", torch.ones(4), "SUM", None), line_here()
    (entry,) = snapshot(record).entries
    assert entry == Entry(
        1, "all", 1, "all_reduce", "SUM", "", "torch.float32 [4]", line, entry.began, ended=None, is_long=False
    )
    assert before <= entry.began <= time.monotonic()
    record.end(number)
    (entry,) = snapshot(record).entries
    assert entry.ended is not None
    assert entry.began <= entry.ended <= time.monotonic()


def test_calls_that_differ_have_different_texts(record: Record) -> None:
    for value in (torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.int64), 7, None):
        for how, root, is_long in (("SUM", None, False), ("MAX", None, False), ("", 0, False), ("", 1, True)):
            record.begin(None, ALL, "reduce", value, how, root, is_long)
    record.begin(None, ALL, "barrier", None, "", None)
    *reductions, barrier = snapshot(record).entries
    assert [one.value for one in reductions[::4]] == [
        "torch.float32 [2]",
        "torch.float32 [3]",
        "torch.int64 [2]",
        "",
        "",
    ]
    for start in range(0, 20, 4):
        assert [(one.how, one.root, one.is_long) for one in reductions[start : start + 4]] == [
            ("SUM", "", False),
            ("MAX", "", False),
            ("", "0", False),
            ("", "1", True),
        ]
    assert barrier.collective == "barrier"


def test_the_line_is_the_first_outside_of_this_package_and_of_context_managers(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inner(depth: int) -> None:
        record.begin(None, ALL, "barrier", None, "", None, depth=depth)

    inner(1)
    inner(2)
    line = line_here()
    monkeypatch.setattr(module, "_inner_files", {*module._inner_files, __file__})
    inner(1)
    texts = [entry.line for entry in snapshot(record).entries]
    assert texts[0].endswith(" in inner")
    assert texts[1].partition(" ")[2] == line.partition(" ")[2]
    assert not texts[2].startswith(__file__)
    folder = Path(module.__file__).parent
    assert {str(folder / "collectives.py"), str(folder / "backends" / "serial.py")} < module._inner_files


def compiled(source: str, path: str, **names: Any) -> dict[str, Any]:
    exec(compile(source, path, "exec"), names)
    return names


HANDLER = str(Path(module.__file__).parents[1] / "handlers" / "metrics.py")
COMPLETED = compiled(
    "def completed(record, ranks):\n    record.begin(None, ranks, 'barrier', None, '', None)", HANDLER
)["completed"]


def test_a_call_within_a_handler_of_this_package_has_the_line_of_each_user(record: Record) -> None:
    user = compiled("def user(*args):\n    call(*args)\n    call(*args)", "/job/train.py", call=COMPLETED)["user"]
    user(record, ALL)
    user(record, ALL)
    entries = snapshot(record).entries
    assert [entry.line for entry in entries] == ["/job/train.py:2 in user", "/job/train.py:3 in user"] * 2
    assert {entry.via for entry in entries} == {entry.inner_line for entry in entries} == {f"{HANDLER}:2 in completed"}
    within = os.path.join("camshaft", "handlers", "metrics.py:2 in completed")
    assert entries[0].place == f"/job/train.py:2 in user, in {within}"


def test_of_lines_that_are_too_long_the_one_that_the_stack_has_is_kept(record: Record) -> None:
    user = compiled("def user(*args):\n    call(*args)", f"/{'long/' * 80}train.py", call=COMPLETED)["user"]
    user(record, ALL)
    (entry,) = snapshot(record).entries
    assert entry.line == entry.inner_line == entry.place == f"{HANDLER}:2 in completed"


def test_lines_of_functions_that_differ_only_by_their_place_differ(record: Record) -> None:
    def one() -> None:
        record.begin(None, ALL, "barrier", None, "", None)

    def other() -> None:
        record.begin(None, ALL, "barrier", None, "", None)

    for function in (one, other, one):
        function()
    first, second, third = (entry.line for entry in snapshot(record).entries)
    assert first.endswith(" in one")
    assert second.endswith(" in other")
    assert third == first


def test_the_last_64_collectives_are_kept(record: Record) -> None:
    for _ in range(100):
        record.end(record.begin(None, ALL, "barrier", None, "", None))
    entries = snapshot(record).entries
    assert [entry.number for entry in entries] == list(range(37, 101))
    assert [entry.sequence for entry in entries] == list(range(37, 101))


def test_a_late_end_leaves_newer_collectives_alone(record: Record) -> None:
    late = record.begin(None, ALL, "all_reduce", None, "", None)
    for _ in range(64):
        record.begin(None, ALL, "barrier", None, "", None)
    record.end(late)
    record.end(0)
    entries = snapshot(record).entries
    assert len(entries) == 64
    assert {entry.ended for entry in entries} == {None}


def test_sequence_numbers_count_per_group_of_ranks(tmp_path: Path) -> None:
    record = Record(0, 200, tmp_path)
    group, same = object(), object()
    pairs = list(range(0, 200, 2))
    for held, ranks in (
        (None, range(200)),
        (group, [0, 2]),
        (same, (0, 2)),
        ([0, 3], [0, 3]),
        ([0, 2], [0, 2]),
        (group, [0, 2]),
        (object(), list(range(200))),
        (object(), pairs),
        (None, range(200)),
    ):
        record.begin(held, ranks, "barrier", None, "", None)
    found = [(entry.group, entry.sequence) for entry in snapshot(record).entries]
    record.close()
    assert found == [
        ("all", 1),
        ("[0, 2]", 1),
        ("[0, 2]", 2),
        ("[0, 3]", 1),
        ("[0, 2]", 3),
        ("[0, 2]", 4),
        ("all", 2),
        (str(pairs), 1),
        ("all", 3),
    ]


def test_what_torch_begins_counts_with_the_calls_of_its_group(record: Record) -> None:
    record.begin(None, ALL, "barrier", None, "", None)
    number, line = record.begin_in_torch("all", "all_reduce", "SUM", None, [torch.ones(4)]), line_here()
    record.begin_in_torch("1: [0, 1]", "broadcast", "", 0, [torch.ones(4), torch.ones(2, 3)])
    record.begin(None, ALL, "barrier", None, "", None)
    record.end(number)
    _, reduction, broadcast, barrier = snapshot(record).entries
    assert (reduction.group, reduction.sequence, reduction.collective) == ("all", 2, "torch.distributed.all_reduce")
    assert (reduction.how, reduction.value, reduction.line) == ("SUM", "torch.float32 [4]", line)
    assert reduction.ended is not None
    assert (broadcast.group, broadcast.sequence, broadcast.ended) == ("1: [0, 1]", 1, None)
    assert (broadcast.root, broadcast.value) == ("0", "torch.float32 [10]")
    assert barrier.sequence == 3


def test_sizes_that_may_differ_are_not_recorded(record: Record) -> None:
    record.begin_in_torch("all", "all_gather", "", None, [torch.ones(4), torch.ones(3)])
    record.begin_in_torch("all", "barrier", "", None, [])
    assert [entry.value for entry in snapshot(record).entries] == ["", ""]


def called_from(path: str, name: str, call: Callable[[], object]) -> Callable[[], object]:
    """Return a function in a file that makes a call."""
    namespace: dict[str, Any] = {"call": call}
    exec(compile(f"def {name}():\n    return call()", path, "exec"), namespace)
    function: Callable[[], object] = namespace[name]
    return function


TORCH = str(Path(torch.__file__).parent)


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        ([("distributed/distributed_c10d.py", "all_reduce")], "torch.distributed.all_reduce"),
        ([("autograd/graph.py", "_engine_run_backward")], "backward (gradient reduction)"),
        ([("nn/parallel/distributed.py", "forward")], "DistributedDataParallel (parameters or buffers)"),
        ([("distributed/fsdp/_runtime_utils.py", "_unshard")], "FSDP (parameters or gradients)"),
        (
            [("distributed/fsdp/_runtime_utils.py", "_reduce"), ("autograd/graph.py", "_engine_run_backward")],
            "backward (gradient reduction)",
        ),
    ],
)
def test_what_torch_begins_is_named_after_what_begins_it(
    record: Record, frames: list[tuple[str, str]], name: str
) -> None:
    def call() -> object:
        return record.begin_in_torch("all", "all_reduce", "SUM", None, [torch.ones(4)])

    module._places[call.__code__.co_filename] = "library"
    try:
        for path, function in frames:
            call = called_from(f"{TORCH}/{path}", function, call)  # type: ignore[assignment]
        called_from("/job/train.py", "step", call)()
    finally:
        module._places.clear()
    (entry,) = snapshot(record).entries
    assert (entry.collective, entry.line) == (name, "/job/train.py:2 in step")
    assert entry.how == ("SUM" if name.startswith("torch") else "all_reduce SUM")


def test_a_part_of_a_recorded_collective_is_not_recorded(record: Record) -> None:
    path = Path(module.__file__).with_name("collectives.py")
    begin = called_from(
        f"{TORCH}/distributed/distributed_c10d.py",
        "all_reduce",
        lambda: record.begin_in_torch("all", "all_reduce", "SUM", None, [torch.ones(4)]),
    )
    module._places[__file__] = "library"
    try:
        assert called_from(str(path), "all_reduce", begin)() == 0
    finally:
        module._places.clear()
    assert snapshot(record).entries == ()


def test_groups_of_other_ranks_are_told_apart_when_an_id_is_used_again(record: Record) -> None:
    class Held:
        """A group."""

    held: Any = Held()
    alive = weakref.ref(held)
    record.begin(held, [0], "barrier", None, "", None)
    del held
    assert alive() is None
    later = Held()  # as if three groups had the same id one after the other
    for ranks in ([0], [1], [0]):
        record.begin(later, ranks, "barrier", None, "", None)
    assert [(entry.group, entry.sequence) for entry in snapshot(record).entries] == [
        ("[0]", 1),
        ("[0]", 2),
        ("[1]", 1),
        ("[0]", 3),
    ]


def test_many_different_calls_take_no_more_memory_and_keep_their_texts(record: Record) -> None:
    def frequent() -> None:
        record.begin(None, ALL, "barrier", None, "always the same", None)

    for size in range(1500):
        frequent()
        record.begin([0], [0], "all_reduce", torch.empty(size), str(size), None)
        record.begin(list(range(size % 7)), [0], "all_gather", None, "", size)
    entries = snapshot(record).entries
    assert len(entries) == 64
    for entry in entries:
        size = (entry.number - 1) // 3
        if entry.collective == "barrier":
            assert entry.how == "always the same"
        elif entry.collective == "all_reduce":
            assert (entry.how, entry.value) == (str(size), f"torch.float32 [{size}]")
        else:
            assert entry.root == str(size)
    assert max(len(counted.texts) for counted in record._counted.values()) <= 1024
    assert len(record._groups) <= 1024


class Odd:
    """It has no hash, and cannot be compared or shown."""

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return "odd"

    def __repr__(self) -> str:
        raise ZeroDivisionError

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError


class OddTensor(torch.Tensor):
    """A tensor without a shape."""

    @property
    def shape(self) -> Any:
        raise ZeroDivisionError


def test_odd_arguments_are_recorded_as_far_as_possible(record: Record) -> None:
    odd: Any = Odd()
    tensor = torch.ones(1)
    for value, how, root in (
        (odd, "", odd),
        (tensor, "", tensor),
        (torch.ones(1).as_subclass(OddTensor), "", [1]),
        (torch.ones(2, 2).to_sparse(), "", True),
        (torch.ones(2, device="meta"), "\ud800", "\0"),
        ({}, "", {}),
    ):
        for _ in range(2):
            assert record.begin(None, ALL, "all_reduce", value, how, root) > 0
    entries = snapshot(record).entries
    assert [entry.sequence for entry in entries] == list(range(1, 13))
    assert entries[0].root == "odd"
    assert entries[4].value == "OddTensor"
    assert entries[6].value == "sparse_coo torch.float32 [2, 2]"


def test_tensors_and_groups_are_not_kept_alive(record: Record) -> None:
    class Held:
        """A group."""

    tensor, root, group = torch.ones(3), torch.ones(()), Held()
    alive = [weakref.ref(one) for one in (tensor, root, group)]
    record.end(record.begin(group, [0], "broadcast", tensor, "", root))
    del tensor, root, group
    gc.collect()
    assert [one() for one in alive] == [None] * 3


def test_threads_share_a_record(record: Record) -> None:
    def call(name: str) -> None:
        for number in range(2000):
            record.end(record.begin(None, ALL, name, None, str(number % 100), None))

    threads = [threading.Thread(target=call, args=(f"of thread {index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = snapshot(record).entries
    assert [entry.number for entry in entries] == list(range(7937, 8001))
    assert sorted(entry.sequence for entry in entries)[-1] == 8000
    assert None not in {entry.ended for entry in entries}


# --- the status and the header ---------------------------------------------------------------------------------


def test_the_header_says_who_writes_it(record: Record) -> None:
    found = snapshot(record)
    assert (found.job, found.rank, found.world_size, found.pid) == ("", 1, 2, os.getpid())
    assert (found.host, found.status, found.entries) == (socket.gethostname(), {}, ())
    assert found.is_alive
    record.job = "a job " + "x" * 2000
    found = snapshot(record)
    assert record.job.startswith(found.job[:100])
    assert found.rank == 1
    record.job = "job 3"
    assert snapshot(record).job == record.job == "job 3"


def test_the_status_is_what_was_written_last(record: Record) -> None:
    for status in ({"time": 1.5, "engines": [{"epoch": 2}], "left": None}, {"text": 'ä "quoted"\n'}, {}):
        record.write_status(status)
        assert snapshot(record).status == status


@pytest.mark.parametrize(
    "status",
    [
        {"time": 1, "text": "x" * 100_000},
        {"time": 1, "texts": [{"text": "ä" * 5000} for _ in range(30)], "short": "all of it"},
        {"time": 1, "numbers": list(range(50_000))},
        {"time": 1, **{str(number): "x" for number in range(50_000)}},
    ],
    ids=["a long text", "many long texts", "many numbers", "many names"],
)
def test_a_status_that_is_too_long_is_shortened(record: Record, status: dict[str, Any]) -> None:
    record.write_status(status)
    found = snapshot(record).status
    assert found["time"] == 1
    assert found.get("short") == status.get("short")
    if "text" in status:
        assert found["text"].startswith("xxx")
        assert 10_000 < len(json.dumps(found)) <= 24 * 1024
        assert "..." in found["text"]


def test_a_status_that_json_cannot_represent_raises_nothing(record: Record) -> None:
    circular: dict[str, Any] = {}
    circular["itself"] = circular
    record.write_status({"time": 1, "object": Path("path"), (1, 2): 3})  # type: ignore[dict-item]
    assert snapshot(record).status == {"time": 1, "object": repr(Path("path"))}
    for odd in (circular, {"odd": Odd()}):
        record.write_status(odd)
        assert snapshot(record).status["time"] == 1


# --- processes -------------------------------------------------------------------------------------------------


def child_of(work: Callable[[], object]) -> int:
    """Fork a child that works until it is killed; the record must be there when this returns."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(tell, b"x")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    return pid


def killed_ranks(folder: Path) -> None:
    for kill in (signal.SIGKILL, signal.SIGABRT):
        survivors = []

        def work() -> None:
            record = Record(0, 2, folder)
            record.write_status({"stack": ["train.py:3 in step"]})
            record.begin(None, ALL, "all_reduce", torch.ones(3), "SUM", None)
            survivor = child_of(lambda: None)  # as a worker of a loader that outlives its rank
            (folder / "survivor").write_text(str(survivor))

        pid = child_of(work)
        survivors.append(int((folder / "survivor").read_text()))
        (path,) = find(folder=folder)
        before = read(path)
        os.kill(pid, kill)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        after = read(path)
        assert before is not None
        assert before.is_alive
        assert after == replace(before, is_alive=False)
        assert after.pid == pid
        assert [entry.ended for entry in after.entries] == [None]
        assert after.status == {"stack": ["train.py:3 in step"]}
        os.kill(survivors[0], signal.SIGKILL)
        os.waitpid(pid, 0)
        path.unlink()


def test_the_record_of_a_killed_process_tells_what_it_did_and_that_it_is_dead(tmp_path: Path) -> None:
    run_on_ranks(1, killed_ranks, tmp_path)


def seen_by_others(folder: Path) -> None:
    record = Record(0, 1, folder)
    record.begin(None, [0], "barrier", None, "", None)
    other = folder / ".." / folder.name / record.path.name
    found = [read(record.path), read(other)]  # closing the file after that would release the lock
    assert [one is not None and one.is_alive for one in found] == [True, True]
    Record(0, 1, folder).close()  # looks for old ones
    lock = Path(folder, "alive")
    pid = child_of(lambda: lock.write_text(str([one.is_alive for path in find(folder=folder) if (one := read(path))])))
    assert lock.read_text() == "[True]"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    record.close(keep=True)
    kept = read(record.path)
    assert kept is not None
    assert not kept.is_alive
    assert [entry.collective for entry in kept.entries] == ["barrier"]


def test_reading_its_own_record_does_not_make_a_process_look_dead(tmp_path: Path) -> None:
    run_on_ranks(1, seen_by_others, tmp_path)


def forked(folder: Path) -> None:
    record = Record(0, 2, folder)
    number = record.begin(None, ALL, "all_reduce", None, "", None)
    before = record.path.read_bytes()[module._STATUS :]

    def work() -> None:
        assert record.begin(None, ALL, "all_reduce", None, "", None) == 0
        assert record.begin([0], [0], "barrier", torch.ones(2), "new", 3) == 0
        record.end(number)
        record.write_status({"of": "the child"})
        record.job = "of the child"
        record.close()
        own = Record(0, 1, folder)
        assert own.begin(None, [0], "barrier", None, "", None) == 1
        own.close()

    with record._lock:  # as if another thread of the parent held it
        pid = child_of(work)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert record.path.read_bytes()[module._STATUS :] == before
    assert record.begin(None, ALL, "all_reduce", None, "", None) == 2
    record.close()
    assert not record.path.exists()


def test_a_forked_child_leaves_the_record_of_its_parent_alone(tmp_path: Path) -> None:
    run_on_ranks(1, forked, tmp_path)


WRITER = """
import sys
from pathlib import Path
from camshaft.distributed.record import Record
record = Record(0, 2, Path(sys.argv[1]))
number = 0
while True:
    number += 1
    text = str(number) * (number % 50)
    record.write_status({"first": number, "text": text, "last": number})
    for _ in range(5):
        record.end(record.begin(None, range(2), "barrier", None, how := str(number // 3), None))
"""


def test_a_record_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 40
        while not (paths := find(folder=tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.02)
        seen, num_reads = set(), 0
        while num_reads < 400 or (len(seen) <= 5 and time.monotonic() < deadline):
            num_reads += 1
            found = read(paths[0])
            assert found is not None
            assert found.is_alive
            status = found.status
            if status:
                assert status["last"] == status["first"]
                assert status["text"] == str(status["first"]) * (status["first"] % 50)
                seen.add(status["first"])
            for entry in found.entries:
                assert entry.sequence == entry.number
                assert entry.how == str(((entry.number - 1) // 5 + 1) // 3)
        assert len(seen) > 5
    finally:
        writer.kill()
        writer.wait()


# --- files -----------------------------------------------------------------------------------------------------


def test_a_record_is_private_and_removed_when_it_is_closed(record: Record, tmp_path: Path) -> None:
    assert record.path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == find(folder=tmp_path) == [record.path]
    for _ in range(2):
        record.close()
        assert list(tmp_path.iterdir()) == []
    assert read(record.path) is None
    assert record.begin(None, ALL, "barrier", None, "", None) == 0
    record.end(1)
    record.write_status({"time": 1})
    record.job = "too late"
    record.close(keep=True)
    assert list(tmp_path.iterdir()) == []


def test_by_default_records_are_in_memory_or_the_temporary_folder(tmp_path: Path, monkeypatch: Any) -> None:
    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(module, "_MEMORY", memory)
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(temporary))
    first = Record(0, 1)  # as on macOS
    memory.mkdir()
    second = Record(0, 1)
    assert (first.path.parent, second.path.parent) == (temporary, memory)
    assert set(find()) == {first.path, second.path}
    for one in (first, second):
        one.close()


def without_space(folder: Path) -> None:
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 50_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, allowed[1]))
        with pytest.raises(OSError, match=r"(File too large|No space left)"):
            Record(0, 1, folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
        assert list(folder.iterdir()) == []


def test_without_space_there_is_an_error_and_no_file(tmp_path: Path) -> None:
    run_on_ranks(1, without_space, tmp_path)


def test_the_files_of_stacks_go_with_their_records(tmp_path: Path) -> None:
    first, second = Record(0, 2, tmp_path), Record(1, 2, tmp_path)
    stacks = [record.path.with_suffix(STACKS) for record in (first, second)]
    lost = tmp_path / f"camshaft-1-0{STACKS}"  # its record was removed by another rank
    for path in (*stacks, lost):
        path.touch()
    third = Record(2, 3, tmp_path)
    assert [path.exists() for path in (*stacks, lost)] == [True, True, False]
    first.close()
    second.close(keep=True)
    assert list(tmp_path.glob(f"*{STACKS}")) == []
    third.close()
    assert list(tmp_path.iterdir()) == [second.path]


DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "/job/hangs.py", line 1 in before

Fatal Python error: Aborted

Current thread 0x00007f00000000ab (most recent call first):
  <no Python frame>

Thread 0x00007f00000000cd (most recent call first):
  File "/lib/threading.py", line 324 in wait

Thread 0x00007f00000000ef (most recent call first):
  File "/site-packages/torch/autograd/graph.py", line 979 in _engine_run_backward
  File "/job/train.py", line 9 in step

Extension modules: torch._C (total: 1)
"""


@pytest.mark.parametrize(
    ("thread", "stack"),
    [
        (None, ["/site-packages/torch/autograd/graph.py:979 in _engine_run_backward", "/job/train.py:9 in step"]),
        (0x7F00000000CD, ["/lib/threading.py:324 in wait"]),
    ],
)
def test_the_record_of_a_process_that_crashed_has_its_stack(
    tmp_path: Path, thread: int | None, stack: list[str]
) -> None:
    record = Record(0, 2, tmp_path)
    record.write_status({"stack": ["/job/train.py:1 in before"], "thread": thread})
    record.path.with_suffix(STACKS).write_text(DUMP)
    assert "crash" not in snapshot(record).status  # while it lives
    record._release()
    status = snapshot(record).status
    assert (status["crash"], status["stack"]) == ("Aborted", stack)
    module._open_records.discard(record)


def test_old_records_of_processes_that_ended_are_removed(tmp_path: Path, monkeypatch: Any) -> None:
    names = ("running", "old", "new", "newest")
    records = {name: Record(0, 1, tmp_path) for name in names}
    for name in names[1:]:
        records[name].close(keep=True)
    long_ago, a_while_ago = time.time() - 25 * 3600, time.time() - 3600
    for name in ("running", "old"):
        os.utime(records[name].path, (long_ago, long_ago))
    os.utime(records["new"].path, (a_while_ago, a_while_ago))
    other = tmp_path / "camshaft-1-2.record"
    other.write_bytes(b"something else")
    os.utime(other, (long_ago, long_ago))
    Record(0, 1, tmp_path).close()
    assert set(tmp_path.iterdir()) == {records[name].path for name in ("running", "new", "newest")} | {other}
    monkeypatch.setattr(module, "_MAX_DEAD", 2)  # one is that of the new process
    Record(0, 1, tmp_path).close()
    assert set(tmp_path.iterdir()) == {records[name].path for name in ("running", "newest")} | {other}
    records["running"].close()


def test_what_is_no_record_of_this_user_is_not_read(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = record.path.read_bytes()  # opens it, and so releases its lock
    copy, link, pipe, short, folder = (tmp_path / f"camshaft-{name}.record" for name in "12345")
    copy.write_bytes(content)
    link.symlink_to(copy)
    os.mkfifo(pipe)
    short.write_bytes(content[:-1])
    folder.mkdir()
    for path in (link, pipe, short, folder, tmp_path / "absent", Path("/dev/zero")):
        assert read(path) is None
    assert read(copy) is not None
    monkeypatch.setattr(module.os, "geteuid", lambda: os.getuid() + 1)
    assert read(copy) is None


@given(
    changes=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=80)), max_size=6),
    fill=st.none() | st.binary(min_size=1, max_size=4),
    start=st.sampled_from([0, module._HEADER, module._STATUS, module._ENTRIES]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_damaged_content_never_raises(
    tmp_path: Path, changes: list[tuple[float, bytes]], fill: bytes | None, start: int
) -> None:
    record = Record(0, 2, tmp_path)
    for number in range(3):
        record.begin(None, ALL, "all_reduce", torch.ones(number), "SUM", None)
    record.write_status({"time": 1.5})
    record.close(keep=True)
    content = bytearray(record.path.read_bytes())
    if fill is not None:
        content[start:] = (fill * len(content))[: len(content) - start]
    for place, change in changes:
        offset = min(start + int(place * 200), len(content) - len(change))
        content[offset : offset + len(change)] = change
    record.path.write_bytes(content)
    found = read(record.path)
    record.path.unlink()
    if found is not None:
        assert len(found.entries) <= 64


@given(text=st.text(max_size=600))
def test_any_text_is_kept_or_shortened(text: str) -> None:
    assert (
        json.loads(module._fitting([text, text], 472))[0] in (text, module._shortened(text, len(text) - 1))
        or len(module._json([text, text])) > 472
    )


# --- the last call ---------------------------------------------------------------------------------------------


def test_the_state_of_a_call_tells_who_waits() -> None:
    call = Entry(7, "all", 7, "all_reduce", "SUM", "", "torch.float32 [4]", "a.py:1 in f", 100.0, None, is_long=False)
    waiting = Snapshot(Path("a"), "job", 10, 12, 1, True, "elsewhere", {"time": 112.4}, (call,))
    assert module.state_of(waiting, call) == "waiting for 12 s"
    assert module.state_of(replace(waiting, is_alive=False), call) == "died after 12 s"
    assert module.state_of(waiting, replace(call, ended=101.0)) == "completed"


def test_the_last_call_is_the_one_that_still_runs(record: Record) -> None:
    assert snapshot(record).last is None
    record.begin(None, ALL, "all_reduce", None, "", None)
    record.end(record.begin([0], [0], "barrier", None, "", None))  # of another thread
    found = snapshot(record)
    assert found.last == found.entries[0]
    assert math.isclose(float(module.state_of(found, found.entries[0]).split()[2]), 0, abs_tol=60)
    record.end(1)
    found = snapshot(record)
    assert found.last == found.entries[1]
