"""Load checkpoints, from memory or from files, or resume from the newest complete one of a directory."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import stat
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from camshaft.arguments import described
from camshaft.distributed import (
    all_gather,
    broadcast,
    get_local_rank,
    get_rank,
    get_world_size,
    hostname,
)
from camshaft.engine.engine import Engine
from camshaft.errors import DamagedCheckpointError, annotate, level_of_caller
from camshaft.handlers.checkpoint.manifest import FOLDER, MISSING, Entry, Manifest, checkpoints_in
from camshaft.handlers.checkpoint.savers import agreed
from camshaft.handlers.checkpoint.state import CHECKPOINTER, check_objects, is_container, joined, load_state, walk
from camshaft.text import counted
from camshaft.types import PathLike

logger = logging.getLogger(__name__)
Found = dict[str, Entry]
_MOST_CHANGES = 100
_MOST_NAMED = 4  # nodes in a message
_PIECE = 1 << 26  # bytes that are sent at a time


def load_objects(
    to_load: Mapping[str, Any], checkpoint: Mapping[str, Any] | PathLike, *, map_location: Any = None, **kwargs: Any
) -> None:
    """Load objects from a checkpoint.

    A file is read without running code from it. Other contents of the checkpoint are ignored. The checkpoint of a
    single object may be the state of that object. If the checkpoint lacks an object, none is changed.

    Args:
        to_load: objects with ``load_state_dict()``, by name, as they were saved.
        checkpoint: what was saved, or the path of its file.
        map_location: for ``torch.load``; by default tensors are loaded to the CPU first, and from there to where the
            objects are.
        kwargs: passed to ``load_state_dict`` of modules, for example ``strict=False``.

    Raises:
        TypeError: an argument is of the wrong type.
        DamagedCheckpointError: the file does not match its entry in the manifest.
        ValueError: a key is missing, or a list has another length.

    >>> source, target = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    >>> load_objects({"model": target}, {"model": source.state_dict(), "other": {}})
    >>> bool(source.weight == target.weight)
    True
    """
    check_objects(to_load, "load_state_dict", "to_load")
    content: Any = checkpoint
    if isinstance(checkpoint, (str, os.PathLike)):
        path = Path(checkpoint)
        content = read_checkpoint(path, map_location)
    elif not isinstance(checkpoint, Mapping):
        raise TypeError(f"checkpoint must be a mapping, a str or a Path, got {described(checkpoint)}")
    for where, target, state in list(_pairs(to_load, _by_name(to_load, content), "checkpoint")):  # all before the first
        try:
            load_state(target, state, kwargs)
        except Exception as error:
            annotate(error, f"raised while loading {where}")
            raise


def resume(to_load: Mapping[str, Any], directory: PathLike, *, map_location: Any = None, **kwargs: Any) -> Path | None:
    """Load objects from the newest complete checkpoint of a directory that holds them, the same on all ranks.

    A checkpoint that is damaged, truncated or missing is reported in a warning, and the previous one is used. If nodes
    have local disks, the newest file of any node is sent to the others, with a warning. All ranks must call this. A job
    that saves to the directory and prunes it may be running.

    Args:
        to_load: objects with ``load_state_dict()``, by name, as they were saved. Include the handler that saves, as
            ``"checkpointer"``, if it saves its record (``include_self``).
        directory: where they were saved.
        map_location: for ``torch.load``; by default tensors are loaded to the CPU first, and from there to where the
            objects are.
        kwargs: passed to ``load_state_dict`` of modules, for example ``strict=False``.

    Returns:
        The file, or ``None`` if no rank has one yet, so that the run starts from the beginning. A job that was killed
        during its very first save has none; a warning reports what it left.

    Raises:
        TypeError: ``to_load`` is not a mapping of such objects.
        ValueError: ``directory`` is a file, or its checkpoints hold an engine of ``to_load`` and not all other objects.
        DamagedCheckpointError: there are checkpoints, and none of them can be loaded.
        RuntimeError: the newest checkpoint is sharded, and not all ranks see its directory.
        OSError: the directory cannot be read.

    >>> import tempfile, torch
    >>> from camshaft.handlers import DiskSaver
    >>> model = torch.nn.Linear(1, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = resume({"model": model}, folder)
    ...     DiskSaver(folder)(model.state_dict(), "model_10.pt")
    ...     first, resume({"model": model}, folder).name
    (None, 'model_10.pt')
    """
    return resume_newest(to_load, directory, map_location, kwargs)[0]


def resume_newest(
    to_load: Mapping[str, Any], directory: PathLike, map_location: Any, options: Mapping[str, Any]
) -> tuple[Path | None, list[Entry]]:
    """Resume, and also return the entries of the files in the directory, of all nodes, the oldest first.

    Each rank looks for the newest checkpoint and reads it, and one exchange shows whether all have read the same. Only
    if they have not, because a file is damaged or missing on some of them, they look again.
    """
    check_objects(to_load, "load_state_dict", "to_load")
    folder, wanted = Path(directory).expanduser(), list(to_load)
    if os.path.isfile(folder):  # an OSError of this rank alone is raised on all ranks below
        raise ValueError(f"directory must contain checkpoints, got the file '{folder}'; load it with load_objects")
    handlers = [one for _, one in walk(dict(to_load), "load_state_dict") if hasattr(one, "forget_missing_files")]
    search = _Search(folder, wanted, [one.folder for one in handlers], map_location)
    problems: dict[str, str] = {}
    seen: list[_Look] = []
    changes = 0
    while True:
        before, seen = seen, agreed(partial(search.look, problems), all_gather)
        read = {look.newest.file for look in seen if look.newest}
        # Of several problems of a file, that of the first rank, which has verified it.
        damaged = {file: what for look in seen[::-1] for file, what in look.problems.items() if what != MISSING}
        damaged |= problems
        if read & damaged.keys():  # only some ranks have noticed, or only their disks are damaged
            problems = damaged
            continue
        newest = max((one.newest for one in seen if one.newest), key=lambda one: (one.saved_at, one.file), default=None)
        lacking = [rank for rank, look in enumerate(seen) if newest and not _is_same(look.newest, newest)]
        changes += 1
        if not lacking or seen == before or changes == _MOST_CHANGES:  # else a job may be saving to the directory
            break
    entries: Found = {}
    for look in seen:
        problems |= {file: damaged.get(file, what) for file, what in look.problems.items() if file not in read}
        for file, entry in look.entries.items():
            entries[file] = max(entry, entries.get(file, entry), key=lambda one: one.saved_at)
    texts = [f"the checkpoint '{folder / file}' {problem}" for file, problem in problems.items()]
    if newest is None:
        if damaged:
            raise DamagedCheckpointError("no checkpoint can be loaded:\n" + "\n".join(texts)) from search.error
        _check_may_start(to_load, folder, entries, texts)
        return None, []
    path, content = folder / newest.file, search.content
    if lacking:
        content = _send(path, newest, content, lacking, seen, map_location)
    _warn_once([f"{text}; resuming from '{newest.file}'" for text in texts])
    load_objects(to_load, content, **options)
    files = [set[str]().union(*on_ranks) for on_ranks in zip(*(look.files for look in seen), strict=True)]
    for handler, there in zip(handlers, files[1:], strict=True):
        handler.forget_missing_files(there)
    logger.info("resuming from the checkpoint '%s'%s", path, _next_of(to_load))
    return path, sorted((one for file, one in entries.items() if file in files[0]), key=lambda one: one.saved_at)


def _next_of(loaded: Mapping[str, Any]) -> str:
    """Return where the first engine continues, in words."""
    engine = next((one for _, one in walk(dict(loaded), "load_state_dict") if isinstance(one, Engine)), None)
    if engine is None:
        return ""
    state = engine.state_dict()
    done = {"epoch": state.get("epochs_completed"), "iteration": state.get("iteration")}
    done["sample"] = (state.get("position") or {}).get("consumed")
    return "; next: " + ", ".join(f"{name} {count + 1}" for name, count in done.items() if count is not None)


def read_checkpoint(path: Path, map_location: Any = None) -> Any:
    """Verify a checkpoint, a file or a directory of shards, and return its content.

    Raises:
        DamagedCheckpointError: it does not match its entry in the manifest, or lacks shards.
    """
    entry = _entry_of_shards(path) if path.is_dir() else None
    problem = entry.problem(path) if entry else Manifest(path.parent).problem(path.name)
    if problem is None and entry is None and path.is_dir():
        problem = "is a directory of which the manifest lists no shards, so that it is incomplete or no checkpoint"
    if problem:
        raise DamagedCheckpointError(f"the checkpoint '{path}' {problem}")
    return _read_shards(path, entry) if entry else _read(path, map_location)


@dataclass
class _Look:
    """What a rank sees in a directory.

    Args:
        node: the name of its machine.
        newest: the newest checkpoint that it has read; ``None`` if there is none.
        problems: of newer ones.
        entries: all checkpoints, on the first rank of each node; on others the newest one.
        files: the files in this and other directories, likewise.
    """

    node: str
    newest: Entry | None
    problems: dict[str, str]
    entries: Found
    files: list[set[str]]


class _Search:
    """Finds and reads the newest complete checkpoint on this rank."""

    def __init__(self, folder: Path, wanted: list[str], others: list[Path | None], map_location: Any) -> None:
        self.folder, self.wanted, self.others, self.map_location = folder, wanted, others, map_location
        self.newest: Entry | None = None
        self.content: Any = None
        self.error: Exception | None = None

    def look(self, skipped: Collection[str]) -> _Look:
        """Read the newest checkpoint, but for some files."""
        found, problems, changes = find(self.folder), dict[str, str](), 0
        newest = None
        while newest is None and (entry := _newest(found, self.wanted, {*problems, *skipped})):
            problem = None if entry == self.newest else self._read(entry)
            if problem is None and not self._holds_all():
                held = list(self.content) if isinstance(self.content, Mapping) else []
                found[entry.file] = replace(entry, objects=held)  # which its entry lacks
            elif problem is None:
                newest = entry
            else:
                problems[entry.file] = problem
                # A trainer that saves to this directory may have replaced or pruned what has a problem.
                if changes < _MOST_CHANGES and (again := find(self.folder)) != found:
                    found, problems, changes = again, {}, changes + 1
        self.newest, is_first = newest, get_local_rank() == 0
        found = found if is_first else {newest.file: newest} if newest else {}
        files = [_files_in(folder) if is_first else {*found} for folder in (self.folder, *self.others)]
        return _Look(hostname(), newest, problems, found, files)

    def _read(self, entry: Entry) -> str | None:
        """Verify a checkpoint, once per node, or a part of its shards on each rank; read it, and return its problem."""
        path = self.folder / entry.file
        self.newest = None
        try:
            if entry.shards is not None:
                problem = entry.problem(path, part=slice(get_rank(), None, get_world_size()))
            elif not stat.S_ISREG(path.lstat().st_mode):
                problem = "is not a regular file, and links are not followed"
            else:
                problem = entry.problem(path) if entry.checksum and get_local_rank() == 0 else None
            if problem is None:
                self.content = _read(path, self.map_location) if entry.shards is None else _read_shards(path, entry)
            return problem
        except FileNotFoundError:
            return MISSING
        except Exception as raised:  # the other ranks must not wait for this one
            self.error = raised
            # torch replaces the reason by advice that begins with how to load unsafely.
            reason = raised.__context__ if isinstance(raised, pickle.UnpicklingError) and raised.__context__ else raised
            return f"cannot be read: {type(raised).__name__}: {str(reason).partition(chr(10))[0]}"

    def _holds_all(self) -> bool:
        named = _by_name(self.wanted, self.content)
        return len(self.wanted) == 1 or (isinstance(named, Mapping) and named.keys() >= set(self.wanted))


def find(directory: Path) -> Found:
    """Find the checkpoints of a directory on this node."""
    found: Found = {}
    try:
        for entry in reversed(Manifest(directory).entries()):
            # A file whose replacement was interrupted has two entries, of which that of its content counts.
            if entry.file not in found or entry.problem(directory / entry.file) is None:
                found[entry.file] = entry
        for file in checkpoints_in(directory):
            with suppress(FileNotFoundError):  # removed meanwhile
                if file.name not in found:
                    status = file.stat(follow_symlinks=False)
                    found[file.name] = Entry(file.name, "", status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise OSError(f"the checkpoints in '{directory}' cannot be listed: {error}") from error
    return found


def _newest(found: Found, wanted: list[str], skipped: Collection[str]) -> Entry | None:
    """Return the newest checkpoint that, according to the manifest, holds what is wanted."""
    held = [one for one in found.values() if one.objects is None or {*wanted} <= {*one.objects}]
    return max((one for one in held if one.file not in skipped), key=lambda one: (one.saved_at, one.file), default=None)


def _is_same(one: Entry | None, other: Entry) -> bool:
    """Return whether two ranks have read the same checkpoint; nodes with local disks have files of their own."""
    return one is not None and one.file == other.file and (other.shards is None or one.checksum == other.checksum)


def _files_in(folder: Path | None) -> set[str]:
    try:
        return set() if folder is None else {name for name in os.listdir(folder) if not name.startswith(".")}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _send(path: Path, newest: Entry, content: Any, lacking: list[int], seen: list[_Look], map_location: Any) -> Any:
    """Return the content of a checkpoint on all ranks, which is sent to those that lack the file.

    Raises:
        RuntimeError: it is sharded.
    """
    nodes: dict[str, list[int]] = {}
    for rank in lacking:
        nodes.setdefault(seen[rank].node, []).append(rank)
    named = [f"{node} ({counted(len(ranks), 'rank')}, from {ranks[0]})" for node, ranks in nodes.items()]
    more = [counted(len(nodes) - _MOST_NAMED, "other node")] if len(nodes) > _MOST_NAMED else []
    where = ", ".join([*named[:_MOST_NAMED], *more])
    problem, hint = f"the checkpoint '{path}' is not on {where}", "use a directory that all nodes share"
    if newest.shards is not None:
        raise RuntimeError(f"{problem}: {hint}, or copy '{path}' and '{path.parent / FOLDER}' to all nodes")
    source = next(rank for rank in range(len(seen)) if rank not in lacking)
    _warn_once([f"{problem}, so rank {source} sends it: {hint}, or save_on_rank='node'"])
    buffer = BytesIO()
    if get_rank() == source:
        torch.save(content, buffer)
    size = broadcast(buffer.tell(), src=source)
    sent = torch.frombuffer(buffer.getbuffer() if buffer.tell() else bytearray(size), dtype=torch.uint8)
    for piece in torch.split(sent, _PIECE):
        broadcast(piece, src=source)
    if get_rank() not in lacking:
        return content
    location = "cpu" if map_location is None else map_location
    return torch.load(BytesIO(sent.numpy().data), map_location=location, weights_only=True)


def _check_may_start(
    to_load: Mapping[str, Any],
    folder: Path,
    entries: Found,
    texts: list[str],
) -> None:
    """Raise ``ValueError`` if the checkpoints hold an engine, but not all other objects."""
    wanted = list(to_load)
    engines = {name for name, one in to_load.items() if isinstance(one, Engine)}
    for file, entry in entries.items():
        missing = [name for name in wanted if name not in (entry.objects or ())]
        if missing and engines & {
            *(entry.objects or ())
        }:  # to start from the beginning would be a mistake that replaces this file
            raise ValueError(
                f"no checkpoint in '{folder}' holds all of {wanted}: '{file}' lacks {missing}. To continue from it, "
                "load the others with Checkpoint.resume(to_load, directory), and save to another directory; to start "
                "from the beginning, use another directory"
            )
    if texts:
        _warn_once(["nothing was loaded, as there is no checkpoint to resume from: " + "; ".join(texts)])
    elif entries:
        other = next((f", but one holds {entry.objects}" for entry in entries.values() if entry.objects), "")
        _warn_once([f"nothing was loaded: no checkpoint in '{folder}' holds {wanted}{other}"])


def _entry_of_shards(path: Path) -> Entry | None:
    """Return the newest entry of a sharded checkpoint, if there is one."""
    return next((entry for entry in Manifest(path.parent).entries(path.name) if entry.shards is not None), None)


def _read_shards(path: Path, entry: Entry) -> Any:
    """Return the state in a sharded checkpoint; of its tensors, only the parts that are used will be read."""
    return joined(_read(path / name, mmap=True) for name in entry.shards or ())


def _warn_once(texts: list[str]) -> None:
    """Warn, on one rank, of what all ranks have found."""
    for text in texts if get_rank() == 0 else ():
        warnings.warn(text, stacklevel=level_of_caller())


def _read(path: PathLike, map_location: Any = None, **options: Any) -> Any:
    """Read a checkpoint without running code from it, by default to the CPU."""
    location = "cpu" if map_location is None else map_location
    try:
        return torch.load(path, map_location=location, weights_only=True, **options)
    except (EOFError, RuntimeError) as error:  # what torch raises for truncated files
        raise DamagedCheckpointError(f"the checkpoint '{path!s}' cannot be read: {error or 'it is empty'}") from error
    except Exception as error:
        annotate(error, f"raised while reading the checkpoint '{path!s}'")
        raise


def _by_name(to_load: Collection[str], checkpoint: Any) -> Any:
    """Put a checkpoint that is the state of a single object under the name of that object.

    Such a state may contain the record of the handler that saved it.
    """
    names = [name for name in to_load if name != CHECKPOINTER]
    record = checkpoint.get(CHECKPOINTER) if isinstance(checkpoint, Mapping) else None
    is_alone = len(names) == 1 and (len(to_load) == 1 or record is not None)
    if not is_alone or (isinstance(checkpoint, Mapping) and names[0] in checkpoint):
        return checkpoint
    if isinstance(record, Mapping) and "_saved" in record:
        checkpoint = copy.copy(checkpoint)  # not a new dict: the state of a module has attributes
        del checkpoint[CHECKPOINTER]
    return {names[0]: checkpoint, CHECKPOINTER: record}


def _pairs(targets: Any, states: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each object in nested containers with its path and its state."""
    if hasattr(targets, "load_state_dict"):
        yield where, targets, states
        return
    if isinstance(targets, Mapping):
        if not isinstance(states, Mapping):
            raise ValueError(f"{where} must be a mapping with the keys {list(targets)}, got a {type(states).__name__}")
        missing = [key for key in targets if key not in states]
        if missing:
            raise ValueError(f"{where} lacks the key {missing[0]!r} of to_load, it has {list(states)}")
    elif isinstance(states, Mapping) or not is_container(states):
        raise ValueError(f"{where} must be a list of length {len(targets)}, got a {type(states).__name__}")
    elif len(states) != len(targets):
        raise ValueError(f"{where} must be a list of length {len(targets)}, got one of length {len(states)}")
    for key, target in targets.items() if isinstance(targets, Mapping) else enumerate(targets):
        yield from _pairs(target, states[key], f"{where}[{key!r}]")
