"""Going on from the newest checkpoint that is whole."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from camshaft.distributed import all_gather, get_local_rank, get_world_size
from camshaft.errors import DamagedCheckpointError
from camshaft.handlers.checkpoint.loading import load_objects, read_checkpoint
from camshaft.handlers.checkpoint.manifest import Entry, entries_of, problem_among
from camshaft.handlers.checkpoint.names import checkpoints_in
from camshaft.handlers.checkpoint.objects import check_objects, objects_in
from camshaft.handlers.checkpoint.recorded import Recorded

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to go on from, if it is whole.

    Args:
        file: its name.
        saved_at: nanoseconds since 1970.
        entries: what the manifest says, if it says anything; while a file is replaced both of the old and the new.
    """

    file: str
    saved_at: int
    entries: tuple[Entry, ...] = ()

    def holds(self, wanted: list[str]) -> bool:
        """Say whether all that is wanted is in it, as far as that is known without a look into it."""
        return all(entry.objects is None or set(wanted) <= set(entry.objects) for entry in self.entries)

    def problem(self, directory: Path, wanted: list[str]) -> str | None:
        """Say what is wrong with the file, or ``None``; an empty text if it is just not one that is looked for."""
        path = directory / self.file
        if self.entries:
            return problem_among(self.entries, path)
        try:
            content = read_checkpoint(path)
        except Exception as error:  # whatever is in the file
            return f"cannot be read: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        is_it = len(wanted) == 1 or (isinstance(content, Mapping) and set(wanted) <= content.keys())
        return None if is_it else ""


def resume(
    to_load: Mapping[str, Any], directory: str | PathLike[str], *, map_location: Any = None, **kwargs: Any
) -> Path | None:
    """Load objects from the newest checkpoint of a directory that is whole and holds them; the same on all ranks.

    One that is damaged, cut off or gone is named in a warning, and the one before is taken. All ranks call this.
    Nodes with disks of their own take the newest that all of them have.

    Args:
        to_load: objects with ``load_state_dict()``, by name, as they were saved. Give the handler that saves too,
            as ``"checkpointer"``, where it saves its record (``include_self``).
        directory: where they were saved.
        map_location: for ``torch.load``; by default all goes to the CPU first, and from there to where the
            objects are.
        kwargs: such as ``strict=False``, handed to ``load_state_dict`` of modules.

    Returns:
        The file, or ``None`` if there is none yet, so that the run begins anew.

    Raises:
        TypeError: ``to_load`` is not a mapping of such objects.
        ValueError: ``directory`` is a file.
        DamagedCheckpointError: there are checkpoints, and none is whole.

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
    if folder.is_file():
        raise ValueError(f"directory must be one of checkpoints, got the file '{folder}'; load that by load_objects")
    problems: list[str] = []
    found = candidates_in(folder) if get_local_rank() == 0 else {}
    for name in _agreed(found, wanted):
        problem = _agreed_problem(found.get(name), folder, wanted)
        if problem is None:
            for text in problems:
                warnings.warn(f"{text}; going on from '{name}'", stacklevel=2)
            load_objects(to_load, read_checkpoint(folder / name, map_location), **kwargs)
            _forget_missing(to_load)
            logger.info("going on from the checkpoint '%s'", folder / name)
            return folder / name
        if problem:
            problems.append(f"the checkpoint '{folder / name}' {problem}")
    if problems:
        raise DamagedCheckpointError("no checkpoint is whole:\n" + "\n".join(problems))
    if found:
        warnings.warn(
            f"nothing was loaded: of the {len(found)} checkpoints in '{folder}' none holds {wanted}", stacklevel=2
        )
    return None


def candidates_in(directory: Path) -> dict[str, Candidate]:
    """Find the checkpoints of a directory, by name."""
    entries: dict[str, list[Entry]] = {}
    damaged: list[str] = []
    for entry in entries_of(directory, damaged=damaged):
        entries.setdefault(entry.file, []).append(entry)
    found = {file: Candidate(file, known[0].saved_at, tuple(known)) for file, known in entries.items()}
    for path in checkpoints_in(directory):
        if path.name not in found:
            found[path.name] = Candidate(path.name, path.stat().st_mtime_ns)
    for text in damaged:
        warnings.warn(text, stacklevel=3)
    return found


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


def _agreed_problem(candidate: Candidate | None, directory: Path, wanted: list[str]) -> str | None:
    """Look into a candidate, once on each node, and give what is wrong on any."""
    problem = None if candidate is None else candidate.problem(directory, wanted)
    if get_world_size() == 1:
        return problem
    return next((text for (text,) in all_gather((problem,)) if text is not None), None)
