"""Handlers that save objects while an engine runs, and keep the newest or the best of what they saved."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from os import PathLike
from pathlib import Path
from typing import Any

from camshaft.base import Serializable
from camshaft.engine.engine import Engine
from camshaft.handlers.checkpoint.events import CheckpointEvents, announce
from camshaft.handlers.checkpoint.loading import load_objects
from camshaft.handlers.checkpoint.names import check_pattern, make_pattern, name_of, score_text
from camshaft.handlers.checkpoint.objects import CHECKPOINTER, check_objects, check_to_save, states_of
from camshaft.handlers.checkpoint.record import Item as SavedItem
from camshaft.handlers.checkpoint.record import as_priority, is_wanted, rank_of, read_items, with_item
from camshaft.handlers.checks import check_callable
from camshaft.handlers.savers import BaseSaveHandler, DiskSaver, takes_metadata

ScoreFunction = Callable[[Engine[Any, Any]], Any]
StepTransform = Callable[[Engine[Any, Any], Any], Any]
SaveHandler = str | PathLike[str] | BaseSaveHandler | Callable[..., object]


class Checkpoint(Serializable):
    """Saves objects whenever the event fires on which it is registered, and keeps ``n_saved`` of the files.

    Without a score the newest are kept: each call must come with a larger step than those kept, or it saves
    nothing. Call :meth:`reset` before an engine is run anew from 0, and give a handler on an evaluator, whose
    iteration is always the same, a ``global_step_transform`` or a score. With a score the best are kept; NaN is
    worse than any number.

    A file is written first, then recorded, and only then the one it replaces is removed; a save that fails
    changes nothing. On ``EXCEPTION_RAISED`` it works too, but counts there as a handler of the exception, as any
    does: re-raise it in another handler, registered later, or the run goes on.

    Args:
        to_save: what to save, by name: objects with ``state_dict()``, also in nested mappings and sequences.
            Modules are taken out of ``DataParallel``, ``DistributedDataParallel`` and ``torch.compile``.
        save_handler: a directory, for a :class:`DiskSaver`; or a ``BaseSaveHandler``; or a function that is
            called with the checkpoint, the file name and, if it takes that, the metadata.
        filename_prefix: first part of the file names.
        score_function: called with the engine, gives a number; the larger, the better.
        score_name: of the score, for the file names. Without ``score_function`` the metric of this name is it.
        n_saved: how many to keep; ``None`` for all.
        global_step_transform: called with the engine and the event, gives the step for the file names;
            see ``global_step_from_engine``.
        filename_pattern: of the file names, with any of ``{filename_prefix}``, ``{name}``, ``{global_step}``,
            ``{score_name}``, ``{score}`` and ``{ext}``. By default those that there are, in this order.
        include_self: save the record of this handler too, under the key ``checkpointer``; with a single object
            the key lies inside the state of that object.
        greater_or_equal: save also when the score, or step, only equals the lowest one kept.
        save_on_rank: where files are written, and the state of sharded optimizers is brought together.

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
    ...     sorted(path.name for path in checkpoint.save_handler.dirname.iterdir())
    ['model_20.pt', 'model_30.pt']
    """

    SAVED_CHECKPOINT = CheckpointEvents.SAVED_CHECKPOINT
    Item = SavedItem

    _state_dict_all_req_keys = ("_saved",)

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
        save_on_rank: int = 0,
    ) -> None:
        check_to_save(to_save, include_self)
        check_callable("score_function", score_function)
        check_callable("global_step_transform", global_step_transform)
        if n_saved is not None and n_saved < 1:
            raise ValueError(f"n_saved must be None or at least 1, got {n_saved!r}")
        if filename_pattern is not None:
            check_pattern(filename_pattern)
        if score_function is None and score_name is not None:
            score_function = self.get_default_score_fn(score_name)
        if isinstance(save_handler, (str, PathLike)):
            save_handler = DiskSaver(save_handler, create_dir=True, save_on_rank=save_on_rank)
        self.to_save = to_save
        self.save_handler = save_handler
        self.filename_prefix = filename_prefix
        self.score_function = score_function
        self.score_name = score_name
        self.n_saved = n_saved
        self.global_step_transform = global_step_transform
        self.filename_pattern = filename_pattern
        self.include_self = include_self
        self.greater_or_equal = greater_or_equal
        self.save_on_rank = save_on_rank
        self.ext = "pt"
        self._saved: list[SavedItem] = []

    @property
    def save_handler(self) -> BaseSaveHandler | Callable[..., object]:
        """Where checkpoints go; may be exchanged."""
        return self._save_handler

    @save_handler.setter
    def save_handler(self, save_handler: BaseSaveHandler | Callable[..., object]) -> None:
        self._takes_metadata = takes_metadata(save_handler)
        self._save_handler = save_handler

    @property
    def last_checkpoint(self) -> str | Path | None:
        """The file of the highest score, or without scores of the largest step; ``None`` before the first.

        A path with a ``DiskSaver``, else the name that the save handler was given.
        """
        if not self._saved:
            return None
        filename = self._saved[-1].filename
        return self.save_handler.dirname / filename if isinstance(self.save_handler, DiskSaver) else filename

    def __call__(self, engine: Engine[Any, Any], *args: Any, **kwargs: Any) -> None:
        """Save, if the score or the step is large enough.

        Raises:
            ValueError: ``score_function`` or ``global_step_transform`` does not give a number.
        """
        global_step = self._global_step(engine)
        priority = self._priority(engine, global_step)
        if not is_wanted(self._saved, priority, self.n_saved, self.greater_or_equal):
            self._warn_if_behind(priority)
            return
        name = name_of(self.to_save)
        score = None if self.score_function is None else score_text(priority)
        filename = self._filename(name, score, global_step)
        saved, dropped = with_item(self._saved, SavedItem(priority, filename), self.n_saved)
        basename = "_".join(part for part in (self.filename_prefix, name) if part)
        metadata = {"basename": basename, "score_name": self.score_name, "priority": priority}
        self._save(self._checkpoint(saved), filename, metadata)
        self._saved = saved
        if dropped is not None and isinstance(self.save_handler, BaseSaveHandler):
            self.save_handler.remove(dropped)
        announce(engine)

    def reset(self) -> None:
        """Forget what was saved, for a run from 0. The files stay."""
        self._saved = []

    def state_dict(self) -> OrderedDict[str, Any]:
        """Give the record: pairs of priority and file name, lowest first."""
        return _record_of(self._saved)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a record, in place of the one so far.

        Raises:
            TypeError: it is not a mapping.
            ValueError: ``_saved`` is missing, or is not a list of pairs of a number and a file name.
        """
        super().load_state_dict(state_dict)
        self._saved = read_items(state_dict["_saved"])

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
        score, step = filename_components.get("score"), filename_components.get("global_step")
        text = score if score is None or isinstance(score, str) else score_text(score)
        path = self.save_handler.dirname / self._filename(name, text, step)
        self.load_objects(to_load, path, **(load_kwargs or {}))

    load_objects = staticmethod(load_objects)
    setup_filename_pattern = staticmethod(make_pattern)
    _check_objects = staticmethod(check_objects)

    @staticmethod
    def get_default_score_fn(metric_name: str, score_sign: float = 1.0) -> ScoreFunction:
        """Make a score function of a metric; ``score_sign=-1.0`` is for those of which less is better.

        Raises:
            ValueError: ``score_sign`` is neither 1 nor -1.
        """
        if score_sign not in (1, -1):
            raise ValueError(f"score_sign must be 1 or -1, got {score_sign!r}")
        return lambda engine: engine.state.metrics[metric_name] * score_sign

    # --- one call ------------------------------------------------------------------------------------------

    def _global_step(self, engine: Engine[Any, Any]) -> Any:
        if self.global_step_transform is not None:
            return self.global_step_transform(engine, engine.last_event_name)
        return engine.state.iteration if self.score_function is None else None

    def _priority(self, engine: Engine[Any, Any], global_step: Any) -> int | float:
        if self.score_function is None:
            return as_priority(global_step, "global_step_transform")
        return as_priority(self.score_function(engine), "score_function")

    def _warn_if_behind(self, priority: float) -> None:
        if self.score_function is None and rank_of(priority) < rank_of(self._saved[0].priority):
            warnings.warn(
                "nothing was saved: the step is smaller than those of all checkpoints kept; call reset() before an "
                "engine is run anew from 0",
                stacklevel=3,
            )

    def _filename(self, name: str, score: str | None, global_step: Any) -> str:
        pattern = self.filename_pattern or make_pattern(
            with_prefix=bool(self.filename_prefix),
            with_score=score is not None,
            with_score_name=score is not None and self.score_name is not None,
            with_global_step=global_step is not None,
        )
        fields = {"name": name, "score": score, "global_step": global_step, "score_name": self.score_name}
        return pattern.format(**fields, filename_prefix=self.filename_prefix, ext=self.ext)

    def _checkpoint(self, saved: list[SavedItem]) -> Any:
        states = self._setup_checkpoint()
        checkpoint = next(iter(states.values())) if len(states) == 1 else states
        if not self.include_self:
            return checkpoint
        # The state may be the object's own, so the key goes into a copy.
        checkpoint = copy.copy(checkpoint) if isinstance(checkpoint, MutableMapping) else states
        checkpoint[CHECKPOINTER] = _record_of(saved)
        return checkpoint

    def _setup_checkpoint(self) -> dict[str, Any]:
        return {name: states_of(one, self.save_on_rank) for name, one in self.to_save.items()}

    def _save(self, checkpoint: Any, filename: str, metadata: Mapping[str, Any]) -> None:
        if self._takes_metadata:
            self.save_handler(checkpoint, filename, metadata)
        else:
            self.save_handler(checkpoint, filename)


def _record_of(items: list[SavedItem]) -> OrderedDict[str, Any]:
    return OrderedDict(_saved=[tuple(item) for item in items])
