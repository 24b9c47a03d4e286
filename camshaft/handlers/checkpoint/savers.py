"""Where checkpoints are stored: files that are either complete or absent, or any place that the user provides."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import warnings
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch.utils.serialization import config

from camshaft.arguments import check_keywords
from camshaft.distributed import get_local_rank, get_rank, get_world_size
from camshaft.errors import annotate, level_of_caller
from camshaft.files import (
    flush_and_sum,
    flush_directory,
    is_regular,
    lock,
    remove_leftovers,
    write_atomically,
)
from camshaft.handlers.checkpoint.chunks import Chunk, owners
from camshaft.handlers.checkpoint.manifest import SHARD, Entry, Manifest, checksum_of_entry, names_in
from camshaft.types import PathLike

logger = logging.getLogger(__name__)
_NODE = "node"
_MARK = ".saving"  # a file that is locked in a directory of shards while they change
T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks, in the order of the ranks."""


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
        """Remove a stored checkpoint."""

    def prune(self, filename: str) -> None:
        """Remove a stored checkpoint that is no longer kept; called after the one that replaces it was stored."""
        self.remove(filename)


class DiskSaver(BaseSaveHandler):
    """Saves to files of one directory with ``torch.save``, on one rank.

    A file appears under its name when it is complete and flushed to disk; a save that fails or is killed leaves the
    previous file unchanged. The folder ``.manifest`` beside the files holds the checksum, size, step, score and
    library versions of each. Construct it on every rank.

    Args:
        dirname: the directory; ``~`` is expanded to the home directory.
        atomic: write to a temporary file and rename it. Otherwise a failed save leaves a broken file.
        create_dir: create the directory and its parents if they do not exist.
        require_empty: raise if the directory already holds ``*.pt`` files.
        save_on_rank: the rank that writes and removes; ``"node"`` for the first process of each node, if nodes have
            local disks.
        kwargs: passed to ``torch.save``.

    Raises:
        ValueError: ``dirname`` is not an existing directory or not empty, or ``save_on_rank`` is not a rank of the job.
            In a job with a single process, that process saves whatever the rank, with a warning.
        PermissionError: the directory is not writable.
        NotADirectoryError: ``.manifest`` in it is a link or a file.
        TypeError: ``torch.save`` does not accept the ``kwargs``.

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
        check_keywords(DiskSaver, kwargs, torch.save, "obj", "f")
        check_save_on_rank(save_on_rank)
        if get_world_size() == 1 and save_on_rank not in (0, _NODE):
            text = f"save_on_rank is {save_on_rank}, but the job has a single process: rank 0 saves instead"
            warnings.warn(text, stacklevel=2)
        self.dirname = Path(dirname).expanduser()
        self.atomic = atomic
        self.require_empty = require_empty
        self.save_on_rank = save_on_rank
        self.kwargs = kwargs
        self._create_dir = create_dir
        self._prepare()

    def inside(self, folder: Path) -> DiskSaver:
        """Return a saver like this one for a folder in its directory."""
        saver = copy.copy(self)
        saver.dirname = self.dirname / folder
        saver._prepare()
        return saver

    def _prepare(self) -> None:
        self._manifest = Manifest(self.dirname)
        self._newest: Path | None = None
        self._protected: Path | None = None
        self._owned: tuple[Any, set[str]] | None = None  # which sharded tensors this rank saves, and in which layout
        if not self.writes:
            return
        if self._create_dir and not self.dirname.exists():
            self.dirname.mkdir(parents=True, exist_ok=True)
        if not self.dirname.is_dir():
            hint = ", which is a file" if self.dirname.exists() else ": create it, or pass create_dir=True"
            raise ValueError(f"dirname must be an existing directory, got '{self.dirname}'{hint}")
        if not os.access(self.dirname, os.W_OK | os.X_OK):
            raise PermissionError(f"dirname must be a writable directory, got '{self.dirname}'")
        if self.require_empty and (found := names_in(self.dirname)):
            foreign = next((name for name in found if not self._manifest.lists(name)), None)
            problem = f"must not contain checkpoints, got '{self.dirname}' with '{foreign or found[0]}'"
            hint = "to resume, pass the directory to Checkpoint and call its resume_latest()"
            if foreign is not None:
                problem, hint = f"{problem}, which no Checkpoint saved", "to load it, call Checkpoint.load_objects"
            raise ValueError(f"dirname {problem}: use another one, or require_empty=False to save beside them; {hint}")
        if (folder := self._manifest.folder).is_symlink() or (folder.exists() and not folder.is_dir()):
            raise NotADirectoryError(f"the manifest of the checkpoints, '{folder}', is a link or a file: remove it")
        remove_leftovers(self.dirname)
        remove_leftovers(folder)
        for mark in self.dirname.glob(f"*/{_MARK}"):  # of a process that was killed, unless it is locked
            if is_regular(mark) and not mark.parent.is_symlink():
                with suppress(OSError), open(mark, "rb+") as file:  # NFS locks only what is open for writing
                    if lock(file):
                        self._remove_unlisted(mark.parent)

    @property
    def writes(self) -> bool:
        """Whether this process writes."""
        return is_writer(self.save_on_rank)

    def __call__(self, checkpoint: Mapping[str, Any], filename: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Save a checkpoint as ``filename`` in the directory, with ``metadata`` in the manifest.

        Raises:
            OSError: the disk is full, or the directory was removed.
            ValueError: ``filename`` contains a folder.
        """
        if not self.writes:
            check_save_on_rank(self.save_on_rank)  # the handler may be older than the job
            return
        path = self._path(filename)

        def write(file: BinaryIO) -> Entry:
            torch.save(checkpoint, file, **self.kwargs)
            return self._manifest.new_entry(path.name, flush_and_sum(file), file.tell(), metadata or {})

        with _full_disk_named(path):
            if self.atomic:
                entry = write_atomically(path, write, before_rename=self._manifest.write)
            else:
                with open(path, "wb") as file:
                    entry = write(file)
                self._manifest.write(entry)
            self._manifest.remove(path.name, but=entry)
        if self._newest is None:
            _warn_if_unloadable(path)
        self._newest = path

    def save_shard(self, shard: Mapping[str, Any], filename: str, metadata: Mapping[str, Any], gather: Gather) -> None:
        """Save a sharded checkpoint as a directory ``filename``; all ranks call this, and it fails on all or none.

        It becomes a checkpoint when its entry in the manifest is written, after all shards are on disk.

        Args:
            shard: what this rank holds, as ``split`` returns it.
            filename: the same on all ranks.
            metadata: for the manifest.
            gather: exchanges values between the ranks.

        Raises:
            FileNotFoundError: the ranks do not share the directory.
            ValueError: the ranks hold different tensors.
            OSError: the disk is full.
        """
        path, rank = self._path(filename), get_rank()
        with ExitStack() as stack:

            def begin() -> tuple[str | None, int, int]:
                check_save_on_rank(self.save_on_rank)
                if self.writes:
                    stack.enter_context(self._changing(path))
                token = os.urandom(4).hex() if self.writes else None
                return token, zlib.crc32(repr(shard["shapes"]).encode()), zlib.crc32(repr(regions).encode())

            regions = {where: (begins, tuple(chunk.shape)) for where, (begins, chunk) in shard["chunks"].items()}
            tokens, tensors, layout = zip(*agreed(begin, gather), strict=True)
            if len({*tensors}) > 1:
                raise ValueError(
                    f"to_save must hold sharded tensors with the same names and shapes on all ranks: '{path}'"
                )
            if self._owned is None or self._owned[0] != layout:
                self._owned = layout, owners(gather(regions), shard["shapes"])[rank]
            chunks = {where: _compact(shard["chunks"][where]) for where in sorted(self._owned[1])}
            name = f"shard-{rank}-{next(filter(None, tokens))}.pt"

            def write() -> tuple[str, str, int]:
                if not path.is_dir():
                    hint = "a sharded checkpoint needs a directory that all ranks share"
                    raise FileNotFoundError(
                        f"rank {rank} does not see '{path}', which another rank has created: {hint}"
                    )

                def save(file: BinaryIO) -> tuple[str, str, int]:
                    # The checksums of records take longer than writing them, and the manifest has one of the file.
                    # Earlier versions of torch would omit them in all threads.
                    is_local = torch.__version__ >= "2.13"  # compared as versions, not as text
                    options: Any = config  # torch's stubs lack patch()
                    with options.patch("save.compute_crc32", False) if is_local else nullcontext():
                        torch.save({"state": shard["state"], "chunks": chunks}, file, **self.kwargs)
                    return name, flush_and_sum(file), file.tell()

                with _full_disk_named(path / name):
                    return write_atomically(path / name, save)

            files = agreed(write, gather)

            def commit() -> None:
                if not self.writes:
                    return
                for file, _, size in files:
                    if (path / file).stat().st_size != size:
                        raise OSError(f"'{path / file}' does not have the {size} bytes that were written")
                flush_directory(self.dirname)
                shards = {file: [checksum, size] for file, checksum, size in files}
                total = sum(size for _, _, size in files)
                entry = self._manifest.new_entry(path.name, checksum_of_entry(shards), total, metadata, shards)
                self._manifest.write(entry)
                self._manifest.remove(path.name, but=entry)

            agreed(commit, gather)
        if self._newest is None and self.writes:
            _warn_if_unloadable(path / name)
        self._newest = path

    def begin_after(self, saved_at: int) -> None:
        """Make the next checkpoint newer than one on any node, whatever the clock of this one says."""
        self._manifest.newest = saved_at

    def is_of_another(self, filename: str, handler: str) -> bool:
        """Return whether another handler has saved a checkpoint, in place of one of this handler."""
        return any(entry.handler not in (None, handler) for entry in self._manifest.entries(filename))

    def remove(self, filename: str) -> None:
        """Delete a checkpoint of the directory; a missing file is not an error.

        Only shards and regular files that the manifest lists are deleted. Others are left alone, with a warning.

        Raises:
            ValueError: ``filename`` contains a folder.
        """
        path = self._path(filename)
        if not self.writes or path == self._protected:
            return
        if path.is_dir() and not path.is_symlink() and any(one.shards for one in self._manifest.entries(path.name)):
            with self._changing(path):
                self._manifest.remove(path.name)
            return
        # In this order: if it is interrupted, the manifest still lists what is left.
        is_listed = self._manifest.lists(path.name)
        if is_listed and (is_regular(path) or not os.path.lexists(path)):
            path.unlink(missing_ok=True)
            self._manifest.remove(path.name)
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

    def _path(self, filename: str) -> Path:
        check_is_name("filename", filename)
        return self.dirname / filename

    @contextmanager
    def _changing(self, path: Path) -> Iterator[None]:
        """Mark a directory while its shards change; a process that finds the mark of a killed process cleans up."""
        if path.is_symlink():
            raise FileExistsError(f"'{path}' is a link, which checkpoints do not follow: remove it")
        path.mkdir(exist_ok=True)
        with open(path / _MARK, "ab") as file:
            lock(file)
            try:
                yield
            finally:
                self._remove_unlisted(path)

    def _remove_unlisted(self, path: Path) -> None:
        """Remove shards that no entry lists, the mark and, if nothing is left in it, the directory."""
        listed = {shard for entry in self._manifest.entries(path.name) for shard in entry.shards or ()}
        remove_leftovers(path)
        for shard in path.glob("shard-*.pt"):
            if shard.name not in listed and SHARD.fullmatch(shard.name) and is_regular(shard):
                shard.unlink(missing_ok=True)
        (path / _MARK).unlink(missing_ok=True)
        with suppress(OSError):
            path.rmdir()


def agreed(act: Callable[[], T], gather: Gather) -> list[T]:
    """Call a function on all ranks and return their results; if it raises on one rank, raise the error on all."""
    if get_world_size() == 1:
        return [act()]
    outcome, error = None, None
    try:
        outcome = act()
    except Exception as raised:
        error = raised
        annotate(raised, f"raised on rank {get_rank()} in a step of a checkpoint that all ranks take")
    results = gather((outcome, error if error is None else _portable(error)))
    failures = [failure for _, failure in results if failure is not None]
    if failures:
        raise error or failures[0]
    return [result for result, _ in results]


@contextmanager
def _full_disk_named(path: Path) -> Iterator[None]:
    """Raise the error of a full disk, which torch's writer hides."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(cause := error.__context__, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise


def _compact(chunk: Chunk) -> Chunk:
    """Return a chunk with memory of its own, because torch saves whole storages, in which uneven parts are padded."""
    offset, tensor = chunk
    return (offset, tensor.clone()) if tensor.untyped_storage().nbytes() > tensor.nbytes else chunk


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent to other ranks."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def check_is_name(argument: str, name: str) -> None:
    """Raise ``ValueError`` if the name of a file contains a folder.

    >>> check_is_name("filename", "../best.pt")
    Traceback (most recent call last):
    ValueError: filename must not contain a folder, got '../best.pt': make a DiskSaver for that folder
    """
    if os.path.basename(name) != name:
        raise ValueError(f"{argument} must not contain a folder, got {name!r}: make a DiskSaver for that folder")
    check_is_inside(argument, name)


def check_is_inside(argument: str, path: str) -> None:
    """Raise ``ValueError`` if a path leads out of its directory, or cannot be one."""
    if os.path.isabs(path) or os.pardir in Path(path).parts or "\0" in path:
        raise ValueError(f"{argument} must stay in the directory, got {path!r}")


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


def _warn_if_unloadable(path: Path) -> None:
    """Warn about a file that cannot be loaded with ``weights_only=True``."""
    if not zipfile.is_zipfile(path):
        return
    try:
        refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except pickle.UnpicklingError as error:  # a pickle_protocol that the safe reader does not know
        refused = [str(error)]
    if refused:
        hint = "return plain values and tensors from state_dict(), or call torch.serialization.add_safe_globals"
        text = f"'{path}' cannot be loaded with weights_only=True, because of {', '.join(refused)}; {hint}"
        warnings.warn(text, stacklevel=level_of_caller())
