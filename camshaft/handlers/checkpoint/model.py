"""A handler that gets what to save as an argument, and saves it to a directory."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from camshaft.engine.engine import Engine
from camshaft.handlers.checkpoint.handler import Checkpoint, StepTransform
from camshaft.handlers.checkpoint.objects import check_to_save, is_container
from camshaft.handlers.checkpoint.savers import DiskSaver
from camshaft.handlers.checkpoint.scores import ScoreFunction


class ModelCheckpoint(Checkpoint):
    """A :class:`Checkpoint` that saves to a directory, and gets what to save as an argument of the handler.

    Args:
        dirname: the directory; see :class:`DiskSaver`, also for ``atomic``, ``require_empty``, ``create_dir``
            and ``kwargs``.
        filename_prefix: and the rest, see :class:`Checkpoint`.

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
        when_busy: str = "wait",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            {},
            DiskSaver(dirname, atomic, create_dir, require_empty, save_on_rank, **kwargs),
            filename_prefix,
            score_function,
            score_name,
            n_saved,
            global_step_transform,
            filename_pattern,
            include_self,
            greater_or_equal,
            save_on_rank,
            asynchronous=asynchronous,
            when_busy=when_busy,
        )

    @property
    def last_checkpoint(self) -> Path | None:
        """The file of the highest score, or without scores of the largest step; ``None`` before the first.

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
            rest: ends with ``to_save`` on events that hand something over first, as ``EXCEPTION_RAISED`` does.

        Raises:
            RuntimeError: ``to_save`` is empty.
            TypeError: it is not a mapping of objects with ``state_dict()``.
        """
        given = rest[-1] if rest else to_save
        if isinstance(given, BaseException):
            raise TypeError(
                "to_save is missing: register a ModelCheckpoint with its objects, "
                "engine.add_event_handler(event, handler, {'model': model})"
            ) from given
        if is_container(given) and not given:
            raise RuntimeError(f"to_save must hold at least one object, got {given!r}")
        check_to_save(given, self.include_self)
        self.to_save = given
        super().__call__(engine)
