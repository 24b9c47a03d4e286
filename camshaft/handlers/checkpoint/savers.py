"""Where checkpoints are stored: files that are either complete or absent, or any place that the user provides."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from camshaft.distributed import all_gather, get_local_rank, get_rank, get_world_size
from camshaft.files import is_regular, remove_leftovers, write_and_sum, write_atomically
from camshaft.handlers.checkpoint.manifest import Entry, Manifest
from camshaft.handlers.checkpoint.names import SAFETENSORS, check_length, check_path, checkpoints_in
from camshaft.handlers.utils import load_optional
from camshaft.types import PathLike

_NODE = "node"


class BaseSaveHandler(ABC):
    """Stores checkpoints under names, and removes them."""

    @abstractmethod
    def __call__(self, checkpoint: Mapping[str, Any], filename: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Store a checkpoint, replacing one of the same name.

        Args:
            checkpoint: what to store.
            filename: its name.
            metadata: ``basename`` (the name without step and score), ``score_name`` and ``priority``.
        """

    @abstractmethod
    def remove(self, filename: str) -> None:
        """Remove a stored checkpoint; called after the one that replaces it was stored."""


class DiskSaver(BaseSaveHandler):
    """Saves to files of one directory with ``torch.save``, on one rank.

    A file appears under its name when it is complete and flushed to disk; a save that fails or is killed leaves the
    previous file unchanged. The folder ``.manifest`` beside the files holds the checksum, size, step, score and
    library versions of each. Construct it on every rank.

    Files with the suffix ``.safetensors`` are written by the safetensors library, and can only hold tensors.

    Args:
        dirname: the directory; ``~`` is expanded to the home directory.
        atomic: write to a temporary file and rename it. Otherwise a failed save leaves a broken file.
        create_dir: create the directory and its parents if they do not exist.
        require_empty: raise if the directory, or the folder of a ``filename_prefix`` that is used with it, already
            holds ``*.pt`` or ``*.safetensors`` files.
        save_on_rank: the rank that writes and removes; ``"node"`` for the first process of each node, if nodes have
            local disks.
        kwargs: passed to ``torch.save``.

    Raises:
        ValueError: ``dirname`` is not an existing directory or not empty, or ``save_on_rank`` is not a rank of the job.
            In a job with a single process, that process saves whatever the rank, with a warning.
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
        _warn_if_alone(save_on_rank)
        self.dirname = Path(dirname).expanduser()
        self.atomic = atomic
        self.require_empty = require_empty
        self.save_on_rank = save_on_rank
        self.kwargs = kwargs
        self._manifests: dict[Path, Manifest] = {}
        self._newest: Path | None = None
        self._protected: Path | None = None
        self._is_first = True
        if create_dir and self.writes and not self.dirname.exists():
            self.dirname.mkdir(parents=True, exist_ok=True)
        self.check_folder("")

    @property
    def writes(self) -> bool:
        """Whether this process writes."""
        return is_writer(self.save_on_rank)

    def __call__(self, checkpoint: Mapping[str, Any], filename: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Save a checkpoint as ``filename`` in the directory, with ``metadata`` in the manifest.

        Raises:
            OSError: the disk is full, or the directory was removed.
            ValueError: ``filename`` leads out of the directory, or is too long.
            TypeError: ``torch.save`` does not accept the ``kwargs``.
        """
        if not self.writes:
            check_save_on_rank(self.save_on_rank)  # the handler may be older than the job
            return
        path = self._path(filename)
        check_length("filename", path)
        try:
            self._save(path, checkpoint, metadata or {})
            self._newest = path
        except (OSError, RuntimeError) as error:
            cause = error.__context__ if isinstance(error, RuntimeError) else error
            if not isinstance(cause, OSError) or cause.errno is None or cause.filename is not None:
                raise
            # A full disk. torch's writer raises an error about positions in the file instead.
            raise OSError(cause.errno, cause.strerror, str(path)) from error

    def remove(self, filename: str) -> None:
        """Delete a checkpoint of the directory; a missing file is not an error.

        Only regular files that the manifest lists are deleted. Others are left alone, with a warning.

        Raises:
            ValueError: ``filename`` leads out of the directory.
        """
        path = self._path(filename)
        if not self.writes or path == self._protected:
            return
        # In this order: if it is interrupted, the manifest still lists what is left.
        manifest = Manifest(path.parent)
        is_listed = manifest.lists(path.name)
        if is_listed and (is_regular(path) or not os.path.lexists(path)):
            path.unlink(missing_ok=True)
            manifest.remove(path.name)
        elif os.path.lexists(path):
            reason = "it is not a regular file" if is_listed else "the manifest lists no such checkpoint"
            warnings.warn(f"'{path}' is not removed: {reason}", stacklevel=2)

    def prune(self, filename: str) -> None:
        """Remove a checkpoint that is no longer kept, unless it is the file that was just written.

        A subclass may map several names to one file, which must outlive its previous names.
        """
        self._protected = self._newest
        try:
            self.remove(filename)
        finally:
            self._protected = None

    def check_folder(self, name: str) -> None:
        """Check, before training starts, that checkpoints can be written to a folder of the directory.

        Raises:
            ValueError: it does not exist, or it holds checkpoints and ``require_empty`` is True.
            PermissionError: it is not writable.
        """
        folder = self.dirname / name
        if not self.writes or folder in self._manifests:
            return
        if not folder.is_dir():
            problem = "is not a directory" if folder.exists() else "does not exist: create it"
            raise ValueError(f"checkpoints need an existing directory, got '{folder}', which {problem}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"checkpoints need a writable directory, got '{folder}'")
        if self.require_empty and (found := sorted(path.name for path in checkpoints_in(folder))):
            hint = "DiskSaver(dirname, require_empty=False) or ModelCheckpoint(dirname, require_empty=False)"
            problem = f"contains {len(found)} checkpoints, such as {found[0]}"
            raise ValueError(f"'{folder}' {problem}; to save beside them, for example to resume, use {hint}")
        self._manifest(folder)

    def _manifest(self, folder: Path) -> Manifest:
        """Return the manifest of a folder; on first use, remove what killed processes left there."""
        if folder not in self._manifests:
            manifest = Manifest(folder)
            manifest.check_folder()
            remove_leftovers(folder)
            remove_leftovers(manifest.folder)
            self._manifests[folder] = manifest
        return self._manifests[folder]

    def _path(self, filename: str) -> Path:
        check_path("filename", filename)
        return self.dirname / filename

    def _save(self, path: Path, checkpoint: Any, metadata: Mapping[str, Any]) -> None:
        manifest = self._manifest(path.parent)

        def serialize(file: BinaryIO) -> None:
            if path.suffix == SAFETENSORS:
                file.write(_as_safetensors(checkpoint))
            else:
                torch.save(checkpoint, file, **self.kwargs)

        def write(file: BinaryIO) -> Entry:
            checksum = write_and_sum(file, serialize)
            return manifest.new_entry(path.name, checksum, file.tell(), metadata)

        if self.atomic:
            entry = write_atomically(path, write, before_rename=manifest.write)
        else:
            with open(path, "wb") as file:
                entry = write(file)
            manifest.write(entry)
        manifest.remove(path.name, but=entry)
        if self._is_first:
            self._is_first = False
            _warn_if_unloadable(path)


def check_save_on_rank(save_on_rank: int | str) -> None:
    """Raise ``ValueError`` if this is neither a rank of the job nor ``"node"``."""
    if save_on_rank == _NODE:
        return
    if not isinstance(save_on_rank, int) or isinstance(save_on_rank, bool) or save_on_rank < 0:
        raise ValueError(f"save_on_rank must be an integer >= 0 or {_NODE!r}, got {save_on_rank!r}")
    if 1 < get_world_size() <= save_on_rank:
        size = f"which has {get_world_size()} processes"
        raise ValueError(f"save_on_rank must be a rank of the job, {size}, got {save_on_rank}: nothing would be saved")


def is_writer(save_on_rank: int | str) -> bool:
    """Return whether this process writes; the only process of a job always does."""
    if get_world_size() == 1:
        return True
    return get_local_rank() == 0 if save_on_rank == _NODE else get_rank() == save_on_rank


def writers(save_on_rank: int | str) -> list[int]:
    """Return the ranks that write; all ranks must call this."""
    flags: list[tuple[bool]] = all_gather((is_writer(save_on_rank),))
    return [rank for rank, (writes,) in enumerate(flags) if writes]


def _warn_if_alone(save_on_rank: int | str) -> None:
    """Warn if the rank does not exist because the job has a single process."""
    if get_world_size() == 1 and save_on_rank not in (0, _NODE):
        level = 1
        while sys._getframe(level).f_globals.get("__package__") == __package__:
            level += 1  # a Checkpoint may construct the DiskSaver
        text = f"save_on_rank is {save_on_rank}, but the job has a single process: rank 0 saves instead"
        warnings.warn(text, stacklevel=level + 1)


def safetensors() -> Any:
    """Import the library for ``.safetensors`` files."""
    return load_optional("safetensors.torch", extra="safetensors", needed_by=f"a checkpoint in a {SAFETENSORS} file")


def _as_safetensors(checkpoint: Any) -> bytes:
    """Serialize a dict of tensors."""
    values = list(checkpoint.values()) if isinstance(checkpoint, Mapping) else [[checkpoint]]
    if kinds := sorted({type(one).__name__ for one in values if not isinstance(one, torch.Tensor)}):
        raise TypeError(f"a {SAFETENSORS} file holds the state of one model, a dict of tensors; got values of {kinds}")
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in checkpoint.items():
        storage = tensor.untyped_storage()
        # The format holds neither views nor shared memory, as tied weights have it.
        is_view = storage.data_ptr() in seen or storage.nbytes() != tensor.numel() * tensor.element_size()
        seen.add(storage.data_ptr())
        tensors[name] = (tensor.detach().clone() if is_view else tensor.detach()).contiguous()
    content: bytes = safetensors().save(tensors)
    return content


def _warn_if_unloadable(path: Path) -> None:
    """Warn about a file that cannot be loaded with ``weights_only=True``."""
    if path.suffix == SAFETENSORS or not zipfile.is_zipfile(path):
        return
    try:
        refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        hint = "return plain values and tensors from state_dict(), or call torch.serialization.add_safe_globals"
        reason = f"it holds objects of {', '.join(refused)}; {hint}"
    except pickle.UnpicklingError as error:  # a pickle_protocol that the safe reader does not know
        refused, reason = [""], str(error)
    if refused:
        warnings.warn(f"'{path}' cannot be loaded with weights_only=True: {reason}", stacklevel=5)
