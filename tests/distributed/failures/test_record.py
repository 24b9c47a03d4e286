"""The record: what it says, also of processes that were killed or crashed, and what it refuses to read."""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from camshaft.distributed.failures import record as module
from camshaft.distributed.failures.record import LEFT_BY_EXEC, LEFT_BY_EXIT, Node, Record, Snapshot, find, read
from tests.limits import wait_until
from tests.ranks import on_ranks


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    record = Record(1, 2, tmp_path)
    yield record
    record.close()


def snapshot(path: Path) -> Snapshot:
    found = read(path)
    assert found is not None
    return found


# --- the status and the header ---------------------------------------------------------------------------------


def test_a_record_says_who_writes_it_and_what_was_written_last(record: Record) -> None:
    host, start = socket.gethostname(), module.start_of(os.getpid())
    expected = Snapshot(record.path, "", 1, 2, os.getpid(), True, host, {}, start, Path(sys.argv[0]).name)
    assert snapshot(record.path) == expected
    record.job = "job 3"
    for status in ({"time": 1.5, "engines": [{"epoch": 2}], "left": None}, {"text": 'ä "quoted"\n'}, {}):
        record.write_status(status)
        assert snapshot(record.path) == replace(expected, job="job 3", status=status)


class Odd:
    def __repr__(self) -> str:
        raise ZeroDivisionError


CIRCULAR: dict[str, Any] = {"time": 2}
CIRCULAR["itself"] = CIRCULAR


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"time": 1, "text": "x" * 100_000}, {"time": 1}),
        ({"time": 1, "texts": ["ä" * 5000] * 30, "short": "all of it"}, {"time": 1, "short": "all of it"}),
        ({"time": 1, "object": Path("path"), (1, 2): 3}, {"time": 1, "object": repr(Path("path"))}),
        (CIRCULAR, {"time": 0}),  # what was written before
        ({"time": 1, "odd": Odd()}, {"time": 0}),
    ],
    ids=["a long text", "many long texts", "objects", "circular", "raises"],
)
def test_what_does_not_fit_or_cannot_be_written_is_left_out(record: Record, status: Any, expected: Any) -> None:
    record.write_status({"time": 0})
    record.write_status(status)
    assert snapshot(record.path).status == expected


def test_of_many_items_as_many_are_kept_as_fit(record: Record) -> None:
    record.write_status({str(number): "x" for number in range(50_000)})
    assert 40 * 1024 < len(json.dumps(snapshot(record.path).status)) <= 48 * 1024


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


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@on_ranks(1)
def test_the_record_of_a_killed_process_tells_what_it_did_and_that_it_is_dead(tmp_path: Path) -> None:
    def work() -> None:
        Record(0, 2, tmp_path).write_status({"stack": ["train.py:3 in step"]})
        survivor = child_of(lambda: None)  # as a worker of a loader that outlives its rank
        (tmp_path / "survivor").write_text(str(survivor))

    pid = child_of(work)
    (path,) = find(tmp_path)
    before = snapshot(path)
    assert (before.pid, before.is_alive, before.status) == (pid, True, {"stack": ["train.py:3 in step"]})
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert read(path) == replace(before, is_alive=False)
    os.kill(int((tmp_path / "survivor").read_text()), signal.SIGKILL)
    os.waitpid(pid, 0)


@on_ranks(1)
def test_reading_its_own_record_does_not_make_a_process_look_dead(tmp_path: Path) -> None:
    record = Record(0, 1, tmp_path)
    record.write_status({"time": 1})
    other = tmp_path / ".." / tmp_path.name / record.path.name
    assert snapshot(record.path).is_alive  # closing the file after that would release the lock
    assert snapshot(other).is_alive
    Record(0, 1, tmp_path).close()  # looks for old ones
    seen = tmp_path / "seen"
    end(child_of(lambda: seen.write_text(str([snapshot(path).is_alive for path in find(tmp_path)]))))
    assert seen.read_text() == "[True]"
    record.close(keep=True)
    assert (snapshot(record.path).is_alive, snapshot(record.path).status) == (False, {"time": 1})


@on_ranks(1)
def test_a_forked_child_leaves_the_record_of_its_parent_alone(tmp_path: Path) -> None:
    record = Record(0, 2, tmp_path)
    record.write_status({"of": "the parent"})
    before = record.path.read_bytes()[module._STATUS :]

    def work() -> None:
        record.write_status({"of": "the child"})
        record.job = "of the child"
        record.close()
        Record(0, 1, tmp_path).close()

    with record._lock:  # as if another thread of the parent held it
        end(child_of(work))
    assert record.path.read_bytes()[module._STATUS :] == before
    record.close()
    assert not record.path.exists()


@on_ranks(1)
def test_a_record_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    if (writer := os.fork()) == 0:
        own = Record(0, 2, tmp_path)
        for number in itertools.count(1):
            own.write_status({"first": number, "text": str(number) * (number % 50), "last": number})
    seen, num_reads = set[int](), 0

    def look() -> bool:
        nonlocal num_reads
        for path in 20 * find(tmp_path):
            num_reads += 1
            if (found := read(path)) is not None and (status := found.status):  # else it is being created
                assert status["last"] == status["first"]
                assert status["text"] == str(status["first"]) * (status["first"] % 50)
                seen.add(status["first"])
        return num_reads >= 400 and len(seen) > 5

    try:
        wait_until(look)
    finally:
        end(writer)


@on_ranks(1)
def test_how_a_process_ended_is_read_where_the_system_tells(tmp_path: Path) -> None:
    """That is, before the parent of the process has asked; another process may have the same id elsewhere."""
    record = Record(0, 2, tmp_path)
    record.job = "job"
    program = [sys.executable, "-c", "import time; time.sleep(60)"]

    def be_killed() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    ways: tuple[tuple[dict[str, str], str, Callable[[], object]], ...] = (
        ({"left": LEFT_BY_EXIT}, "", lambda: os._exit(0)),
        ({"killed": "exit code 3"}, "", lambda: os._exit(3)),
        ({"killed": "SIGKILL"}, "", be_killed),
        ({"left": LEFT_BY_EXEC}, "", lambda: os.execv(sys.executable, program)),
        ({}, "1/", be_killed),  # of another namespace of process ids
    )
    for expected, namespace, way in ways:

        def work(way: Callable[[], object] = way, namespace: str = namespace) -> None:
            other = Record(1, 2, tmp_path)
            other._facts["start"] = f"{namespace}{other._facts['start']}"
            other.job = "job"
            signal.signal(signal.SIGUSR1, lambda *_: way())

        node = Node(record, 2, tmp_path)
        pid = child_of(work)
        assert node.read(is_urgent=True)[1].is_alive
        os.kill(pid, signal.SIGUSR1)
        if namespace:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its exit code could be read
        while (one := node.read(is_urgent=True)[1]).is_alive or not (one.status or namespace):
            time.sleep(0.01)  # it ends, or the new program starts
        assert one.status == expected
        end(pid)
        one.path.unlink()
    record.close()


# --- files -----------------------------------------------------------------------------------------------------


def test_a_record_is_private_and_removed_when_it_is_closed(record: Record, tmp_path: Path) -> None:
    assert record.path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == find(tmp_path) == [record.path]
    for keep in (False, False, True):
        record.close(keep)
        record.write_status({"time": 1})
        record.job = "too late"
        assert list(tmp_path.iterdir()) == []
    assert read(record.path) is None


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


@on_ranks(1)
def test_without_space_there_is_an_error_and_no_file(tmp_path: Path) -> None:
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 30_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, allowed[1]))
        with pytest.raises(OSError, match=r"(File too large|No space left)"):
            Record(0, 1, tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
        assert list(tmp_path.iterdir()) == []


def test_the_files_of_stacks_go_with_their_records(tmp_path: Path) -> None:
    first, second = Record(0, 2, tmp_path), Record(1, 2, tmp_path)
    stacks = [record.path.with_suffix(module._STACKS) for record in (first, second)]
    lost = tmp_path / f"camshaft-1-0{module._STACKS}"  # its record was removed by another rank
    for path in (*stacks, lost):
        path.touch()
    third = Record(2, 3, tmp_path)
    assert [path.exists() for path in (*stacks, lost)] == [True, True, False]
    for one, keep in ((first, False), (second, True), (third, False)):
        one.close(keep)
    assert list(tmp_path.iterdir()) == [second.path]


def test_old_records_of_processes_that_ended_are_removed(tmp_path: Path, monkeypatch: Any) -> None:
    records = {name: Record(0, 1, tmp_path) for name in ("running", "old", "new", "newest")}
    other = tmp_path / "camshaft-1-2.record"
    other.write_bytes(b"something else")
    for name, hours in {"running": 25, "old": 25, "new": 1, "newest": 0}.items():
        if name != "running":
            records[name].close(keep=True)
        then = time.time() - 3600 * hours
        os.utime(records[name].path, (then, then))
    os.utime(other, (0, 0))
    for most, kept in ((module._MAX_DEAD, ("running", "new", "newest")), (2, ("running", "newest"))):
        monkeypatch.setattr(module, "_MAX_DEAD", most)  # one is that of the new process
        Record(0, 1, tmp_path).close()
        assert set(tmp_path.iterdir()) == {records[name].path for name in kept} | {other}
    records["running"].close()


def test_what_is_no_record_of_this_user_is_not_read(record: Record, tmp_path: Path, monkeypatch: Any) -> None:
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
    start=st.sampled_from([0, module._HEADER, module._STATUS]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
def test_damaged_content_never_raises(tmp_path: Path, changes: list[tuple[float, bytes]], start: int) -> None:
    path = tmp_path / "camshaft-1-2.record"
    if not path.exists():
        record = Record(0, 2, tmp_path)
        record.write_status({"time": 1.5})
        record.close(keep=True)
        record.path.rename(path)
        (tmp_path / "intact").write_bytes(path.read_bytes())
    content = bytearray((tmp_path / "intact").read_bytes())
    for place, change in changes:
        offset = start + int(place * 200)
        content[offset : offset + len(change)] = change
    path.write_bytes(content)
    read(path)


# --- crashes ---------------------------------------------------------------------------------------------------


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
BACKWARD = ["/site-packages/torch/autograd/graph.py:979 in _engine_run_backward", "/job/train.py:9 in step"]


@pytest.mark.parametrize(("thread", "stack"), [(None, BACKWARD), (0x7F00000000CD, ["/lib/threading.py:324 in wait"])])
def test_the_record_of_a_process_that_crashed_has_its_stack(tmp_path: Path, thread: Any, stack: list[str]) -> None:
    record = Record(0, 2, tmp_path)
    record.write_status({"stack": ["/job/train.py:1 in before"], "thread": thread})
    record.path.with_suffix(module._STACKS).write_text(DUMP)
    assert "crash" not in snapshot(record.path).status  # while it lives
    record._release()
    assert snapshot(record.path).status == {"thread": thread, "crash": "Aborted", "stack": stack}
    module._open_records.discard(record)


@on_ranks(1)
def test_the_stack_of_a_crash_in_a_second_job_is_beside_its_own_record(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # which the ranks of tests enable
        for number in range(2):  # jobs, one after the other
            record = Record(0, 1, tmp_path)
            record.catch_crashes()
            if number == 0:
                record.close()
        os.kill(os.getpid(), signal.SIGABRT)
    os.waitpid(pid, 0)
    (path,) = find(tmp_path)
    assert snapshot(path).status["crash"] == "Aborted"


def test_a_file_of_stacks_does_not_follow_links(record: Record, tmp_path: Path, monkeypatch: Any) -> None:
    target = tmp_path / "precious"
    target.write_text("content")
    record.path.with_suffix(module._STACKS).symlink_to(target)
    monkeypatch.setattr(module.faulthandler, "is_enabled", lambda: False)
    with pytest.raises(FileExistsError):
        record.catch_crashes()
    assert target.read_text() == "content"
