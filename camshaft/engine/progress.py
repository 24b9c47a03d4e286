"""Progress of training: what is saved and loaded, where the next run resumes, and the arguments of ``run``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import ceil
from typing import Any

from camshaft.engine.data import Position, check_iterable, length_of
from camshaft.engine.state import State
from camshaft.types import is_integer


@dataclass(frozen=True)
class Progress:
    """Completed work, from which training resumes without a gap or a repetition.

    An iteration is completed when its process function has returned. No field follows from the others: epochs may end
    early, and streams have no length.

    Args:
        epoch: epochs completed.
        iteration: iterations completed in all epochs.
        done: iterations completed in the current epoch.
        position: position in the data, or ``None`` to read them from their beginning.
    """

    epoch: int = 0
    iteration: int = 0
    done: int = 0
    position: Position | None = None

    def in_epochs_of(self, length: int | None) -> Progress:
        """Return the progress now that the length of an epoch is known."""
        if length is None or self.done < length:
            return self
        return replace(self, epoch=self.epoch + self.done // length, done=self.done % length)


class Origin(Enum):
    """How an engine got to its progress, which decides how the next ``run`` continues."""

    LOADED = auto()  # by load_state_dict: it continues in the middle of the epoch
    FAILED = auto()  # an error left the run in the middle of an epoch: likewise
    ENDED = auto()  # the run ended, perhaps early: the next epoch starts
    COUNTERS = auto()  # the user assigned to the counters of the state


@dataclass(frozen=True)
class Snapshot:
    """What an engine keeps of its last run, or of a loaded state, for the next run.

    Args:
        progress: what is saved.
        origin: how the engine got there.
        counters: ``state.iteration`` and ``state.epoch`` at that time. If the user has changed them since, they count.
        retry: progress from which the same data continue in this process, if they cannot return a batch again.
        batches: the batch of the failed iteration, which these data do not return again; perhaps none.
    """

    progress: Progress = Progress()
    origin: Origin = Origin.ENDED
    counters: tuple[int, int] = (0, 0)
    retry: Progress | None = None
    batches: tuple[Any, ...] = ()

    def at(self, state: State[Any, Any]) -> Snapshot:
        """Return this snapshot, or that of the counters of the state if the user has changed them."""
        if self.counters == (state.iteration, state.epoch):
            return self
        done = state.iteration % state.epoch_length if state.epoch_length else 0
        progress = Progress(state.epoch, state.iteration, done)
        return Snapshot(progress, Origin.COUNTERS, (state.iteration, state.epoch))


# --- saved states ------------------------------------------------------------------------------------------------


def read(state_dict: Mapping[str, Any]) -> tuple[Progress, dict[str, int | None]]:
    """Return the progress in a state dict, and the ``epoch_length`` and the targets.

    Without ``epochs_completed`` and ``iterations_in_epoch``, all epochs are assumed to have had ``epoch_length``
    iterations.

    Raises:
        TypeError: a number is not an integer, or ``position`` is not a mapping.
        ValueError: a number is out of range, or a number of epochs comes without their length.

    >>> read({"epoch": 3, "epoch_length": 10, "max_epochs": 5})[0].iteration
    30
    """
    length = state_dict["epoch_length"]
    if length or state_dict.get("iteration", state_dict.get("epoch")):
        length = positive("epoch_length", length)
    targets = {name: positive(name, state_dict.get(name)) for name in ("max_epochs", "max_iters")}
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
        limit = iteration if length is None else min(iteration, length - 1)
        if done > limit:
            raise ValueError(f"iterations_in_epoch must be at most {limit}, got {done}")
    for name, reached in (("max_epochs", epoch), ("max_iters", iteration)):
        target = targets[name]
        if target is not None and target < reached:
            raise ValueError(f"{name} must not be below the progress of the state dict, {reached}, got {target}")
    position = state_dict.get("position")
    if position is not None:
        if not isinstance(position, Mapping):
            raise TypeError(f"position must be a mapping, got {position!r} of type {type(position).__name__}")
        for name in ("epoch", "batches", "consumed", "steps", "lost"):
            if position.get(name) is not None:
                _count(f"position[{name!r}]", position[name])
    return Progress(epoch, iteration, done, position), {"epoch_length": length or None, **targets}


def _count(name: str, value: Any) -> int:
    if not is_integer(value) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return int(value)


def positive(name: str, value: Any) -> int | None:
    """Return ``value`` if it is ``None`` or an integer of at least 1."""
    if value is None:
        return None
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer of at least 1, got {value!r} of type {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


# --- targets -----------------------------------------------------------------------------------------------------


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
    """Return whether a state has a target, from a run or from a loaded state."""
    return state.max_epochs is not None or state.max_iters is not None


def target_of(state: State[Any, Any]) -> str:
    """Return the target of a state in words."""
    return f"{state.max_epochs} epochs" if state.max_iters is None else f"{state.max_iters} iterations"


def derived_max_epochs(state: State[Any, Any]) -> int | None:
    """Return the number of epochs that ``max_iters`` iterations take, if both lengths are known."""
    return ceil(state.max_iters / state.epoch_length) if state.max_iters and state.epoch_length else None


# --- the arguments of run ----------------------------------------------------------------------------------------


class Request:
    """The arguments of one call of ``run``.

    Args:
        data: what to iterate over, or ``None``.
        max_epochs: target in epochs.
        max_iters: target in iterations.
        epoch_length: iterations per epoch.

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
        """Reject a target of the other kind than that of the state, and one below its progress."""
        mode = "max_epochs" if state.max_iters is None else "max_iters"
        other = "max_iters" if state.max_iters is None else "max_epochs"
        if getattr(self, other) is not None and has_target(state):
            raise ValueError(
                f"{other}={getattr(self, other)} was given, but the state counts by {mode}={getattr(state, mode)}; to "
                f"change over, set engine.state.{mode} = None first"
            )
        wanted, reached = getattr(self, mode), state.epoch if mode == "max_epochs" else state.iteration
        if has_target(state) and wanted is not None and wanted < reached:
            raise ValueError(
                f"{mode} must not be below the progress of the state, {reached}, got {wanted}; to start from the "
                f"beginning, set engine.state.{mode} = None first"
            )

    def exceeds(self, progress: Progress, state: State[Any, Any]) -> bool:
        """Return whether work is left for a run that continues from ``progress`` to the new target."""
        if not has_target(state):
            return False
        wanted: State[Any, Any] = State(
            iteration=progress.iteration, epoch=progress.epoch, epoch_length=state.epoch_length,
            max_epochs=state.max_epochs, max_iters=state.max_iters,
        )  # fmt: skip
        self._set_target(wanted)
        return not is_done(wanted)

    def begin(self, state: State[Any, Any], inferred_length: int | None) -> int | None:
        """Set a state to the start of a new run; return the length of its epochs if it comes from the data.

        Args:
            state: changed only if there is no error.
            inferred_length: length that an earlier run inferred from its data; it does not apply to other data.
        """
        left = state.epoch_length
        if self.data is not None and left == inferred_length:
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

    def resume(self, state: State[Any, Any], is_paused: bool) -> int | None:
        """Set the targets of a state; return the length of its epochs if it is inferred from the data now."""
        if self.epoch_length is not None and state.epoch_length not in (None, self.epoch_length):
            raise ValueError(
                f"epoch_length must stay {state.epoch_length} when a run is resumed, got {self.epoch_length}; to start "
                "from the beginning, set engine.state.max_epochs = engine.state.max_iters = None first"
            )
        inferred = None
        if state.epoch_length is None:
            if self.epoch_length is None and not is_paused:
                if self.data is None:
                    raise ValueError(
                        "data or epoch_length must be given: the state does not know the length of an epoch"
                    )
                inferred = length_of(self.data)
                if inferred == 0:
                    raise ValueError(f"data must hold at least one batch, got {self.data!r}")
            state.epoch_length = self.epoch_length or inferred
        self._set_target(state)
        return inferred

    def _set_target(self, state: State[Any, Any]) -> None:
        state.max_epochs = self.max_epochs or state.max_epochs
        if self.max_iters is not None:
            state.max_iters = self.max_iters
            state.max_epochs = derived_max_epochs(state) if state.max_epochs is not None else None
