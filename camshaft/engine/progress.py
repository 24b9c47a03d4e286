"""Progress of training: what the loop advances, what is saved, and where the next run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from camshaft.arguments import check_type, described
from camshaft.types import is_integer

Position = Mapping[str, Any]
"""A place in data, from which a pass can start; its keys depend on the kind of data."""


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
    """

    epoch: int = 0
    iteration: int = 0
    done: int = 0
    position: Position | None = None
    origin: Origin = Origin.ENDED
    lost: str = ""

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


# --- saved states ------------------------------------------------------------------------------------------------


def read(state_dict: Mapping[str, Any]) -> tuple[Progress, dict[str, int | None]]:
    """Return the progress in a state dict, and the ``epoch_length``, the targets, and ``optimizer_steps``.

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
        if length and done >= length:  # perhaps more than all iterations, which had other batch sizes
            raise ValueError(f"iterations_in_epoch must be at most {length - 1}, got {done}")
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
    progress = Progress(epoch, iteration, done, position, Origin.LOADED)
    steps = _integer("optimizer_steps", state_dict.get("optimizer_steps", 0), least=0)
    return progress, {"epoch_length": length or None, **targets, "optimizer_steps": steps}


def _integer(name: str, value: Any, least: int) -> int:
    if not is_integer(value) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer of at least {least}, got {described(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def positive(name: str, value: Any) -> int | None:
    """Return ``value`` if it is ``None`` or an integer of at least 1."""
    return None if value is None else _integer(name, value, least=1)
