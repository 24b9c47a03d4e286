"""Handlers that save objects while an engine runs, and keep the newest or the best checkpoints."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from numbers import Integral, Number
from os import PathLike
from pathlib import Path
from string import Formatter
from typing import Any

import torch

from camshaft.arguments import check_callable, check_is_no_class, check_keywords, check_text, check_type, described
from camshaft.base import ResettableHandler, Serializable
from camshaft.distributed import all_gather, get_rank
from camshaft.distributed.models.replicas import compare_saved
from camshaft.engine.engine import Engine, outermost_engine
from camshaft.engine.events import Events, HandlerEvents, Order
from camshaft.engine.state import LazyNumber, missing_metric
from camshaft.errors import level_of_caller
from camshaft.handlers.checkpoint.background import BackgroundSave, Exchange
from camshaft.handlers.checkpoint.loading import load_objects, resume, resume_newest
from camshaft.handlers.checkpoint.manifest import Manifest, names_in
from camshaft.handlers.checkpoint.retention import Item, in_order, retained
from camshaft.handlers.checkpoint.savers import (
    BaseSaveHandler,
    DiskSaver,
    agreed,
    check_is_inside,
    check_is_name,
    check_save_on_rank,
    is_writer,
)
from camshaft.handlers.checkpoint.state import (
    CHECKPOINTER,
    check_to_save,
    differs_by_rank,
    is_container,
    split,
    take_state,
    walk,
)

ScoreFunction = Callable[[Engine[Any, Any]], Any]
StepTransform = Callable[[Engine[Any, Any], Any], Any]
SaveHandler = str | PathLike[str] | BaseSaveHandler | Callable[..., object]
_FIELDS = ("filename_prefix", "name", "score", "score_name", "global_step", "ext")  # of names
_LONGEST_PREFIX = 180  # bytes; of the usual 255 of a file name, the name, score, and suffix of its entry take the rest
_ENDS = Events.TERMINATE | Events.COMPLETED | Events.INTERRUPT | Events.EXCEPTION_RAISED


class CheckpointEvents(HandlerEvents):
    """Events that :class:`Checkpoint` fires. Every engine knows them."""

    SAVED_CHECKPOINT = "saved_checkpoint"


def score_of_metric(metric_name: str, score_sign: float = 1.0) -> ScoreFunction:
    """Return a score function that reads a metric; use ``score_sign=-1.0`` for metrics where lower is better.

    Raises:
        ValueError: ``score_sign`` is neither 1 nor -1.
        KeyError: raised by the function if the metric does not exist.
    """
    if score_sign not in (1, -1):
        raise ValueError(f"score_sign must be 1 or -1, got {score_sign!r}")

    def score(engine: Engine[Any, Any]) -> Any:
        metrics = engine.state.metrics
        if metric_name not in metrics:
            raise KeyError(missing_metric("the score", metric_name, metrics))
        return _as_priority(metrics[metric_name], f"the metric {metric_name!r} must be") * score_sign

    return score


def check_score_function(function: Any) -> None:
    """Raise an error unless ``function`` is ``None`` or can be called with an engine."""
    if isinstance(function, str):
        problem = f"score_function must be callable, got {described(function)}"
        raise TypeError(f"{problem}: for a metric, pass score_name={function!r} instead")
    check_callable("score_function", function, "(engine)")


def make_pattern(
    with_prefix: bool = True, with_score: bool = True, with_score_name: bool = True, with_global_step: bool = True
) -> str:
    """Return the pattern of default names with the selected components.

    Raises:
        ValueError: there is neither a score nor a step, or the name of a score without the score.

    >>> make_pattern(with_prefix=False)
    '{name}_{global_step}_{score_name}={score}.{ext}'
    """
    if not (with_score or with_global_step):
        raise ValueError("at least one of with_score and with_global_step must be True, got False for both")
    if with_score_name and not with_score:
        raise ValueError("with_score_name=True needs with_score=True, got with_score=False")
    score = "{score_name}={score}" if with_score_name else "{score}"
    wanted = {"{filename_prefix}": with_prefix, "{name}": True, "{global_step}": with_global_step, score: with_score}
    return "_".join(component for component in wanted if wanted[component]) + ".{ext}"


def check_pattern(pattern: str) -> None:
    """Raise ``KeyError`` if a pattern uses unknown fields, ``ValueError`` if it is invalid.

    >>> check_pattern("{name}_{global_step:06d}.{ext}")
    >>> check_pattern("{epoch}.{ext}")
    Traceback (most recent call last):
    KeyError: "filename_pattern '{epoch}.{ext}' uses {epoch}; ..."
    """
    try:
        fields = {field for _, field, _, _ in Formatter().parse(pattern)} - {None}
    except ValueError as error:
        raise ValueError(f"filename_pattern {pattern!r} is not a format string: {error}") from error
    if unknown := fields.difference(_FIELDS):
        known = ", ".join(f"{{{name}}}" for name in _FIELDS)
        raise KeyError(f"filename_pattern {pattern!r} uses {{{unknown.pop()}}}; it may use {known}")
    if pattern.endswith(".safetensors"):
        hint = "save .pt files, and convert them with `python -m camshaft.checkpoint consolidate`"
        raise ValueError(f"filename_pattern must not end in '.safetensors', got {pattern!r}: {hint}")


def name_of(objects: Mapping[str, Any]) -> str:
    """Return the name of a checkpoint: that of its only object, or ``"checkpoint"``.

    >>> name_of({"model": None}), name_of({"model": None, "optimizer": None})
    ('model', 'checkpoint')
    """
    return str(next(iter(objects))) if len(objects) == 1 else "checkpoint"


class Checkpoint(Serializable):
    """Saves objects whenever the event fires for which it is registered, and keeps ``n_saved`` of the files.

    Without a score, each call saves, and the newest checkpoints are kept, whatever their steps. One of the same step
    replaces the file: on an evaluator, whose iteration is the same in each run, a ``global_step_transform`` keeps
    several. With a score the best are kept; NaN is worse than any number.

    A file is written first, then recorded, and only then the one it replaces is removed; a save that fails changes
    nothing. On ``EXCEPTION_RAISED``, it counts as handling the exception, like any handler: re-raise the exception in
    another handler, registered later, or the run continues.

    Args:
        to_save: what to save, by name: objects with ``state_dict()``, also in nested mappings and sequences.
            Modules are unwrapped from ``DataParallel``, ``DistributedDataParallel`` and ``torch.compile``.
        save_handler: a directory, for a :class:`DiskSaver`; or a ``BaseSaveHandler``; or a function that is
            called with the checkpoint, the file name and, if it accepts it, the metadata. If the directory holds
            checkpoints of an earlier run, call :meth:`resume_latest` before the run.
        filename_prefix: first component of the file names; with a directory, it may begin with a subfolder.
        score_function: called with the engine, returns a number; higher is better.
        score_name: of the score, for the file names. Without ``score_function``, the metric of this name is the score.
        n_saved: how many to keep; ``None`` for all.
        global_step_transform: called with the engine and the event, returns the step for the file names;
            see ``global_step_from_engine``.
        filename_pattern: of the file names, with any of ``{filename_prefix}``, ``{name}``, ``{global_step}``,
            ``{score_name}``, ``{score}`` and ``{ext}``. By default those that exist, in this order.
        include_self: save the record of this handler too, under the key ``checkpointer``; with a single object
            the key is inside the state of that object.
        greater_or_equal: save also when the score only equals the lowest one kept.
        save_on_rank: the rank that writes files and gathers sharded state; ``"node"`` for the first process of each
            node, if nodes have local disks. A ``DiskSaver`` as ``save_handler`` has its own.
        asynchronous: save in the background: the state is copied to host memory, and the run continues. One save at a
            time is in progress: the next one waits for it, its error is raised at the next iteration, and the run ends
            after it. A function as ``save_handler`` is called in another thread.
        sharded: let every rank save its part of the state: a checkpoint is a directory of shards, inside a directory
            that all ranks share. Sharded tensors are not gathered, and can be loaded into any other layout. Everything
            else is saved by ``save_on_rank``, whose score is the one that counts. Create the handler on all ranks.

    Raises:
        TypeError: ``to_save`` is not a mapping of such objects, or another argument is of the wrong type.
        ValueError: ``n_saved`` is below 1, ``to_save`` has the key ``checkpointer`` with ``include_self``, or the
            directory cannot be used, or holds ``*.pt`` files that no ``Checkpoint`` saved.
        KeyError: ``filename_pattern`` uses an unknown field.

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
    Item = Item
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
        save_on_rank: int | str = 0,
        *,
        asynchronous: bool = False,
        sharded: bool = False,
    ) -> None:
        check_to_save(to_save, include_self)
        check_score_function(score_function)
        check_callable("global_step_transform", global_step_transform, "(engine, event_name)")
        if n_saved is not None and (not isinstance(n_saved, int) or n_saved < 1):
            raise ValueError(f"n_saved must be None, for all, or an integer of at least 1, got {n_saved!r}")
        check_text("filename_prefix", filename_prefix)
        check_text("score_name", score_name, optional=True)
        check_text("filename_pattern", filename_pattern, optional=True)
        if filename_pattern is not None:
            check_pattern(filename_pattern)
        found: list[str] = []
        if isinstance(save_handler, (str, PathLike)):
            folder, filename_prefix = split_prefix(save_handler, filename_prefix)
            found = names_in(folder.expanduser()) if sharded or is_writer(save_on_rank) else []
            is_foreign = not {entry.file for entry in Manifest(folder.expanduser()).entries()}.issuperset(found)
            save_handler = DiskSaver(folder, create_dir=True, require_empty=is_foreign, save_on_rank=save_on_rank)
        elif isinstance(save_handler, DiskSaver) and os.path.dirname(filename_prefix):
            folder, filename_prefix = split_prefix("", filename_prefix)
            save_handler = save_handler.inside(folder)
        if isinstance(save_handler, DiskSaver):
            check_is_name("filename_prefix", filename_prefix)
            check_is_name("filename_pattern", filename_pattern or "")
            if (length := len(os.fsencode(filename_prefix))) > _LONGEST_PREFIX:  # else the first save fails
                raise ValueError(f"filename_prefix must have at most {_LONGEST_PREFIX} bytes, got {length}")
        takes_metadata(save_handler)
        check_save_on_rank(save_on_rank)
        if sharded:
            _check_can_shard(save_handler)
        self.to_save = to_save
        self._unresumed = len(found)  # checkpoints of earlier runs in the directory, which were not resumed yet
        if found:  # a run fails at its start rather than at its first save
            for one in self._objects():
                if isinstance(one, Engine):
                    one.add_event_handler(Events.STARTED, self._check_is_resumed, order=Order.LAST)
        self.save_handler = save_handler
        self.filename_prefix = filename_prefix
        self.score_function = score_of_metric(score_name) if score_name and not score_function else score_function
        self.score_name = score_name
        self.n_saved = n_saved
        self.global_step_transform = global_step_transform
        self.filename_pattern = filename_pattern
        self.include_self = include_self
        self.greater_or_equal = greater_or_equal
        self.save_on_rank = save_on_rank
        self.asynchronous = asynchronous
        self.sharded = sharded
        self.ext = "sharded" if sharded else "pt"
        self._exchange = Exchange()
        if sharded:
            self._exchange.prepare()
        self._background = BackgroundSave()
        self._saved: list[Item] = []
        self._due: Engine[Any, Any] | None = None  # whose event a save waits for that is not taken yet
        self._last_save: tuple[Any, int] | None = None  # its event and iteration
        self._last_run: tuple[str, int] | None = None  # the run of an engine in which this handler was called last
        self._has_warned = False  # of a repeated step

    @property
    def last_checkpoint(self) -> str | Path | None:
        """The file with the highest score, or without scores with the largest step; ``None`` before the first.

        A path with a ``DiskSaver``, otherwise the name that the save handler received. Waits for a save in progress.
        """
        self._background.settle()
        if not self._saved:
            return None
        saver, filename = self.save_handler, self._saved[-1].filename
        return saver.dirname / filename if isinstance(saver, DiskSaver) else filename

    def __call__(self, engine: Engine[Any, Any], *args: Any, **kwargs: Any) -> None:
        """Save, if the score or the step is large enough.

        Inside an iteration or a window of accumulated gradients, of ``engine`` or of an engine in ``to_save``, the save
        is taken at its end, under the step that is then completed.

        Raises:
            ValueError: ``score_function`` or ``global_step_transform`` does not return a number.
        """
        check_type("engine", engine, Engine, "an Engine")
        self._due = engine
        self._save_if_due()

    def _save_if_due(self, *_: Any) -> None:
        if self._due is None:  # saved meanwhile, at the same step
            return
        for one in (self._due, *self._objects()):
            if isinstance(one, Engine) and one.in_step:
                one.defer(self._save_if_due)
                return
        self._save(self._due)

    def save_after(self, event: Any, engine: Engine[Any, Any]) -> None:
        """Save regardless of the step, unless the last save was on this event of this iteration; wait for the file."""
        if self._last_save != (event, engine.state.iteration):
            self._save(engine, always=True)
        self._background.settle()

    def _save(self, engine: Engine[Any, Any], always: bool = False) -> None:
        self._due = None
        self._background.settle()
        saver = self.save_handler
        save_on_rank = saver.save_on_rank if isinstance(saver, DiskSaver) else self.save_on_rank
        writes = is_writer(save_on_rank)
        if self.sharded:
            self._exchange.prepare()
        last = (outermost_engine() or engine).last_event_name
        of_ranks = last != Events.EXCEPTION_RAISED and differs_by_rank(self.to_save)  # other ranks may not have failed
        if (self.sharded or of_ranks) and not (self.score_function is None and self.global_step_transform is None):
            # The ranks may disagree, and must not wait for ranks that never come.
            gather = self._exchange if self.sharded else all_gather
            proposals = agreed(lambda: (writes, self._ranking(engine)), gather)
            step, score, priority = next(values for is_of_writer, values in proposals if is_of_writer)
        else:
            step, score, priority = self._ranking(engine)
        name = name_of(self.to_save)
        filename = self._unique_filename(name, score, step)
        warns = writes and (save_on_rank != "node" or get_rank() == 0)
        if warns:
            self._warn_of_repeated_step(priority, engine)
            if self._last_save is None:
                self._warn_of_schedules()
        by_score, ties_win = self.score_function is not None, self.greater_or_equal
        after = retained(
            self._saved, Item(priority, filename), self.n_saved, by_score=by_score, ties_win=ties_win, always=always
        )
        if after is None:
            return
        saved, dropped = after
        self._check_is_resumed(is_over=last in _ENDS)
        key = self._key(name)
        state = take_state(self.to_save, writes, gather=not self.sharded, of_ranks=of_ranks)
        checkpoint = next(iter(state.values())) if len(state) == 1 else state
        if last != Events.EXCEPTION_RAISED:  # ranks fail in different places
            compare_saved(self.to_save, engine, f"when {filename} is saved")
        if self.include_self:
            # The state may be the object's own, so the key goes into a copy.
            checkpoint = copy.copy(checkpoint if isinstance(checkpoint, MutableMapping) else state)
            checkpoint[CHECKPOINTER] = _record(saved)
        basename = f"{self.filename_prefix}_{name}" if self.filename_prefix else name
        metadata: dict[str, Any] = {"basename": basename, "score_name": self.score_name, "priority": priority}
        if isinstance(saver, DiskSaver):  # for its manifest
            objects = [*self.to_save, *([CHECKPOINTER] if self.include_self else [])]
            step = engine.state.iteration if step is None else step
            metadata.update(objects=objects, step=step, score=score, handler=key)

        def prune() -> None:
            if not isinstance(saver, BaseSaveHandler):
                return
            for file in dropped:
                if not (isinstance(saver, DiskSaver) and writes and saver.is_of_another(file, key)):
                    saver.prune(file)

        def save(checkpoint: Any) -> None:
            if self.sharded and isinstance(saver, DiskSaver):
                saver.save_shard(checkpoint, filename, metadata, self._exchange)
            else:
                saver(checkpoint, filename, *([metadata] if takes_metadata(saver) else []))
            self._saved = saved
            if self.sharded:
                agreed(prune, self._exchange)
            else:
                prune()

        def announce() -> None:
            event = engine.last_event_name  # which other handlers of this event look at
            engine.fire_event(CheckpointEvents.SAVED_CHECKPOINT)
            engine.last_event_name = event

        if self.sharded:
            checkpoint = split(checkpoint, writes)
        if self.asynchronous and (self.sharded or not isinstance(saver, DiskSaver) or writes):
            self._background.start(checkpoint, save, announce)
        else:
            save(checkpoint)
            announce()
        self._last_save = engine.last_event_name, engine.state.iteration

    def _ranking(self, engine: Engine[Any, Any]) -> tuple[Any, int | float | None, int | float]:
        """Return the step and the score of a checkpoint, and its priority."""
        step = engine.state.iteration if self.score_function is None else None
        if self.global_step_transform is not None:
            step = self.global_step_transform(engine, engine.last_event_name)
        if self.score_function is None:
            return step, None, _as_priority(step, "global_step_transform must return")
        score = _as_priority(self.score_function(engine), "score_function must return")
        return step, score, score

    def resume_latest(self, *, map_location: Any = None, **kwargs: Any) -> Path | None:
        """Load the objects that this handler saves from the newest complete checkpoint in its directory.

        The handler also takes over the checkpoints that it saved there before, as listed in the manifest of the
        directory, so that it prunes them, too. Call this on all ranks before the run, once the handler and the objects
        that it saves have been created. See also :meth:`resume`.

        Args:
            map_location: for ``torch.load``; by default tensors are loaded to the CPU first, and from there to where
                the objects are.
            kwargs: passed to ``load_state_dict`` of modules, for example ``strict=False``.

        Returns:
            The file, or ``None`` if there is none yet, so that the run starts from the beginning.

        Raises:
            AttributeError: the save handler is not a ``DiskSaver``.
            RuntimeError: this is a :class:`ModelCheckpoint` that was not called yet, so it does not know what it saves.
            DamagedCheckpointError: there are checkpoints, and none of them can be loaded.
            ValueError: there are checkpoints, and none of them holds all objects that this handler saves.

        >>> import tempfile
        >>> from camshaft.engine import Events
        >>> def train(folder: str, max_epochs: int) -> int:
        ...     trainer = Engine(lambda engine, batch: None)
        ...     checkpoint = Checkpoint({"trainer": trainer}, folder, n_saved=2)
        ...     trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
        ...     checkpoint.resume_latest()
        ...     resumed_at = trainer.state.epoch
        ...     trainer.run(range(10), max_epochs=max_epochs)
        ...     return resumed_at
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train(folder, max_epochs=3), train(folder, max_epochs=5)
        (0, 3)
        """
        saver = self._disk_saver("resume_latest")
        if not self.to_save:
            hint = "use Checkpoint, or Checkpoint.resume(to_load, directory)"
            raise RuntimeError(f"resume_latest needs to_save, which is unknown before the first call: {hint}")
        self._background.settle()
        if get_rank() == 0 and not any(isinstance(one, Engine) for one in self._objects()):
            problem = "to_save holds no engine, so that a resumed run starts from the beginning with the loaded state"
            warnings.warn(f"{problem}: add the trainer to to_save", stacklevel=level_of_caller())
        path, entries = resume_newest(self.to_save, saver.dirname, map_location, kwargs)
        if path is None:  # the run starts from the beginning, and so do handlers that are saved with this one
            for one in self._objects():
                if isinstance(one, Checkpoint):
                    one._unresumed = 0
        else:
            saver.begin_after(entries[-1].saved_at)
            entries = entries[: [entry.file for entry in entries].index(path.name) + 1]
        key, by_score = self._key(name_of(self.to_save)), self.score_function is not None
        own = [(one.score if by_score else one.step, one.file) for one in entries if one.handler == key]
        self.load_state_dict({"_saved": [item for item in own if item[0] is not None]})
        return path

    def reload_objects(
        self, to_load: Mapping[str, Any], load_kwargs: Mapping[str, Any] | None = None, **filename_components: Any
    ) -> None:
        """Load objects from a file that was saved earlier, given the components of its name.

        Args:
            to_load: objects by name.
            load_kwargs: passed to :meth:`load_objects`.
            filename_components: ``name`` (by default the one with which ``to_load`` would be saved), ``score``
                (a number, or its text in the name) and ``global_step``.

        Raises:
            AttributeError: the save handler is not a ``DiskSaver``.
            TypeError: there are other components.
            FileNotFoundError: the file does not exist.
        """
        saver = self._disk_saver("reload_objects")
        self._background.settle()
        file = self._filename(**{"name": name_of(to_load), **filename_components})
        self.load_objects(to_load, saver.dirname / file, **(load_kwargs or {}))

    load_objects = staticmethod(load_objects)
    resume = staticmethod(resume)
    get_default_score_fn = staticmethod(score_of_metric)
    setup_filename_pattern = staticmethod(make_pattern)

    def reset(self) -> None:
        """Forget what was saved, to restart a run from 0. The files stay."""
        self._background.settle()
        self._saved = []
        self._has_warned = False

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the record: pairs of priority and file name, lowest first."""
        self._background.settle()
        return _record(self._saved)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the record.

        Raises:
            TypeError: it is not a mapping.
            ValueError: ``_saved`` is missing, or is not a list of pairs of a number and a file name.
        """
        super().load_state_dict(state_dict)
        try:
            saved = [Item(_as_priority(priority, "_saved must hold"), name) for priority, name in state_dict["_saved"]]
            for item in saved:
                check_text("a file name", item.filename)
                check = check_is_name if isinstance(self.save_handler, DiskSaver) else check_is_inside
                check("a file name", item.filename)
        except (TypeError, ValueError) as error:
            expected = "a list of pairs (priority, file name)"
            raise ValueError(f"_saved must be {expected}, got {state_dict['_saved']!r}: {error}") from error
        self.reset()
        self._unresumed = 0
        self._saved = in_order(saved, self.score_function is not None)

    @property
    def folder(self) -> Path | None:
        """The directory of the files, if they are on disk."""
        return self.save_handler.dirname if isinstance(self.save_handler, DiskSaver) else None

    def forget_missing_files(self, files: Collection[str]) -> None:
        """Remove from the record the files of the directory that no rank finds any more."""
        if self.folder is not None:
            self._saved = [item for item in self._saved if item.filename in files]

    def _disk_saver(self, method: str) -> DiskSaver:
        if not isinstance(self.save_handler, DiskSaver):
            raise AttributeError(f"{method} needs a directory as save_handler, got {described(self.save_handler)}")
        return self.save_handler

    def _check_is_resumed(self, *, is_over: bool = False) -> None:
        """Raise if this run is about to mix its checkpoints with those of another run; warn if this run is over."""
        if not self._unresumed or not isinstance(saver := self.save_handler, DiskSaver):
            return
        problem = f"'{saver.dirname}' contains checkpoints of an earlier run, which were not resumed"
        hint = "call resume_latest() before the run, save this handler with the one that does, or use another directory"
        if not is_over:
            raise ValueError(f"{problem}: {hint}")
        warnings.warn(
            f"{problem}, and the run is over, so new ones are saved beside them: {hint}", stacklevel=level_of_caller()
        )
        self._unresumed = 0

    def _warn_of_repeated_step(self, step: float, engine: Engine[Any, Any]) -> None:
        """Warn once if several checkpoints are to be kept, but each run of an engine has the same step."""
        before, self._last_run = self._last_run, (engine.run_line, engine.run_number)
        if self._has_warned or self.n_saved == 1 or before == self._last_run:
            return
        has_steps = self.score_function is None and self.global_step_transform is None
        counts_from_0 = has_steps and (outermost_engine() or engine) is not engine
        if counts_from_0 and not self.greater_or_equal and any(step == item.priority for item in self._saved):
            self._has_warned = True
            why = f"this engine counts from 0 in each run, to step {step} again"
            hint = "pass score_name or score_function to keep the best, or a global_step_transform to keep several"
            text = f"the last checkpoint was overwritten on {engine.last_event_name!r}: {why}; {hint}"
            warnings.warn(text, stacklevel=level_of_caller())

    def _warn_of_schedules(self) -> None:
        """Warn of schedules, scalers, and early stopping that a resumed run would start anew, as they are not saved."""
        saved = list(self._objects())
        optimizers = {id(one) for one in saved if isinstance(one, torch.optim.Optimizer)}
        for engine in (one for one in saved if optimizers and isinstance(one, Engine)):
            scaler = getattr(engine.state, "scaler", None)
            driving, stopping = "an optimizer, but not the {} that drives it", "an engine, but not its {}"
            needed = {id(scaler): (scaler, driving)} if scaler is not None and scaler.is_enabled() else {}
            for registration in engine.registrations():
                handler, owner = registration.handler, getattr(registration.handler, "__self__", None)
                owned = getattr(handler, "optimizer", None)
                if optimizers.intersection(map(id, owned if isinstance(owned, list) else [owned])):
                    needed[id(handler)] = handler, driving
                if isinstance(owner, ResettableHandler):  # EarlyStopping, which is attached to another engine, too
                    needed[id(owner)] = owner, stopping
            for one, problem in needed.values():
                if hasattr(one, "load_state_dict") and not any(one is other for other in saved):
                    name = type(one).__name__
                    hint = f"add the {name} to to_save, or a resumed run starts it anew"
                    warnings.warn(f"to_save has {problem.format(name)}: {hint}", stacklevel=level_of_caller())

    def _objects(self) -> Iterator[Any]:
        """Yield the objects that are saved."""
        return (one for _, one in walk(dict(self.to_save), "state_dict"))

    def _unique_filename(self, name: str, score: Any, step: Any) -> str:
        """Return the name of a new file; its score has all digits if another file has the name with four decimals.

        A file of the same score is replaced, also if the one that made its name longer is gone by now.
        """
        if not isinstance(score, float):
            return self._filename(name, score, step)
        # repr(0.0002) is also what 0.00019 is with four decimals.
        names = [self._filename(name, text, step) for text in (f"{score:.4f}", repr(score), f"{score:.17e}")]
        scores = {item.filename: item.priority for item in self._saved}
        own = [one for one in names if scores.get(one) == score]
        return [*own, *(one for one in names if one not in scores), names[0]][0]

    def _filename(self, name: str, score: Any = None, global_step: Any = None) -> str:
        """Return the name of a file: ``[prefix_]name[_step][_score_name=score].pt``, or that of the pattern."""
        if score is not None and not isinstance(score, str):
            score = str(score) if isinstance(score, Integral) else f"{score:.4f}"
        pattern = self._pattern(score is not None, global_step is not None)
        score_name = self.score_name and _without_slashes(self.score_name)
        values = {"filename_prefix": self.filename_prefix, "name": _without_slashes(name), "global_step": global_step}
        values.update(score_name=score_name, score=score, ext=self.ext)
        try:
            return pattern.format(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"filename_pattern {pattern!r} does not fit {values}: {error}") from error

    def _pattern(self, has_score: bool, has_step: bool) -> str:
        has_score_name = has_score and self.score_name is not None
        return self.filename_pattern or make_pattern(bool(self.filename_prefix), has_score, has_score_name, has_step)

    def _key(self, name: str) -> str:
        """Return what the manifest notes about the files of this handler: their names without score and step."""
        by_score = self.score_function is not None
        pattern = self._pattern(by_score, not by_score or self.global_step_transform is not None)
        values = {"filename_prefix": self.filename_prefix, "name": name, "score_name": self.score_name}
        for field, value in values.items():
            pattern = pattern.replace(f"{{{field}}}", str(value))
        return f"{'best' if by_score else 'newest'} {pattern}"


class ModelCheckpoint(Checkpoint):
    """A :class:`Checkpoint` that saves to a directory, and takes what to save as an argument of the handler.

    Args:
        dirname: the directory; see :class:`DiskSaver`, also for ``atomic``, ``require_empty``, ``create_dir``
            and ``kwargs``.
        filename_prefix: see :class:`Checkpoint`, as for all other arguments.

    >>> import tempfile, torch
    >>> from camshaft.engine import Events
    >>> trainer = Engine(lambda engine, batch: None)
    >>> model = torch.nn.Linear(1, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint = ModelCheckpoint(folder, "first")
    ...     handle = trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint, {"model": model})
    ...     state = trainer.run(range(10), max_epochs=3)
    ...     checkpoint.last_checkpoint.name
    'first_model_30.pt'
    """

    def __init__(
        self,
        dirname: str | PathLike[str],
        filename_prefix: str = "",
        score_function: ScoreFunction | None = None,
        score_name: str | None = None,
        n_saved: int | None = 1,
        atomic: bool = True,
        require_empty: bool = True,
        create_dir: bool = True,
        global_step_transform: StepTransform | None = None,
        filename_pattern: str | None = None,
        include_self: bool = False,
        greater_or_equal: bool = False,
        save_on_rank: int | str = 0,
        *,
        asynchronous: bool = False,
        sharded: bool = False,
        **kwargs: Any,
    ) -> None:
        check_keywords(ModelCheckpoint, kwargs, torch.save, "obj", "f")
        folder, filename_prefix = split_prefix(dirname, filename_prefix)
        saver = DiskSaver(folder, atomic, create_dir, require_empty, save_on_rank, **kwargs)
        super().__init__(
            {}, saver, filename_prefix, score_function, score_name, n_saved, global_step_transform, filename_pattern,
            include_self, greater_or_equal, save_on_rank, asynchronous=asynchronous, sharded=sharded,
        )  # fmt: skip

    @property
    def last_checkpoint(self) -> Path | None:
        """The file with the highest score, or without scores with the largest step; ``None`` before the first.

        Raises:
            RuntimeError: the save handler is no longer a ``DiskSaver``.
        """
        if not isinstance(self.save_handler, DiskSaver):
            raise RuntimeError(f"last_checkpoint needs a DiskSaver as save_handler, got {self.save_handler!r}")
        return Path(last) if (last := super().last_checkpoint) is not None else None

    def __call__(self, engine: Engine[Any, Any], to_save: Mapping[str, Any], *rest: Any) -> None:
        """Save, if the score or the step is large enough.

        Args:
            engine: the engine.
            to_save: what to save, by name.
            rest: ends with ``to_save`` on events that pass other arguments first, as ``EXCEPTION_RAISED`` does.

        Raises:
            RuntimeError: ``to_save`` is empty.
            TypeError: it is not a mapping of objects with ``state_dict()``.
        """
        given = rest[-1] if rest else to_save
        if isinstance(given, BaseException):
            hint = "engine.add_event_handler(event, handler, {'model': model})"
            raise TypeError(f"to_save is missing: register a ModelCheckpoint with its objects, {hint}") from given
        if is_container(given) and not given:
            raise RuntimeError(f"to_save must hold at least one object, got {given!r}")
        check_to_save(given, self.include_self)
        self.to_save = given
        super().__call__(engine)


def split_prefix(dirname: str | PathLike[str], filename_prefix: str) -> tuple[Path, str]:
    """Return the directory of the files and the prefix of their names.

    Raises:
        TypeError: the prefix is not a string.
        ValueError: it leads out of the directory.

    >>> split_prefix("checkpoints", "best/model")
    (PosixPath('checkpoints/best'), 'model')
    """
    check_type("dirname", dirname, (str, PathLike), "a str or a Path")
    check_text("filename_prefix", filename_prefix)
    check_is_inside("filename_prefix", filename_prefix)
    folder, prefix = os.path.split(filename_prefix)
    return Path(dirname, folder), prefix


def _check_can_shard(save_handler: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` if ranks cannot save shards with these arguments."""
    if not isinstance(save_handler, DiskSaver):
        expected = "a directory that all ranks share, or a DiskSaver for one"
        raise TypeError(f"save_handler must be {expected}, with sharded=True, got {described(save_handler)}")
    if save_handler.save_on_rank == "node":
        raise ValueError("save_on_rank must be a rank with sharded=True, got 'node': the shards are in one directory")


def _without_slashes(name: str) -> str:
    """Replace the slashes in a name, such as that of a metric "validation/accuracy"."""
    return name.replace("/", "_").replace(os.sep, "_")


def takes_metadata(save_handler: Any) -> bool:
    """Return whether a save handler takes the metadata.

    Raises:
        TypeError: it cannot be called as a save handler.
    """
    check_is_no_class("save_handler", save_handler)
    for count in (3, 2):
        try:
            inspect.signature(save_handler).bind(*range(count))
            return count == 3
        except TypeError:
            continue
    expected = "a str, a Path, or a callable that takes (checkpoint, filename[, metadata])"
    raise TypeError(f"save_handler must be {expected}, got {described(save_handler)}")


def _as_priority(value: Any, rule: str) -> int | float:
    """Convert any real number to a plain one, which ``torch.load(weights_only=True)`` accepts.

    Raises:
        ValueError: it is not a real number.

    >>> (
    ...     _as_priority(True, "score_function must return"),
    ...     _as_priority(0.5, "score_function must return"),
    ... )
    (1, 0.5)
    """
    if isinstance(value, LazyNumber):
        value = value.read()
    elif getattr(value, "shape", None) == () and hasattr(value, "item"):  # a tensor or an array
        value = value.item()
    if isinstance(value, Number) and not isinstance(value, complex):
        return int(value) if isinstance(value, Integral) else float(value)  # type: ignore[arg-type]  # real, or a Decimal
    hint = "; use its item()" if getattr(value, "shape", None) == (1,) else ""
    raise ValueError(f"{rule} a real number, got {described(value)}{hint}")


def _record(items: list[Item]) -> OrderedDict[str, Any]:
    return OrderedDict(_saved=[tuple(item) for item in items])
