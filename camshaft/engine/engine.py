"""The engine: what users hold, register handlers on, and run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from camshaft.engine.control import Stoppable
from camshaft.engine.data import check_iterable
from camshaft.engine.event import CallableEventWithFilter, EventEnum, Events, EventsList
from camshaft.engine.handle import RemovableEventHandle
from camshaft.engine.loop import Run
from camshaft.engine.position import Position, exact_batches, open_at, recounted, take_redo, warn_of_new_pass
from camshaft.engine.resume import Request, Standing, has_target, positive, target_of
from camshaft.engine.running import running
from camshaft.engine.saved import Savable
from camshaft.engine.signatures import check_process_function
from camshaft.engine.source import EventSource
from camshaft.engine.state import Batch, Output, State

__all__ = ["CallableEventWithFilter", "Engine", "EventEnum", "Events", "EventsList", "RemovableEventHandle"]


class Engine(EventSource[Batch, Output], Stoppable, Savable):
    """Runs a process function over data, in epochs of iterations, and fires events on the way.

    Args:
        process_function: called as ``process_function(engine, batch)`` in each iteration; what it returns
            becomes ``state.output``.

    Raises:
        TypeError: ``process_function`` is not callable.
        ValueError: it is ``None``, or cannot be called with two positional arguments.

    Attributes:
        state: counters, targets, batch, output and results; see :class:`State`.
        last_event_name: the event fired last.
        logger: where the engine's records go; may be replaced.
        state_dict_user_keys: attributes of ``state`` to save with the counters.
        interrupt_resume_enabled: whether :meth:`interrupt` may be used.

    >>> from camshaft.engine import Events
    >>> def step(engine: Engine[int, int], batch: int) -> int:
    ...     return batch + 1
    >>> engine = Engine(step)
    >>> @engine.on(Events.EPOCH_COMPLETED)
    ... def show(engine: Engine[int, int]) -> None:
    ...     print(f"epoch {engine.state.epoch}: {engine.state.output}")
    >>> state = engine.run([1, 2, 3], max_epochs=2)
    epoch 1: 4
    epoch 2: 4
    """

    def __init__(self, process_function: Callable[[Engine[Batch, Output], Batch], Output]) -> None:
        check_process_function(process_function)
        super().__init__()
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self.state_dict_user_keys: list[str] = []
        self._process_function = process_function
        self._state: State[Batch, Output] = State()
        self._run: Run | None = None
        self._next_data: Iterable[Any] | None = None
        self._found_length: int | None = None
        self._derived_epochs: int | None = None
        self._stood: Standing | None = None
        self._loaded = False
        self._position: Position | None = None
        self._goes_on_at: Position | None = None

    @property
    def iteration_in_epoch(self) -> int:
        """Iterations begun in the current epoch, 0 when no run is on."""
        return 0 if self._run is None else self._run.done

    @property
    def batch_share(self) -> float:
        """The size of this rank's batch over the mean size of the batches of all ranks in this iteration.

        The mean of a loss over this rank's batch times this, averaged over ranks as its gradients are, is the mean over
        all samples of the iteration: ``(loss * engine.batch_share).backward()``. It is computed, not communicated, and
        is 1 where the data do not tell, and in a single process.
        """
        return 1.0 if self._run is None else self._run.feed.share()

    def hold_position(self) -> None:
        """Let a state that is saved from now on go back to the start of this iteration.

        This is for steps that collect gradients over several iterations, as those of supervised trainers do by
        themselves: what was collected is not saved, so its batches are given again to a run that goes on from the
        state. :meth:`release_position` when the gradients are in the weights.
        """
        if self._run is not None:
            self._run.feed.held_at = self.state.iteration - 1

    def release_position(self) -> None:
        """Let a state that is saved from now on go on where the run is."""
        if self._run is not None:
            self._run.feed.held_at = None

    @property
    def state(self) -> State[Batch, Output]:
        """What the engine knows of its run."""
        return self._state

    @state.setter
    def state(self, state: State[Batch, Output]) -> None:
        state._add_counters(self._dispatcher.counters)
        self._state = state

    def run(
        self,
        data: Iterable[Batch] | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> State[Batch, Output]:
        """Run until the target is reached, or go on with a run that stopped before it.

        A new run begins when no target is set yet, or when the last one is reached and no farther one is
        given; else the run resumes where its state stands. An interrupted run goes on with the very next event.

        Args:
            data: batches; anything that can be iterated over. ``None`` for none: the process function then
                gets ``None``, and ``epoch_length`` must be given.
            max_epochs: epochs to reach in total; 1 in a new run without ``max_iters``.
            max_iters: iterations to reach in total, instead of ``max_epochs``.
            epoch_length: iterations in an epoch; ``len(data)`` where that is known, else found in the first pass.

        Returns:
            The state of the engine, always the same object.

        Raises:
            TypeError: ``data`` cannot be iterated over, or a number is not an integer.
            ValueError: the numbers are out of range, or contradict each other or the state.
            RuntimeError: the engine is running already.

        >>> engine = Engine(lambda engine, batch: batch)
        >>> engine.run([1, 2, 3], max_epochs=2).iteration
        6
        >>> engine.run([1, 2, 3], max_epochs=5).iteration
        15
        """
        if self._run is not None and self._run.active:
            raise RuntimeError("run was called on an engine that is running: use another engine inside its handlers")
        request = Request(self._next_data if data is None else data, max_epochs, max_iters, epoch_length)
        self._forget_derived_target()
        request.check_target(self.state)
        if self._run is not None and has_target(self.state):
            run = self._continue(self._run, request)
        else:
            self._check_data(request.data)
            run = self._resume(request) if request.reaches_beyond(self.state, self._reopens()) else self._begin(request)
        self._next_data = None
        self._proceed(run)
        return self.state

    def _begin(self, request: Request) -> Run:
        if self._loaded and has_target(self.state):
            warnings.warn(
                f"the loaded state had reached its target of {target_of(self.state)}: the run begins anew; to go on, "
                "give run a larger target",
                stacklevel=3,
            )
        self._found_length = request.begin(self.state, self._found_length)
        self._drop_run()
        self._stood, self._goes_on_at = Standing.of(self.state), None
        self.logger.info("Engine run starting with %s", target_of(self.state))
        return self._start(request.data)

    def _resume(self, request: Request) -> Run:
        length_was_known = self.state.epoch_length is not None
        reopens = self._reopens()
        begins_anywhere = self._loaded or (reopens and exact_batches(request.data) is not None)
        position = dict(self._position) if begins_anywhere and self._position is not None else None
        recount = recounted(self.state, request.data, position)
        found = request.resume(self.state, suspended=False)
        redo = 0 if position is None else take_redo(position)
        self._goes_on_at = position
        if recount is not None:
            self.state.iteration, self.state.epoch_length = recount
            self.state.epoch = self.state.iteration // self.state.epoch_length
            self.logger.info("The loader makes %d batches of an epoch now: iterations are counted anew", recount[1])
        self.state.iteration -= redo if recount is None else 0
        self._found_length = self._found_length if found is None else found
        if reopens and recount is None:
            assert self._stood is not None, "else nothing is taken up again"
            self.state.epoch -= 1
            self._stood = Standing.of(self.state, self._stood.done - redo)
        elif (redo or not length_was_known) and self.state.epoch_length is not None:
            self.state.epoch = self.state.iteration // self.state.epoch_length
        self._log_resuming()
        return self._start(request.data)

    def _reopens(self) -> bool:
        """Say whether the run stopped in the middle of the epoch that the state names, and stands there still."""
        return self._stood is not None and self._stood.in_epoch and self._stood.is_at(self.state)

    def _done_of_first_epoch(self) -> int:
        """Count the iterations already done of the epoch that a run begins with."""
        if self._stood is not None and self._stood.is_at(self.state):
            return self._stood.done
        return self.state.iteration % self.state.epoch_length if self.state.epoch_length else 0

    def _forget_derived_target(self) -> None:
        """Forget a number of epochs that only followed from a number of iterations, once that is gone."""
        if self.state.max_iters is None and self._derived_epochs == self.state.max_epochs:
            self.state.max_epochs = None
        self._derived_epochs = None

    def _continue(self, run: Run, request: Request) -> Run:
        request.resume(self.state, suspended=True)
        if request.data is not None and not run.feed.begun:
            self.state.dataloader = request.data
        self._log_resuming()
        return run

    def _log_resuming(self) -> None:
        state = self.state
        self.logger.info(
            "Engine run resuming from iteration %d, epoch %d until %s",
            state.iteration,
            state.epoch,
            target_of(state),
        )

    def _start(self, data: Iterable[Any] | None) -> Run:
        self._stops.clear()
        self.state.dataloader = data
        self._run = Run(self)
        return self._run

    def _proceed(self, run: Run) -> None:
        """Let a run go on to its next pause or its end."""
        tracing = self.logger.isEnabledFor(logging.DEBUG)
        if tracing:
            self._dispatcher.trace(self.logger)
        ended = True
        try:
            with running(self):
                ended, error = run.proceed()
            if error is not None:
                raise error
        finally:
            error = None  # its traceback holds this frame
            if tracing:
                self._dispatcher.trace(None)
            if ended:
                self._remember(run)

    def _remember(self, run: Run) -> None:
        """Keep what a later call needs to know of a run that has ended."""
        self._position = run.feed.position()
        self._run, self._loaded = None, False
        self._derived_epochs = self.state.max_epochs if self.state.max_iters is not None else None
        if run.began_epochs:
            unfinished = run.failed and run.in_epoch and run.done != self.state.epoch_length
            self._stood = Standing.of(self.state, run.done if unfinished else 0, in_epoch=unfinished)

    def _check_data(self, data: Iterable[Any] | None) -> None:
        """Refuse data that this kind of engine cannot run over; a subclass may do so, before anything changes."""

    def _prepare(self) -> None:
        """Do what belongs to the start of a run, before ``STARTED`` fires; for subclasses."""

    def _open_data_at_position(self) -> tuple[Iterator[Any], int]:
        """Begin the first pass of a run, and tell how many batches of the pass are left out as already done."""
        assert self.state.dataloader is not None, "the feed asks only when there is data"
        if self._goes_on_at is None:
            if self._loaded:
                warn_of_new_pass(self.state.dataloader, self.iteration_in_epoch)
            return iter(self.state.dataloader), 0
        return open_at(self.state.dataloader, self._goes_on_at)

    def _open_data(self, cut_after: int | None) -> Iterator[Any]:
        """Begin another pass; ``cut_after`` tells the length of the last epoch if that was cut short."""
        assert self.state.dataloader is not None, "the feed asks only when there is data"
        return iter(self.state.dataloader)

    def change_epoch_length(self, length: int) -> None:
        """Give epochs another length, from ``EPOCH_STARTED``; iterations are counted anew, as if all had had it."""
        if self._run is None or not self._run.in_epoch or self._run.done:
            raise RuntimeError("change_epoch_length was called elsewhere than in EPOCH_STARTED of an epoch not begun")
        state, before = self.state, self.state.iteration
        state.epoch_length = positive("length", length)
        state.iteration = (state.epoch - 1) * length
        self._run.feed.recount(state.iteration - before)

    def set_data(self, data: Iterable[Batch]) -> None:
        """Go on with other data: from the next fetch on in a run, else in the next run that is given none.

        Raises:
            TypeError: ``data`` cannot be iterated over.
        """
        check_iterable(data)
        if self._run is None:
            self._next_data = data
        else:
            self._run.feed.replace(data)
