"""Where a run stands: what is saved and loaded, where the next run continues, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import ceil
from typing import Any

from camshaft.engine.data import Position, check_iterable, length_of
from camshaft.engine.filters import is_integer
from camshaft.engine.state import State


class Origin(Enum):
    """How an engine came to its progress, which decides what the next ``run`` does."""

    LOADED = auto()  # by load_state_dict: continue in the middle of the epoch
    FAILED = auto()  # an error left the run in the middle of an epoch: likewise
    ENDED = auto()  # the run ended, perhaps early: begin the next epoch
    SET = auto()  # the user assigned to the counters of the state


@dataclass(frozen=True)
class Progress:
    """The work that is done, from which training continues without a gap and without a repetition.

    An iteration is completed when its process function has returned. No field follows from another: epochs may end
    early, and streams have no length.

    Args:
        epoch: epochs completed.
        iteration: iterations completed in all epochs.
        done: iterations completed in the epoch after those.
        position: the place in the data, or ``None`` to read them from their beginning.
        origin: how the engine came here.
        counters: ``state.iteration`` and ``state.epoch`` at that moment; if the user changes them, they count.
        unfinished: the batch of an iteration that failed, or nothing, before what the same data return next; ``None``
            where the data start at ``position``.
    """

    epoch: int = 0
    iteration: int = 0
    done: int = 0
    position: Position | None = None
    origin: Origin = Origin.ENDED
    counters: tuple[int, int] = (0, 0)
    unfinished: tuple[Any, ...] | None = None

    def in_epochs_of(self, length: int | None) -> Progress:
        """Return the progress when the length of an epoch has become known only now."""
        if length is None or self.done < length:
            return self
        return replace(self, epoch=self.epoch + self.done // length, done=self.done % length)

    def elsewhere(self, length: int | None) -> Progress:
        """Return the progress for another process, which cannot repeat an iteration whose batch is kept in this one."""
        if not self.unfinished or self.position is None:
            return self
        position = {**self.position, "batches": self.position.get("batches", 0) + 1}
        position["lost"] = self.position.get("lost", 0) + 1
        counted = replace(self, iteration=self.iteration + 1, done=self.done + 1, position=position, unfinished=None)
        return counted.in_epochs_of(length)

    def items(self) -> dict[str, int]:
        """Return the counts that a state dict holds besides ``iteration``."""
        return {"epochs_completed": self.epoch, "iterations_in_epoch": self.done}


@dataclass(frozen=True)
class Saved:
    """The contents of a state dict: the progress, and what it is measured by."""

    progress: Progress
    epoch_length: int | None
    max_epochs: int | None
    max_iters: int | None


def read(state_dict: Mapping[str, Any]) -> Saved:
    """Read the counters of a state dict.

    Args:
        state_dict: with ``epoch_length``, one of ``iteration`` and ``epoch``, and one of ``max_epochs`` and
            ``max_iters``. Without ``epochs_completed`` and ``iterations_in_epoch``, all epochs are taken to have had
            ``epoch_length`` iterations.

    Raises:
        TypeError: a number is not an integer, or ``position`` is not a mapping.
        ValueError: a number is out of range, or a count of epochs comes without their length.

    >>> read({"epoch": 3, "epoch_length": 10, "max_epochs": 5}).progress.iteration
    30
    """
    length = state_dict["epoch_length"]
    if length or state_dict.get("iteration", state_dict.get("epoch")):
        length = positive("epoch_length", length)
    max_epochs, max_iters = (positive(name, state_dict.get(name)) for name in ("max_epochs", "max_iters"))
    if "iteration" in state_dict:
        iteration = _count("iteration", state_dict["iteration"])
        epoch, done = divmod(iteration, length) if length else (0, iteration)  # else an unfinished first pass
    else:
        epoch, done = _count("epoch", state_dict["epoch"]), 0
        if epoch and not length:
            raise ValueError(f"epoch_length must be a positive integer when epoch is {epoch}, got None")
        iteration = epoch * (length or 0)
    if "epochs_completed" in state_dict:
        epoch = _count("epochs_completed", state_dict["epochs_completed"])
        done = _count("iterations_in_epoch", state_dict.get("iterations_in_epoch", 0))
        if done > iteration or (length is not None and done >= length):
            limit = iteration if length is None else min(iteration, length - 1)
            raise ValueError(f"iterations_in_epoch must be at most {limit}, got {done}")
    for name, target, reached in (("max_epochs", max_epochs, epoch), ("max_iters", max_iters, iteration)):
        if target is not None and target < reached:
            raise ValueError(f"{name} must not be below the progress of the state dict, {reached}, got {target}")
    position = state_dict.get("position")
    if position is not None and not isinstance(position, Mapping):
        raise TypeError(f"position must be a mapping, got {position!r} of type {type(position).__name__}")
    progress = Progress(epoch, iteration, done, position, Origin.LOADED, (iteration, epoch))
    return Saved(progress, length or None, max_epochs, max_iters)


def _count(name: str, value: Any) -> int:
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return int(value)


# --- targets ---------------------------------------------------------------------------------------------------


def is_done(state: State[Any, Any]) -> bool:
    """Return whether the target of a state is reached."""
    if state.max_iters is not None and state.iteration >= state.max_iters:
        return True
    if state.max_epochs is None:
        return False
    if state.epoch_length is not None and state.iteration >= state.epoch_length * state.max_epochs:
        return True
    return state.epoch >= state.max_epochs


def has_target(state: State[Any, Any]) -> bool:
    """Return whether a run was started or loaded."""
    return state.max_epochs is not None or state.max_iters is not None


def target_of(state: State[Any, Any]) -> str:
    """Return the target of a state in words."""
    return f"{state.max_epochs} epochs" if state.max_iters is None else f"{state.max_iters} iterations"


def derived_max_epochs(state: State[Any, Any]) -> int | None:
    """Return the number of epochs that ``max_iters`` iterations take, when both lengths are known."""
    return ceil(state.max_iters / state.epoch_length) if state.max_iters and state.epoch_length else None


def elapsed(seconds: float) -> str:
    """Format a duration as ``HH:MM:SS.mmm``.

    >>> elapsed(3723.5)
    '01:02:03.500'
    """
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours:02d}:{minutes:02d}:{rest:06.3f}"


# --- the arguments of run ----------------------------------------------------------------------------------------


class Request:
    """The arguments of one call of ``run``.

    Args:
        data: what to iterate over, or ``None``.
        max_epochs: the target in epochs.
        max_iters: the target in iterations.
        epoch_length: iterations in an epoch.

    Raises:
        TypeError: ``data`` is not iterable, or a number is not an integer.
        ValueError: both targets are given, or a number is below 1.
    """

    def __init__(self, data: Any, max_epochs: int | None, max_iters: int | None, epoch_length: int | None) -> None:
        if data is not None:
            check_iterable(data)
        if max_epochs is not None and max_iters is not None:
            raise ValueError(f"give max_epochs or max_iters, not both, got {max_epochs!r} and {max_iters!r}")
        self.data = data
        self.max_epochs = positive("max_epochs", max_epochs)
        self.max_iters = positive("max_iters", max_iters)
        self.epoch_length = positive("epoch_length", epoch_length)

    def check_target(self, state: State[Any, Any]) -> None:
        """Refuse a target of the other kind than the state's, and one that is behind its progress."""
        if self.max_iters is not None and state.max_epochs is not None and state.max_iters is None:
            raise ValueError(_other_mode("max_iters", self.max_iters, "max_epochs", state.max_epochs))
        if self.max_epochs is not None and state.max_iters is not None:
            raise ValueError(_other_mode("max_epochs", self.max_epochs, "max_iters", state.max_iters))
        if not has_target(state):
            return
        for name, wanted, reached in (
            ("max_epochs", self.max_epochs, state.epoch),
            ("max_iters", self.max_iters, state.iteration),
        ):
            if wanted is not None and wanted < reached:
                raise ValueError(
                    f"{name} must not be below the progress of the state, {reached}, got {wanted}; to start from the "
                    f"beginning, set engine.state.{name} = None first"
                )

    def reaches_beyond(self, state: State[Any, Any], progress: Progress) -> bool:
        """Return whether there is work left for a run that continues from ``progress`` to the new target."""
        if not has_target(state):
            return False
        wanted: State[Any, Any] = State(
            iteration=progress.iteration, epoch=progress.epoch, epoch_length=state.epoch_length
        )
        wanted.max_epochs, wanted.max_iters = self.max_epochs or state.max_epochs, self.max_iters or state.max_iters
        if self.max_iters is not None:
            wanted.max_epochs = derived_max_epochs(wanted) if wanted.max_epochs is not None else None
        return not is_done(wanted)

    def begin(self, state: State[Any, Any], found_length: int | None) -> int | None:
        """Set a state to the start of a new run; return the length of its epochs if it was found in the data.

        Args:
            state: changed only if nothing is wrong.
            found_length: the length that an earlier run found by itself; it says nothing about other data.
        """
        left = state.epoch_length
        if self.data is not None and left == found_length:
            left = None
        own = length_of(self.data) if self.epoch_length is None else None
        length = self.epoch_length or (left if own is None else own)
        if self.data is None and length is None:
            raise ValueError("data or epoch_length must be given: without data the length of an epoch is not known")
        if length is not None and length < 1:
            raise ValueError(f"data must hold at least one batch, got {self.data!r} of length {length}")
        state.iteration = state.epoch = 0
        state.epoch_length = length
        state.max_iters = self.max_iters
        state.max_epochs = 1 if self.max_epochs is None and self.max_iters is None else self.max_epochs
        return own

    def resume(self, state: State[Any, Any], suspended: bool) -> int | None:
        """Set the targets of a state to those asked for; return the length of its epochs if that was found now."""
        if self.epoch_length is not None and state.epoch_length not in (None, self.epoch_length):
            raise ValueError(
                f"epoch_length must stay {state.epoch_length} when a run is resumed, got {self.epoch_length}; to start "
                "from the beginning, set engine.state.max_epochs = engine.state.max_iters = None first"
            )
        found = None
        if state.epoch_length is None and not suspended:
            found = length_of(self.data) if self.epoch_length is None else None
            if self.data is None and self.epoch_length is None:
                raise ValueError("data or epoch_length must be given: the state does not know the length of an epoch")
            if found == 0:
                raise ValueError(f"data must hold at least one batch, got {self.data!r}")
        if state.epoch_length is None:
            state.epoch_length = found if self.epoch_length is None else self.epoch_length
        state.max_epochs = self.max_epochs or state.max_epochs
        if self.max_iters is not None:
            state.max_iters = self.max_iters
            state.max_epochs = derived_max_epochs(state) if state.max_epochs is not None else None
        return found


def positive(name: str, value: Any) -> int | None:
    """Check that an argument is ``None`` or an integer of at least 1."""
    if value is None:
        return None
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer of at least 1, got {value!r} of type {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


def _other_mode(name: str, value: int, other: str, other_value: int) -> str:
    return (
        f"{name}={value} was given, but the state counts by {other}={other_value}; to change over, set "
        f"engine.state.{other} = None first"
    )
