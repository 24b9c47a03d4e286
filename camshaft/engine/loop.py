"""The run of an engine, top to bottom: the one place that fires the built-in events.

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

Stop requests take effect after each of these events except the last: ``TERMINATE`` or ``TERMINATE_SINGLE_EPOCH`` fires
on the way out of the run or the epoch, ``INTERRUPT`` before a pause. The run is a generator; a pause is a ``yield``.

A target in iterations that is reached inside an epoch terminates the run, too. An exception in an iteration that
handlers of ``EXCEPTION_RAISED`` swallow leaves out the rest of the epoch, as in PyTorch-Ignite, and the next epoch
reads on in the same pass. Anywhere else, and for a ``KeyboardInterrupt`` everywhere, the run ends without
``COMPLETED``.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Iterator
from enum import Enum, auto
from time import perf_counter
from typing import TYPE_CHECKING, Any

from camshaft import activity
from camshaft.engine.events import Events, FailureEvents
from camshaft.engine.plan import is_done, target_of
from camshaft.engine.progress import Origin, Progress
from camshaft.errors import RankDivergenceError, RankFailedError, annotate, line_of_caller, line_of_error
from camshaft.text import counted

if TYPE_CHECKING:
    from camshaft.engine.engine import Engine

Pauses = Generator[None, None, BaseException | None]
_END: Any = object()


class Phase(Enum):
    """What an engine is doing."""

    IDLE = auto()  # it was not run yet, or its run has ended
    RUNNING = auto()
    PAUSED = auto()  # after an interrupt, until the next call of run


class Pending(Enum):
    """What is to happen after the current event; in one mapping, so that the loop has one thing to test."""

    STOP = auto()  # the run ends
    STOP_EPOCH = auto()
    PAUSE = auto()
    ERROR = auto()  # another thread has left an error, the value, to be raised here
    DUE = auto()  # functions, the value, are called once no step is open


class StopFlag:
    """Attribute of an engine that shows and sets a stop request: ``False``, ``True``, or which event to skip."""

    def __init__(self, kind: Pending, *skips: str) -> None:
        self._kind = kind
        self._allowed = (False, True, *skips)

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Engine[Any, Any] | None, kind: type) -> Any:
        return self if engine is None else engine._pending.get(self._kind, False)

    def __set__(self, engine: Engine[Any, Any], value: bool | str) -> None:
        if value not in self._allowed:
            raise TypeError(f"{self._name} must be one of {self._allowed}, got {value!r}")
        if value:
            if self._kind is Pending.STOP:
                engine._terminated_by = f"terminate() at {line_of_caller()}"
            engine._pending[self._kind] = value
        else:
            engine._pending.pop(self._kind, None)


class StopRun(BaseException):
    """Leaves the loop for the end of the run. As it is not an ``Exception``, it is not reported as an error."""


class StopEpoch(BaseException):
    """Leaves the iterations of an epoch."""


class Run:
    """One run of an engine, which can pause and continue.

    Args:
        engine: the engine. Its state holds the targets of the run; it has kept the progress to start from.

    Attributes:
        passes: the passes over the data.
        fetched: iterations of the epoch for which a batch was fetched, which some data cannot return again.
        completed: those whose process function has returned, so that they can be saved. Those that have begun, in
            between, follow from the counter in the state, which a handler may set.
        is_accumulating: whether gradients wait for an iteration to come.
        in_epoch: whether an epoch has begun whose iterations are not over.
        is_leaving: whether the run is terminated, fails, or pauses now, so that an open step may never end.
        is_active: whether the run is being executed, and not paused.
        generator: executes the run up to the next pause.
    """

    def __init__(self, engine: Engine[Any, Any]) -> None:
        self.engine = engine
        self.passes = engine._passes(engine)
        self.completed = self.fetched = 0
        self._before = 0  # iterations before the epoch
        self.is_accumulating = self.in_epoch = self.is_active = self.is_leaving = False
        self._has_epochs = False
        self._failed = self._warned = False
        self._swallowed_at: int | None = None  # the iteration after which handlers swallowed an error
        for event in (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED):
            engine._dispatcher.plans[
                event
            ].replan()  # they fire once a count, and the last run may have ended at this one
        self.generator = self._run()

    # --- the run -------------------------------------------------------------------------------------------

    def _run(self) -> Pauses:
        """Run to the target; return the error that must leave ``Engine.run``, if any."""
        engine, pending = self.engine, self.engine._pending
        began = perf_counter()
        engine.state.times = {"EPOCH_COMPLETED": 0.0, "COMPLETED": 0.0}
        is_terminated = False
        try:
            try:
                self._fire(Events.STARTED)
                if pending and self._act_on_pending():
                    yield
                while not is_done(engine.state):
                    iteration, epoch_began, is_cut = engine.state.iteration, perf_counter(), False
                    swallowed_at = self._swallowed_at
                    self._begin_epoch()
                    try:
                        self._fire(Events.EPOCH_STARTED)
                        if pending and self._act_on_pending():
                            yield
                        if self.passes.iterator is None:
                            skipped = self.passes.open()
                            if engine.state.epoch_length is None:  # the epoch is this pass
                                self._set_done(max(self.begun, skipped))
                        error = yield from self._iterations()
                        if error is not None:
                            self._failed = True
                            return error
                    except StopEpoch:
                        is_cut = True
                        self.passes.cut(self.begun)
                    self.in_epoch = self.is_accumulating = self.is_leaving = False
                    self.passes.end_epoch(self.begun)
                    if is_cut:
                        engine._dispatcher.plans[Events.TERMINATE_SINGLE_EPOCH].fire_with(
                            engine, iter_counter=self.begun
                        )
                    engine.state.times["EPOCH_COMPLETED"] = perf_counter() - epoch_began
                    if pending.pop(Pending.STOP_EPOCH, None) != "skip_epoch_completed":
                        self._fire(Events.EPOCH_COMPLETED)
                        seconds = engine.state.times["EPOCH_COMPLETED"] = perf_counter() - epoch_began
                        engine.logger.info("Epoch[%d] Complete. Time taken: %s", engine.state.epoch, elapsed(seconds))
                        pending.pop(Pending.STOP_EPOCH, None)  # too late for this epoch, and not meant for the next
                    if pending and self._act_on_pending():
                        yield
                    has_stalled = not is_cut and engine.state.iteration == iteration
                    if self._swallowed_at == iteration and swallowed_at != iteration:
                        has_stalled = False  # an error before the first iteration of this epoch, perhaps the only one
                    if has_stalled and engine.state.max_epochs is None:
                        self._warn_that_data_ran_out()  # the target in iterations cannot be reached any more
                        break
            except StopRun:
                is_terminated = True
            if is_terminated:
                self.is_leaving = True
                length = engine.state.epoch_length
                is_inside = self.in_epoch and (length is None or self.completed < length)
                if not is_done(engine.state, is_inside):
                    activity.left_early(engine, engine._terminated_by)
                self._fire(Events.TERMINATE)
                self._do_what_is_due()
            engine.state.times["COMPLETED"] = perf_counter() - began
            if pending.get(Pending.STOP) != "skip_completed":
                self._fire(Events.COMPLETED)
                engine.state.times["COMPLETED"] = perf_counter() - began
            self._raise_pending()
            engine.logger.info("Engine run complete. Time taken: %s", elapsed(perf_counter() - began))
        except GeneratorExit:  # a paused run is discarded
            raise
        except BaseException as error:
            self._failed = True
            return self._report(error)
        return None

    def _report(self, error: BaseException) -> BaseException | None:
        self.is_leaving = True
        self.engine._pending.pop(Pending.DUE, None)  # the step that it waited for does not end
        leaving = report(self.engine, error)
        if leaving is None:
            self._swallowed_at = self.engine.state.iteration
            if self.in_epoch and self.fetched > self.begun:  # no iteration has counted this batch
                self.passes.lose()
        return leaving

    def _begin_epoch(self) -> None:
        engine = self.engine
        if self._has_epochs:
            self._set_done(0)
        else:  # a handler of STARTED may have changed the counters, or loaded a state
            progress = self.passes.start = engine._kept()
            continues = progress.origin is Origin.FAILED and isinstance(engine.state.dataloader, Iterator)
            self.passes.warns = progress.origin in (Origin.LOADED, Origin.FAILED) and not continues
            self._set_done(progress.done)
        self.in_epoch = self._has_epochs = True
        engine.state.epoch += 1
        self.passes.set_epoch_if_over()

    def _iterations(self) -> Pauses:
        """Run the iterations of one epoch.

        While the count of an event is between ``since`` and ``due`` of its plan, none of its handlers is due.
        """
        engine, passes, pending = self.engine, self.passes, self.engine._pending
        step = engine._process_function
        before_step = engine._dispatcher.plans[Events.ITERATION_STARTED]
        after_step = engine._dispatcher.plans[Events.ITERATION_COMPLETED]
        fetching_event, starting_event = Events.GET_BATCH_STARTED, Events.ITERATION_STARTED
        state, begun = engine._state, self.begun
        try:
            while True:
                state.batch = None
                engine.last_event_name = fetching_event
                if not passes.before_fetch.since < state.iteration < passes.before_fetch.due:
                    passes.before_fetch.fire(engine)
                if pending and self._act_on_pending():
                    yield
                state = engine._state
                batch = next(passes.iterator, _END)  # type: ignore[arg-type]  # the pass is open
                if batch is _END:
                    passes.ran_out()
                    if state.epoch_length is None:  # the epoch is this pass
                        if not passes.is_whole(begun):  # the run resumed in the middle of it, and read it again
                            passes.cut(begun)
                        elif begun:
                            engine._infer_epoch_length(begun)
                        else:
                            engine._report_that_data_are_empty()
                            passes.cut(0)
                        return None
                    passes.set_epoch()
                    self._fire(Events.DATALOADER_STOP_ITERATION)
                    if pending and self._act_on_pending():
                        yield
                    passes.open()
                    batch = next(passes.iterator, _END)  # type: ignore[arg-type]  # open() sets it
                    if batch is _END:
                        self._warn_that_data_ran_out()
                        return None
                    state = engine._state
                state.batch = batch
                self.fetched = begun + 1
                batch = state._output = None  # nothing else keeps the batch and the output alive
                if not passes.after_fetch.since < state.iteration < passes.after_fetch.due:
                    passes.after_fetch.fire(engine)
                if pending and self._act_on_pending():
                    yield
                state = engine._state
                state.iteration = iteration = state.iteration + 1
                begun += 1
                engine.last_event_name = starting_event
                if not before_step.since < iteration < before_step.due:
                    before_step.fire(engine)
                if pending and self._act_on_pending():
                    yield
                state = engine._state
                state._output = step(engine, state.batch)
                self.completed = begun
                if not after_step.since < state.iteration < after_step.due:
                    after_step.fire(engine)
                if pending and self._act_on_pending():
                    yield
                state = engine._state
                if state.epoch_length is not None and begun >= state.epoch_length:
                    return None
                if state.max_iters is not None and state.iteration >= state.max_iters:
                    pending[Pending.STOP] = True  # in the middle of an epoch: the run is terminated
                    raise StopRun
        except Exception as error:
            return self._report(error)  # None if it was handled, which ends the epoch

    def _fire(self, event: Events) -> None:
        self.engine._dispatcher.plans[event].fire(self.engine)

    def _act_on_pending(self) -> bool:
        """Leave the run or the epoch if requested; return whether the run is to pause."""
        pending = self.engine._pending
        self._raise_pending()
        if Pending.DUE in pending and not self.in_step:
            self._do_what_is_due()
        if Pending.STOP in pending:
            raise StopRun
        if Pending.STOP_EPOCH in pending:
            if not self.in_epoch:
                raise RuntimeError("terminate_epoch was called in STARTED, before the first epoch")
            raise StopEpoch
        if Pending.PAUSE not in pending:
            return False
        self.is_leaving = True
        self._fire(Events.INTERRUPT)
        self.is_leaving = False
        pending.pop(Pending.PAUSE, None)
        self._raise_pending()
        return True

    @property
    def begun(self) -> int:
        """Iterations of the epoch that have begun."""
        return self.engine.state.iteration - self._before

    def _set_done(self, count: int) -> None:
        """Set the number of iterations of the epoch that are done."""
        self.completed = self.fetched = count
        self._before = self.engine.state.iteration - count

    @property
    def in_step(self) -> bool:
        """Whether an iteration or a window of accumulated gradients is open, and its end is to come."""
        is_open = self.is_accumulating or self.fetched > self.completed
        return is_open and self.in_epoch and self.is_active and not self.is_leaving

    def _do_what_is_due(self) -> None:
        if self.in_epoch and not self.is_leaving:
            self.engine.last_event_name = Events.ITERATION_COMPLETED  # without handlers, it did not fire and set this
        for function in self.engine._pending.pop(Pending.DUE, ()):
            function(self.engine)

    def _raise_pending(self) -> None:
        if Pending.ERROR in self.engine._pending:
            raise self.engine._pending.pop(Pending.ERROR)

    def _warn_that_data_ran_out(self) -> None:
        if self._warned:
            return
        self._warned = True
        state = self.engine.state
        activity.left_early(self.engine, "the data ran out")
        warnings.warn(
            f"the data ran out in epoch {state.epoch} after {counted(state.iteration, 'iteration')}, before the "
            f"target of {target_of(state)}: pass data that can be iterated over again, or assign a new iterator to "
            "engine.state.dataloader in a handler of DATALOADER_STOP_ITERATION",
            stacklevel=2,
        )

    # --- progress ------------------------------------------------------------------------------------------

    def progress(self, with_open_step: bool = False) -> Progress:
        """Return the progress to save, without an iteration whose process function has not returned.

        Data that save their position themselves are past its batch and cannot return it again: it counts as completed.
        """
        if not self._has_epochs:
            return self.engine._kept()
        state, done = self.engine.state, self.completed
        if self.in_epoch and (with_open_step or self.passes.present_source().saves_itself):
            done = self.fetched
        back = self.begun - done if self.in_epoch else 0  # below 0 for a batch that no iteration has begun with yet
        iteration, position = state.iteration - back, self.passes.position(back)
        if self.in_epoch and (state.epoch_length is None or done < state.epoch_length):
            return Progress(state.epoch - 1, iteration, done, position)
        return Progress(state.epoch, iteration, 0, position)

    def final_progress(self) -> Progress:
        """Return the progress of this run, which has ended."""
        state = self.engine.state
        if not self._has_epochs:
            return self.engine._kept()
        is_over = state.epoch_length is not None and self.completed >= state.epoch_length
        if not self._failed or not self.in_epoch or is_over:
            return self.progress()._replace(origin=Origin.ENDED)
        is_past = self.passes.present_source().is_past
        lost = ["accumulated gradients"] if self.is_accumulating else []
        if is_past and self.fetched > self.completed:
            lost.append(f"a batch, which {type(state.dataloader).__name__} cannot return again")
        return self.progress(with_open_step=is_past)._replace(origin=Origin.FAILED, lost=" and ".join(lost))


def elapsed(seconds: float) -> str:
    """Format a duration as ``HH:MM:SS.mmm``.

    >>> elapsed(3723.5)
    '01:02:03.500'
    """
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours:02d}:{minutes:02d}:{rest:06.3f}"


# --- errors -----------------------------------------------------------------------------------------------------------


def report(engine: Any, error: BaseException) -> BaseException | None:
    """Pass an error to its handlers; return the error that must leave the run, or ``None`` if it was handled."""
    state = engine.state
    error = activity.explained(error)
    activity.left_early(engine, f"{activity.summary(error)} at {line_of_error(error) or engine.run_line}")
    if engine._pending.get(Pending.ERROR) is error:
        del engine._pending[Pending.ERROR]  # it has been raised
    place = "raised in epoch "
    is_recorded = any(note.startswith(place) for note in getattr(error, "__notes__", ()))  # by an engine inside
    annotate(error, f"{place}{state.epoch}, iteration {state.iteration}; the last event was {engine.last_event_name!r}")
    for registration in engine._dispatcher.plans[FailureEvents.ERROR_MET].registrations:
        try:  # an error of a cleanup handler must not hide the one that is reported
            registration.invoke(engine)
        except Exception:
            engine.logger.exception("A handler of %s failed", FailureEvents.ERROR_MET)
    is_known = isinstance(error, (RankDivergenceError, RankFailedError))  # the same on every rank
    is_exit = isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code)
    level = logging.DEBUG if is_exit or is_recorded else logging.INFO if is_known else logging.ERROR
    engine.logger.log(level, "Engine met an exception: %s", activity.summary(error))
    plan = engine._dispatcher.plans[Events.EXCEPTION_RAISED]
    if not plan.registrations:
        return error
    try:
        plan.fire_with(engine, error)
    except BaseException as raised:
        return raised
    finally:
        del error  # a local reference would be a cycle through the traceback, whose frames hold the engine
    return None
