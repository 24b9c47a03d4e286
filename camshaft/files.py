"""Write files so that they are complete or absent, and name checkpoints by their content."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from camshaft.types import PathLike

_CHUNK_BYTES = 1 << 20


def write_atomically(path: PathLike, write: Callable[[BinaryIO], object]) -> None:
    """Write a file that appears under its name complete and flushed to disk, or not at all.

    Args:
        path: of the file; its directory must exist. A file already there is replaced at the end, in one step.
        write: called with a temporary file in the same directory, open for writing bytes. When it raises, the
            temporary file is removed and what was at ``path`` stays.

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
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_directory(target.parent)


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


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _flush_directory(directory: Path) -> None:
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
