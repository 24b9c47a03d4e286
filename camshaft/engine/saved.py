"""Saving where an engine stands, and going on there: what a state dict holds, and what it means for the counters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from camshaft.base import Serializable
from camshaft.engine.filters import is_integer
from camshaft.engine.position import Position
from camshaft.engine.resume import Standing, positive

if TYPE_CHECKING:
    from camshaft.engine.loop import Run
    from camshaft.engine.state import State


@dataclass(frozen=True)
class Progress:
    """Counts of completed work, and the target."""

    iteration: int
    epoch: int
    epoch_length: int | None
    max_epochs: int | None
    max_iters: int | None


def progress_of(state_dict: Mapping[str, Any]) -> Progress:
    """Read the counters of a state dict.

    Args:
        state_dict: with ``epoch_length``, one of ``iteration`` and ``epoch``, one of ``max_epochs`` and
            ``max_iters``.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is out of range, or a count of epochs comes without their length.

    >>> progress_of({"epoch": 3, "epoch_length": 10, "max_epochs": 5}).iteration
    30
    """
    length = _length(state_dict)
    max_epochs, max_iters = (positive(name, state_dict.get(name)) for name in ("max_epochs", "max_iters"))
    if "iteration" in state_dict:
        iteration = _count("iteration", state_dict["iteration"])
        epoch = iteration // length if length else 0  # an unfinished first pass over data of unknown length
    else:
        epoch = _count("epoch", state_dict["epoch"])
        if epoch and not length:
            raise ValueError(f"epoch_length must be a positive integer when epoch is {epoch}, got None")
        iteration = epoch * (length or 0)
    for name, target, reached in (("max_epochs", max_epochs, epoch), ("max_iters", max_iters, iteration)):
        if target is not None and target < reached:
            raise ValueError(f"{name} must not be below the progress of the state dict, {reached}, got {target}")
    return Progress(iteration, epoch, length, max_epochs, max_iters)


def _length(state_dict: Mapping[str, Any]) -> int | None:
    length = state_dict["epoch_length"]
    started = state_dict.get("iteration", state_dict.get("epoch"))
    return None if not length and not started else positive("epoch_length", length)


def _count(name: str, value: Any) -> int:
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return int(value)


class Savable(Serializable):
    """The part of an engine that is saved and loaded."""

    _state_dict_all_req_keys = ("epoch_length",)
    _state_dict_one_of_opt_keys = (("iteration", "epoch"), ("max_epochs", "max_iters"))

    state: State[Any, Any]
    state_dict_user_keys: list[str]
    _run: Run | None
    _found_length: int | None
    _stood: Standing | None
    _loaded: bool
    _position: Position | None

    def _drop_run(self) -> None:
        """Give up a paused run."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def state_dict(self) -> OrderedDict[str, Any]:
        """Give the counters and the target, and what ``state_dict_user_keys`` names, to resume from later.

        Where the data can go on in the middle of a pass, ``position`` is where: that of loaders that
        ``auto_dataloader`` makes, that of data with ``state_dict`` and ``load_state_dict``, and the number of batches
        to skip of an iterator or a loader over an iterable dataset. In the middle of a window of accumulated gradients,
        that is the start of the window, and the next run does its iterations again.

        >>> from camshaft.engine import Engine
        >>> dict(Engine(lambda engine, batch: None).state_dict())
        {'epoch_length': None, 'iteration': 0, 'max_epochs': None}
        """
        target = "max_epochs" if self.state.max_iters is None else "max_iters"
        keys = ["epoch_length", "iteration", target, *self.state_dict_user_keys]
        saved = OrderedDict((key, getattr(self.state, key)) for key in keys)
        position = self._position if self._run is None else self._run.feed.position()
        if position is not None:
            saved["position"] = position
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over counters and target; the next ``run`` resumes from them. A paused run is given up.

        Args:
            state_dict: with ``epoch_length``, one of ``iteration`` and ``epoch`` (completed), one of
                ``max_epochs`` and ``max_iters``, and the keys of ``state_dict_user_keys``. With ``position``, the next
                run goes on with the very next sample; without it, the data are read from their beginning.

        Raises:
            TypeError: not a mapping, or a number is not an integer.
            ValueError: a key is missing, or a number is out of range; the engine is as before.
            RuntimeError: the engine is in an epoch.

        >>> from camshaft.engine import Engine
        >>> engine = Engine(lambda engine, batch: None)
        >>> engine.load_state_dict({"epoch": 3, "epoch_length": 10, "max_epochs": 5})
        >>> engine.run(range(10)).iteration
        50
        """
        if self._run is not None and self._run.active and self._run.in_epoch:
            raise RuntimeError(
                "load_state_dict was called in an epoch of the engine's own run: load before it, or in STARTED"
            )
        super().load_state_dict(state_dict)
        missing = [key for key in self.state_dict_user_keys if key not in state_dict]
        if missing:
            raise ValueError(f"state_dict lacks the user keys {missing}, it has {list(state_dict)}")
        progress = progress_of(state_dict)
        position = state_dict.get("position")
        if position is not None and not isinstance(position, Mapping):
            raise TypeError(f"position must be a mapping, got {position!r} of type {type(position).__name__}")
        if self._run is not None and not self._run.active:
            self._drop_run()
        state = self.state
        state.iteration, state.epoch, state.epoch_length = (
            progress.iteration,
            progress.epoch,
            progress.epoch_length,
        )
        state.max_epochs, state.max_iters = progress.max_epochs, progress.max_iters
        self._stood, self._found_length, self._loaded = None, None, True
        self._position = position
        for key in self.state_dict_user_keys:
            setattr(state, key, state_dict[key])
