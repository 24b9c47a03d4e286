"""Resume from the newest complete checkpoint of a directory, on any number of ranks."""

from __future__ import annotations

import logging
import os
import stat
import warnings
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from camshaft.distributed import all_gather, get_local_rank
from camshaft.errors import DamagedCheckpointError, annotate
from camshaft.handlers.checkpoint.loading import load_objects, read_checkpoint
from camshaft.handlers.checkpoint.manifest import MISSING, Entry, Manifest
from camshaft.handlers.checkpoint.names import checkpoints_in
from camshaft.handlers.checkpoint.state import check_objects, walk

logger = logging.getLogger(__name__)
_ATTEMPTS = 100
_NEWEST = 2**63  # later than any time that a checkpoint may have
# When each file was saved, and its entries in the manifest; while it is replaced, those of the old and the new one.
Found = dict[str, tuple[int, list[Entry]]]


def resume(
    to_load: Mapping[str, Any], directory: str | PathLike[str], *, map_location: Any = None, **kwargs: Any
) -> Path | None:
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
        ValueError: ``directory`` is a file.
        DamagedCheckpointError: there are checkpoints, and none of them is complete.
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
    for attempt in range(_ATTEMPTS):
        found, damaged = _find_on_all(folder)
        problems: dict[str, str] = {}
        failure: Exception | None = None
        for name in _newest_first(found, set(wanted)):
            problem, content, error = _read(folder / name, name in found, wanted, map_location)
            if problem is None:
                _warn([*damaged, *(f"{text}; resuming from '{name}'" for text in _described(problems, folder))])
                load_objects(to_load, content, **kwargs)
                for _, one in walk(dict(to_load), "load_state_dict"):
                    if hasattr(one, "forget_missing_files"):  # a Checkpoint
                        one.forget_missing_files()
                logger.info("resuming from the checkpoint '%s'", folder / name)
                return folder / name
            problems[name] = problem
            failure = failure or error
            if attempt + 1 < _ATTEMPTS and _first(None if _find_on_all(folder)[0] == found else "changed"):
                break  # a trainer that saves to this directory has replaced or pruned it
        else:
            break
    _warn(damaged)
    texts = _described(problems, folder)
    if failure is not None:
        annotate(failure, "no checkpoint can be loaded:\n" + "\n".join(texts))
        raise failure
    if any(problem not in ("", MISSING) for problem in problems.values()):
        raise DamagedCheckpointError("no checkpoint is complete:\n" + "\n".join(texts))
    if texts:
        _warn(["nothing was loaded, as there is no checkpoint to resume from: " + "; ".join(texts)])
    elif found:
        _warn([f"nothing was loaded: none of the {len(found)} checkpoints in '{folder}' holds {wanted}"])
    return None


def _find(directory: Path, damaged: list[str]) -> Found:
    """Find the checkpoints of a directory on this node; problems of the manifest are appended to ``damaged``."""
    found: Found = {}
    for entry in Manifest(directory).entries(damaged=damaged):
        saved_at, entries = found.get(entry.file, (entry.saved_at, []))
        found[entry.file] = saved_at, [*entries, entry]
    for file, (_, entries) in found.items():
        if len(entries) > 1:  # an interrupted replacement: the entry of the content counts
            actual = (entry for entry in entries if entry.problem(directory / file) is None)
            found[file] = next(actual, entries[0]).saved_at, entries
    for path in checkpoints_in(directory):
        with suppress(FileNotFoundError):  # removed meanwhile
            found.setdefault(path.name, (_modified_at(path), []))
    return found


def _modified_at(path: Path) -> int:
    """Return when a file was modified, for the order in which the files that the manifest does not list are tried."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise
    except OSError:
        return _NEWEST  # tried first, so that a warning reports it
    return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else -1  # links and pipes are tried last


def _find_on_all(directory: Path) -> tuple[Found, list[str]]:
    """Find the checkpoints on the first rank of each node; raise on all ranks if one cannot read the directory."""
    found: Found = {}
    damaged: list[str] = []
    error: OSError | None = None
    if get_local_rank() == 0:
        try:
            found = _find(directory, damaged)
        except OSError as raised:
            error = raised
    if (problem := _first(None if error is None else str(error))) is not None:
        raise OSError(f"the checkpoints in '{directory}' cannot be listed: {problem}") from error
    return found, damaged


def _newest_first(found: Found, wanted: set[str]) -> list[str]:
    """List the checkpoints that every node has and that, according to the manifest, hold what is wanted."""

    def holds(entry: Entry) -> bool:
        return entry.objects is None or wanted.issubset(entry.objects)

    mine = {file: saved_at for file, (saved_at, entries) in found.items() if all(map(holds, entries))}
    on_nodes = [files for is_first, files in all_gather((get_local_rank() == 0, mine)) if is_first]
    times = {file: max(files[file] for files in on_nodes) for file in set.intersection(*map(set, on_nodes))}
    return sorted(times, key=lambda file: (times[file], file), reverse=True)


def _read(path: Path, is_found: bool, wanted: list[str], map_location: Any) -> tuple[str | None, Any, Exception | None]:
    """Verify a checkpoint once per node and read it on every rank.

    Returns:
        The problem, the same on all ranks, empty if the file holds other objects; the content; this rank's error.
    """
    content, error = None, None
    problem = _first(_problem(path) if is_found else None)
    if problem is None:
        try:
            content = read_checkpoint(path, map_location)
            if len(wanted) > 1 and not (isinstance(content, Mapping) and content.keys() >= set(wanted)):
                problem = ""
        except FileNotFoundError:
            problem = MISSING
        except Exception as raised:  # the other ranks must not wait for this one
            problem, error = f"cannot be read: {type(raised).__name__}: {str(raised).partition(chr(10))[0]}", raised
        problem = _first(problem)
    return problem, content, error


def _problem(path: Path) -> str | None:
    """Return what is wrong with a checkpoint according to its directory and the manifest, or ``None``."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return "is not a regular file, and links are not followed"
        return Manifest(path.parent).problem(path.name)
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return f"cannot be read: {error}"


def _first(text: str | None) -> str | None:
    """Return the first text that a rank has, on all ranks."""
    return next((one for (one,) in all_gather((text,)) if one is not None), None)


def _described(problems: Mapping[str, str], directory: Path) -> list[str]:
    return [f"the checkpoint '{directory / name}' {problem}" for name, problem in problems.items() if problem]


def _warn(texts: list[str]) -> None:
    for text in texts:
        warnings.warn(text, stacklevel=3)
