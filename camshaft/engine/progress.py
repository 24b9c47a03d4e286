"""Progress of training: what is saved and loaded, where the next run resumes, and the arguments of ``run``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from math import ceil
from typing import Any, NamedTuple

from camshaft.arguments import check_type, described
from camshaft.engine.data import Position, batch_size_of, length_of
from camshaft.engine.state import State
from camshaft.text import counted
from camshaft.types import is_integer


class Origin(Enum):
    """Where the progress of an engine comes from, which decides how the next ``run`` continues."""

    LOADED = auto()  # by load_state_dict: it continues in the middle of the epoch
    FAILED = auto()  # an error left the run in the middle of an epoch: likewise
    ENDED = auto()  # the run ended, perhaps early: the next epoch starts
    COUNTERS = auto()  # the user assigned to the counters of the state


class Progress(NamedTuple):
    """Completed work, from which training resumes without a gap or a repetition.

    An iteration is completed when its process function has returned. No field follows from the others: epochs may end
    early, and streams have no length.

    Args:
        epoch: epochs completed.
        iteration: iterations completed in all epochs.
        done: iterations completed in the current epoch.
        position: position in the data, or ``None`` to read them from their beginning.
        origin: how the engine got there.
        lost: what the run lacks from here on, because an error has left a step that cannot be repeated.
        batch_size: of data without a length.
    """

    epoch: int = 0
    iteration: int = 0
    done: int = 0
    position: Position | None = None
    origin: Origin = Origin.ENDED
    lost: str = ""
    batch_size: int | None = None

    def in_epochs_of(self, length: int | None, before: int | None) -> Progress:
        """Return the progress in epochs of another length than ``before``, with the same share of the epoch done."""
        if length is None or length == before:
            return self
        if before is None:  # an unfinished first pass
            return self._replace(epoch=self.epoch + self.done // length, done=self.done % length)
        position = self.position
        if position is not None and position.get("steps") == before and "batches" in position:
            position = {**position, "batches": position["batches"] * length // before, "steps": length}
        return self._replace(done=self.done * length // before, position=position)

    def in_batches_of(self, data: Any, has_given_length: bool) -> Progress:
        """Return the progress in the batches of a stream, unchanged if their size has not changed, or is not known."""
        before, size, position = self.batch_size, batch_size_of(data), self.position
        if before is None or size in (None, before):
            return self
        done = self.done if has_given_length else self.done * before // size
        if position is not None and position.get("batches") and not self.done and not has_given_length:
            position = {"epoch": position["epoch"] + 1, "batches": 0}  # that pass is over
        elif position is not None and "batches" in position:
            position = {**position, "batches": position["batches"] * before // size, "steps": None}
        return self._replace(done=done, position=position, batch_size=size)


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
    counts = ("iteration", "epoch", "epochs_completed", "iterations_in_epoch")
    given = {name: _integer(name, state_dict[name], least=0) for name in counts if name in state_dict}
    targets = {name: positive(name, state_dict.get(name)) for name in ("max_epochs", "max_iters")}
    length = state_dict["epoch_length"]
    if length or given.get("iteration", given.get("epoch")):
        length = positive("epoch_length", length)
    if given.get("epoch") and not length:
        raise ValueError(f"epoch_length must be a positive integer when epoch is {given['epoch']}, got None")
    iteration = given["iteration"] if "iteration" in given else given["epoch"] * (length or 0)
    epoch, done = divmod(iteration, length) if length else (0, iteration)  # else an unfinished first pass
    if "epochs_completed" in given:
        epoch, done = given["epochs_completed"], given.get("iterations_in_epoch", 0)
        limit = min(iteration, length - 1) if length else iteration
        if done > limit:
            raise ValueError(f"iterations_in_epoch must be at most {limit}, got {done}")
    for name, reached in (("max_epochs", epoch), ("max_iters", iteration)):
        target = targets[name]
        if target is not None and target < reached:
            raise ValueError(f"{name} must not be below the progress of the state dict, {reached}, got {target}")
    position = state_dict.get("position")
    if position is not None:
        check_type("position", position, Mapping, "a mapping")
        for name in ("epoch", "batches", "consumed", "steps"):
            if position.get(name) is not None:
                _integer(f"position[{name!r}]", position[name], least=0)
    size = positive("batch_size", state_dict.get("batch_size"))
    progress = Progress(epoch, iteration, done, position, Origin.LOADED, batch_size=size)
    return progress, {"epoch_length": length or None, **targets}


def _integer(name: str, value: Any, least: int) -> int:
    if not is_integer(value) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer of at least {least}, got {described(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def positive(name: str, value: Any) -> int | None:
    """Return ``value`` if it is ``None`` or an integer of at least 1."""
    return None if value is None else _integer(name, value, least=1)


# --- targets -----------------------------------------------------------------------------------------------------


def is_done(state: State[Any, Any], in_epoch: bool = False) -> bool:
    """Return whether the target of a state is reached; ``in_epoch``: the last of its epochs is not over."""
    if state.max_iters is not None and state.iteration >= state.max_iters:
        return True
    return state.max_epochs is not None and state.epoch - in_epoch >= state.max_epochs


def has_target(state: State[Any, Any]) -> bool:
    """Return whether a state has a target, from a run or from a loaded state."""
    return state.max_epochs is not None or state.max_iters is not None


def target_of(state: State[Any, Any]) -> str:
    """Return the target of a state in words."""
    if state.max_iters is not None:
        return counted(state.max_iters, "iteration")
    return counted(state.max_epochs or 0, "epoch")  # never without a target


def derived_max_epochs(state: State[Any, Any]) -> int | None:
    """Return the number of epochs that ``max_iters`` iterations take, if both lengths are known."""
    return ceil(state.max_iters / state.epoch_length) if state.max_iters and state.epoch_length else None


# --- the arguments of run ----------------------------------------------------------------------------------------


def check_iterable(data: Any) -> None:
    """Raise ``TypeError`` unless data can be iterated over."""
    if not isinstance(data, Iterable):
        hint = ": pass it to a torch.utils.data.DataLoader" if hasattr(data, "__getitem__") else ""
        raise TypeError(f"data must be iterable, got {described(data)}{hint}")


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
            raise ValueError(f"pass max_epochs or max_iters, not both, got {max_epochs!r} and {max_iters!r}")
        self.data = data
        self.max_epochs = positive("max_epochs", max_epochs)
        self.max_iters = positive("max_iters", max_iters)
        self.epoch_length = positive("epoch_length", epoch_length)

    def check_target(self, state: State[Any, Any]) -> None:
        """Reject a target of the other kind than that of the state, and one below its progress."""
        if not has_target(state):
            return
        mode, other, reached = "max_epochs", "max_iters", state.epoch
        if state.max_iters is not None:
            mode, other, reached = other, mode, state.iteration
        wanted = getattr(self, mode)
        if getattr(self, other) is not None:
            raise ValueError(
                f"{other}={getattr(self, other)} was given, but the state counts by {mode}={getattr(state, mode)}; to "
                f"change over, set engine.state.{mode} = None first"
            )
        if wanted is not None and wanted < reached:
            raise ValueError(
                f"{mode} must not be below the progress of the state, {reached}, got {wanted}; to start from the "
                f"beginning, set engine.state.{mode} = None first"
            )

    def exceeds(self, progress: Progress, state: State[Any, Any]) -> bool:
        """Return whether work is left for a run that continues from ``progress`` to the new target."""
        if not has_target(state):
            return False
        wanted: State[Any, Any] = State(  # copying it would make access to its attributes slower from then on
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
        is_kept = self.data is None or state.epoch_length != inferred_length
        length, inferred = self._length_after(state.epoch_length if is_kept else None)
        state.iteration = state.epoch = 0
        state.epoch_length = length
        state.max_iters = self.max_iters
        state.max_epochs = 1 if self.max_epochs is None and self.max_iters is None else self.max_epochs
        return inferred

    def resume(self, state: State[Any, Any], is_given: bool) -> int | None:
        """Set the targets of a state; return the length of its epochs if it comes from the data.

        Args:
            state: changed only if there is no error.
            is_given: whether the length of its epochs must stay; otherwise, that of the data replaces it.
        """
        is_new = self.epoch_length is not None and state.epoch_length not in (None, self.epoch_length)
        if is_new and (is_given or self.epoch_length != length_of(self.data)):
            raise ValueError(
                f"epoch_length must stay {state.epoch_length} when a run is resumed, got {self.epoch_length}; to start "
                "from the beginning, set engine.state.max_epochs = engine.state.max_iters = None first"
            )
        inferred = None
        if not is_given:
            state.epoch_length, inferred = self._length_after(state.epoch_length)
        state.epoch_length = self.epoch_length or state.epoch_length
        self._set_target(state)
        return inferred

    def _length_after(self, left: int | None) -> tuple[int | None, int | None]:
        """Return the length of an epoch, by default ``left`` by an earlier run; and that of the data, if it counts."""
        inferred = length_of(self.data) if self.epoch_length is None else None
        length = self.epoch_length or (left if inferred is None else inferred)
        if self.data is None and length is None:
            raise ValueError("data must be given, got None; to run without data, pass epoch_length")
        if length is not None and length < 1:
            raise ValueError(f"data must hold at least one batch, got an empty {type(self.data).__name__}")
        return length, inferred

    def _set_target(self, state: State[Any, Any]) -> None:
        state.max_epochs = self.max_epochs or state.max_epochs
        if self.max_iters is not None:
            state.max_iters = self.max_iters
            state.max_epochs = derived_max_epochs(state) if state.max_epochs is not None else None


def num_epochs(state: State[Any, Any]) -> int | None:
    """Return the number of epochs of a run, if known."""
    return derived_max_epochs(state) if state.max_epochs is None else state.max_epochs
