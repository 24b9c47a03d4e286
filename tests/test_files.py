from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import zlib
from contextlib import nullcontext
from pathlib import Path

import pytest

from camshaft import files
from camshaft.files import checksum_of, flush_and_sum, hash_checkpoint, write_atomically


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def steps(monkeypatch):
    """Record the operations on the disk, in order."""
    recorded = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        recorded.append("flush directory" if is_directory else f"flush {os.fstat(descriptor).st_size} bytes")
        fsync(descriptor)

    def record_replace(source, target):
        recorded.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    return recorded


# write_atomically


@pytest.mark.parametrize("kind", [str, Path])
def test_content_is_flushed_before_the_rename_and_the_rename_before_returning(tmp_path, steps, kind):
    write_atomically(kind(tmp_path / "model.pt"), lambda file: file.write(b"weights"))
    assert steps == ["flush 7 bytes", "rename", "flush directory"]
    assert (tmp_path / "model.pt").read_bytes() == b"weights"
    assert names(tmp_path) == ["model.pt"]


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path):
    target = tmp_path / "model.pt"
    target.write_bytes(b"old")

    def write(file):
        file.write(b"new")
        assert target.read_bytes() == b"old"
        assert Path(file.name).parent == tmp_path

    write_atomically(target, write)
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize(
    ("failing", "error", "old"),
    [
        ("write", ValueError, b"old"),
        ("write", KeyboardInterrupt, None),
        ("fsync", OSError, None),
        ("replace", OSError, b"old"),
    ],
)
def test_a_failure_leaves_the_old_file_and_no_temporary_file(tmp_path, monkeypatch, error, failing, old):
    target = tmp_path / "model.pt"
    if old:
        target.write_bytes(old)

    def fail(*_):
        raise error

    def write(file):
        file.write(b"half")
        if failing == "write":
            fail()

    if failing != "write":
        monkeypatch.setattr(os, failing, fail)
    with pytest.raises(error):
        write_atomically(target, write)
    assert names(tmp_path) == (["model.pt"] if old else [])
    assert not old or target.read_bytes() == old


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "model.pt", lambda file: file.write(b""))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.pt").stat().st_mode) == mode


def test_names_can_have_the_maximum_length(tmp_path):
    write_atomically(tmp_path / ("m" * 255), lambda file: file.write(b""))
    assert names(tmp_path) == ["m" * 255]


def test_a_missing_directory_raises_before_anything_is_written(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "absent" / "model.pt", lambda file: pytest.fail("written"))


@pytest.mark.parametrize(("code", "is_fatal"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_flush_directories_is_accepted(tmp_path, monkeypatch, code, is_fatal):
    fsync = os.fsync

    def refuse_directories(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, "refused")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    with pytest.raises(OSError, match="refused") if is_fatal else nullcontext():
        write_atomically(tmp_path / "model.pt", lambda file: file.write(b"x"))
    assert names(tmp_path) == ["model.pt"]


# hash_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "best.model.pth"
    path.write_bytes(b"weights")
    return path


@pytest.mark.parametrize("kind", [str, Path])
def test_a_checkpoint_moves_to_the_name_with_its_digest(checkpoint, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK_BYTES", 3)
    digest = hashlib.sha256(b"weights").hexdigest()
    output_dir = tmp_path / "new" / "folder"
    moved, returned = hash_checkpoint(kind(checkpoint), kind(output_dir))
    assert moved == output_dir / f"best.model-{digest[:8]}.pt"
    assert isinstance(moved, Path)
    assert returned == digest
    assert moved.read_bytes() == b"weights"
    assert not checkpoint.exists()


@pytest.mark.parametrize("name", ["absent.pt", "."])
def test_without_a_file_nothing_is_created(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="checkpoint_path must be an existing file, got"):
        hash_checkpoint(tmp_path / name, tmp_path / "new")
    assert names(tmp_path) == []


# flush_and_sum


PIECES = [b"weights", b"x" * 3_000_000, b"", b"end"]
EXPECTED = f"crc32:{zlib.crc32(b''.join(PIECES)):08x}"


def summed(path):
    with open(path, "wb") as file:
        for piece in PIECES:
            file.write(piece)
        return flush_and_sum(file)


def test_the_checksum_is_that_of_the_file(tmp_path, steps):
    assert summed(tmp_path / "file") == checksum_of(tmp_path / "file") == EXPECTED
    assert steps == ["flush 3000010 bytes"]


def test_if_no_thread_can_start_the_checksum_is_computed_without(tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert summed(tmp_path / "file") == EXPECTED
