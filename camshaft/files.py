"""Write files that are either complete or absent, and compute their checksums."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from camshaft.types import PathLike

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # the module does not exist there

T = TypeVar("T")
_CHUNK_BYTES = 1 << 18  # fits into the cache of a core


def write_atomically(
    path: PathLike, write: Callable[[BinaryIO], T], before_rename: Callable[[T], object] = lambda result: None
) -> T:
    """Write a file that appears under its name complete and flushed to disk, or not at all.

    Args:
        path: the file; its directory must exist. An existing file is replaced at the end, in one step.
        write: called with a temporary file in the same directory, open for writing bytes. If it raises, the
            temporary file is removed and ``path`` is unchanged.
        before_rename: called with the result of ``write`` when the content is on disk, before the file gets its name.

    Returns:
        The result of ``write``.

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
            lock(file)  # keeps remove_leftovers in other processes away
            result = write(file)
            file.flush()
            os.fsync(file.fileno())
            before_rename(result)
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_directory(target.parent)
    return result


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files of processes that were killed while writing to a directory."""
    for temporary in filter(is_regular, directory.glob(".camshaft-*.tmp")):
        with suppress(OSError), open(temporary, "rb+") as file:
            status = os.fstat(file.fileno())
            may_be_new = status.st_size == 0 and time.time() - status.st_mtime < 60  # and not locked yet
            if not may_be_new and lock(file):
                temporary.unlink()


def lock(file: BinaryIO) -> bool:
    """Lock a file until it is closed or the process ends. Return False if another process holds the lock."""
    if fcntl is not None:  # Windows does not remove open files anyway
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or a file system without locks
            return False
    return True


def flush_and_sum(file: BinaryIO) -> str:
    """Flush a file to disk, and return its checksum, computed at the same time.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(b"weights")
    ...     flush_and_sum(file)
    'crc32:1ad27358'
    """
    file.flush()
    with ThreadPoolExecutor(1, "camshaft-checksum") as executor:
        summing = None
        with suppress(RuntimeError):  # no thread can start at the exit of the process, or if it has too many
            summing = executor.submit(checksum_of, file.name)
        os.fsync(file.fileno())
    return checksum_of(file.name) if summing is None else summing.result()


def hash_checkpoint(checkpoint_path: PathLike, output_dir: PathLike) -> tuple[Path, str]:
    """Move a checkpoint to ``<output_dir>/<stem>-<first 8 digits of its SHA-256>.pt``.

    Args:
        checkpoint_path: the file to move, with any suffix.
        output_dir: where to move it; created if it does not exist.

    Returns:
        The new path and all 64 hexadecimal digits.

    Raises:
        FileNotFoundError: ``checkpoint_path`` is not an existing file.

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
    sha256 = hashlib.sha256()
    for chunk in _chunks(source):
        sha256.update(chunk)
    digest = sha256.hexdigest()
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"{source.stem}-{digest[:8]}.pt"
    shutil.move(source, target)
    return target, digest


def checksum_of(path: PathLike) -> str:
    """Return the CRC-32 of a file."""
    checksum = 0
    for chunk in _chunks(path):
        checksum = zlib.crc32(chunk, checksum)
    return f"crc32:{checksum:08x}"


def is_regular(path: Path) -> bool:
    """Return whether a path is a regular file: not a directory, link, pipe or device."""
    return os.path.isfile(path) and not os.path.islink(path)


def _chunks(path: PathLike) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def flush_directory(directory: Path) -> None:
    """Make a new name durable: until then a crash may forget a file whose content is on disk."""
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
