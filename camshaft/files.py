"""Write files so that they are complete or absent, and name checkpoints by their content."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import BinaryIO

from camshaft.types import PathLike

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # there is no such module

_CHUNK_BYTES = 1 << 20
_SUMMED_BYTES = 1 << 18  # at a time, which fit into the cache of a core
_LOOKS_EVERY = 0.005  # seconds, for more of a file


def write_atomically(
    path: PathLike, write: Callable[[BinaryIO], object], before_rename: Callable[[], object] | None = None
) -> None:
    """Write a file that appears under its name complete and flushed to disk, or not at all.

    Args:
        path: of the file; its directory must exist. A file already there is replaced at the end, in one step.
        write: called with a temporary file in the same directory, open for writing bytes. When it raises, the
            temporary file is removed and what was at ``path`` stays.
        before_rename: called when the content is on disk, before the file gets its name.

    Raises:
        OSError: the directory does not exist, is not writable or is full.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     target = Path(folder, "model.pt")
    ...     write_atomically(target, lambda file: torch.save({"step": 3}, file))
    ...     torch.load(target)
    {'step': 3}
    """
    target = Path(path)
    # Short whatever the target is called, and without `random`, whose state belongs to the user.
    temporary = target.with_name(f".camshaft-{os.urandom(8).hex()}.tmp")
    try:
        with open(temporary, "xb") as file:  # open() honours the umask, tempfile does not
            is_unused(file)  # held as long as it is open, so that nobody takes it for a left-over
            write(file)
            file.flush()
            os.fsync(file.fileno())
            if before_rename is not None:
                before_rename()
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_directory(target.parent)


def remove_leftovers(directory: Path) -> None:
    """Remove what processes that were killed while they wrote have left in a directory."""
    for temporary in filter(is_regular, directory.glob(".camshaft-*.tmp")):
        with suppress(OSError), open(temporary, "rb+") as file:
            status = os.fstat(file.fileno())
            may_be_new = status.st_size == 0 and time.time() - status.st_mtime < 60  # and about to be locked
            if not may_be_new and is_unused(file):
                temporary.unlink()


def is_unused(file: BinaryIO) -> bool:
    """Lock a file until it is closed or the process ends; tell whether nobody else holds it."""
    if fcntl is None:
        return True  # Windows removes no file that is open
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return False
    return True


def write_and_sum(file: BinaryIO, write: Callable[[BinaryIO], object]) -> str:
    """Write a file from its beginning on and flush it to the disk; give its checksum, which is taken meanwhile.

    Args:
        file: new, with a path, and open for writing.
        write: called with the file; writes to its end only.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     write_and_sum(file, lambda file: file.write(b"weights"))
    'crc32:1ad27358'
    """
    is_written, sums = Event(), dict[int, str]()

    def follow() -> None:
        with suppress(OSError):
            size, checksum = _sum(file.name, is_written)
            sums[size] = checksum

    helper = Thread(target=follow, name="camshaft-checksum", daemon=True)
    try:
        with suppress(RuntimeError):  # no thread can begin when the process ends, or when it has too many
            helper.start()
        write(file)
        file.flush()
        is_written.set()
        os.fsync(file.fileno())
    finally:
        is_written.set()  # wherever an interrupt came
        if helper.is_alive():
            helper.join()
    # a mount where the helper did not see all of it at once is read again
    return sums.get(file.tell()) or checksum_of(file.name)


def hash_checkpoint(checkpoint_path: PathLike, output_dir: PathLike) -> tuple[Path, str]:
    """Move a checkpoint to ``<output_dir>/<stem>-<first 8 digits of its SHA-256>.pt``.

    Args:
        checkpoint_path: of the file to move, whatever its suffix.
        output_dir: where to; made if it does not exist.

    Returns:
        The new path and all 64 hexadecimal digits.

    Raises:
        FileNotFoundError: there is no file ``checkpoint_path``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     source = Path(folder, "best.pth")
    ...     _ = source.write_bytes(b"weights")
    ...     moved, digest = hash_checkpoint(source, folder)
    ...     moved.name, len(digest), source.exists()
    ('best-9a129038.pt', 64, False)
    """
    source, directory = Path(checkpoint_path), Path(output_dir)
    if not source.is_file():
        raise FileNotFoundError(f"checkpoint_path must be an existing file, got {os.fspath(checkpoint_path)!r}")
    digest = _sha256(source)
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"{source.stem}-{digest[:8]}.pt"
    shutil.move(source, target)
    return target, digest


def checksum_of(path: PathLike) -> str:
    """Give the CRC-32 of a file."""
    return _sum(path)[1]


def _sum(path: PathLike, is_written: Event | None = None) -> tuple[int, str]:
    """Give the size and the CRC-32 of a file, which may still be written to until ``is_written`` is set."""
    size, total, chunk, is_whole = 0, 0, memoryview(bytearray(_SUMMED_BYTES)), False
    with open(path, "rb", buffering=0) as file:
        while not is_whole:
            is_whole = is_written is None or is_written.wait(_LOOKS_EVERY)
            while count := file.readinto(chunk):
                size, total = size + count, zlib.crc32(chunk[:count], total)
    return size, f"crc32:{total:08x}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def is_regular(path: Path) -> bool:
    """Return whether a path is a regular file: not a directory, a link, a pipe or a device."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def flush_directory(directory: Path) -> None:
    """Make the new name durable too: until then a crash may forget a file whose content is on disk."""
    if os.name == "nt":
        return  # Windows opens no directories
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)
