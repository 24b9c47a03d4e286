"""Scheduler of the batch size."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from camshaft.arguments import check_callable, check_type
from camshaft.data.samplers import ExactBatchSampler
from camshaft.engine.engine import Engine
from camshaft.engine.events import EventLike, Events, RemovableEventHandle
from camshaft.engine.sources import length_of
from camshaft.handlers.base_scheduler import SteppedScheduler


class BatchSizeScheduler(SteppedScheduler):
    """Set the batch size of a loader, usually at the start of each epoch.

    The size is that of the batches of this process: with a loader of ``auto_dataloader`` on four ranks, 8 makes steps
    of 32 samples. An epoch that a resumed run continues keeps its size.

    Another size changes the number of batches, while the engine still counts ``epoch_length`` iterations, so an epoch
    is more or less than a pass over the data. With ``adapt_epoch_length=True`` it remains a pass: if epochs were passes
    over this loader, the engine adopts the new number of batches at the start of an epoch. A run over ``max_iters``
    iterations is unaffected.

    Args:
        dataloader: a loader with a batch sampler of torch or of ``auto_dataloader``.
        scheduler_fn: called with the index of the event, from 0; returns the size.
        save_history: whether to keep the sizes in ``engine.state.param_history["batch_size"]``.
        adapt_epoch_length: see above.

    Raises:
        TypeError: ``dataloader`` is not a ``DataLoader``, or ``scheduler_fn`` is not callable.
        ValueError: the loader has no batch sampler whose size can be set.

    >>> from camshaft.engine import Engine
    >>> loader = DataLoader(range(12), batch_size=2)
    >>> trainer = Engine(lambda engine, batch: print(batch.tolist()))
    >>> handle = BatchSizeScheduler(
    ...     loader, lambda epoch: 4 + 2 * epoch, adapt_epoch_length=True
    ... ).attach(trainer)
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
        check_type("dataloader", dataloader, DataLoader, "a DataLoader")
        check_callable("scheduler_fn", scheduler_fn)
        sampler: Any = dataloader.batch_sampler
        if not isinstance(sampler, BatchSampler) or not isinstance(getattr(sampler, "batch_size", None), Integral):
            raise ValueError(f"dataloader must have a torch.utils.data.BatchSampler, got {sampler!r}: pass batch_size")
        if isinstance(sampler, ExactBatchSampler) and sampler.total_batch_size is None:
            raise ValueError(
                f"dataloader must have batches whose size can be set, got those of {sampler.source!r}: call "
                "auto_dataloader with batch_size=..., and with sampler=... if needed, instead of batch_sampler=..."
            )
        self.dataloader = dataloader
        self.scheduler_fn = scheduler_fn
        self.adapt_epoch_length = adapt_epoch_length

    @property
    def batch_size(self) -> int:
        """The size of the batches of this process."""
        sampler: Any = self.dataloader.batch_sampler
        return int(sampler.batch_size)

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        sampler: Any = self.dataloader.batch_sampler
        if isinstance(sampler, ExactBatchSampler):
            sampler.total_batch_size = size * sampler.num_replicas
        sampler.batch_size = size

    def attach(self, engine: Engine[Any, Any], event: EventLike = Events.EPOCH_STARTED) -> RemovableEventHandle:
        """Set the size whenever an event fires."""
        return super().attach(engine, event)

    def get_param(self) -> int:
        """Return the size for ``event_index``."""
        return _checked(self.scheduler_fn(self.event_index))

    def _apply(self, engine: Engine[Any, Any] | None) -> None:
        before = length_of(self.dataloader)
        self.batch_size = self.get_param()
        after = length_of(self.dataloader)
        if not self.adapt_epoch_length or engine is None or not after or after == before:
            return
        state = engine.state
        starts = engine.last_event_name is Events.EPOCH_STARTED and engine.iteration_in_epoch == 0
        if starts and state.dataloader is self.dataloader and state.epoch_length == before and state.max_iters is None:
            engine.change_epoch_length(after)

    def _written(self) -> int:
        return self.batch_size

    @classmethod
    def simulate_values(  # type: ignore[override]  # needs no loader
        cls, num_events: int, scheduler_fn: Callable[[int], int], **kwargs: Any
    ) -> list[list[Any]]:
        """Return the first sizes as a list of ``[index, size]``.

        Args:
            num_events: number of sizes.
            scheduler_fn: see the class.
            kwargs: other arguments of the class, which are ignored.

        >>> BatchSizeScheduler.simulate_values(3, lambda epoch: 8 * 2**epoch)
        [[0, 8], [1, 16], [2, 32]]
        """
        return [[index, _checked(scheduler_fn(index))] for index in range(num_events)]


def _checked(size: Any) -> int:
    if not isinstance(size, Integral) or int(size) < 1:
        raise ValueError(f"scheduler_fn must return an integer of at least 1, got {size!r}")
    return int(size)
