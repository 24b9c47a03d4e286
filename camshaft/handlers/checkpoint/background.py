"""Save in the background while the run continues."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from contextvars import copy_context
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from camshaft.distributed import backend, get_rank, get_world_size, new_group
from camshaft.distributed.failures.alone import check_all_present
from camshaft.distributed.job import current
from camshaft.engine.engine import outermost_engine
from camshaft.engine.events import Events, FailureEvents
from camshaft.handlers.checkpoint.state import walk

logger = logging.getLogger(__name__)
_ENDS = Events.TERMINATE | Events.COMPLETED | Events.INTERRUPT


class StateCopier:
    """Copies states to host memory, which it reuses for the next copy.

    Copies from a GPU go to pinned memory and are only enqueued: the device makes them before later work changes the
    state. Tensors that share memory share it in the copy too.

    >>> weight = torch.ones(2)
    >>> copied, finish = StateCopier().copy({"weight": weight, "step": 3})
    >>> weight.zero_()
    tensor([0., 0.])
    >>> copied
    {'weight': tensor([1., 1.]), 'step': 3}
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copy(self, state: Any) -> tuple[Any, Callable[[], None]]:
        """Start to copy a state; invalidates the previous copy.

        Returns:
            The copy, and a function that waits, in any thread, until it is complete.
        """
        storages: dict[tuple[torch.device, int, int], UntypedStorage] = {}
        copies: dict[int, Any] = {}
        for _, tensor in walk(state):
            if isinstance(tensor, Tensor) and id(tensor) not in copies:
                if _is_plain(tensor):
                    copies[id(tensor)] = self._copied(tensor, storages)
                elif tensor.is_meta:  # there is nothing in it to copy
                    copies[id(tensor)] = tensor
        del self._buffers[len(storages) :]
        events = []
        for device in {device for device, *_ in storages if device.type == "cuda"}:
            events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]  # torch has no types for it
            events[-1].record(torch.cuda.current_stream(device))

        def finish() -> None:
            for event in events:
                event.synchronize()

        return copy.deepcopy(state, copies), finish

    def _copied(self, tensor: Tensor, storages: dict[tuple[torch.device, int, int], UntypedStorage]) -> Tensor:
        if tensor.device.type not in ("cpu", "cuda"):
            return tensor.detach().cpu()
        storage = tensor.untyped_storage()
        # The size too: arrays of NumPy that overlap start at one address, and make storages of their own.
        place = (storage.device, storage.data_ptr(), storage.nbytes())
        if place not in storages:
            storages[place] = self._buffer(len(storages), storage)
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(storages[place], tensor.storage_offset(), tensor.shape, tensor.stride())

    def _buffer(self, number: int, storage: UntypedStorage) -> UntypedStorage:
        """Copy a storage to host memory of exactly its size, since torch saves whole storages."""
        is_pinned = storage.device.type == "cuda"
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if number == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        buffer = self._buffers[number]
        if buffer.numel() != source.numel() or buffer.is_pinned() != is_pinned:
            buffer = self._buffers[number] = torch.empty_like(source, device="cpu", pin_memory=is_pinned)
        buffer.copy_(source, non_blocking=is_pinned)
        return buffer.untyped_storage()


class Exchange:
    """Exchanges values between all ranks in its own process group, so that a thread can do this during training."""

    def __init__(self) -> None:
        self._job: Any = None
        self._group: Any = None

    def prepare(self) -> None:
        """Create the group, if this job has none yet; all ranks call this.

        Raises:
            RuntimeError: the backend of the job is not one of ``torch.distributed``.
            RankDivergenceError: not all ranks call this.
        """
        job, size = current().job, get_world_size()
        check_all_present("Checkpoint(sharded=True)", range(size), get_rank())
        if job is self._job or size == 1:
            return
        if not dist.is_initialized():
            hint = "use a backend of torch.distributed, such as gloo or nccl"
            raise RuntimeError(f"sharded=True needs torch.distributed, got the backend {backend()!r}: {hint}")
        self._group, self._job = new_group(range(size), backend="gloo"), job

    def __call__(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        size = get_world_size()
        if size == 1:
            return [value]
        values = [None] * size
        dist.all_gather_object(values, value, group=self._group)
        return values


class BackgroundSave:
    """Saves copies of states in a thread, one at a time.

    While a save is in progress, the running engine checks it at each iteration, raises its error, and waits for it
    before the run ends. If an engine runs in a handler of another, as an evaluator does, that is the outer one.
    """

    def __init__(self) -> None:
        self._copier = StateCopier()
        self._pending: tuple[Future[None], Callable[[], None]] | None = None
        self._handlers = ExitStack()

    def start(self, checkpoint: Any, save: Callable[[Any], None], on_saved: Callable[[], None]) -> None:
        """Copy a checkpoint and start to save the copy.

        Args:
            checkpoint: what to save.
            save: called in another thread with the copy.
            on_saved: called in this thread after a successful save.
        """
        copied, finish = self._copier.copy(checkpoint)

        def work() -> None:
            try:
                finish()
                save(copied)
            except BaseException:
                logger.exception("saving in the background failed")  # the caller may never ask for the error
                raise

        executor = ThreadPoolExecutor(1, "camshaft-checkpoint")
        try:
            # The context holds the rank of this thread.
            self._pending = executor.submit(copy_context().run, work), on_saved
        except RuntimeError:  # no thread can start at the exit of the process
            work()
            return on_saved()
        executor.shutdown(wait=False)  # ends the thread after the save; at exit the process waits for it
        engine = outermost_engine()
        if engine is None:
            return  # the next access to the record waits
        if engine.last_event_name in _ENDS:
            return self.settle()
        self._handlers.enter_context(engine.add_event_handler(Events.ITERATION_COMPLETED, self._check))
        self._handlers.enter_context(engine.add_event_handler(_ENDS, self.settle))
        # The run fails with an error of its own; that of the save is in the log.
        self._handlers.enter_context(engine.add_event_handler(FailureEvents.ERROR_MET, self._finish))

    def settle(self) -> None:
        """Wait for the save in progress, if any, and raise its error."""
        if self._pending is not None:
            self._finish()
            (future, on_saved), self._pending = self._pending, None
            future.result()
            on_saved()

    def _finish(self) -> None:
        self._handlers.close()
        if self._pending is not None:
            wait([self._pending[0]])

    def _check(self) -> None:
        if self._pending is not None and self._pending[0].done():
            self.settle()


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor that is only a view of memory; others know how to copy themselves."""
    is_dense = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return is_dense and not value.is_quantized and not value.is_meta and value.numel() > 0
