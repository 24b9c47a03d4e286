"""The record: what it says, also of processes that were killed or crashed, and what it refuses to read."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from camshaft.distributed.failures import record as module
from camshaft.distributed.failures.record import LEFT_BY_EXEC, LEFT_BY_EXIT, Node, Record, Snapshot, find, read
from tests.limits import HANG
from tests.ranks import run_on_ranks


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    record = Record(1, 2, tmp_path)
    yield record
    record.close()


def snapshot(record: Record) -> Snapshot:
    found = read(record.path)
    assert found is not None
    return found


# --- the status and the header ---------------------------------------------------------------------------------


def test_the_header_says_who_writes_it(record: Record) -> None:
    found = snapshot(record)
    assert (found.job, found.rank, found.world_size, found.pid) == ("", 1, 2, os.getpid())
    assert (found.host, found.status) == (socket.gethostname(), {})
    assert found.is_alive
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
        {"time": 1, **{str(number): "x" for number in range(50_000)}},
    ],
    ids=["a long text", "many long texts", "many names"],
)
def test_a_status_that_is_too_long_lacks_its_largest_items(record: Record, status: dict[str, Any]) -> None:
    record.write_status(status)
    found = snapshot(record).status
    assert found["time"] == 1
    assert found.get("short") == status.get("short")
    assert len(json.dumps(found)) <= 48 * 1024


class Odd:
    def __repr__(self) -> str:
        raise ZeroDivisionError


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
        assert after.status == {"stack": ["train.py:3 in step"]}
        os.kill(survivors[0], signal.SIGKILL)
        os.waitpid(pid, 0)
        path.unlink()


def test_the_record_of_a_killed_process_tells_what_it_did_and_that_it_is_dead(tmp_path: Path) -> None:
    run_on_ranks(1, killed_ranks, tmp_path)


def seen_by_others(folder: Path) -> None:
    record = Record(0, 1, folder)
    record.write_status({"time": 1})
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
    assert kept.status == {"time": 1}


def test_reading_its_own_record_does_not_make_a_process_look_dead(tmp_path: Path) -> None:
    run_on_ranks(1, seen_by_others, tmp_path)


def forked(folder: Path) -> None:
    record = Record(0, 2, folder)
    record.write_status({"of": "the parent"})
    before = record.path.read_bytes()[module._STATUS :]

    def work() -> None:
        record.write_status({"of": "the child"})
        record.job = "of the child"
        record.close()
        Record(0, 1, folder).close()

    with record._lock:  # as if another thread of the parent held it
        pid = child_of(work)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert record.path.read_bytes()[module._STATUS :] == before
    record.close()
    assert not record.path.exists()


def test_a_forked_child_leaves_the_record_of_its_parent_alone(tmp_path: Path) -> None:
    run_on_ranks(1, forked, tmp_path)


WRITER = """
import sys
from pathlib import Path
from camshaft.distributed.failures.record import Record
record = Record(0, 2, Path(sys.argv[1]))
number = 0
while True:
    number += 1
    text = str(number) * (number % 50)
    record.write_status({"first": number, "text": text, "last": number})
"""


def test_a_record_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + HANG
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
    for size in (0, 30_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, allowed[1]))
        with pytest.raises(OSError, match=r"(File too large|No space left)"):
            Record(0, 1, folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
        assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_listed_has_no_records(record: Record, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "default_folders", lambda: [tmp_path / "gone", tmp_path])
    assert find() == [record.path]


def test_without_space_there_is_an_error_and_no_file(tmp_path: Path) -> None:
    run_on_ranks(1, without_space, tmp_path)


def test_the_files_of_stacks_go_with_their_records(tmp_path: Path) -> None:
    first, second = Record(0, 2, tmp_path), Record(1, 2, tmp_path)
    stacks = [record.path.with_suffix(module._STACKS) for record in (first, second)]
    lost = tmp_path / f"camshaft-1-0{module._STACKS}"  # its record was removed by another rank
    for path in (*stacks, lost):
        path.touch()
    third = Record(2, 3, tmp_path)
    assert [path.exists() for path in (*stacks, lost)] == [True, True, False]
    first.close()
    second.close(keep=True)
    assert list(tmp_path.glob(f"*{module._STACKS}")) == []
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
    record.path.with_suffix(module._STACKS).write_text(DUMP)
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
    start=st.sampled_from([0, module._HEADER, module._STATUS]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_damaged_content_never_raises(
    tmp_path: Path, changes: list[tuple[float, bytes]], fill: bytes | None, start: int
) -> None:
    record = Record(0, 2, tmp_path)
    record.write_status({"time": 1.5})
    record.close(keep=True)
    content = bytearray(record.path.read_bytes())
    if fill is not None:
        content[start:] = (fill * len(content))[: len(content) - start]
    for place, change in changes:
        offset = min(start + int(place * 200), len(content) - len(change))
        content[offset : offset + len(change)] = change
    record.path.write_bytes(content)
    read(record.path)
    record.path.unlink()


# --- how a process ended ---------------------------------------------------------------------------------------


def ends(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the records say of processes that ended in different ways, before their parents ask."""
    record, found = Record(0, 2, folder), {}
    record.job = "job"
    node = Node(record, 2, folder)
    ways: dict[str, Callable[[], object]] = {
        "0": lambda: os._exit(0),
        "3": lambda: os._exit(3),
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exec": lambda: os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"]),
    }
    for name, end in ways.items():

        def work(end: Callable[[], object] = end) -> None:
            Record(1, 2, folder).job = "job"
            signal.signal(signal.SIGUSR1, lambda *_: end())

        pid = child_of(work)
        assert node.read(is_urgent=True)[1].is_alive
        os.kill(pid, signal.SIGUSR1)
        if name != "exec":
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        while (one := node.read(is_urgent=True)[1]).is_alive or (name == "exec" and "left" not in one.status):
            time.sleep(0.01)  # the new program starts
        found[name] = {key: value for key, value in one.status.items() if key in ("left", "killed")}
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        one.path.unlink()
        node = Node(record, 2, folder)
    record.close()
    return found


def test_how_a_process_ended_is_read_where_the_system_tells(tmp_path: Path) -> None:
    (found,) = run_on_ranks(1, ends, tmp_path)
    assert found == {
        "0": {"left": LEFT_BY_EXIT},
        "3": {"killed": "exit code 3"},
        "killed": {"killed": "SIGKILL"},
        "exec": {"left": LEFT_BY_EXEC},
    }


def test_the_stack_of_a_crash_in_a_second_job_is_beside_its_own_record(tmp_path: Path) -> None:
    (found,) = run_on_ranks(1, catching_twice, tmp_path)
    assert found == "Aborted"


def catching_twice(folder: Path) -> str:
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # which the ranks of tests enable
        for number in range(2):  # jobs, one after the other
            record = Record(0, 1, folder)
            record.catch_crashes()
            if number == 0:
                record.close()
        os.kill(os.getpid(), signal.SIGABRT)
    os.waitpid(pid, 0)
    (path,) = find(folder=folder)
    found = read(path)
    assert found is not None
    return str(found.status["crash"])


def test_a_file_of_stacks_does_not_follow_links(record: Record, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("content")
    record.path.with_suffix(module._STACKS).symlink_to(target)
    with mock.patch.object(module.faulthandler, "is_enabled", return_value=False), pytest.raises(FileExistsError):
        record.catch_crashes()
    assert target.read_text() == "content"
