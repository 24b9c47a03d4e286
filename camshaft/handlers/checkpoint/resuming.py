"""Resuming from the newest checkpoint that is whole."""

from __future__ import annotations

import logging
import os
import stat
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from camshaft.distributed import all_gather, get_local_rank, get_world_size
from camshaft.errors import DamagedCheckpointError, annotate
from camshaft.handlers.checkpoint.loading import load_objects, read_checkpoint
from camshaft.handlers.checkpoint.manifest import MISSING, Entry, entries_of, problem_of
from camshaft.handlers.checkpoint.names import checkpoints_in
from camshaft.handlers.checkpoint.objects import check_objects, objects_in
from camshaft.handlers.checkpoint.recorded import Recorded

logger = logging.getLogger(__name__)
_ATTEMPTS = 100
_NEWEST = 2**63  # later than any time that a checkpoint may have
_NOT_REGULAR = "is not a regular file, and links are not followed"


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to resume from, if it is whole.

    Args:
        file: its name.
        saved_at: nanoseconds since 1970.
        entries: what the manifest says, if it says anything; while a file is replaced both of the old and the new.
    """

    file: str
    saved_at: int
    entries: tuple[Entry, ...] = ()

    def holds(self, wanted: list[str]) -> bool:
        """Return whether it may hold all that is wanted, as far as that is known without reading it."""
        return all(entry.objects is None or set(wanted) <= set(entry.objects) for entry in self.entries)

    def problem(self, directory: Path, wanted: list[str]) -> str | None:
        """Return what is wrong with the file, or ``None``; an empty text if it only holds something else."""
        path = directory / self.file
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                return _NOT_REGULAR
        except FileNotFoundError:
            return MISSING
        except OSError as error:
            return f"cannot be read: {error}"
        if self.entries:
            return problem_of(path)
        try:
            content = read_checkpoint(path)
        except FileNotFoundError:
            return MISSING
        except Exception as error:  # whatever is in the file
            return _unreadable(error)
        return None if _has_all(content, wanted) else ""


def resume(
    to_load: Mapping[str, Any], directory: str | PathLike[str], *, map_location: Any = None, **kwargs: Any
) -> Path | None:
    """Load objects from the newest checkpoint of a directory that is whole and holds them; the same on all ranks.

    A checkpoint that is damaged, truncated or missing is named in a warning, and the one before it is taken. Nodes
    with disks of their own take the newest checkpoint that all of them have. All ranks must call this. A job that
    saves to the directory and prunes it may be running.

    Args:
        to_load: objects with ``load_state_dict()``, by name, as they were saved. Give the handler that saves too,
            as ``"checkpointer"``, where it saves its record (``include_self``).
        directory: where they were saved.
        map_location: for ``torch.load``; by default all goes to the CPU first, and from there to where the
            objects are.
        kwargs: such as ``strict=False``, handed to ``load_state_dict`` of modules.

    Returns:
        The file, or ``None`` if there is none yet, so that the run starts from the beginning. A job that was killed
        during its very first save has none, and a warning names what it left.

    Raises:
        TypeError: ``to_load`` is not a mapping of such objects.
        ValueError: ``directory`` is a file.
        DamagedCheckpointError: there are checkpoints, and none of them is whole.
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
    if not isinstance(to_load, Mapping):
        raise TypeError(f"to_load must be a mapping, got {to_load!r} of type {type(to_load).__name__}")
    check_objects(dict(to_load), "load_state_dict", "to_load")
    folder, wanted = Path(directory).expanduser(), list(to_load)
    if os.path.isfile(folder):  # no error: one that this rank alone sees is raised on all ranks below
        raise ValueError(f"directory must be one of checkpoints, got the file '{folder}'; load that by load_objects")
    for attempt in range(_ATTEMPTS):
        damaged: list[str] = []
        found = _listed(folder, damaged)
        problems: dict[str, str] = {}
        first_failure: Exception | None = None
        for name in _agreed(found, wanted):
            problem, content, failure = _agreed_content(found.get(name), folder / name, wanted, map_location)
            if problem is None:
                _warn([*damaged, *(f"{text}; resuming from '{name}'" for text in _named(problems, folder))])
                load_objects(to_load, content, **kwargs)
                _forget_missing(to_load)
                logger.info("resuming from the checkpoint '%s'", folder / name)
                return folder / name
            problems[name] = problem
            first_failure = first_failure or failure
            if attempt + 1 < _ATTEMPTS and _agreed_change(found, folder):
                break  # a trainer that saves to this directory has gone on meanwhile
        else:
            break
    _warn(damaged)
    texts = _named(problems, folder)
    if first_failure is not None:
        annotate(first_failure, "no checkpoint can be loaded:\n" + "\n".join(texts))
        raise first_failure
    if any(text not in ("", MISSING) for text in problems.values()):
        raise DamagedCheckpointError("no checkpoint is whole:\n" + "\n".join(texts))
    if texts:
        _warn(["nothing was loaded, as there is no checkpoint to resume from: " + "; ".join(texts)])
    elif found:
        _warn([f"nothing was loaded: of the {len(found)} checkpoints in '{folder}' none holds {wanted}"])
    return None


def candidates_in(directory: Path, damaged: list[str]) -> dict[str, Candidate]:
    """Find the checkpoints of a directory, by name; problems of the manifest are appended to ``damaged``."""
    entries: dict[str, list[Entry]] = {}
    for entry in entries_of(directory, damaged=damaged):
        entries.setdefault(entry.file, []).append(entry)
    found = {file: Candidate(file, _saved_at(directory / file, known), tuple(known)) for file, known in entries.items()}
    for path in checkpoints_in(directory):
        if path.name not in found:
            with suppress(FileNotFoundError):  # removed meanwhile
                found[path.name] = Candidate(path.name, _changed_at(path))
    return found


def _changed_at(path: Path) -> int:
    """Return when a file that the manifest does not list was changed."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise
    except OSError:  # it comes first, so that a warning names it
        return _NEWEST
    # a link or a pipe comes last: it is named if there is nothing else
    return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else -1


def _listed(directory: Path, damaged: list[str]) -> dict[str, Candidate]:
    """Find the checkpoints, on the first rank of each node; a directory that cannot be read is an error on all."""
    found: dict[str, Candidate] = {}
    failure: OSError | None = None
    if get_local_rank() == 0:
        try:
            found = candidates_in(directory, damaged)
        except OSError as error:
            failure = error
    problem = _agreed_text(None if failure is None else str(failure))
    if problem is not None:
        raise OSError(f"the checkpoints in '{directory}' cannot be listed: {problem}") from failure
    return found


def _saved_at(path: Path, entries: list[Entry]) -> int:
    """Return when a file was saved: of several entries, as a save that replaced it left them, that of its content."""
    whole = (entry.saved_at for entry in entries if len(entries) > 1 and entry.problem(path) is None)
    return next(whole, entries[0].saved_at)


def _has_all(content: Any, wanted: list[str]) -> bool:
    return len(wanted) == 1 or (isinstance(content, Mapping) and set(wanted) <= content.keys())


def _warn(texts: list[str]) -> None:
    for text in texts:
        warnings.warn(text, stacklevel=3)


def _named(problems: Mapping[str, str], directory: Path) -> list[str]:
    return [f"the checkpoint '{directory / name}' {problem}" for name, problem in problems.items() if problem]


def _forget_missing(to_load: Mapping[str, Any]) -> None:
    """Take out of records what is on no disk any more: the run that saved them has gone on, and removed it."""
    handlers = [one for one in objects_in(to_load) if isinstance(one, Recorded)]
    if not handlers:
        return
    there = [handler.files_there() for handler in handlers]
    everywhere = all_gather((there,)) if get_world_size() > 1 else [(there,)]
    for handler, files in zip(handlers, zip(*(mine for (mine,) in everywhere), strict=True), strict=True):
        handler.forget_but(set().union(*files))


def _agreed(found: Mapping[str, Candidate], wanted: list[str]) -> list[str]:
    """Name the checkpoints that every node has and that may hold what is wanted, the newest first."""
    mine = {one.file: one.saved_at for one in found.values() if one.holds(wanted)}
    if get_world_size() > 1:
        on_nodes = [files for is_first, files in all_gather((get_local_rank() == 0, mine)) if is_first]
        everywhere = set.intersection(*(set(files) for files in on_nodes))
        mine = {file: max(files[file] for files in on_nodes) for file in everywhere}
    return sorted(mine, key=lambda file: (mine[file], file), reverse=True)


def _agreed_content(
    candidate: Candidate | None, path: Path, wanted: list[str], map_location: Any
) -> tuple[str | None, Any, Exception | None]:
    """Verify a candidate, once on each node, and read it on every rank.

    Returns:
        What is wrong, the same on all ranks; the content; and the error that reading it raised on this rank.
    """
    content: Any = None
    failure: Exception | None = None
    problem = _agreed_text(None if candidate is None else candidate.problem(path.parent, wanted))
    if problem is None:
        try:
            content = read_checkpoint(path, map_location)
            problem = None if _has_all(content, wanted) else ""  # a damaged entry does not tell
        except FileNotFoundError:
            problem = MISSING
        except Exception as error:  # the others must not wait for this rank
            problem, failure = _unreadable(error), error
        problem = _agreed_text(problem)
    return problem, content, failure


def _unreadable(error: Exception) -> str:
    return f"cannot be read: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _agreed_text(text: str | None) -> str | None:
    """Return a text that any rank has."""
    if get_world_size() == 1:
        return text
    return next((text for (text,) in all_gather((text,)) if text is not None), None)


def _agreed_change(found: Mapping[str, Candidate], directory: Path) -> bool:
    """Return whether, on any node, the checkpoints are no longer those that were found."""
    return _agreed_text("changed" if _listed(directory, []) != found else None) is not None
