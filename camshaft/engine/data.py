"""The data of a run: the live pass over them, the place in it, and samplers that want to know the epoch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from camshaft.engine.event import Events
from camshaft.engine.plan import Plan
from camshaft.types import Stateful

if TYPE_CHECKING:
    from camshaft.engine.engine import Engine

Position = Mapping[str, Any]
_REREAD = (SequentialSampler, RandomSampler, DistributedSampler)  # of torch's, which start each pass at its beginning
_DEEPEST = 8  # batch samplers within each other; an object that invents attributes has no end
_SILENT = Plan(None, None)


def length_of(data: Any) -> int | None:
    """Return ``len(data)``, or ``None`` where there is none.

    >>> length_of([1, 2]), length_of(iter([1, 2])), length_of(None)
    (2, None, None)
    """
    try:
        return len(data)
    except TypeError:  # also what loaders over data without a length raise
        return None


def check_iterable(data: Any) -> None:
    """Refuse data that cannot be iterated over."""
    if not isinstance(data, Iterable):
        raise TypeError(f"data must be iterable, got {data!r} of type {type(data).__name__}")


def announce_epoch(data: Any, number: int) -> None:
    """Call ``set_epoch(number)`` on the samplers and batch samplers of a loader that have it."""
    called: list[Any] = []
    for sampler in _samplers(data):
        if not any(sampler is one for one in called) and callable(getattr(sampler, "set_epoch", None)):
            called.append(sampler)
            sampler.set_epoch(number)


def _samplers(data: Any) -> Iterator[Any]:
    """Walk the chain of samplers: a batch sampler may wrap another one, and each may hold a sampler."""
    yield getattr(data, "sampler", None)
    wrapper = getattr(data, "batch_sampler", None)
    seen: list[Any] = []
    while wrapper is not None and len(seen) < _DEEPEST and not any(wrapper is one for one in seen):
        seen.append(wrapper)
        yield wrapper
        yield getattr(wrapper, "sampler", None)
        wrapper = getattr(wrapper, "batch_sampler", None)


def exact_batches(data: Any) -> Any:
    """Return the batch sampler of a loader if it can start at any sample: its class has ``position`` and ``seek``."""
    sampler = getattr(data, "batch_sampler", None)
    kind = type(sampler)  # of the class: a mock has every attribute
    return sampler if callable(getattr(kind, "position", None)) and callable(getattr(kind, "seek", None)) else None


def can_start_anywhere(data: Any) -> bool:
    """Return whether data can start at a position, also new data in the place of those that it was of."""
    is_exact = exact_batches(data) is not None
    return is_exact or isinstance(data, Stateful) or getattr(data, "is_skipped_forward", False)


# --- the place in the data ---------------------------------------------------------------------------------------


def open_at(data: Any, position: Position) -> tuple[Iterator[Any], int]:
    """Start a pass at a position; return it, and how many batches of the pass are left out.

    Raises:
        ValueError: the position is of other data.
    """
    sampler = exact_batches(data)
    if sampler is not None and "consumed" in position:
        _, left_out = sampler.seek(position)
        return iter(data), left_out
    batches: int = position.get("batches", 0)
    has_state = isinstance(data, Stateful)  # in a variable, as data are iterable, too
    if has_state and "state" in position:
        data.load_state_dict(position["state"])
        return iter(data), batches
    if not batches or not getattr(data, "is_skipped_forward", False):
        return iter(data), 0
    warnings.warn(
        f"the data cannot start in the middle: {batches} batches are loaded and thrown away, and only if the data come "
        "in the same order again are those the ones that the run had before; auto_dataloader over a dataset with a "
        "length and loaders with state_dict and load_state_dict need no skipping",
        stacklevel=2,
    )
    iterator = iter(data)
    return iterator, sum(1 for _ in itertools.islice(iterator, batches))


def warn_of_new_pass(data: Any, done: int) -> None:
    """Warn where a saved run resumes in the middle of an epoch, and its data are read from where they begin."""
    if not done % (length_of(data) or done + 1):
        return
    if isinstance(data, Iterator) or isinstance(getattr(data, "dataset", None), IterableDataset):
        warnings.warn(
            f"the run resumes after {done} iterations of an epoch, but a {type(data).__name__} without state_dict is "
            "read from where it is now: unless you have moved it forward, some samples are seen twice; make the loader "
            "with auto_dataloader, which skips forward, or use a loader with state_dict and load_state_dict",
            stacklevel=2,
        )
    if not isinstance(data, DataLoader):
        return
    sampler = data.sampler
    is_reread = isinstance(sampler, _REREAD) and not getattr(sampler, "replacement", False)
    if exact_batches(data) is not None or (type(data.batch_sampler) is BatchSampler and is_reread):
        warnings.warn(
            f"the run resumes after {done} iterations of an epoch, but its loader starts from the beginning: in this "
            "epoch some samples are seen twice and others never; make the loader with auto_dataloader and load a state "
            "with its position, or use a DeterministicEngine",
            stacklevel=2,
        )


def recount(data: Any, position: Position, epoch: int, epoch_length: int | None) -> tuple[int, int, int] | None:
    """Count iterations anew, if the loader now makes more or fewer batches of an epoch than when it was saved.

    Returns:
        The epochs and the iterations of the next epoch that are completed, and the new length of an epoch; ``None``
        where the counts stay as they are.

    Raises:
        ValueError: the position is of other data.
    """
    if "consumed" not in position:
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
    return epoch + number - position["epoch"], left_out, length


# --- the live pass -------------------------------------------------------------------------------------------------


class DataIterator:
    """The live pass over ``state.dataloader``; a pass may be shorter or longer than an epoch.

    Args:
        engine: the engine that consumes the data.

    Attributes:
        start: where the first pass starts, or ``None`` for its beginning.
        iterator: the live iterator, ``None`` when the next epoch is to start a pass.
        begun: whether the first pass has begun.
        fetching: the plan of ``GET_BATCH_STARTED``, or a silent one without data.
        fetched: the plan of ``GET_BATCH_COMPLETED``, likewise.
        cut_after: iterations of the last epoch, if it was cut short and so starts a new pass; else ``None``.
    """

    def __init__(self, engine: Engine[Any, Any]) -> None:
        self.engine = engine
        self.start: Position | None = None
        self.iterator: Iterator[Any] | None = None
        self.cut_after: int | None = None
        self.begun = False
        self.fetching = self.fetched = _SILENT
        self._announced: Any = None
        self._number = -1
        self._first_iteration = 0
        self._length: int | None = None
        self._exact: Any = None  # the batch sampler, if it can start at any sample,
        self._pass: dict[str, Any] = {}  # and its pass, which others that read the same loader do not change
        self._shares: Callable[..., float] | None = None

    def open(self) -> int:
        """Start a pass; return how many batches of it are left out, as the run had them before."""
        engine = self.engine
        if engine.state.dataloader is None:
            self.iterator = repeat(None)
            self.fetching = self.fetched = _SILENT
            return 0
        self.announce()
        number, skipped = self.next_number(), 0
        if self.begun:
            self.iterator = engine._open_pass(number, self.cut_after)
        else:
            self.iterator, skipped = engine._open_first_pass(self.start)
        self._number, self.begun, self.cut_after = number, True, None
        self._opened()
        length = length_of(engine.state.dataloader)
        if self.start is not None:
            length = self.start.get("steps") if length is None else length
            self.start = None
        self._first_iteration = engine.state.iteration - skipped
        self._length = length
        return skipped

    def ran_out(self) -> None:
        """Take the end of the pass for the length of a pass over these data, if they have none."""
        if self._length is None:
            self._length = self._given()

    def cut(self, done: int) -> None:
        """Give up the pass; the next epoch starts another one."""
        if self.iterator is not None:
            self.iterator, self.cut_after = None, done

    def replace(self, data: Any) -> None:
        """Continue with other data, now if a pass is live."""
        state = self.engine.state
        previous, state.dataloader = state.dataloader, data
        if self.iterator is not None:
            self.announce()
            number = self.next_number()
            try:
                self.iterator = self.engine._open_pass(number, None)
            except BaseException:
                state.dataloader = previous
                raise
            self._number = number
            self._opened()
            self._first_iteration, self._length = state.iteration, length_of(data)

    def shift(self, iterations: int) -> None:
        """Keep the place in the pass although ``state.iteration`` counts otherwise now."""
        self._first_iteration += iterations

    def announce_if_over(self) -> None:
        """Announce the number of the next pass, if it is known that the next fetch starts one.

        This comes before ``EPOCH_STARTED``, so that a handler may call ``set_epoch`` with a number of its own.
        """
        if self.iterator is None or (self._length is not None and self._given() >= self._length):
            self.announce()

    def announce(self) -> None:
        """Announce the number of the next pass to the samplers, once."""
        data = self.engine.state.dataloader
        if self._announced is not data:
            announce_epoch(data, self.next_number())
            self._announced = data

    def next_number(self) -> int:
        """Return the number of the next pass: from the counters, so that resumed runs agree, and never one twice."""
        if not self.begun and self.start is not None and "epoch" in self.start:
            number: int = self.start["epoch"]
            return number
        state = self.engine.state
        length = length_of(state.dataloader)
        by_epoch = not length or length == state.epoch_length
        number = state.epoch - 1 if by_epoch else state.iteration // (length or 1)
        return max(number, self._number + 1)

    def can_return(self, batches: int) -> bool:
        """Return whether :meth:`position` is known as it was some batches ago."""
        if not self.begun or self.engine.state.dataloader is None:
            return True
        data = self.engine.state.dataloader
        is_exact = exact_batches(data) is not None
        return batches <= self._given() and (is_exact or not isinstance(data, Stateful))

    def position(self, back: int = 0) -> Position | None:
        """Return the place in the data, some batches ago; ``None`` where the next pass starts at its beginning."""
        data = self.engine.state.dataloader
        if data is None or not self.begun:
            return self.start
        batches = self._given() - back
        over = self.iterator is None or (self._length is not None and batches >= self._length)
        if self._exact is not None:
            position: Position = self._exact.position(batches, over=over, **self._pass)
            return position
        if isinstance(data, Stateful):
            return {"batches": batches, "state": data.state_dict()} if batches and not over else None
        is_skipped = self.engine._has_positions or getattr(data, "is_skipped_forward", False)
        if not is_skipped or (self._length is None and not batches):
            return None
        return {"epoch": self._number + over, "batches": 0 if over else batches, "steps": self._length}

    def share(self) -> float:
        """Return the size of this rank's batch over the mean size of those of all ranks."""
        return 1.0 if self._shares is None else self._shares(self._given() - 1, **self._pass)

    def _given(self) -> int:
        """Count the batches of this pass that the run was given."""
        return self.engine.state.iteration - self._first_iteration

    def _opened(self) -> None:
        sampler = self._exact = exact_batches(self.engine.state.dataloader)
        self._pass = {"of": sampler.current_pass()} if hasattr(sampler, "current_pass") else {}
        self._shares = sampler.share if sampler is not None and sampler.num_replicas > 1 else None
        plans = self.engine._dispatcher.plans
        self.fetching, self.fetched = plans[Events.GET_BATCH_STARTED], plans[Events.GET_BATCH_COMPLETED]
        self._announced = None
