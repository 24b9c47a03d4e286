"""The run of an engine, top to bottom: the one place that fires the built-in events (errors apart: failures.py).

::

    STARTED
    while the target is not reached:
        EPOCH_STARTED
        while the epoch is not over:
            GET_BATCH_STARTED                                       } with data only
            (the data ran out: DATALOADER_STOP_ITERATION, restart)  }
            GET_BATCH_COMPLETED                                     }
            ITERATION_STARTED
            state.output = process_function(engine, state.batch)
            ITERATION_COMPLETED
        EPOCH_COMPLETED
    COMPLETED

Wishes to stop are acted on after each of these events, except the last: ``TERMINATE`` or
``TERMINATE_SINGLE_EPOCH`` fires on the way out of the run or the epoch, ``INTERRUPT`` before a pause. A pause
is a ``yield``: the run is a generator, and goes on from there when it is asked for more.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator
from dataclasses import replace
from time import perf_counter
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from camshaft.engine.control import EPOCH_STOPS, Stop, StopEpoch, StopRun
from camshaft.engine.data import DataIterator, exact_batches
from camshaft.engine.event import Events
from camshaft.engine.failures import THE_DATA, Reported, Shielded, carry_out, naming_the_data, place, report
from camshaft.engine.plan import Plan
from camshaft.engine.progress import Origin, Progress, derived_max_epochs, elapsed, is_done, target_of
from camshaft.types import Stateful

if TYPE_CHECKING:
    from camshaft.engine.engine import Engine

Pauses = Generator[None, None, None]
_END: Any = object()


class Run:
    """One run of an engine, which can pause and be continued.

    Args:
        engine: the engine, whose state already holds the targets of the run, and whose progress is where it starts.

    Attributes:
        data: the live pass over the data.
        begun: iterations begun in the epoch.
        completed: those of them whose process function has returned.
        held: iterations completed in the epoch that a saved state returns to, or ``None`` for the present ones.
        in_epoch: whether an epoch has begun whose iterations are not over.
    """

    def __init__(self, engine: Engine[Any, Any]) -> None:
        self.engine = engine
        self.data = DataIterator(engine)
        self.begun = self.completed = 0
        self.held: int | None = None
        self.in_epoch = False
        self.failed = False
        self.began_epochs = False
        self._starved = False
        self._warned = False
        self._main: GeneratorType[None, None, BaseException | None] = self._rotate()  # type: ignore[assignment]  # it is one

    @property
    def active(self) -> bool:
        """Whether the run is being executed right now, and not paused."""
        return self._main.gi_running

    def proceed(self) -> tuple[bool, BaseException | None]:
        """Go on to the next pause or the end; say whether it is the end, and which error must leave the run."""
        try:
            next(self._main)
        except StopIteration as end:
            return True, end.value
        return False, None

    def close(self) -> None:
        """Give up a paused run without a trace."""
        self._main.close()

    def progress(self) -> Progress:
        """Return where the run stands."""
        if not self.began_epochs:
            return self.engine._standing()
        if self._keeps_batches() and self.engine.last_event_name is Events.GET_BATCH_COMPLETED:
            return self._progress_with_batch()
        return self._progress(back=self.begun - min(self.completed, self.completed if self.held is None else self.held))

    def last_progress(self) -> Progress:
        """Return where the run, which has ended, stands."""
        counters = self.engine.state.iteration, self.engine.state.epoch
        if not self.began_epochs:
            return replace(self.engine._standing(), counters=counters)
        progress = self.progress()
        if not self.failed or progress.epoch == self.engine.state.epoch:
            return replace(progress, origin=Origin.ENDED, counters=counters)
        if self._keeps_batches():
            progress = self._progress_with_batch()
        return replace(progress, origin=Origin.FAILED, counters=counters)

    def _keeps_batches(self) -> bool:
        """Return whether the data cannot return a batch again that the run was given."""
        data = self.engine.state.dataloader
        return isinstance(data, Iterator | Stateful) and exact_batches(data) is None

    def _progress_with_batch(self) -> Progress:
        """Return where the run stands, with the batch of its unfinished iteration, if there is one."""
        is_unfinished = self.begun > self.completed or self.engine.last_event_name is Events.GET_BATCH_COMPLETED
        progress = self._progress(back=self.begun - self.completed, kept=True)
        if progress.position is None and not isinstance(self.engine.state.dataloader, Iterator):
            return progress  # the pass is read from its beginning
        if self.held is not None and self.held < self.completed:
            lost = self.completed - self.held
            progress = replace(progress, position={**(progress.position or {"batches": 0}), "lost": lost})
        return replace(progress, unfinished=(self.engine.state.batch,) if is_unfinished else ())

    def _progress(self, back: int, kept: bool = False) -> Progress:
        """Return where the run stood some iterations ago; ``kept``: the data need not return their batches."""
        state = self.engine.state
        back = back if self.in_epoch else 0
        can_return = kept or self.data.can_return(back)
        back, lost = (back, 0) if can_return else (0, back)
        position = self.data.position(back)
        if lost:
            position = {**(position or {"batches": 0}), "lost": lost}
        done = self.begun - back
        if self.in_epoch and (state.epoch_length is None or done < state.epoch_length):
            return Progress(state.epoch - 1, state.iteration - back, done, position)
        return Progress(state.epoch, state.iteration - back, 0, position)

    # --- the run -------------------------------------------------------------------------------------------

    def _rotate(self) -> Generator[None, None, BaseException | None]:
        try:
            yield from self._run()
        except GeneratorExit:
            raise
        except Reported as reported:
            self.failed = True
            return reported.error
        except BaseException as error:
            self.failed = True
            return report(self.engine, error)
        return None

    def _run(self) -> Pauses:
        engine = self.engine
        began = perf_counter()
        engine.state.times = {"EPOCH_COMPLETED": 0.0, "COMPLETED": 0.0}
        engine._prepare()
        if (yield from self._is_stopped()):
            self._fire(Events.TERMINATE)
        engine.state.times["COMPLETED"] = perf_counter() - began
        if Stop.SKIP_COMPLETED not in engine._stops:
            self._fire(Events.COMPLETED)
            engine.state.times["COMPLETED"] = perf_counter() - began
        engine.logger.info("Engine run complete. Time taken: %s", elapsed(perf_counter() - began))

    def _is_stopped(self) -> Generator[None, None, bool]:
        """Run to the target; say whether somebody stopped the run before."""
        engine = self.engine
        try:
            yield from self._started()
            while not is_done(engine.state):
                reached = engine.state.iteration
                yield from self._epoch()
                if self._starved and engine.state.iteration == reached and engine.state.max_epochs is None:
                    self._warn_once()  # the iterations asked for cannot be reached any more
                    break
        except StopRun:
            return True
        return False

    def _started(self) -> Pauses:
        try:
            self._fire(Events.STARTED)
            yield from self._obey()
        except StopEpoch:
            raise RuntimeError("terminate_epoch was asked for in STARTED, where there is no epoch yet") from None

    def _epoch(self) -> Pauses:
        engine = self.engine
        if self.began_epochs:
            self.begun = self.completed = 0
        else:  # the counters may have been changed, or a state loaded, in STARTED
            start = engine._progress = engine._standing()
            self.begun = self.completed = start.done
            self.data.start = start.position
        self.in_epoch = self.began_epochs = True
        began = perf_counter()
        engine.state.epoch += 1
        with naming_the_data(engine):
            self.data.announce_if_over()
        is_cut = yield from self._is_cut()
        if is_cut:
            self.data.cut(self.begun)
        self.in_epoch, self.held = False, None
        if is_cut:
            self._fire(Events.TERMINATE_SINGLE_EPOCH, iter_counter=self.begun)
        engine.state.times["EPOCH_COMPLETED"] = perf_counter() - began
        skipped = Stop.SKIP_EPOCH_COMPLETED in engine._stops
        engine._stops -= EPOCH_STOPS
        if not skipped:
            yield from self._epoch_completed(began)

    def _is_cut(self) -> Generator[None, None, bool]:
        """Run the iterations of an epoch; say whether somebody cut it short."""
        try:
            self._fire(Events.EPOCH_STARTED)
            yield from self._obey()
            if self.data.iterator is None:
                self._open()
            yield from self._iterations()
        except StopEpoch:
            return True
        return False

    def _epoch_completed(self, began: float) -> Pauses:
        engine = self.engine
        self._fire(Events.EPOCH_COMPLETED)
        seconds = engine.state.times["EPOCH_COMPLETED"] = perf_counter() - began
        engine.logger.info("Epoch[%d] Complete. Time taken: %s", engine.state.epoch, elapsed(seconds))
        engine._stops -= EPOCH_STOPS  # too late for this epoch, and not meant for the next
        yield from self._obey()

    def _iterations(self) -> Pauses:
        """Run the iterations of one epoch; no plan is asked to fire when nobody on it can be due."""
        engine, data, stops, step = self.engine, self.data, self.engine._stops, self.engine._process_function
        starting, completed = self._plan(Events.ITERATION_STARTED), self._plan(Events.ITERATION_COMPLETED)
        fetching_event, starting_event = Events.GET_BATCH_STARTED, Events.ITERATION_STARTED
        state, begun = engine._state, self.begun
        try:
            while True:
                state.batch = None
                engine.last_event_name = fetching_event
                if not data.fetching.since < state.iteration < data.fetching.due:
                    data.fetching.fire(engine)
                if stops:
                    yield from self._obey()
                state = engine._state
                try:
                    batch = next(data.iterator, _END)  # type: ignore[arg-type]  # the pass is open
                except Exception as error:
                    place(error, THE_DATA, state)
                    raise
                if batch is _END:
                    batch = yield from self._refill()
                    if batch is _END:
                        return
                    state = engine._state
                state.batch = batch
                batch = state._output = None  # nothing else holds on to the batch and the output
                if not data.fetched.since < state.iteration < data.fetched.due:
                    data.fetched.fire(engine)
                if stops:
                    yield from self._obey()
                state = engine._state
                state.iteration = iteration = state.iteration + 1
                self.begun = begun = begun + 1
                engine.last_event_name = starting_event
                if not starting.since < iteration < starting.due:
                    starting.fire(engine)
                if stops:
                    yield from self._obey()
                state = engine._state
                state._output = step(engine, state.batch)
                self.completed = begun
                if not completed.since < state.iteration < completed.due:
                    completed.fire(engine)
                if stops:
                    yield from self._obey()
                state = engine._state
                if state.epoch_length is not None and begun >= state.epoch_length:
                    return
                if state.max_iters is not None and state.iteration >= state.max_iters:
                    stops.add(Stop.RUN)
                    raise StopRun
        except Exception as error:
            carry_out(report(engine, error, in_iteration=True))
            self._starved = True  # counts only if the epoch made no iteration

    # --- events, stops, errors -----------------------------------------------------------------------------

    def _plan(self, event: Events) -> Plan:
        return self.engine._dispatcher.plans[event]

    def _fire(self, event: Events, **keywords: Any) -> None:
        plan = self._plan(event)
        try:
            plan.fire_with(self.engine, **keywords)
        except StopIteration as error:
            raise Shielded(error) from None

    def _obey(self) -> Pauses:
        """Do what was asked of the engine during the last event."""
        stops = self.engine._stops
        if Stop.RUN in stops:
            raise StopRun
        if Stop.EPOCH in stops:
            raise StopEpoch
        if Stop.PAUSE in stops:
            self._fire(Events.INTERRUPT)
            stops.discard(Stop.PAUSE)
            yield

    # --- data that ran out ---------------------------------------------------------------------------------

    def _refill(self) -> Generator[None, None, Any]:
        """Give the first batch of the next pass, or ``_END`` where the epoch ends instead."""
        engine = self.engine
        self.data.ran_out()
        if engine.state.epoch_length is None:
            self._learn_length()
            return _END
        self.data.announce()
        self._fire(Events.DATALOADER_STOP_ITERATION)
        yield from self._obey()
        self._open()
        batch = self._first_batch()
        self._starved = batch is _END
        if self._starved:
            self._warn_once()
        return batch

    def _open(self) -> None:
        with naming_the_data(self.engine):
            left_out = self.data.open()
        if self.engine.state.epoch_length is None:  # the epoch is this pass
            self.begun = self.completed = max(self.begun, left_out)

    def _first_batch(self) -> Any:
        with naming_the_data(self.engine):
            return next(self.data.iterator, _END)  # type: ignore[arg-type]  # the pass is open

    def _learn_length(self) -> None:
        """Take the first pass over data of unknown length for the length of an epoch."""
        engine, state = self.engine, self.engine.state
        state.epoch_length = engine._found_length = self.begun
        if state.max_iters is not None:
            state.max_epochs = derived_max_epochs(state)
        self._starved = self.begun == 0
        if self._starved and state.max_iters is not None:
            self._warn_once()

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            state = self.engine.state
            warnings.warn(
                f"the data ran out in epoch {state.epoch} after {state.iteration} iterations, but {target_of(state)} "
                "were asked for: give data that can be iterated over again, or assign a new iterator to "
                "engine.state.dataloader in a handler of DATALOADER_STOP_ITERATION",
                stacklevel=2,
            )
