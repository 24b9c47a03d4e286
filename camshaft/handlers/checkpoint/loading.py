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
from pathlib import Path
from typing import Any

import torch

from camshaft.distributed import all_gather, get_local_rank, get_rank, get_world_size
from camshaft.engine.engine import Engine
from camshaft.errors import DamagedCheckpointError, annotate, described, level_of_caller
from camshaft.handlers.checkpoint.savers import (
    MISSING,
    SAFETENSORS,
    Entry,
    Manifest,
    agreed,
    checkpoints_in,
    safetensors,
)
from camshaft.handlers.checkpoint.state import CHECKPOINTER, check_objects, is_container, joined, load_state, walk
from camshaft.types import PathLike

logger = logging.getLogger(__name__)
Found = dict[str, Entry]
_MOST_CHANGES = 100


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
        _warn([entry.unreadable for entry in Manifest(path.parent).entries(path.name) if entry.unreadable])
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

    A checkpoint that is damaged, truncated or missing is reported in a warning, and the previous one is used. Nodes
    with local disks use the newest checkpoint that all of them have. All ranks must call this. A job that saves to the
    directory and prunes it may be running.

    Args:
        to_load: objects with ``load_state_dict()``, by name, as they were saved. Include the handler that saves, as
            ``"checkpointer"``, if it saves its record (``include_self``).
        directory: where they were saved.
        map_location: for ``torch.load``; by default tensors are loaded to the CPU first, and from there to where the
            objects are.
        kwargs: passed to ``load_state_dict`` of modules, for example ``strict=False``.

    Returns:
        The file, or ``None`` if there is none yet, so that the run starts from the beginning. A job that was killed
        during its very first save has none; a warning reports what it left.

    Raises:
        TypeError: ``to_load`` is not a mapping of such objects.
        ValueError: ``directory`` is a file, or its checkpoints hold an engine of ``to_load`` and not all other objects.
        DamagedCheckpointError: there are checkpoints, and none of them can be loaded.
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
    check_objects(to_load, "load_state_dict", "to_load")
    folder, wanted = Path(directory).expanduser(), list(to_load)
    if os.path.isfile(folder):  # an OSError of this rank alone is raised on all ranks below
        raise ValueError(f"directory must contain checkpoints, got the file '{folder}'; load it with load_objects")
    listed: list[Found | None] = []
    problems: dict[str, str] = {}
    others: dict[str, set[Any]] = {}  # what files without an entry in the manifest hold instead
    failure: Exception | None = None
    changes = 0
    while True:
        # On the first rank of each node, as nodes may have local disks.
        on_ranks = agreed(lambda: _find(folder) if get_local_rank() == 0 else None, all_gather)
        found = on_ranks[get_rank()] or {}
        unreadable = [entry.unreadable for entry in found.values() if entry.unreadable]
        if on_ranks != listed:
            # The first listing, or a trainer that saves to this directory has replaced or pruned what had a problem.
            if changes == _MOST_CHANGES:
                break
            listed, problems, changes = on_ranks, {}, changes + 1
        on_nodes = [one for one in on_ranks if one is not None]
        candidates = [name for name in _newest_first(on_nodes, set(wanted)) if name not in problems]
        if not candidates:
            break
        name = candidates[0]
        problem, content, error = _read_on_all(folder / name, name in found, wanted, map_location)
        if problem is None:
            _warn(unreadable)
            _warn_once([f"{text}; resuming from '{name}'" for text in _described(problems, folder)])
            load_objects(to_load, content, **kwargs)
            for _, one in walk(dict(to_load), "load_state_dict"):
                if hasattr(one, "forget_missing_files"):  # a Checkpoint
                    one.forget_missing_files()
            logger.info("resuming from the checkpoint '%s'", folder / name)
            return folder / name
        problems[name] = problem
        failure = failure or error
        if not problem and isinstance(content, Mapping):
            others[name] = set(content)
    _warn(unreadable)
    texts = _described(problems, folder)
    if any(problem not in ("", MISSING) for problem in problems.values()):
        raise DamagedCheckpointError("no checkpoint can be loaded:\n" + "\n".join(texts)) from failure
    for one in on_nodes:
        others |= {file: set(entry.objects) for file, entry in one.items() if entry.objects}
    engines = {name for name, one in to_load.items() if isinstance(one, Engine)}
    for file, held in others.items():
        missing = [name for name in wanted if name not in held]
        if missing and engines & held:  # to start from the beginning would be a mistake that replaces this file
            raise ValueError(
                f"no checkpoint in '{folder}' holds all of {wanted}: '{file}' lacks {missing}. To continue from it, "
                "load the others with Checkpoint.resume(to_load, directory), and save to another directory; to start "
                "from the beginning, use another directory"
            )
    if texts:
        _warn_once(["nothing was loaded, as there is no checkpoint to resume from: " + "; ".join(texts)])
    elif found:
        other = next((f", but one holds {entry.objects}" for entry in found.values() if entry.objects), "")
        _warn([f"nothing was loaded: no checkpoint in '{folder}' holds {wanted}{other}"])
    return None


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


def _find(directory: Path) -> Found:
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
                    found[file.name] = Entry(file.name, "", None, file.stat(follow_symlinks=False).st_mtime_ns)
    except OSError as error:
        raise OSError(f"the checkpoints in '{directory}' cannot be listed: {error}") from error
    return found


def _newest_first(on_nodes: list[Found], wanted: set[str]) -> list[str]:
    """List the checkpoints that every node has and that, according to the manifest, hold what is wanted."""
    held = [
        {file: one.saved_at for file, one in found.items() if one.objects is None or wanted <= set(one.objects)}
        for found in on_nodes
    ]
    times = {file: max(files[file] for files in held) for file in set.intersection(*map(set, held))}
    return sorted(times, key=lambda file: (times[file], file), reverse=True)


def _entry_of_shards(path: Path) -> Entry | None:
    """Return the newest entry of a sharded checkpoint, if there is one."""
    return next((entry for entry in Manifest(path.parent).entries(path.name) if entry.shards is not None), None)


def _read_shards(path: Path, entry: Entry) -> Any:
    """Return the state in a sharded checkpoint; of its tensors, only the parts that are used will be read."""
    return joined(_read(path / name, mmap=True) for name in entry.shards or ())


def _read_on_all(
    path: Path, is_found: bool, wanted: list[str], map_location: Any
) -> tuple[str | None, Any, Exception | None]:
    """Verify a checkpoint once per node, or a part of its shards on each rank, and read it on every rank.

    Returns:
        The problem, the same on all ranks, empty if the file holds other objects; the content; this rank's error.
    """
    problem, content, error, entry = None, None, None, None
    try:
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) and (entry := _entry_of_shards(path)):
            problem = entry.problem(path, part=slice(get_rank(), None, get_world_size()))
        elif not stat.S_ISREG(mode):
            problem = "is not a regular file, and links are not followed"
        elif is_found:
            problem = Manifest(path.parent).problem(path.name)
        if problem is None:
            content = _read(path, map_location) if entry is None else _read_shards(path, entry)
            named = _by_name(wanted, content)
            if len(wanted) > 1 and not (isinstance(named, Mapping) and named.keys() >= set(wanted)):
                problem = ""
    except FileNotFoundError:
        problem = MISSING
    except Exception as raised:  # the other ranks must not wait for this one
        # torch replaces the reason by advice that begins with how to load unsafely.
        reason = raised.__context__ if isinstance(raised, pickle.UnpicklingError) and raised.__context__ else raised
        problem, error = f"cannot be read: {type(raised).__name__}: {str(reason).partition(chr(10))[0]}", raised
    results: list[tuple[str | None, str | None]] = all_gather((problem, entry and entry.checksum))
    if len({checksum for _, checksum in results}) > 1 and all(one is None for one, _ in results):
        return "was replaced while it was read", content, error
    # What is missing for one rank, another can name.
    return (
        min((one for one, _ in results if one is not None), key=lambda one: one == MISSING, default=None),
        content,
        error,
    )


def _described(problems: Mapping[str, str], directory: Path) -> list[str]:
    return [f"the checkpoint '{directory / name}' {problem}" for name, problem in problems.items() if problem]


def _warn(texts: list[str]) -> None:
    for text in texts:
        warnings.warn(text, stacklevel=level_of_caller())


def _warn_once(texts: list[str]) -> None:
    """Warn, on one rank, of what all ranks have found."""
    if get_rank() == 0:
        _warn(texts)


def _read(path: PathLike, map_location: Any = None, **options: Any) -> Any:
    """Read a checkpoint without running code from it, by default to the CPU."""
    location = "cpu" if map_location is None else map_location
    try:
        if Path(path).suffix == SAFETENSORS:
            return safetensors().load_file(path, device=str(location))
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
