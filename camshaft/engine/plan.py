"""Where a run starts: the one decision of ``Engine.run``, from its arguments, the state, and the progress so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from camshaft.arguments import described
from camshaft.engine.progress import Origin, Progress, positive
from camshaft.engine.sources import length_of, source_of
from camshaft.engine.state import State
from camshaft.text import counted

Inferred = Mapping[str, int | None]
"""Numbers of a state that come from the data. The user has not requested them: they do not bind the next run."""


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


@dataclass(frozen=True)
class Start:
    """Where a run starts, and its target.

    Args:
        data: what it reads.
        progress: what is done already.
        epoch_length: iterations per epoch, if known.
        max_epochs: target in epochs.
        max_iters: target in iterations.
        inferred: those of these numbers that come from the data.
        is_new: whether nothing is done yet.
    """

    data: Any
    progress: Progress
    epoch_length: int | None
    max_epochs: int | None
    max_iters: int | None
    inferred: Inferred
    is_new: bool


def plan(state: State[Any, Any], progress: Progress, request: Request, inferred: Inferred) -> Start | None:
    """Return where a run starts, or ``None`` if a loaded state has reached its target; changes nothing.

    Args:
        state: of the engine, with the target of the last run or of a loaded state.
        progress: of the last run, or of a loaded state.
        request: the arguments of ``run``.
        inferred: the numbers in the state that come from the data of an earlier run.

    Raises:
        ValueError: the arguments contradict the state, the data are empty, or the position is one in other data.
    """
    if progress.origin is Origin.ENDED:  # perhaps in the middle of an epoch, whose rest is then left out
        progress = Progress(state.epoch, state.iteration)
    elif progress.origin is Origin.FAILED and request.data is not state.dataloader:
        progress = progress if source_of(request.data).can_seek else progress._replace(position=None)
    max_epochs, max_iters = target_after(state, request, inferred)
    if max_epochs is None and max_iters is None:
        return start_anew(state, request, inferred)
    if is_reached(progress.epoch, progress.iteration, max_epochs, max_iters):
        return None if progress.origin is Origin.LOADED else start_anew(state, request, inferred)
    length, inferred, progress = resume(state, progress, request, inferred)
    return Start(request.data, progress, length, max_epochs, max_iters, inferred, is_new=False)


def start_anew(state: State[Any, Any], request: Request, inferred: Inferred) -> Start:
    """Return the start of a run from the beginning."""
    kept = state.epoch_length
    if request.data is not None and kept == inferred.get("epoch_length"):
        kept = None  # a length that came from other data
    length, inferred = _length_after(kept, request)
    max_epochs = 1 if request.max_epochs is None and request.max_iters is None else request.max_epochs
    return Start(request.data, Progress(), length, max_epochs, request.max_iters, inferred, is_new=True)


def resume(
    state: State[Any, Any], progress: Progress, request: Request, inferred: Inferred
) -> tuple[int | None, Inferred, Progress]:
    """Return the length of an epoch in a run that resumes, what is inferred, and the progress in such epochs.

    A length that the user has given stays; otherwise that of the data replaces it, as after a change of the batch size.
    """
    before, wanted = state.epoch_length, request.epoch_length
    is_given = has_given_length(state, inferred) or _is_rest(request.data, progress, before)
    found = source_of(request.data).locate(progress.position, before, progress.done)
    if is_given or wanted != length_of(request.data):
        check_length(state, request)
    length = wanted or before
    if not is_given:
        length, of_data = _length_after(before, request)
        inferred = {**inferred, **of_data}
    position = progress.position
    if found is None or position is None or (wanted not in (None, found[2]) if found[2] else wanted or is_given):
        return length, inferred, progress.in_epochs_of(length, before)
    number, done, length = found
    epoch = progress.epoch + number - position["epoch"]
    if length is None and done and not progress.done:  # a pass of unknown length ended together with the epoch
        done, position = 0, {"epoch": number + 1, "batches": 0}
    progress = progress._replace(epoch=epoch, done=done, position=position)
    return length, inferred, progress


def check_length(state: State[Any, Any], request: Request) -> None:
    """Raise ``ValueError`` if the arguments of ``run`` change the length of an epoch."""
    before, wanted = state.epoch_length, request.epoch_length
    if wanted is not None and before not in (None, wanted):
        raise ValueError(
            f"epoch_length must stay {before} when a run is resumed, got {wanted}; to start from the beginning, set "
            "engine.state.max_epochs = engine.state.max_iters = None first"
        )


def _length_after(left: int | None, request: Request) -> tuple[int | None, Inferred]:
    """Return the length of an epoch, by default ``left`` by an earlier run; and that of the data, if it counts."""
    of_data = length_of(request.data) if request.epoch_length is None else None
    length = request.epoch_length or (left if of_data is None else of_data)
    if request.data is None and length is None:
        raise ValueError("data must be given, got None; to run without data, pass epoch_length")
    if length is not None and length < 1:
        raise ValueError(f"data must hold at least one batch, got an empty {type(request.data).__name__}")
    return length, {} if of_data is None else {"epoch_length": of_data}


def has_given_length(state: State[Any, Any], inferred: Inferred) -> bool:
    """Return whether the user has given the length of an epoch, and it is not that of the data."""
    return state.epoch_length not in (None, inferred.get("epoch_length"), length_of(state.dataloader))


def _is_rest(data: Any, progress: Progress, length: int | None) -> bool:
    """Return whether a sequence has the length of the rest of an epoch, as of batches that were left."""
    return length is not None and not hasattr(data, "dataset") and length_of(data) == length - progress.done


# --- targets -----------------------------------------------------------------------------------------------------


def target_after(state: State[Any, Any], request: Request, inferred: Inferred) -> tuple[int | None, int | None]:
    """Return the target of a run that continues from a state, in epochs and in iterations.

    Raises:
        ValueError: it is of the other kind than that of the state, or below its progress.
    """
    max_epochs, max_iters = state.max_epochs, state.max_iters
    if max_iters is None and max_epochs == inferred.get("max_epochs"):
        max_epochs = None
    if max_epochs is None and max_iters is None:
        return None, None
    mode, other, present, reached = "max_epochs", "max_iters", max_epochs, state.epoch
    if max_iters is not None:
        mode, other, present, reached = other, mode, max_iters, state.iteration
    wanted = getattr(request, mode)
    if getattr(request, other) is not None:
        raise ValueError(
            f"{other}={getattr(request, other)} was given, but the state counts by {mode}={present}; to change over, "
            f"set engine.state.{mode} = None first"
        )
    if wanted is not None and wanted < reached:
        raise ValueError(
            f"{mode} must not be below the progress of the state, {reached}, got {wanted}; to start from the "
            f"beginning, set engine.state.{mode} = None first"
        )
    if request.max_iters is not None:
        max_iters = request.max_iters
        max_epochs = None if max_epochs is None else epochs_of(max_iters, state.epoch_length)
    return request.max_epochs or max_epochs, max_iters


def is_reached(epoch: int, iteration: int, max_epochs: int | None, max_iters: int | None) -> bool:
    """Return whether a target is reached with so many epochs and iterations completed."""
    if max_iters is not None and iteration >= max_iters:
        return True
    return max_epochs is not None and epoch >= max_epochs


def is_done(state: State[Any, Any], in_epoch: bool = False) -> bool:
    """Return whether the target of a state is reached; ``in_epoch``: the last of its epochs is not over."""
    return is_reached(state.epoch - in_epoch, state.iteration, state.max_epochs, state.max_iters)


def target_of(state: State[Any, Any]) -> str:
    """Return the target of a state in words."""
    if state.max_iters is not None:
        return counted(state.max_iters, "iteration")
    return counted(state.max_epochs or 0, "epoch")  # never without a target


def epochs_of(iterations: int | None, length: int | None) -> int | None:
    """Return the number of epochs that iterations take, if both numbers are known."""
    return ceil(iterations / length) if iterations and length else None


def num_epochs(state: State[Any, Any]) -> int | None:
    """Return the number of epochs of a run, if known."""
    return epochs_of(state.max_iters, state.epoch_length) if state.max_epochs is None else state.max_epochs
