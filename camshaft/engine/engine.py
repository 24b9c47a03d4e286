"""The engine: what users hold, register handlers on, and run."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from camshaft.base import Serializable
from camshaft.engine.control import Stoppable
from camshaft.engine.data import Position, can_start_anywhere, check_iterable, open_at, recount, warn_of_new_pass
from camshaft.engine.event import CallableEventWithFilter, EventEnum, Events, EventsList
from camshaft.engine.handle import RemovableEventHandle
from camshaft.engine.loop import Run
from camshaft.engine.progress import Origin, Progress, Request, has_target, positive, read, target_of
from camshaft.engine.running import running
from camshaft.engine.signatures import check_process_function
from camshaft.engine.source import EventSource
from camshaft.engine.state import Batch, Output, State

__all__ = ["CallableEventWithFilter", "Engine", "EventEnum", "Events", "EventsList", "RemovableEventHandle"]


class Engine(EventSource[Batch, Output], Stoppable, Serializable):
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

    _has_positions = False  # whether it finds its place in data that cannot start in the middle
    _state_dict_all_req_keys = ("epoch_length",)
    _state_dict_one_of_opt_keys = (("iteration", "epoch"), ("max_epochs", "max_iters"))

    def __init__(self, process_function: Callable[[Engine[Batch, Output], Batch], Output]) -> None:
        check_process_function(process_function)
        super().__init__()
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self.state_dict_user_keys: list[str] = []
        self._process_function = process_function
        self._state: State[Batch, Output] = State()
        self._progress = Progress(origin=Origin.SET)  # where the last run, or the present one, started or ended
        self._run: Run | None = None
        self._next_data: Iterable[Any] | None = None
        # What the engine wrote into the state by itself; the user did not ask for it, so it does not bind the next run.
        self._found_length: int | None = None
        self._derived_epochs: int | None = None

    @property
    def iteration_in_epoch(self) -> int:
        """Iterations begun in the current epoch, 0 when there is no run."""
        return 0 if self._run is None else self._run.begun

    @property
    def batch_share(self) -> float:
        """The size of this rank's batch over the mean size of the batches of all ranks in this iteration.

        The mean of a loss over this rank's batch times this, averaged over ranks as its gradients are, is the mean over
        all samples of the iteration: ``(loss * engine.batch_share).backward()``. It is computed, not communicated, and
        is 1 where the data do not say, and in a single process.
        """
        return 1.0 if self._run is None else self._run.data.share()

    def hold_position(self) -> None:
        """Let a state that is saved from now on return to the start of this iteration.

        This is for steps that accumulate gradients over several iterations, as those of supervised trainers do by
        themselves: what was accumulated is not saved, so a run that resumes from the state repeats the iterations.
        Call :meth:`release_position` when the gradients are in the weights; the end of an epoch does so too.
        """
        if self._run is not None:
            self._run.held = self._run.begun - 1

    def release_position(self) -> None:
        """Let a state that is saved from now on resume where the run is."""
        if self._run is not None:
            self._run.held = None

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
            start = self._start_of(request)
            run = self._resume(request, start) if request.reaches_beyond(self.state, start) else self._begin(request)
        self._next_data = None
        self._proceed(run)
        return self.state

    def _begin(self, request: Request) -> Run:
        if self._progress.origin is Origin.LOADED and has_target(self.state):
            warnings.warn(
                f"the loaded state had reached its target of {target_of(self.state)}: the run starts from the "
                "beginning; to continue, call run with a larger target",
                stacklevel=3,
            )
        self._found_length = request.begin(self.state, self._found_length)
        self._drop_run()
        self.logger.info("Engine run starting with %s", target_of(self.state))
        return self._start(request.data, Progress())

    def _start_of(self, request: Request) -> Progress:
        """Return where a run that does not start from the beginning continues."""
        progress, state = self._standing(), self.state
        if progress.origin is Origin.ENDED:  # also in the middle of an epoch, whose rest is then given up
            return Progress(state.epoch, state.iteration)
        same_data = request.data is state.dataloader
        if progress.origin is Origin.FAILED and not (same_data or can_start_anywhere(request.data)):
            progress = replace(progress, position=None)
        return progress if same_data else replace(progress, unfinished=None)

    def _standing(self) -> Progress:
        """Return where the last run, or the loaded state, stands; the counters of the state if the user set them."""
        state = self.state
        if self._progress.counters == (state.iteration, state.epoch):
            return self._progress
        done = state.iteration % state.epoch_length if state.epoch_length else 0
        return Progress(state.epoch, state.iteration, done, origin=Origin.SET)

    def _resume(self, request: Request, start: Progress) -> Run:
        state = self.state
        counted_anew = None
        if start.position is not None:
            counted_anew = recount(request.data, start.position, start.epoch, state.epoch_length)
        length_was_known = state.epoch_length is not None
        found = request.resume(state, suspended=False)
        self._found_length = self._found_length if found is None else found
        if counted_anew is not None:
            epoch, done, length = counted_anew
            start = replace(start, epoch=epoch, done=done, iteration=epoch * length + done)
            state.epoch_length = length
            self.logger.info("The loader makes %d batches of an epoch now: iterations are counted anew", length)
        elif not length_was_known:
            start = start.in_epochs_of(state.epoch_length)
        if start.position is not None and (lost := start.position.get("lost", 0)):
            warnings.warn(
                "the run resumes from the middle of an iteration or of a window of accumulated gradients, whose start "
                f"its data cannot return to: {lost} {'batch is' if lost == 1 else 'batches are'} lost; save at the end "
                "of a window, or use a loader of auto_dataloader with epochs that are passes",
                stacklevel=3,
            )
        state.iteration, state.epoch = start.iteration, start.epoch
        self._log_resuming()
        return self._start(request.data, start)

    def _forget_derived_target(self) -> None:
        """Forget a number of epochs that only followed from a number of iterations, once that is gone."""
        if self.state.max_iters is None and self._derived_epochs == self.state.max_epochs:
            self.state.max_epochs = None
        self._derived_epochs = None

    def _continue(self, run: Run, request: Request) -> Run:
        request.resume(self.state, suspended=True)
        if request.data is not None and not run.data.begun:
            self.state.dataloader = request.data
        self._log_resuming()
        return run

    def _log_resuming(self) -> None:
        state = self.state
        self.logger.info(
            "Engine run resuming from iteration %d, epoch %d until %s", state.iteration, state.epoch, target_of(state)
        )

    def _start(self, data: Iterable[Any] | None, progress: Progress) -> Run:
        self._stops.clear()
        self.state.dataloader = data
        self._progress = replace(progress, counters=(self.state.iteration, self.state.epoch))
        self._run = Run(self)
        return self._run

    def _proceed(self, run: Run) -> None:
        """Let a run continue to its next pause or its end."""
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
                self._progress = run.last_progress()
                self._run = None
                self._derived_epochs = self.state.max_epochs if self.state.max_iters is not None else None

    def _drop_run(self) -> None:
        """Give up a paused run."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def _check_data(self, data: Iterable[Any] | None) -> None:
        """Refuse data that this kind of engine cannot run over; a subclass may do so, before anything changes."""

    def _prepare(self) -> None:
        """Do what belongs to the start of a run, before ``STARTED`` fires; for subclasses."""

    def _open_first_pass(self, position: Position | None) -> tuple[Iterator[Any], int]:
        """Start the first pass of a run; return it, and how many batches of it are left out as already done."""
        data, progress = self.state.dataloader, self._progress
        assert data is not None, "there are passes over data only"
        iterator, left_out = open_at(data, position) if position is not None else (iter(data), 0)
        if progress.unfinished is not None:
            return itertools.chain(progress.unfinished, iterator), left_out
        if position is None and progress.origin in (Origin.LOADED, Origin.FAILED):
            warn_of_new_pass(data, self.iteration_in_epoch)
        return iterator, left_out

    def _open_pass(self, number: int, cut_after: int | None) -> Iterator[Any]:
        """Start another pass, ``number`` counted from 0; ``cut_after``: iterations of the epoch if it was cut short."""
        assert self.state.dataloader is not None, "there are passes over data only"
        return iter(self.state.dataloader)

    def change_epoch_length(self, length: int) -> None:
        """Give epochs another length, from ``EPOCH_STARTED``; iterations are counted anew, as if all had had it."""
        if self._run is None or not self._run.in_epoch or self._run.begun:
            raise RuntimeError("change_epoch_length was called elsewhere than in EPOCH_STARTED of an epoch not begun")
        state, before = self.state, self.state.iteration
        state.epoch_length = positive("length", length)
        state.iteration = (state.epoch - 1) * length
        self._run.data.shift(state.iteration - before)

    def set_data(self, data: Iterable[Batch]) -> None:
        """Go on with other data: from the next fetch on in a run, else in the next run that is given none.

        Raises:
            TypeError: ``data`` cannot be iterated over.
        """
        check_iterable(data)
        if self._run is None:
            self._next_data = data
        else:
            self._run.data.replace(data)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the progress and the target, and what ``state_dict_user_keys`` names, to resume from later.

        ``iteration`` counts completed iterations: one whose process function has not returned is repeated by the run
        that resumes. ``epochs_completed`` and ``iterations_in_epoch``, the iterations completed in the epoch after
        those, are there once a run has begun. Where the data can start in the middle of a pass, ``position`` is the
        place: in loaders of ``auto_dataloader``, and in data with ``state_dict`` and ``load_state_dict``. In the middle
        of a window of accumulated gradients, all of this is that of the start of the window.

        >>> from camshaft.engine import Engine, Events
        >>> engine = Engine(lambda engine, batch: None)
        >>> dict(engine.state_dict())
        {'epoch_length': None, 'iteration': 0, 'max_epochs': None}
        >>> handle = engine.add_event_handler(Events.ITERATION_COMPLETED(once=4), engine.terminate)
        >>> _ = engine.run(range(3), max_epochs=2)
        >>> dict(engine.state_dict())
        {'epoch_length': 3, 'iteration': 4, 'max_epochs': 2, 'epochs_completed': 1, 'iterations_in_epoch': 1}
        """
        progress = self._standing() if self._run is None else self._run.progress()
        progress = progress.elsewhere(self.state.epoch_length)
        target = "max_epochs" if self.state.max_iters is None else "max_iters"
        saved: OrderedDict[str, Any] = OrderedDict(epoch_length=self.state.epoch_length, iteration=progress.iteration)
        saved.update((key, getattr(self.state, key)) for key in [target, *self.state_dict_user_keys])
        if progress.origin is not Origin.SET:
            saved.update(progress.items())
        if progress.position is not None:
            saved["position"] = progress.position
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over progress and target; the next ``run`` resumes from them. A paused run is given up.

        Args:
            state_dict: with ``epoch_length``, one of ``iteration`` and ``epoch`` (completed), one of
                ``max_epochs`` and ``max_iters``, and the keys of ``state_dict_user_keys``. With ``position``, the next
                run continues with the very next sample; without it, the data are read from their beginning.

        Raises:
            TypeError: not a mapping, or a number is not an integer.
            ValueError: a key is missing, or a number is out of range; the engine is as before.
            RuntimeError: the engine is in an epoch.

        >>> from camshaft.engine import Engine
        >>> engine = Engine(lambda engine, batch: None)
        >>> engine.load_state_dict({"epoch": 3, "epoch_length": 10, "max_epochs": 5})
        >>> engine.run(range(10)).iteration
        50
        """
        if self._run is not None and self._run.active and self._run.in_epoch:
            raise RuntimeError(
                "load_state_dict was called in an epoch of the engine's own run: load before it, or in STARTED"
            )
        super().load_state_dict(state_dict)
        if missing := [key for key in self.state_dict_user_keys if key not in state_dict]:
            raise ValueError(f"state_dict lacks the user keys {missing}, it has {list(state_dict)}")
        saved, state = read(state_dict), self.state
        if self._run is not None and not self._run.active:
            self._drop_run()
        self._progress, self._found_length = saved.progress, None
        state.iteration, state.epoch = saved.progress.iteration, saved.progress.epoch
        state.epoch_length, state.max_epochs, state.max_iters = saved.epoch_length, saved.max_epochs, saved.max_iters
        for key in self.state_dict_user_keys:
            setattr(state, key, state_dict[key])
