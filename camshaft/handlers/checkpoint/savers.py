"""Where the bytes of a checkpoint go: a file that is complete or absent, or any place of one's own."""

from __future__ import annotations

import inspect
import os
import pickle
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from camshaft.files import is_regular, remove_leftovers, write_and_sum, write_atomically
from camshaft.handlers.checkpoint import manifest
from camshaft.handlers.checkpoint.names import check_inside, check_length, checkpoints_in
from camshaft.handlers.checkpoint.weights import SUFFIX, as_weights, is_weights_file
from camshaft.handlers.checkpoint.writer import check_save_on_rank, is_writer, warn_if_alone
from camshaft.types import PathLike


class BaseSaveHandler(ABC):
    """Stores checkpoints under names, and removes them again."""

    @abstractmethod
    def __call__(self, checkpoint: Mapping[str, Any], filename: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Store a checkpoint, in place of one of the same name.

        Args:
            checkpoint: what to store.
            filename: under which name.
            metadata: ``basename`` (the name without step and score), ``score_name`` and ``priority``.
        """

    @abstractmethod
    def remove(self, filename: str) -> None:
        """Remove a checkpoint stored earlier; called after the one that takes its place was stored."""


class DiskSaver(BaseSaveHandler):
    """Saves to files of one directory, with ``torch.save``, on one rank.

    A file appears under its name when it is complete and flushed to disk; a save that fails or is killed
    leaves what was there before. The folder ``.manifest`` beside the files holds for each its checksum, size,
    step, score and the versions of the libraries. Construct it on every rank.

    Files whose name ends in ``.safetensors`` are written by the library of this name, and can hold tensors only.

    Args:
        dirname: the directory; ``~`` is the home directory.
        atomic: write to another name first and rename. Without it a failed save leaves a broken file.
        create_dir: make the directory, and those above it, where they do not exist.
        require_empty: refuse a directory that holds ``*.pt`` or ``*.safetensors`` files already.
        save_on_rank: the rank that writes and removes; ``"node"`` for the first process of each node, where the
            nodes have disks of their own.
        kwargs: handed to ``torch.save``.

    Raises:
        ValueError: ``dirname`` is not an existing directory or not empty, or ``save_on_rank`` is not a rank of the job.
            In a job of a single process that process saves, whatever the rank, with a warning.
        PermissionError: the directory is not writable.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saver = DiskSaver(folder)
    ...     saver({"step": 3}, "model.pt")
    ...     torch.load(saver.dirname / "model.pt")
    {'step': 3}
    """

    def __init__(
        self,
        dirname: PathLike,
        atomic: bool = True,
        create_dir: bool = True,
        require_empty: bool = True,
        save_on_rank: int | str = 0,
        **kwargs: Any,
    ) -> None:
        check_save_on_rank(save_on_rank)
        warn_if_alone(save_on_rank)
        self.dirname = Path(dirname).expanduser()
        self.atomic = atomic
        self.save_on_rank = save_on_rank
        self.kwargs = kwargs
        self._saved_at = 0
        self._tidied: set[Path] = set()
        self._newest: Path | None = None
        self._kept: Path | None = None
        self._is_first = True
        if self.writes:
            _prepare(self.dirname, create_dir, require_empty)
            self._tidy(self.dirname)

    @property
    def writes(self) -> bool:
        """Whether this process writes."""
        return is_writer(self.save_on_rank)

    def __call__(self, checkpoint: Mapping[str, Any], filename: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Save a checkpoint as ``filename`` in the directory; what ``metadata`` tells goes into the manifest.

        Raises:
            OSError: the disk is full, or the directory is gone.
            ValueError: ``filename`` leads out of the directory, or is too long.
            TypeError: ``torch.save`` does not take the ``kwargs``.
        """
        if not self.writes:
            check_save_on_rank(self.save_on_rank)  # the handler may be older than the job
            return
        path = self._path(filename)
        check_length("filename", path)
        try:
            self._save(path, checkpoint, metadata)
            self._newest = path
        except (OSError, RuntimeError) as error:
            cause = error.__context__ if isinstance(error, RuntimeError) else error
            if not isinstance(cause, OSError) or cause.errno is None or cause.filename is not None:
                raise
            # A full disk. torch's writer trips over it and raises an error about positions in the file instead.
            raise OSError(cause.errno, cause.strerror, str(path)) from error

    def remove(self, filename: str) -> None:
        """Delete a checkpoint of the directory; one that is gone already is not an error.

        Only regular files that the manifest lists are deleted. Another file is left alone, with a warning.

        Raises:
            ValueError: ``filename`` leads out of the directory.
        """
        if not self.writes:
            return
        path = self._path(filename)
        if path == self._kept:
            return
        # In this order: when it is cut off in the middle, the manifest still knows what is left.
        is_known = manifest.is_known(path.parent, path.name)
        if is_known and (is_regular(path) or not os.path.lexists(path)):
            path.unlink(missing_ok=True)
            manifest.remove_entries(path.parent, path.name)
        elif os.path.lexists(path):
            reason = "it is not a regular file" if is_known else "the manifest lists no such checkpoint"
            warnings.warn(f"'{path}' is not removed: {reason}", stacklevel=2)

    def prune(self, filename: str) -> None:
        """Remove a checkpoint that is no longer kept, unless it is the file that was just written.

        A subclass may map several names to one file, which must outlive the names that it had before.
        """
        self._kept = self._newest
        try:
            self.remove(filename)
        finally:
            self._kept = None

    def _path(self, filename: str) -> Path:
        check_inside("filename", filename)
        return self.dirname / filename

    def _tidy(self, directory: Path) -> None:
        """At the first use of a directory, remove what killed processes left and look up its newest entry."""
        if directory not in self._tidied:
            self._tidied.add(directory)
            remove_leftovers(directory)
            remove_leftovers(directory / manifest.FOLDER)
            self._saved_at = max(self._saved_at, manifest.next_time(manifest.entries_of(directory)))

    def _save(self, path: Path, checkpoint: Any, metadata: Mapping[str, Any] | None) -> None:
        self._tidy(path.parent)
        older = manifest.entries_of(path.parent, path.name)
        entry: manifest.Entry

        def write(file: BinaryIO) -> None:
            nonlocal entry
            checksum = write_and_sum(file, lambda file: self._write(file, checkpoint, is_weights_file(path)))
            self._saved_at = max(self._saved_at + 1, manifest.next_time(older))
            entry = manifest.make_entry(path.name, checksum, file.tell(), self._saved_at, metadata)

        if self.atomic:
            write_atomically(path, write, before_rename=lambda: manifest.write_entry(path.parent, entry))
        else:
            with open(path, "wb") as file:
                write(file)
            manifest.write_entry(path.parent, entry)
        manifest.remove_entries(path.parent, path.name, but=entry)
        if self._is_first:
            self._is_first = False
            _warn_if_unloadable(path)

    def _write(self, file: BinaryIO, checkpoint: Any, only_weights: bool) -> None:
        if only_weights:
            file.write(as_weights(checkpoint))
        else:
            torch.save(checkpoint, file, **self.kwargs)


def _prepare(directory: Path, create: bool, require_empty: bool) -> None:
    """Make sure, before the training begins, that saving will find a directory it can use."""
    if create and not directory.exists():
        directory.mkdir(parents=True, exist_ok=True)
    if not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "does not exist, and create_dir is False"
        raise ValueError(f"dirname must be an existing directory, got '{directory}', which {problem}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(f"dirname must be writable, got '{directory}', where this process may not write")
    manifest.check_folder(directory)
    found = sorted(path.name for path in checkpoints_in(directory)) if require_empty else []
    if found:
        raise ValueError(
            f"dirname must hold no *.pt and *{SUFFIX} files, got '{directory}' with {len(found)} of them, such as "
            f"{found[0]}; to save beside them, as when a run goes on, use DiskSaver(dirname, require_empty=False), "
            "or ModelCheckpoint(dirname, require_empty=False)"
        )


def _warn_if_unloadable(path: Path) -> None:
    """Warn of a file that nobody can load without running code from it, as long as that can be helped."""
    if is_weights_file(path) or not zipfile.is_zipfile(path):
        return
    try:
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except pickle.UnpicklingError as error:  # a pickle_protocol that the safe reader does not know
        warnings.warn(f"'{path}' is not loaded again without running code from the file: {error}", stacklevel=5)
        return
    if refused:
        warnings.warn(
            f"'{path}' holds objects of {', '.join(sorted(refused))}, which are not loaded again without running code "
            "from the file; let state_dict() give plain numbers, strings, tensors, lists and dicts, or call "
            "torch.serialization.add_safe_globals before loading",
            stacklevel=5,
        )


def takes_metadata(save_handler: Any) -> bool:
    """Say whether a save handler takes the metadata; asked once, not at each save.

    Raises:
        TypeError: it cannot be called as one.

    >>> takes_metadata(lambda checkpoint, filename: None)
    False
    """
    if not callable(save_handler):
        raise TypeError(
            f"save_handler must be a str, a Path, a callable or a BaseSaveHandler, got {save_handler!r} of type "
            f"{type(save_handler).__name__}"
        )
    try:
        signature = inspect.signature(save_handler)
    except ValueError:  # some builtins
        return False
    for count in (3, 2):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count == 3
    raise TypeError(
        f"save_handler must take (checkpoint, filename, metadata) or (checkpoint, filename), got one with {signature}"
    )
