"""Handlers that save objects while an engine runs, and keep the newest or the best of what they saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from camshaft.engine.engine import Engine, outermost_engine
from camshaft.engine.events import Events
from camshaft.handlers.checkpoint import record
from camshaft.handlers.checkpoint.events import CheckpointEvents, announce
from camshaft.handlers.checkpoint.later import Later
from camshaft.handlers.checkpoint.loading import load_objects
from camshaft.handlers.checkpoint.names import (
    check_folder,
    check_length,
    check_pattern,
    check_stays,
    file_name,
    folder_of,
    make_pattern,
    name_of,
)
from camshaft.handlers.checkpoint.objects import CHECKPOINTER, check_to_save, checkpoint_of, needs_all_ranks
from camshaft.handlers.checkpoint.recorded import Recorded
from camshaft.handlers.checkpoint.resuming import resume
from camshaft.handlers.checkpoint.savers import BaseSaveHandler, DiskSaver
from camshaft.handlers.checkpoint.scores import ScoreFunction, score_of_metric
from camshaft.handlers.checkpoint.writer import is_writer
from camshaft.handlers.utils import check_callable, check_text

_ENDS = Events.TERMINATE | Events.COMPLETED | Events.INTERRUPT | Events.EXCEPTION_RAISED
StepTransform = Callable[[Engine[Any, Any], Any], Any]
SaveHandler = str | PathLike[str] | BaseSaveHandler | Callable[..., object]


class Checkpoint(Recorded):
    """Saves objects whenever the event fires on which it is registered, and keeps ``n_saved`` of the files.

    Without a score the newest are kept: where there are ``n_saved`` already, a call with a step that is not larger
    than the lowest of them saves nothing, unless ``greater_or_equal`` lets an equal one replace it. Call :meth:`reset`
    before an engine is run anew from 0, and give a handler on an evaluator, whose iteration is always the same, a
    ``global_step_transform`` or a score. With a score the best are kept; NaN is worse than any number.

    A file is written first, then recorded, and only then the one it replaces is removed; a save that fails
    changes nothing. On ``EXCEPTION_RAISED`` it works too, but counts there as a handler of the exception, as any
    does: re-raise it in another handler, registered later, or the run goes on.

    Args:
        to_save: what to save, by name: objects with ``state_dict()``, also in nested mappings and sequences.
            Modules are taken out of ``DataParallel``, ``DistributedDataParallel`` and ``torch.compile``.
        save_handler: a directory, for a :class:`DiskSaver`; or a ``BaseSaveHandler``; or a function that is
            called with the checkpoint, the file name and, if it takes that, the metadata.
        filename_prefix: first part of the file names. With a ``DiskSaver``, ``"best/run"`` leads to the folder
            ``best`` in its directory, which must exist.
        score_function: called with the engine, gives a number; the larger, the better.
        score_name: of the score, for the file names. Without ``score_function`` the metric of this name is it.
        n_saved: how many to keep; ``None`` for all.
        global_step_transform: called with the engine and the event, gives the step for the file names;
            see ``global_step_from_engine``.
        filename_pattern: of the file names, with any of ``{filename_prefix}``, ``{name}``, ``{global_step}``,
            ``{score_name}``, ``{score}`` and ``{ext}``. By default those that there are, in this order. One that
            ends in ``.safetensors`` is for the weights of a single model, in that format.
        include_self: save the record of this handler too, under the key ``checkpointer``; with a single object
            the key lies inside the state of that object.
        greater_or_equal: save also when the score, or step, only equals the lowest one kept.
        save_on_rank: the rank where files are written and what ranks hold in parts is brought together;
            ``"node"`` for the first process of each node, where the nodes have disks of their own. A
            ``DiskSaver`` as ``save_handler`` has its own.
        asynchronous: save in the background. The state is copied to host memory, as much of it as there is, and
            the run goes on. One save at a time is under way; its error is raised at the next event, and the run
            ends when it has ended. A function as ``save_handler`` is called in another thread.
        when_busy: in the background, what a save does when the one before is still under way: ``"wait"`` for it,
            or ``"skip"``, so that nothing is saved.

    Raises:
        TypeError: ``to_save`` is not a mapping of such objects, or another argument is of the wrong kind.
        ValueError: ``n_saved`` is below 1, ``to_save`` has the key ``checkpointer`` with ``include_self``, or
            the directory is not empty or cannot be used.
        KeyError: ``filename_pattern`` uses what is not there.

    >>> import tempfile, torch
    >>> from camshaft.engine import Events
    >>> model = torch.nn.Linear(1, 1)
    >>> trainer = Engine(lambda engine, batch: None)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint = Checkpoint({"model": model}, folder, n_saved=2)
    ...     handle = trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
    ...     state = trainer.run(range(10), max_epochs=3)
    ...     sorted(path.name for path in checkpoint.save_handler.dirname.glob("*.pt"))
    ['model_20.pt', 'model_30.pt']
    """

    SAVED_CHECKPOINT = CheckpointEvents.SAVED_CHECKPOINT
    Item = record.Item

    def __init__(
        self,
        to_save: Mapping[str, Any],
        save_handler: SaveHandler,
        filename_prefix: str = "",
        score_function: ScoreFunction | None = None,
        score_name: str | None = None,
        n_saved: int | None = 1,
        global_step_transform: StepTransform | None = None,
        filename_pattern: str | None = None,
        include_self: bool = False,
        greater_or_equal: bool = False,
        save_on_rank: int | str = 0,
        *,
        asynchronous: bool = False,
        when_busy: str = "wait",
    ) -> None:
        check_to_save(to_save, include_self)
        check_callable("score_function", score_function)
        check_callable("global_step_transform", global_step_transform)
        if n_saved is not None and (not isinstance(n_saved, int) or n_saved < 1):
            raise ValueError(f"n_saved must be None or at least 1, got {n_saved!r}")
        check_text("filename_prefix", filename_prefix)
        check_text("score_name", score_name, optional=True)
        check_text("filename_pattern", filename_pattern, optional=True)
        if filename_pattern is not None:
            check_pattern(filename_pattern, to_save, include_self)
        if score_function is None and score_name is not None:
            score_function = score_of_metric(score_name)
        if isinstance(save_handler, (str, PathLike)):
            save_handler = DiskSaver(save_handler, create_dir=True, save_on_rank=save_on_rank)
        if isinstance(save_handler, DiskSaver):
            check_stays("filename_pattern", filename_pattern or "")
            check_folder(filename_prefix, filename_pattern, save_handler.dirname, save_handler.writes)
        super().__init__(save_handler, save_on_rank)
        self.to_save = to_save
        self.filename_prefix = filename_prefix
        self.score_function = score_function
        self.score_name = score_name
        self.n_saved = n_saved
        self.global_step_transform = global_step_transform
        self.filename_pattern = filename_pattern
        self.include_self = include_self
        self.greater_or_equal = greater_or_equal
        self.ext = "pt"
        self._later = Later(when_busy) if asynchronous else None
        if isinstance(save_handler, DiskSaver):
            self._check_length(save_handler.dirname)

    @property
    def last_checkpoint(self) -> str | Path | None:
        """The file of the highest score, or without scores of the largest step; ``None`` before the first.

        A path with a ``DiskSaver``, else the name that the save handler was given. Waits for a save under way.

        Raises:
            RuntimeError: saves may have been skipped, and another rank knows which.
        """
        saved = self._settled()
        if self._later is not None and self._later.skips and not is_writer(self._writer):
            raise RuntimeError(f"with when_busy='skip' only rank {self._writer} knows what was saved; ask there")
        if not saved:
            return None
        filename = saved[-1].filename
        return self.save_handler.dirname / filename if isinstance(self.save_handler, DiskSaver) else filename

    def __call__(self, engine: Engine[Any, Any], *args: Any, **kwargs: Any) -> None:
        """Save, if the score or the step is large enough.

        Raises:
            ValueError: ``score_function`` or ``global_step_transform`` does not return a number, or another handler has
                saved to the same file since this one was made. When the run is over, as on ``COMPLETED``, the latter is
                a warning, and the file is overwritten.
        """
        later = self._later
        if later is not None and later.is_busy(may_skip=not needs_all_ranks(self.to_save)):
            return
        global_step = self._global_step(engine)
        priority = self._priority(engine, global_step)
        if not record.is_wanted(self._saved, priority, self.n_saved, self.greater_or_equal):
            self._warn_if_behind(priority)
            return
        filename = self._filename(name_of(self.to_save), self._score(priority), global_step)
        saved, dropped = record.with_item(self._saved, record.Item(priority, filename), self.n_saved)
        checkpoint = checkpoint_of(
            self.to_save, self.save_on_rank, record.record_of(saved) if self.include_self else None
        )
        metadata = self._metadata(engine, priority, global_step)

        def save(checkpoint: Any) -> None:
            self._store(checkpoint, filename, metadata)
            self._saved = saved
            if dropped is not None:
                self._remove(dropped)

        self._claim(filename, is_over=(outermost_engine() or engine).last_event_name in _ENDS)
        if later is None or not self._has_work:
            save(checkpoint)
            announce(engine)
        else:
            later.save(checkpoint, save, then=lambda: announce(engine))

    def reload_objects(
        self, to_load: Mapping[str, Any], load_kwargs: Mapping[str, Any] | None = None, **filename_components: Any
    ) -> None:
        """Load objects from a file saved earlier, which is named by what its name is made of.

        Args:
            to_load: objects by name.
            load_kwargs: handed to :meth:`load_objects`.
            filename_components: ``name`` (by default as in saving ``to_load``), ``score`` (a number, or as it
                stands in the name) and ``global_step``.

        Raises:
            AttributeError: the save handler is not a ``DiskSaver``.
            TypeError: there are other components.
            FileNotFoundError: there is no such file.
        """
        if not isinstance(self.save_handler, DiskSaver):
            raise AttributeError(f"reload_objects needs a DiskSaver as save_handler, got {self.save_handler!r}")
        unknown = sorted(filename_components.keys() - {"name", "score", "global_step"})
        if unknown:
            raise TypeError(f"filename_components may be name, score and global_step, got {unknown}")
        name = filename_components.get("name", name_of(to_load))
        score, step = (filename_components.get(key) for key in ("score", "global_step"))
        self._settled()
        path = self.save_handler.dirname / self._filename(name, score, step)
        self.load_objects(to_load, path, **(load_kwargs or {}))

    load_objects = staticmethod(load_objects)
    resume = staticmethod(resume)
    get_default_score_fn = staticmethod(score_of_metric)
    setup_filename_pattern = staticmethod(make_pattern)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a record, in place of the one so far; files with another prefix are another handler's.

        Raises:
            TypeError: it is not a mapping.
            ValueError: ``_saved`` is missing, or is not a list of pairs of a number and a file name.
        """
        super().load_state_dict(state_dict)
        begin = f"{self.filename_prefix}_" if self.filename_prefix and self.filename_pattern is None else ""
        names = [item.filename for item in self._saved]
        foreign = [name for name in names if not name.startswith(begin) or self._is_elsewhere(name)]
        if foreign:
            self._saved = [item for item in self._saved if item.filename not in foreign]
            warnings.warn(
                f"the record names {foreign}, of a handler with another prefix than {self.filename_prefix!r}: they "
                "are left alone; give the records of handlers that share a directory names of their own in to_save",
                stacklevel=2,
            )

    def _is_elsewhere(self, filename: str) -> bool:
        """Return whether a file of a record lies in another folder than those that this handler saves."""
        return isinstance(self.save_handler, DiskSaver) and folder_of(filename) != folder_of(self.filename_prefix)

    def _check_length(self, directory: Path) -> None:
        """Raise if names will be too long when the steps have ten digits."""
        has_step = self.score_function is None or self.global_step_transform is not None
        score = None if self.score_function is None else -1000.0
        try:
            name = self._filename(name_of(self.to_save) if self.to_save else "", score, 10**9 if has_step else None)
        except ValueError:  # the pattern is for steps of another kind
            return
        check_length("filename_prefix, score_name or filename_pattern", directory / name)

    def _global_step(self, engine: Engine[Any, Any]) -> Any:
        if self.global_step_transform is not None:
            return self.global_step_transform(engine, engine.last_event_name)
        return engine.state.iteration if self.score_function is None else None

    def _priority(self, engine: Engine[Any, Any], global_step: Any) -> int | float:
        if self.score_function is None:
            return record.as_priority(global_step, "global_step_transform")
        return record.as_priority(self.score_function(engine), "score_function")

    def _warn_if_behind(self, priority: float) -> None:
        if self.score_function is None and record.rank_of(priority) < record.rank_of(self._saved[0].priority):
            warnings.warn(
                "nothing was saved: the step is smaller than those of all checkpoints kept; call reset() before an "
                "engine is run anew from 0",
                stacklevel=3,
            )

    def _score(self, priority: float) -> float | None:
        return None if self.score_function is None else priority

    def _filename(self, name: str, score: Any, global_step: Any) -> str:
        return file_name(
            self.filename_pattern,
            filename_prefix=self.filename_prefix,
            name=name,
            score=score,
            score_name=self.score_name,
            global_step=global_step,
            ext=self.ext,
        )

    def _metadata(self, engine: Engine[Any, Any], priority: float, global_step: Any) -> dict[str, Any]:
        basename = "_".join(part for part in (self.filename_prefix, name_of(self.to_save)) if part)
        metadata: dict[str, Any] = {"basename": basename, "score_name": self.score_name, "priority": priority}
        if isinstance(self.save_handler, DiskSaver):  # for its manifest; others get what the API names
            metadata["objects"] = [*self.to_save, *([CHECKPOINTER] if self.include_self else [])]
            metadata["step"] = engine.state.iteration if global_step is None else global_step
            metadata["score"] = self._score(priority)
        return metadata

    def _settle(self) -> None:
        if self._later is not None:
            self._later.settle()

    def _wait(self) -> None:
        if self._later is not None:
            self._later.wait()
