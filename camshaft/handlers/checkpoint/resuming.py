"""Resume from the newest complete checkpoint of a directory, on any number of ranks."""

from __future__ import annotations

import logging
import os
import stat
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to resume from, if it is complete.

    Args:
        saved_at: nanoseconds since 1970.
        entries: of the manifest; while a file is replaced, those of the old and the new one.
    """

    saved_at: int
    entries: tuple[Entry, ...] = ()


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
        for name in _newest_first(found, wanted):
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
            if attempt + 1 < _ATTEMPTS and _has_changed(folder, found):
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


def _find(directory: Path, damaged: list[str]) -> dict[str, Candidate]:
    """Find the checkpoints of a directory by name; problems of the manifest are appended to ``damaged``."""
    entries: dict[str, list[Entry]] = {}
    for entry in Manifest(directory).entries(damaged=damaged):
        entries.setdefault(entry.file, []).append(entry)
    found = {}
    for file, known in entries.items():
        # Several entries are left by an interrupted replacement: the one of the content counts.
        actual = (one for one in known if len(known) > 1 and one.problem(directory / file) is None)
        found[file] = Candidate(next(actual, known[0]).saved_at, tuple(known))
    for path in checkpoints_in(directory):
        if path.name in found:
            continue
        try:
            status = path.lstat()
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:  # tried first, so that a warning reports it
            saved_at = _NEWEST
        else:  # links and pipes are tried last: they are only reported if there is nothing else
            saved_at = status.st_mtime_ns if stat.S_ISREG(status.st_mode) else -1
        found[path.name] = Candidate(saved_at)
    return found


def _find_on_all(directory: Path) -> tuple[dict[str, Candidate], list[str]]:
    """Find the checkpoints on the first rank of each node; raise on all ranks if one cannot read the directory."""
    found: dict[str, Candidate] = {}
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


def _has_changed(directory: Path, found: dict[str, Candidate]) -> bool:
    """Return whether the checkpoints of a directory have changed on any node."""
    return _first("changed" if _find_on_all(directory)[0] != found else None) is not None


def _newest_first(found: Mapping[str, Candidate], wanted: list[str]) -> list[str]:
    """List the checkpoints that every node has and that, according to the manifest, hold what is wanted."""
    mine = {
        file: candidate.saved_at
        for file, candidate in found.items()
        if all(entry.objects is None or set(wanted) <= set(entry.objects) for entry in candidate.entries)
    }
    on_nodes = [files for is_first, files in all_gather((get_local_rank() == 0, mine)) if is_first]
    saved_at = {file: max(files[file] for files in on_nodes) for file in set.intersection(*map(set, on_nodes))}
    return sorted(saved_at, key=lambda file: (saved_at[file], file), reverse=True)


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
            if len(wanted) > 1 and not (isinstance(content, Mapping) and set(wanted) <= content.keys()):
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
