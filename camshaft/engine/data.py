"""The data of a run: the current pass, the position in it, seeking, and samplers that follow the epochs."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from camshaft.engine.dispatch import Plan
from camshaft.engine.events import Events
from camshaft.text import counted
from camshaft.types import Stateful

if TYPE_CHECKING:
    from camshaft.engine.engine import Engine
    from camshaft.engine.progress import Progress

Position = Mapping[str, Any]
_REREAD = (SequentialSampler, RandomSampler, DistributedSampler)  # samplers of torch that restart with each pass
_DEEPEST = 8  # nested batch samplers; limited, because an object that invents attributes has no end
_SILENT = Plan(None, None)


def length_of(data: Any) -> int | None:
    """Return ``len(data)``, or ``None`` if it has no length.

    >>> length_of([1, 2]), length_of(iter([1, 2])), length_of(None)
    (2, None, None)
    """
    try:
        return len(data)
    except TypeError:  # loaders over data without a length raise it too
        return None


def batch_size_of(data: Any) -> int | None:
    """Return how many samples all ranks take in an iteration over a stream; ``None`` if that is not known."""
    size = getattr(data, "total_batch_size", None) or getattr(data, "batch_size", None)
    return size if type(size) is int and length_of(data) is None else None


def announce_epoch(data: Any, number: int) -> None:
    """Call ``set_epoch(number)`` on the dataset, the samplers, and the batch samplers of a loader that have it."""
    for part in (getattr(data, "dataset", None), *samplers_of(data)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(number)


def samplers_of(data: Any) -> list[Any]:
    """Return the samplers and batch samplers of a loader, each once."""
    samplers = [getattr(data, "sampler", None)]
    wrapper = getattr(data, "batch_sampler", None)
    for _ in range(_DEEPEST):  # a batch sampler may wrap another one, and each may hold a sampler
        samplers += [wrapper, getattr(wrapper, "sampler", None)]
        wrapper = getattr(wrapper, "batch_sampler", None)
    return list({id(sampler): sampler for sampler in samplers}.values())


def exact_batches(data: Any) -> Any:
    """Return the batch sampler of a loader if it can start at any sample: its class has ``position`` and ``seek``.

    Batches that a loader yields out of order have no position.
    """
    sampler = getattr(data, "batch_sampler", None) if getattr(data, "in_order", True) else None
    kind = type(sampler)  # the class, as a mock has every attribute
    return sampler if callable(getattr(kind, "position", None)) and callable(getattr(kind, "seek", None)) else None


def has_own_state(data: Any) -> bool:
    """Return whether data save their position themselves, which is always the present one."""
    return isinstance(data, Stateful) and exact_batches(data) is None


def can_start_anywhere(data: Any) -> bool:
    """Return whether data can start at a position, including one that was saved for other data."""
    is_exact = exact_batches(data) is not None
    return is_exact or isinstance(data, Stateful) or getattr(data, "is_skipped_forward", False)


# --- seeking -----------------------------------------------------------------------------------------------------


def open_at(data: Any, position: Position) -> tuple[Iterator[Any], int]:
    """Start a pass at a position; return it, and the number of batches of the pass before it.

    Raises:
        ValueError: the position belongs to other data.
    """
    sampler = exact_batches(data)
    if sampler is not None and "consumed" in position:
        _, left_out = sampler.seek(position)
        return iter(data), left_out
    batches: int = position.get("batches", 0)
    has_state = isinstance(data, Stateful)  # a variable, as isinstance would narrow the type of data
    if has_state and "state" in position:
        data.load_state_dict(position["state"])
        return iter(data), batches
    if not batches or not getattr(data, "is_skipped_forward", False):
        return iter(data), 0
    warnings.warn(
        f"the data cannot seek; skipping {counted(batches, 'batch')} to resume. Unless the data come in the same order "
        "again, they are not the batches that the run had before. Loaders of auto_dataloader over a sized dataset, and "
        "loaders with state_dict and load_state_dict, need no skipping",
        stacklevel=2,
    )
    iterator = iter(data)
    return iterator, sum(1 for _ in itertools.islice(iterator, batches))


def warn_of_new_pass(data: Any, done: int) -> None:
    """Warn if a run resumes in the middle of an epoch but its data are read from their beginning."""
    if not done % (length_of(data) or done + 1):
        return
    if isinstance(data, Iterator) or isinstance(getattr(data, "dataset", None), IterableDataset):
        place = "from where they are now, unless you have moved them forward"
    elif _is_reread(data):
        place = "from the beginning"
    else:
        return
    hint = (
        "make the loader with auto_dataloader, use one with state_dict and load_state_dict, or a DeterministicEngine"
        if exact_batches(data) is None
        else "the loaded state has no position in the data, as those of PyTorch-Ignite"
    )
    warnings.warn(
        f"the run resumes after {counted(done, 'iteration')} of an epoch, but its data are read {place}: in this epoch "
        f"some samples are seen twice or never; {hint}",
        stacklevel=2,
    )


def _is_reread(data: Any) -> bool:
    """Return whether each pass over a loader is known to read all of its samples, each once."""
    sampler = getattr(data, "sampler", None)
    is_of_torch = isinstance(sampler, _REREAD) and not getattr(sampler, "replacement", False)
    return exact_batches(data) is not None or (
        is_of_torch and type(getattr(data, "batch_sampler", None)) is BatchSampler
    )


def seek_with_new_length(data: Any, position: Position | None, epoch_length: int | None) -> tuple[int, int, int] | None:
    """Find a position in a loader that now makes more or fewer batches per epoch than when it was saved.

    Returns:
        The number of the pass, the batches of it before the position, and the new length of an epoch; ``None`` if the
        length has not changed.

    Raises:
        ValueError: the position belongs to other data.
    """
    if position is None or "consumed" not in position:
        return None
    sampler = exact_batches(data)
    if sampler is None:
        raise ValueError(
            "the state was saved with a loader that starts at any sample, and data must be one now, such as "
            f"auto_dataloader makes, got {type(data).__name__}; to start the epoch from its beginning, leave "
            "'position' out of the state dict"
        )
    number, left_out = sampler.seek(position)
    length = length_of(data)
    if length is None or epoch_length != position["steps"] or length == epoch_length:
        return None
    return number, left_out, length


# --- the current pass --------------------------------------------------------------------------------------------


class DataIterator:
    """The current pass over ``state.dataloader``. A pass may be shorter or longer than an epoch.

    Args:
        engine: the engine that consumes the data.

    Attributes:
        iterator: the live iterator, or ``None`` if the next epoch is to start a pass.
        fetching: plan of ``GET_BATCH_STARTED``, or a silent one without data.
        fetched: plan of ``GET_BATCH_COMPLETED``, likewise.
        has_started: whether the first pass of the run has started.
        start: the progress from which the run starts, until its first pass has started.
        warns: whether to warn if the first pass is read from its beginning in the middle of an epoch.
    """

    skips_forward = False  # whether data that cannot seek are read up to the position when a run resumes

    def __init__(self, engine: Engine[Any, Any]) -> None:
        self.engine = engine
        self.iterator: Iterator[Any] | None = None
        self.fetching = self.fetched = _SILENT
        self.has_started = False
        self.start: Progress | None = None
        self.warns = False
        self._cut_after: int | None = None  # iterations of the last epoch, if it was cut short
        self._is_shifted = False  # the pass began in the middle of an epoch, although each epoch is a pass
        self._announced: tuple[Any, int] | None = None  # the data, and the number
        self._usual_length: int | None = None  # batches of the last pass over data without a length
        self._number = -1
        self._first_iteration = 0
        self._length: int | None = None
        self._exact: Any = None  # the batch sampler, if it can start at any sample,
        self._pass: dict[str, Any] = {}  # and its pass, which others that read the same loader do not change
        self._share: Callable[..., float] | None = None

    def open(self) -> int:
        """Start a pass; return the number of its batches that the run already had."""
        state, skipped = self.engine.state, 0
        if state.dataloader is None:
            self.iterator = itertools.repeat(None)
            return 0
        self.announce()
        number = self._next_number()
        if self.has_started:
            iterator = self.open_pass(number, self._cut_after)
        else:
            iterator, skipped = self.open_first_pass()
        length = length_of(state.dataloader)
        if self.start is not None and length and length == state.epoch_length:
            is_in_epoch = self.start.position is None and self.start.done % length and _is_reread(state.dataloader)
            self._is_shifted = bool(is_in_epoch or (self.start.position or {}).get("shifted"))
        if self.start is not None and self.start.position is not None and length is None:
            length = self.start.position.get("steps")
        self._take(iterator, number, length, skipped)
        self.has_started, self.start, self._cut_after = True, None, None
        return skipped

    def open_first_pass(self) -> tuple[Iterator[Any], int]:
        """Open the first pass of the run; return it, and the number of its batches that the run already had."""
        assert self.start is not None, "the run has started"
        data, position = self.engine.state.dataloader, self.start.position
        assert data is not None, "there are passes over data only"
        if position is None and self.warns:
            warn_of_new_pass(data, self.start.done)
        return (iter(data), 0) if position is None else open_at(data, position)

    def open_pass(self, number: int, cut_after: int | None) -> Iterator[Any]:
        """Open a later pass.

        Args:
            number: of the pass, starting at 0.
            cut_after: iterations of the last epoch, if it was cut short.
        """
        assert self.engine.state.dataloader is not None, "there are passes over data only"
        return iter(self.engine.state.dataloader)

    def ran_out(self) -> None:
        """Record the length of the pass, for data without a length."""
        if self._length is None:
            self._length = self._usual_length = self._given()

    def is_whole(self, done: int) -> bool:
        """Return whether the pass has ``done`` batches, all of those of the epoch."""
        return self._given() == done or isinstance(self.engine.state.dataloader, Iterator)

    def cut(self, done: int) -> None:
        """Abandon the pass; the next epoch starts another one."""
        if self.iterator is not None:
            self.iterator, self._cut_after = None, done

    def end_epoch(self, done: int) -> None:
        """Abandon a pass that began in the middle of the epoch, so that later epochs have each sample once."""
        if self._is_shifted:
            self._is_shifted = False
            self.cut(done)

    def replace(self, data: Any) -> None:
        """Continue with other data, at once if a pass is live; with the previous ones if they cannot be opened."""
        state = self.engine.state
        previous, state.dataloader = state.dataloader, data
        self._usual_length = None
        if self.iterator is not None:
            self.announce()
            number = self._next_number()
            try:
                iterator = self.open_pass(number, None)
            except BaseException:
                state.dataloader = previous
                raise
            self._take(iterator, number, length_of(data))

    def announce_if_over(self) -> None:
        """Announce the number of the next pass if the next fetch starts one, as far as is known.

        This precedes ``EPOCH_STARTED``, so that a handler may call ``set_epoch`` with another number. Data without a
        length are assumed to yield as many batches as in the pass before.
        """
        length = self._usual_length if self._length is None else self._length
        if self.iterator is None or (length is not None and self._given() >= length):
            self.announce()

    def announce(self) -> None:
        """Announce the number of the next pass to the dataset and the samplers, once."""
        data, number = self.engine.state.dataloader, self._next_number()
        if self._announced is None or self._announced[0] is not data or self._announced[1] != number:
            announce_epoch(data, number)
            self._announced = data, number

    def position(self, back: int = 0) -> Position | None:
        """Return the position, ``back`` batches ago; ``None`` if a resumed run reads the data from their beginning."""
        data = self.engine.state.dataloader
        if data is None or not self.has_started:
            return None if self.start is None else self.start.position
        batches = self._given() - back
        over = self.iterator is None or (self._length is not None and batches >= self._length)
        if self._exact is not None:
            if self._is_shifted and self.engine.iteration_in_epoch - back >= (self._length or 0):
                over = True  # once the epoch has ended, the pass is abandoned
            position: Position = self._exact.position(batches, over=over, **self._pass)
            return {**position, "shifted": True} if self._is_shifted and position["consumed"] else position
        if isinstance(data, Stateful):
            if over or not batches:
                return None
            return {"epoch": self._number, "batches": batches, "state": data.state_dict()}
        is_skipped = self.skips_forward or getattr(data, "is_skipped_forward", False)
        if not is_skipped or (self._length is None and not batches):
            return None
        return {"epoch": self._number + over, "batches": 0 if over else batches, "steps": self._length}

    def completed_by_all(self, progress: Progress, start: Progress | None) -> Progress:
        """Return the progress that all ranks that share the data have made, which is at least ``start``.

        With ``None``, the run has ended, and the others are told so.
        """
        shared = getattr(self._exact, "completed_by_all", None)
        least: Progress = progress if shared is None else shared(self.engine.run_number, progress, start)
        return least

    def share(self) -> float:
        """Return the size of this rank's batch over the mean size of those of all ranks."""
        return 1.0 if self._share is None else self._share(self._given() - 1, **self._pass)

    def _next_number(self) -> int:
        """Return the number of the next pass: from the counters, so that resumed runs agree, without repetition."""
        state, position = self.engine.state, None if self.start is None else self.start.position
        if position is not None and "epoch" in position:
            number: int = position["epoch"]
            return number
        length = length_of(state.dataloader)
        by_epoch = not length or length == state.epoch_length
        return max(state.epoch - 1 if by_epoch else state.iteration // (length or 1), self._number + 1)

    def _given(self) -> int:
        """Return the number of batches of this pass that iterations have begun with."""
        return self.engine.state.iteration - self._first_iteration

    def _take(self, iterator: Iterator[Any], number: int, length: int | None, skipped: int = 0) -> None:
        self.iterator, self._number, self._length = iterator, number, length
        self._first_iteration = self.engine.state.iteration - skipped
        sampler = self._exact = exact_batches(self.engine.state.dataloader)
        self._pass = {"of": sampler.current_pass()} if hasattr(sampler, "current_pass") else {}
        self._share = sampler.share if sampler is not None and sampler.num_replicas > 1 else None
        plans = self.engine._dispatcher.plans
        self.fetching, self.fetched = plans[Events.GET_BATCH_STARTED], plans[Events.GET_BATCH_COMPLETED]
        self._announced = None
