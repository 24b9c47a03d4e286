"""Where a run begins or goes on: the arguments of ``run`` against the state, checked before anything changes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from camshaft.engine.data import check_iterable, length_of
from camshaft.engine.filters import is_integer
from camshaft.engine.state import State


def is_done(state: State[Any, Any]) -> bool:
    """Say whether the target of a state is reached."""
    if state.max_iters is not None and state.iteration >= state.max_iters:
        return True
    if state.max_epochs is None:
        return False
    if state.epoch_length is not None and state.iteration >= state.epoch_length * state.max_epochs:
        return True
    return state.epoch >= state.max_epochs


def has_target(state: State[Any, Any]) -> bool:
    """Say whether a run was begun or loaded."""
    return state.max_epochs is not None or state.max_iters is not None


def target_of(state: State[Any, Any]) -> str:
    """Name the target of a state, for messages."""
    return f"{state.max_epochs} epochs" if state.max_iters is None else f"{state.max_iters} iterations"


def elapsed(seconds: float) -> str:
    """Write a duration as ``HH:MM:SS.mmm``.

    >>> elapsed(3723.5)
    '01:02:03.500'
    """
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours:02d}:{minutes:02d}:{rest:06.3f}"


def derived_max_epochs(state: State[Any, Any]) -> int | None:
    """Give the epochs that the iterations asked for take, when both are known."""
    return ceil(state.max_iters / state.epoch_length) if state.max_iters and state.epoch_length else None


@dataclass(frozen=True)
class Standing:
    """Where a run stopped: what the counters alone do not tell, valid as long as nobody changes them.

    Args:
        iteration: the state's, when the run stopped.
        epoch: likewise.
        done: iterations already done of the epoch to go on with.
        in_epoch: whether that is the epoch of this number, not yet over, and not the one after it.
    """

    iteration: int
    epoch: int
    done: int = 0
    in_epoch: bool = False

    @classmethod
    def of(cls, state: State[Any, Any], done: int = 0, in_epoch: bool = False) -> Standing:
        """Note where a state stands now."""
        return cls(state.iteration, state.epoch, done, in_epoch)

    def is_at(self, state: State[Any, Any]) -> bool:
        """Say whether a state still stands there."""
        return (self.iteration, self.epoch) == (state.iteration, state.epoch)


class Request:
    """The arguments of one call of ``run``.

    Args:
        data: what to iterate over, or ``None``.
        max_epochs: the target in epochs.
        max_iters: the target in iterations.
        epoch_length: iterations in an epoch.

    Raises:
        TypeError: ``data`` cannot be iterated over, or a number is not an integer.
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
        for name, wanted, progress in (
            ("max_epochs", self.max_epochs, state.epoch),
            ("max_iters", self.max_iters, state.iteration),
        ):
            if wanted is not None and wanted < progress:
                raise ValueError(
                    f"{name} must not be below the progress of the state, {progress}, got {wanted}; to begin anew, set "
                    f"engine.state.{name} = None first"
                )

    def reaches_beyond(self, state: State[Any, Any], in_epoch: bool) -> bool:
        """Say whether the state is unfinished once the new target is taken.

        Args:
            state: stays as it is.
            in_epoch: the epoch that the state names is not over.
        """
        if not has_target(state):
            return False
        epoch = state.epoch - in_epoch
        wanted: State[Any, Any] = State(iteration=state.iteration, epoch=epoch, epoch_length=state.epoch_length)
        wanted.max_epochs, wanted.max_iters = (
            self.max_epochs or state.max_epochs,
            self.max_iters or state.max_iters,
        )
        if self.max_iters is not None:
            wanted.max_epochs = derived_max_epochs(wanted) if wanted.max_epochs is not None else None
        return not is_done(wanted)

    def begin(self, state: State[Any, Any], found_length: int | None) -> int | None:
        """Set a state to the start of a new run; give the length of its epochs if it was found in the data.

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
        """Set a state to go on towards the target asked for; give the length of its epochs if that was found now."""
        if self.epoch_length is not None and state.epoch_length not in (None, self.epoch_length):
            raise ValueError(
                f"epoch_length must stay {state.epoch_length} when a run is resumed, got {self.epoch_length}; to begin "
                "anew, set engine.state.max_epochs = engine.state.max_iters = None first"
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
