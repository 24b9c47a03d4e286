"""Where a run stands in its data, and going on there: what data offer, and what is done where they offer nothing."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from camshaft.engine.data import length_of
from camshaft.engine.state import State
from camshaft.types import Stateful

Position = Mapping[str, Any]
_PASSES = (SequentialSampler, RandomSampler, DistributedSampler)  # of torch's, which begin at their beginning


def exact_batches(data: Any) -> Any:
    """Give the batch sampler of a loader if it can begin at any sample: it has ``position`` and ``seek``."""
    sampler = getattr(data, "batch_sampler", None)
    able = callable(getattr(sampler, "position", None)) and callable(getattr(sampler, "seek", None))
    return sampler if able else None


def position_of(data: Any, batches: int, *, over: bool) -> dict[str, Any] | None:
    """Write down where a run stands.

    Args:
        data: what it runs over.
        batches: those of the present pass that it was given.
        over: the pass is over.

    Returns:
        What :func:`open_at` needs, or ``None`` where the next pass begins at its beginning, as it does for sequences
        and for loaders of torch.
    """
    sampler = exact_batches(data)
    if sampler is not None:
        position: dict[str, Any] = sampler.position(batches, over=over)
        return position
    if over or not batches:
        return None
    if isinstance(data, Stateful):
        return {"batches": batches, "state": data.state_dict()}
    is_stream = isinstance(data, Iterator) or isinstance(getattr(data, "dataset", None), IterableDataset)
    return {"batches": batches} if is_stream or getattr(data, "is_skipped_forward", False) else None


def goes_back(data: Any) -> bool:
    """Say whether :func:`position_of` can tell of batches before the last one."""
    return exact_batches(data) is not None or not isinstance(data, Stateful)


def take_redo(position: dict[str, Any]) -> int:
    """Take out of a position how many iterations before the one it was saved in it is, and warn if it should be."""
    if lost := position.pop("lost", 0):
        warnings.warn(
            "the state was saved in the middle of a window of accumulated gradients, to whose start its data cannot go "
            f"back: the gradients of {lost} batches are lost; save at the end of a window, or use a loader of "
            "auto_dataloader with epochs that are passes",
            stacklevel=2,
        )
    redo: int = position.pop("redo", 0)
    return redo


def recounted(state: State[Any, Any], data: Any, position: Position | None) -> tuple[int, int] | None:
    """Count the iterations anew, if the loader now makes more or fewer batches of an epoch than when it was saved.

    Returns:
        The iterations done and those of an epoch, or ``None`` where they are those of the state.

    Raises:
        ValueError: the position is of other data.
    """
    sampler = exact_batches(data)
    if position is None or "consumed" not in position:
        return None
    if sampler is None:
        raise ValueError(
            "the state was saved with a loader that begins at any sample, and data must be one now, such as "
            f"auto_dataloader makes, got {type(data).__name__}; to begin the epoch anew, leave 'position' out of the "
            "state dict"
        )
    epoch, left_out = sampler.seek(position)
    length = length_of(data)
    epochs_are_passes = state.epoch_length == position["steps"]
    if length is None or not state.epoch_length or not epochs_are_passes or length == state.epoch_length:
        return None
    begun = (state.iteration - position.get("redo", 0)) // state.epoch_length + epoch - position["epoch"]
    return begun * length + left_out, length


def warn_of_new_pass(data: Any, done: int) -> None:
    """Warn where a saved run goes on in the middle of an epoch, and a loader of torch begins it from its beginning."""
    if not isinstance(data, DataLoader) or type(data.batch_sampler) is not BatchSampler:
        return
    sampler = data.sampler
    is_own = not isinstance(sampler, _PASSES) or getattr(sampler, "replacement", False)
    if not is_own and done % (length_of(data) or done + 1):
        warnings.warn(
            f"the run goes on after {done} iterations of an epoch, but its loader begins anew: in this epoch some "
            "samples come twice and others never; make the loader by auto_dataloader, or use a DeterministicEngine",
            stacklevel=2,
        )


def open_at(data: Any, position: Position) -> tuple[Iterator[Any], int]:
    """Begin a pass where another one stood, and tell how many batches of it are left out.

    Raises:
        ValueError: the position is of other data.
    """
    sampler = exact_batches(data)
    if sampler is not None and "consumed" in position:
        _, left_out = sampler.seek(position)
        return iter(data), left_out
    batches = position.get("batches", 0)
    has_state = isinstance(data, Stateful)
    if "state" in position and has_state:
        data.load_state_dict(position["state"])
        return iter(data), batches
    if batches:
        warnings.warn(
            f"the data cannot begin in the middle: {batches} batches are loaded and thrown away to go on where the run "
            "stood, and only if the data come in the same order again are those the ones it was given; a loader of "
            "auto_dataloader over a dataset with a length, or one with state_dict and load_state_dict, need not",
            stacklevel=2,
        )
    iterator = iter(data)
    skipped = sum(1 for _ in itertools.islice(iterator, batches))
    return iterator, skipped
