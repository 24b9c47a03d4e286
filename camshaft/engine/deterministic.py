"""An engine whose data come in a reproducible order, also when a run resumes in the middle of a pass."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from camshaft.arguments import check_type
from camshaft.engine.engine import Engine
from camshaft.engine.plan import Start
from camshaft.engine.progress import Progress
from camshaft.engine.sources import Passes, Skipped, exact_batches, length_of
from camshaft.engine.state import Batch, Output
from camshaft.seeding import (
    capture_random_state,
    manual_seed,
    preserved_random_state,
    restore_random_state,
)
from camshaft.text import counted

__all__ = ["DeterministicEngine", "ReproducibleBatchSampler", "keep_random_state", "update_dataloader"]

P = ParamSpec("P")
T = TypeVar("T")


def update_dataloader(dataloader: DataLoader[Any], new_batch_sampler: BatchSampler) -> DataLoader[Any]:
    """Return a copy of a loader with another batch sampler.

    Copying supports loaders of any class and with any attributes. Batch size and ``drop_last``, which belong to the old
    batch sampler, are reset.

    >>> loader = DataLoader(range(6), batch_size=2)
    >>> [
    ...     batch.tolist()
    ...     for batch in update_dataloader(loader, BatchSampler(range(6), 3, drop_last=False))
    ... ]
    [[0, 1, 2], [3, 4, 5]]
    """
    updated = copy.copy(dataloader)
    vars(updated).update(batch_sampler=new_batch_sampler, batch_size=None, drop_last=False, _iterator=None)
    return updated


class ReproducibleBatchSampler(BatchSampler):
    """A batch sampler that draws all batches of a pass at once, and can start with any of them.

    Args:
        batch_sampler: the batch sampler to draw from.
        start_iteration: number of batches to skip in the next pass; ``None`` for none. It applies to one pass.

    Raises:
        TypeError: ``batch_sampler`` is not a torch ``BatchSampler``.

    >>> list(ReproducibleBatchSampler(BatchSampler(range(6), 2, drop_last=False), start_iteration=1))
    [[2, 3], [4, 5]]
    """

    def __init__(self, batch_sampler: BatchSampler, start_iteration: int | None = None) -> None:
        check_type("batch_sampler", batch_sampler, BatchSampler, "a torch.utils.data.BatchSampler")
        self.batch_indices: list[Any] = []
        self.batch_sampler = batch_sampler
        self.start_iteration = start_iteration
        self.sampler = batch_sampler.sampler
        self.batch_size, self.drop_last = batch_sampler.batch_size, batch_sampler.drop_last
        self._drawn = False

    def setup_batch_indices(self) -> None:
        """Draw the batches of the current pass, before its first batch is taken."""
        self.batch_indices = list(self.batch_sampler)
        self._drawn = True

    def __iter__(self) -> Iterator[Any]:
        self._drawn = False
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        # Drawn with the first batch, after the seed that a loader draws for its workers, as PyTorch-Ignite does it. A
        # loader with workers asks for two iterators and uses the second: start_iteration applies until the first batch.
        self._draw()
        start, self.start_iteration = self.start_iteration or 0, None
        self.batch_indices = self.batch_indices[start:]
        yield from self.batch_indices

    def _draw(self) -> None:
        """Draw the batches of the current pass unless they are drawn already."""
        if not self._drawn:
            self.setup_batch_indices()

    def __len__(self) -> int:
        return len(self.batch_sampler)


def keep_random_state(func: Callable[P, T], *, devices: bool = False) -> Callable[P, T]:
    """Wrap a function so that it leaves the random number generators unchanged.

    Args:
        func: any function.
        devices: also restore the generators of GPUs, besides those of Python, torch on the CPU, and NumPy.

    >>> draw = keep_random_state(lambda: torch.rand(1).item())
    >>> draw() == draw()
    True
    """

    return preserved_random_state(devices=devices)(func)


class SeededPasses(Passes):
    """Passes that are seeded with ``state.seed`` and their number, so that a resumed run has the same batches."""

    plain = Skipped

    def open_first_pass(self, start: Progress) -> tuple[Iterator[Any], int]:
        """Open the first pass of the run, seeded, at the batch where the run resumes."""
        position, state = start.position, self.engine.state
        if position is not None and "state" in position:
            return self._with_saved_random_state(*super().open_first_pass(start))
        data = state.dataloader = _with_reproducible_batches(state.dataloader)
        exact, sampler = exact_batches(data), getattr(data, "batch_sampler", None)
        if exact is None:
            self._warn_if_epochs_drift(data)
        number, skipped = self._find_pass(start, length_of(data))
        self._seed(number)
        if exact is not None:
            exact.set_epoch(number)
            if position is None:
                of = {"of": exact.next_pass()} if hasattr(exact, "next_pass") else {}
                position = exact.position(skipped, **of)
            iterator, skipped = self.present_source().open(position)
        elif isinstance(sampler, ReproducibleBatchSampler):
            sampler.start_iteration = skipped
            iterator = iter(data)
            sampler._draw()
        else:
            iterator = self._skip(data, skipped)
        return self._with_saved_random_state(iterator, skipped)

    def open_pass(self, number: int, cut_after: int | None) -> Iterator[Any]:
        """Open a later pass, seeded."""
        state = self.engine.state
        data = state.dataloader = _with_reproducible_batches(state.dataloader)
        self._seed(number if length_of(data) else state.iteration // max(1, cut_after or 1))
        if isinstance(data, DataLoader) and data._iterator is not None:  # persistent workers draw no new seed
            torch.empty((), dtype=torch.int64).random_(generator=data.generator)
        sampler = getattr(data, "batch_sampler", None)
        iterator, _ = self.present_source().open()
        if isinstance(sampler, ReproducibleBatchSampler):
            sampler._draw()
        return iterator

    def _with_saved_random_state(self, iterator: Iterator[Any], skipped: int) -> tuple[Iterator[Any], int]:
        state = self.engine.state
        if skipped and (random_state := getattr(state, "rng_states", None)) is not None:
            restore_random_state(random_state)
        state.rng_states = None
        return iterator, skipped

    def _find_pass(self, start: Progress, length: int | None) -> tuple[int, int]:
        """Return the number of the pass in which the run starts, and its batches that the run already had."""
        position, state = start.position, self.engine.state
        if position is not None and {"epoch", "batches"} <= set(position):
            batches: int = position["batches"]
            return (state.iteration - batches if length is None else position["epoch"]), batches
        if length is None:
            return 0, state.iteration
        if length == state.epoch_length:  # right also if epochs ended early
            return start.epoch, start.done
        return divmod(state.iteration, length)

    def _skip(self, data: Iterable[Any], count: int) -> Iterator[Any]:
        """Fetch and discard batches, over as many passes as it takes."""
        iterator, skipped, is_new = iter(data), 0, False
        while skipped < count:
            if next(iterator, _NOTHING) is not _NOTHING:
                skipped, is_new = skipped + 1, False
            elif is_new:
                break
            else:
                self._seed(skipped)
                iterator, is_new = iter(data), True
        return iterator

    def _seed(self, number: int) -> None:
        assert self.engine.state.seed is not None, "drawn when the run started"
        manual_seed(self.engine.state.seed + number)

    def _warn_if_epochs_drift(self, data: Any) -> None:
        length, epoch_length = length_of(data), self.engine.state.epoch_length
        if hasattr(getattr(data, "sampler", None), "epoch") and length != epoch_length:
            batches = "unknown length" if length is None else counted(length, "batch")
            warnings.warn(
                f"the sampler of the data has epochs of its own, of {batches}, but epoch_length is "
                f"{epoch_length}: its epochs and the engine's will drift apart",
                stacklevel=2,
            )


class DeterministicEngine(Engine[Batch, Output]):
    """An engine that reproduces the order of the data exactly, also when it resumes in the middle of a pass.

    Each pass over the data is seeded with ``state.seed`` and the number of the pass, so a resumed run has the same
    batches as an uninterrupted one. ``state.seed`` is drawn from torch's generator when a run starts: seed it
    (``camshaft.utils.manual_seed``) the same way before the first run and before a resumed one.

    Resuming at the start of a pass reproduces everything. Resuming in the middle reproduces the samples of each batch,
    without loading those before, and augmentation unless it draws from the generators of the main process. Dropout
    continues with the random states that were saved; :class:`.Checkpoint` saves those of all ranks. During a run
    on a machine with CUDA, torch prefers deterministic algorithms.

    Args:
        process_function: as for :class:`Engine`.

    >>> from torch.utils.data import DataLoader
    >>> def batches(resumed_at: int) -> list[list[int]]:
    ...     seen: list[list[int]] = []
    ...     engine = DeterministicEngine(lambda engine, batch: seen.append(batch.tolist()))
    ...     engine.load_state_dict(
    ...         {"iteration": resumed_at, "epoch_length": 3, "max_epochs": 2, "rng_states": None}
    ...     )
    ...     manual_seed(7)
    ...     _ = engine.run(DataLoader(range(6), batch_size=2, shuffle=True), max_epochs=2)
    ...     return seen
    >>> batches(resumed_at=0)[4:] == batches(resumed_at=4)
    True
    """

    _passes = SeededPasses
    _needs_data = True

    def __init__(self, process_function: Callable[[Engine[Batch, Output], Batch], Output]) -> None:
        super().__init__(process_function)
        self.state_dict_user_keys.append("rng_states")
        self.surround(lambda engine: _deterministic_algorithms())
        self.state.rng_states = None

    @property
    def _keys_of_ranks(self) -> tuple[str, ...]:
        return (*super()._keys_of_ranks, "rng_states")

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return what :meth:`Engine.state_dict` returns, and the current random states as ``rng_states``."""
        self.state.rng_states = getattr(self.state, "rng_states", None)  # the state may be a new one
        state_dict = super().state_dict()
        state_dict["rng_states"] = list(capture_random_state().values())
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`Engine.load_state_dict` loads, and the random states to restore when the run resumes."""
        random_state = state_dict.get("rng_states") if isinstance(state_dict, Mapping) else None
        if random_state is not None:
            with preserved_random_state(devices=False):
                restore_random_state(random_state)  # raises if it is invalid
        super().load_state_dict(state_dict)

    def _start(self, start: Start) -> None:
        super()._start(start)
        self.state.seed = int(torch.randint(0, 10**9, (1,)).item())


_NOTHING: Any = object()


def _with_reproducible_batches(data: Any) -> Any:
    sampler = getattr(data, "batch_sampler", None)
    if not isinstance(data, DataLoader) or not isinstance(sampler, BatchSampler) or exact_batches(data) is not None:
        return data
    if isinstance(sampler, ReproducibleBatchSampler) or isinstance(getattr(data, "dataset", None), IterableDataset):
        return data
    return update_dataloader(data, ReproducibleBatchSampler(sampler))


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """Prefer deterministic algorithms on CUDA, and restore the settings of the process afterwards."""
    if not torch.cuda.is_available():
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
