"""Data of a run, by kind: how a pass is opened, where it is, and whether it can start in the middle."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
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
from camshaft.engine.progress import Position, Progress
from camshaft.text import counted
from camshaft.types import Stateful

if TYPE_CHECKING:
    from camshaft.engine.engine import Engine

Place = tuple[int, int, int | None]
"""The number of a pass, batches of it, and the batches of an epoch, if known."""

_SILENT = Plan(None, None)
_REREAD = (SequentialSampler, RandomSampler, DistributedSampler)  # samplers of torch that restart with each pass
_DEEPEST = 8  # nested batch samplers; limited, because an object that invents attributes has no end


class Source:
    """Data that are read from their beginning in each pass, as lists and loaders of torch are, or to their end.

    Args:
        data: any iterable, or ``None`` for batches that are ``None``.

    Attributes:
        data: the data.
        can_seek: whether a pass can start at a position, also one that was saved for other data.
        saves_itself: whether the data save their position, which is always the present one.
        is_past: whether the data cannot return a batch again.
    """

    can_seek = saves_itself = False

    def __init__(self, data: Any) -> None:
        self.data = data
        self.is_past = self.saves_itself or isinstance(data, Iterator)

    def locate(self, position: Position | None, epoch_length: int | None, done: int) -> Place | None:
        """Find a position in data that now have other batches than when it was saved.

        Args:
            position: the position.
            epoch_length: the batches of an epoch when it was saved.
            done: those done in the epoch, which are those of the pass unless epochs are no passes.

        Returns:
            The number of the pass, the batches of it before the position, and the new length of an epoch, if it is
            known; ``None`` if nothing has changed.

        Raises:
            ValueError: the position is one in other data.
        """
        if position is not None and "consumed" in position:
            raise ValueError(
                "the state was saved with a loader that starts at any sample, and data must be one now, such as "
                f"auto_dataloader makes, got {type(self.data).__name__}; to start the epoch from its beginning, leave "
                "'position' out of the state dict"
            )
        return None

    def open(self, position: Position | None = None) -> tuple[Iterator[Any], int]:
        """Start a pass, at a position if these data can; return it, and the number of its batches before that."""
        return itertools.repeat(None) if self.data is None else iter(self.data), 0

    def position(self, number: int, batches: int, length: int | None, over: bool) -> Position | None:
        """Return a place in the pass that was opened last; ``None`` if a resumed run reads the data from the beginning.

        Args:
            number: of the pass.
            batches: those of the pass that the run has had.
            length: batches of the pass, if known.
            over: whether the rest of the pass is abandoned.
        """
        return None

    def share(self, batch: int) -> float:
        """Return the size of a batch of the pass on this rank over the mean of those on all ranks."""
        return 1.0

    def completed_by_all(self, run: int, progress: Progress, start: Progress | None) -> Progress:
        """Return the progress that all ranks that share the data have made, which is at least ``start``.

        With ``None``, the run has ended, and the others are told so.
        """
        return progress


class Seekable(Source):
    """A loader whose batch sampler starts at any sample, as those of ``auto_dataloader`` over a sized dataset."""

    can_seek = True

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self._sampler = exact_batches(data)
        self._pass: dict[str, Any] = {}  # which others that read the same loader do not change

    def locate(self, position: Position | None, epoch_length: int | None, done: int) -> Place | None:
        """Find a position in data that now have other batches than when it was saved."""
        if position is None or "consumed" not in position:
            return None
        number, left_out = self._sampler.seek(position)
        length = length_of(self.data)
        if length is None or epoch_length != position["steps"]:
            return None
        is_of_epoch = position.get("batches") == done  # else epochs are no longer passes, as after a handled error
        return None if length == epoch_length and not is_of_epoch else (number, left_out, length)

    def open(self, position: Position | None = None) -> tuple[Iterator[Any], int]:
        """Start a pass, at a position or from the beginning."""
        skipped = self._sampler.seek(position)[1] if position is not None and "consumed" in position else 0
        iterator = iter(self.data)
        self._pass = {"of": self._sampler.current_pass()} if hasattr(self._sampler, "current_pass") else {}
        return iterator, skipped

    def position(self, number: int, batches: int, length: int | None, over: bool) -> Position | None:
        """Return a place in the pass, in samples of all ranks, which any number of ranks can continue from."""
        position: dict[str, Any] = self._sampler.position(batches, over=over, **self._pass)
        return {**position, "batches": batches if position["consumed"] else 0}

    def share(self, batch: int) -> float:
        """Return the size of a batch of the pass on this rank over the mean of those on all ranks."""
        return 1.0 if self._sampler.num_replicas == 1 else self._sampler.share(batch, **self._pass)

    def completed_by_all(self, run: int, progress: Progress, start: Progress | None) -> Progress:
        """Return the progress that all ranks that share the data have made."""
        shared = getattr(self._sampler, "completed_by_all", None)
        return progress if shared is None else shared(run, progress, start)


class WithState(Source):
    """Data that save and load their own position, which is always the present one."""

    can_seek = saves_itself = True

    def open(self, position: Position | None = None) -> tuple[Iterator[Any], int]:
        """Start a pass, from a state of the data if there is one."""
        if position is None or "state" not in position:
            return super().open()
        self.data.load_state_dict(position["state"])
        return iter(self.data), position.get("batches", 0)

    def position(self, number: int, batches: int, length: int | None, over: bool) -> Position | None:
        """Return the state of the data."""
        if over or not batches:
            return None
        return {"epoch": number, "batches": batches, "state": self.data.state_dict()}


class Skipped(Source):
    """Data whose batches are loaded and discarded up to a position, as loaders over streams."""

    can_seek = True

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        size = getattr(data, "total_batch_size", None) or getattr(data, "batch_size", None)
        self._size = size if type(size) is int and length_of(data) is None else None  # samples of all ranks

    def locate(self, position: Position | None, epoch_length: int | None, done: int) -> Place | None:
        """Find a position in batches of another size; their number per epoch is not known before the first pass."""
        super().locate(position, epoch_length, done)
        if position is None or position.get("size") in (None, self._size):
            return None
        return position["epoch"], self._batches_before(position), None

    def open(self, position: Position | None = None) -> tuple[Iterator[Any], int]:
        """Start a pass, and skip the batches before a position."""
        batches = 0 if position is None else self._batches_before(position)
        if not batches:
            return super().open()
        warnings.warn(
            f"the data cannot seek; skipping {counted(batches, 'batch')} to resume. Unless the data come in the same "
            "order again, they are not the batches that the run had before. Loaders of auto_dataloader over a sized "
            "dataset, and loaders with state_dict and load_state_dict, need no skipping",
            stacklevel=2,
        )
        iterator = iter(self.data)
        return iterator, sum(1 for _ in itertools.islice(iterator, batches))

    def position(self, number: int, batches: int, length: int | None, over: bool) -> Position | None:
        """Return the number of the pass, and of its batches."""
        if length is None and not batches:
            return None
        return {"epoch": number + over, "batches": 0 if over else batches, "steps": length, "size": self._size}

    def _batches_before(self, position: Position) -> int:
        batches, size = position.get("batches", 0), position.get("size")
        return int(batches if self._size is None or size is None else batches * size // self._size)


def source_of(data: Any, plain: type[Source] = Source) -> Source:
    """Return data by their kind, with ``plain`` for those that have no position."""
    if exact_batches(data) is not None:
        return Seekable(data)
    if isinstance(data, Stateful):
        return WithState(data)
    return Skipped(data) if getattr(data, "is_skipped_forward", False) else plain(data)


# --- the passes of a run -----------------------------------------------------------------------------------------


class Passes:
    """The passes of a run over ``state.dataloader``. A pass may be shorter or longer than an epoch.

    Args:
        engine: the engine that consumes the data.

    Attributes:
        source: the data that are read.
        iterator: the live iterator, or ``None`` if the next epoch is to start a pass.
        before_fetch: plan of ``GET_BATCH_STARTED``, or a silent one without data.
        after_fetch: plan of ``GET_BATCH_COMPLETED``, likewise.
        has_started: whether the first pass of the run has started.
        start: the progress from which the run starts, until its first pass has started.
        warns: whether to warn if the first pass is read from its beginning in the middle of an epoch.
    """

    plain = Source  # for data that have no position

    def __init__(self, engine: Engine[Any, Any]) -> None:
        self.engine = engine
        self.source = Source(None)
        self.iterator: Iterator[Any] | None = None
        self.before_fetch = self.after_fetch = _SILENT
        self.has_started = self.warns = False
        self.start: Progress | None = None
        self._cut_after: int | None = None  # iterations of the last epoch, if it was cut short
        self._is_shifted = False  # the pass began in the middle of an epoch, although each epoch is a pass
        self._numbered: tuple[Any, int] | None = None  # the data, and the number
        self._usual_length: int | None = None  # batches of the last pass over data without a length
        self._number = -1
        self._first_iteration = 0
        self._length: int | None = None

    def open(self) -> int:
        """Start a pass; return the number of its batches that the run already had."""
        data, start, skipped = self.engine.state.dataloader, self.start, 0
        if data is None:
            self.iterator, _ = self.source.open()
            return 0
        self.set_epoch()
        number = self._next_number()
        if start is None or self.has_started:
            iterator = self.open_pass(number, self._cut_after)
        else:
            iterator, skipped = self.open_first_pass(start)
        data = self.engine.state.dataloader  # which may be a copy of the loader
        length = length_of(data)
        if start is not None and length and length == self.engine.state.epoch_length:
            is_in_epoch = start.position is None and start.done % length and is_reread(data)
            self._is_shifted = bool(is_in_epoch or (start.position or {}).get("shifted"))
        if start is not None and start.position is not None and length is None:
            length = start.position.get("steps")
        self._take(iterator, number, length, skipped)
        self.has_started, self.start, self._cut_after = True, None, None
        return skipped

    def open_first_pass(self, start: Progress) -> tuple[Iterator[Any], int]:
        """Open the first pass of the run; return it, and the number of its batches that the run already had."""
        source = self.present_source()
        if start.position is None and self.warns:
            warn_of_new_pass(source.data, start.done)
        return source.open(start.position)

    def open_pass(self, number: int, cut_after: int | None) -> Iterator[Any]:
        """Open a later pass.

        Args:
            number: of the pass, starting at 0.
            cut_after: iterations of the last epoch, if it was cut short.
        """
        return self.present_source().open()[0]

    def present_source(self) -> Source:
        """Return the data, which a handler may have replaced in the state."""
        data = self.engine.state.dataloader
        if self.source.data is not data:
            self.source = source_of(data, self.plain)
        return self.source

    def ran_out(self) -> None:
        """Record the length of the pass, for data without a length."""
        if self._length is None:
            self._length = self._usual_length = self._given()

    def is_whole(self, done: int) -> bool:
        """Return whether the pass has ``done`` batches, all of those of the epoch."""
        return self._given() == done or isinstance(self.source.data, Iterator)

    def cut(self, done: int) -> None:
        """Abandon the pass, also one that has not been opened yet; the next epoch starts another one."""
        if self.iterator is not None or self.start is not None:
            self.iterator, self.start, self._cut_after = None, None, done

    def lose(self) -> None:
        """Count a batch that no iteration will begin with."""
        self._first_iteration -= 1

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
            self.set_epoch()
            number = self._next_number()
            try:
                iterator = self.open_pass(number, None)
            except BaseException:
                state.dataloader = previous
                raise
            self._take(iterator, number, length_of(data))

    def set_epoch_if_over(self) -> None:
        """Set the number of the next pass if the next fetch starts one, as far as is known.

        This precedes ``EPOCH_STARTED``, so that a handler may call ``set_epoch`` with another number. Data without a
        length are assumed to yield as many batches as in the pass before.
        """
        length = self._usual_length if self._length is None else self._length
        if self.iterator is None or (length is not None and self._given() >= length):
            self.set_epoch()

    def set_epoch(self) -> None:
        """Call ``set_epoch`` of the dataset and the samplers with the number of the next pass, once."""
        data, number = self.engine.state.dataloader, self._next_number()
        if self._numbered is None or self._numbered[0] is not data or self._numbered[1] != number:
            for part in (getattr(data, "dataset", None), *samplers_of(data)):
                if callable(set_epoch := getattr(part, "set_epoch", None)):
                    set_epoch(number)
            self._numbered = data, number

    def position(self, back: int = 0) -> Position | None:
        """Return the position, ``back`` batches ago; ``None`` if a resumed run reads the data from their beginning."""
        if not self.has_started:
            return None if self.start is None else self.start.position
        batches = self._given() - back
        over = self.iterator is None or (self._length is not None and batches >= self._length)
        if self.source.saves_itself and self._numbered is not None:
            over = True  # the data know the number of the next pass already, and their state is none of this one
        if self._is_shifted and self.engine.iteration_in_epoch - back >= (self._length or 0):
            over = True  # once the epoch has ended, the pass is abandoned
        position = self.source.position(self._number, batches, self._length, over)
        return {**position, "shifted": True} if self._is_shifted and position and position.get("consumed") else position

    def share(self) -> float:
        """Return the size of this rank's batch over the mean size of those of all ranks."""
        return self.source.share(self._given() - 1)

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
        self.present_source()
        plans = self.engine._dispatcher.plans
        self.before_fetch, self.after_fetch = plans[Events.GET_BATCH_STARTED], plans[Events.GET_BATCH_COMPLETED]
        self._numbered = None


# --- loaders -----------------------------------------------------------------------------------------------------


def length_of(data: Any) -> int | None:
    """Return ``len(data)``, or ``None`` if it has no length.

    >>> length_of([1, 2]), length_of(iter([1, 2])), length_of(None)
    (2, None, None)
    """
    try:
        return len(data)
    except TypeError:  # loaders over data without a length raise it too
        return None


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


def warn_of_new_pass(data: Any, done: int) -> None:
    """Warn if a run resumes in the middle of an epoch but its data are read from their beginning."""
    if not done % (length_of(data) or done + 1):
        return
    if isinstance(data, Iterator) or isinstance(getattr(data, "dataset", None), IterableDataset):
        place = "from where they are now, unless you have moved them forward"
    elif is_reread(data):
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


def is_reread(data: Any) -> bool:
    """Return whether each pass over a loader is known to read all of its samples, each once."""
    sampler = getattr(data, "sampler", None)
    is_of_torch = isinstance(sampler, _REREAD) and not getattr(sampler, "replacement", False)
    return exact_batches(data) is not None or (
        is_of_torch and type(getattr(data, "batch_sampler", None)) is BatchSampler
    )
