"""A schedule for the batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from camshaft.distributed.data.samplers import ExactBatchSampler
from camshaft.engine.data import length_of
from camshaft.engine.engine import Engine
from camshaft.engine.event import EventLike, Events
from camshaft.engine.filters import is_integer
from camshaft.engine.handle import RemovableEventHandle
from camshaft.handlers.param_scheduler.base import SteppedScheduler


class BatchSizeScheduler(SteppedScheduler):
    """Sets the batch size of a loader, usually at the start of each epoch.

    The size is that of the batches of this process: with a loader of ``auto_dataloader`` on four ranks, 8 makes steps
    of 32 samples. An epoch that a resumed run takes up again in its middle keeps the size that it had.

    Another size makes another number of batches, while the engine goes on to count ``epoch_length`` iterations: an
    epoch is then more or less than a pass over the data. With ``adapt_epoch_length=True`` it stays a pass: at the start
    of an epoch over this loader, if epochs were passes, the engine takes over the new number of batches. It counts its
    iterations anew then, as if all epochs had had the new length, which it also does in a run that is resumed with
    another batch size. So ``state.iteration`` jumps. A run over ``max_iters`` iterations is left alone.

    Args:
        dataloader: with a batch sampler of torch, or of ``auto_dataloader``.
        scheduler_fn: called with the index of the event, from 0; gives the size.
        save_history: keep the sizes in ``engine.state.param_history["batch_size"]``.
        adapt_epoch_length: see above.

    Raises:
        TypeError: ``dataloader`` is no ``DataLoader``, or ``scheduler_fn`` cannot be called.
        ValueError: the loader has no batch sampler whose size can be set.

    >>> from camshaft.engine import Engine
    >>> loader = DataLoader(range(12), batch_size=2)
    >>> trainer = Engine(lambda engine, batch: print(batch.tolist()))
    >>> handle = BatchSizeScheduler(loader, lambda epoch: 4 + 2 * epoch, adapt_epoch_length=True).attach(trainer)
    >>> state = trainer.run(loader, max_epochs=2)
    [0, 1, 2, 3]
    [4, 5, 6, 7]
    [8, 9, 10, 11]
    [0, 1, 2, 3, 4, 5]
    [6, 7, 8, 9, 10, 11]
    """

    _state_dict_all_req_keys = (*SteppedScheduler._state_dict_all_req_keys, "batch_size")

    def __init__(
        self,
        dataloader: DataLoader[Any],
        scheduler_fn: Callable[[int], int],
        save_history: bool = False,
        *,
        adapt_epoch_length: bool = False,
    ) -> None:
        super().__init__("batch_size", save_history)
        if not isinstance(dataloader, DataLoader):
            raise TypeError(f"dataloader must be a DataLoader, got {dataloader!r} of type {type(dataloader).__name__}")
        if not callable(scheduler_fn):
            raise TypeError(f"scheduler_fn must be callable, got {scheduler_fn!r}")
        _check_batch_sampler(dataloader.batch_sampler)
        self.dataloader = dataloader
        self.scheduler_fn = scheduler_fn
        self.adapt_epoch_length = adapt_epoch_length

    @property
    def batch_size(self) -> int:
        """The size of the batches of this process."""
        size: int = self._batch_sampler.batch_size
        return size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        sampler = self._batch_sampler
        if isinstance(sampler, ExactBatchSampler):
            sampler.total_batch_size = size * sampler.num_replicas
        sampler.batch_size = size

    @property
    def _batch_sampler(self) -> Any:
        return self.dataloader.batch_sampler

    def attach(self, engine: Engine[Any, Any], event: EventLike = Events.EPOCH_STARTED) -> RemovableEventHandle:
        """Set the size whenever an event fires."""
        return super().attach(engine, event)

    def get_param(self) -> int:
        """Compute the size for ``event_index``."""
        return _checked(self.scheduler_fn(self.event_index))

    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        size = self.get_param()
        before = length_of(self.dataloader)
        self.batch_size = size
        after = length_of(self.dataloader)
        if self.adapt_epoch_length and engine is not None and after and after != before:
            self._adapt(engine, before, after)

    def _written(self) -> int:
        return self.batch_size

    def _adapt(self, engine: Engine[Any, Any], before: int | None, after: int) -> None:
        state = engine.state
        begins = engine.last_event_name is Events.EPOCH_STARTED and engine.iteration_in_epoch == 0
        if begins and state.dataloader is self.dataloader and state.epoch_length == before and state.max_iters is None:
            engine.change_epoch_length(after)

    @classmethod
    def simulate_values(  # type: ignore[override]  # it needs no loader
        cls, num_events: int, scheduler_fn: Callable[[int], int], **kwargs: Any
    ) -> list[list[Any]]:
        """List the first sizes.

        Args:
            num_events: how many.
            scheduler_fn: as for the class.
            kwargs: likewise; they do not matter.

        >>> BatchSizeScheduler.simulate_values(3, lambda epoch: 8 * 2**epoch)
        [[0, 8], [1, 16], [2, 32]]
        """
        return [[index, _checked(scheduler_fn(index))] for index in range(num_events)]


def _checked(size: Any) -> int:
    if not is_integer(size) or size < 1:
        raise ValueError(f"scheduler_fn must give an integer of at least 1, got {size!r}")
    return int(size)


def _check_batch_sampler(sampler: Any) -> None:
    if not isinstance(sampler, BatchSampler) or not is_integer(getattr(sampler, "batch_size", None)):
        raise ValueError(
            "dataloader must have a torch.utils.data.BatchSampler, whose batch_size can be set, got "
            f"{sampler!r} as its batch_sampler: make the loader with batch_size=..., or with a batch_sampler of that "
            "class"
        )
    if isinstance(sampler, ExactBatchSampler) and sampler.total_batch_size is None:
        raise ValueError(
            f"dataloader must have batches whose size can be set, got those that {sampler.source!r} makes: call "
            "auto_dataloader with batch_size=..., and with sampler=... if need be, in place of batch_sampler=..."
        )
