"""The engine, which runs a process function over data and fires events."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from camshaft import activity
from camshaft.arguments import check_takes, check_type
from camshaft.base import Serializable
from camshaft.engine.dispatch import Dispatcher, Registration, Wrapper
from camshaft.engine.events import (
    CallableEventWithFilter,
    EventEnum,
    EventLike,
    Events,
    EventsList,
    OptimizerEvents,
    RemovableEventHandle,
    events_in,
)
from camshaft.engine.loop import Pending, Phase, Run, StopFlag
from camshaft.engine.plan import (
    Request,
    Start,
    check_iterable,
    check_length,
    epochs_of,
    has_given_length,
    plan,
    resume,
    start_anew,
    target_after,
    target_of,
)
from camshaft.engine.progress import Origin, Progress, positive, read
from camshaft.engine.sources import Passes, length_of, source_of
from camshaft.engine.state import Batch, Output, State
from camshaft.errors import level_of_caller

__all__ = ["CallableEventWithFilter", "Engine", "EventEnum", "Events", "EventsList", "RemovableEventHandle"]

_STEP_COMPLETED = OptimizerEvents.STEP_COMPLETED  # looking up a member of an enumeration on each call is slow

P = ParamSpec("P")
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., object])
Plain = TypeVar("Plain", bound="Callable[[Engine[Any, Any]], object] | Callable[[], object]")


def outermost_engine() -> Engine[Any, Any] | None:
    """Return the engine of this thread that does not run in a handler of another one, or ``None`` if none runs."""
    return next(iter(activity.in_thread()), None)


class _Decorator:
    """What :meth:`Engine.on` returns: ``engine.on(event, handler)`` as a plain call would silently register nothing.

    ``on`` cannot distinguish such a handler from an argument for a decorated function, but nothing calls the decorator.
    """

    def __init__(self, register: Callable[[Any], Any], event_name: EventLike) -> None:
        self._register = register
        self._event_name = event_name
        self._is_used = False

    def __call__(self, handler: Any) -> Any:
        self._is_used = True
        return self._register(handler)

    def __del__(self) -> None:
        if not self._is_used:
            warnings.warn(
                f"on({self._event_name!r}, ...) registered nothing, because it decorates no function: write "
                "@engine.on(event) above one, or call add_event_handler(event, handler)",
                stacklevel=2,
            )


class Engine(Serializable, Generic[Batch, Output]):
    """Runs a process function over data, in epochs of iterations, and fires events.

    Args:
        process_function: called as ``process_function(engine, batch)`` in each iteration; its result becomes
            ``state.output``.

    Raises:
        TypeError: ``process_function`` is not callable.
        ValueError: it is ``None``, or cannot be called with two positional arguments.

    Attributes:
        last_event_name: the event fired last, ``None`` before the first.
        logger: logger of the engine; may be replaced.
        should_terminate: whether the run is to end: ``False``, ``True`` or ``"skip_completed"``.
        should_terminate_single_epoch: whether the epoch is to end: ``False``, ``True`` or ``"skip_epoch_completed"``.
        should_interrupt: whether the run is to pause.
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

    interrupt_resume_enabled = True
    _passes: type[Passes] = Passes
    _needs_data = False
    _state_dict_all_req_keys = ("epoch_length",)
    _state_dict_one_of_opt_keys = (("iteration", "epoch"), ("max_epochs", "max_iters"))

    def __init__(self, process_function: Callable[[Engine[Batch, Output], Batch], Output]) -> None:
        if process_function is None:
            raise ValueError("process_function must be given, got None")
        check_takes("process_function", process_function, "(engine, batch)")
        super().__init__()
        self.last_event_name: Any = None
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self.state_dict_user_keys: list[str] = []
        self._process_function = process_function
        self._dispatcher = Dispatcher()
        self._steps = self._dispatcher.plan(_STEP_COMPLETED)  # which fires too often to be looked up
        self._pending: dict[Pending, Any] = {}
        self._terminated_by = ""  # for the record of runs that ended early
        self.run_line, self.run_number, self.run_thread = "", 0, 0  # of the last call of run, see camshaft.activity
        self._state: State[Batch, Output] = State()
        self._progress = Progress(origin=Origin.COUNTERS)  # of the last run, or of a loaded state
        self._counters = (0, 0)  # in the state at that time; values that the user has set since take precedence
        self._run: Run | None = None  # also while it is paused
        self._next_data: Iterable[Any] | None = None
        self._surroundings: list[Callable[[Any], AbstractContextManager[object]]] = []  # of each call of run
        self._is_traced = False  # whether each firing is logged
        self._had_batches = self._is_exhausted = False  # whether an earlier run had any, and has read the present data
        # Values in the state that the engine inferred. The user did not request them: they do not bind the next run.
        self._inferred: dict[str, int | None] = {}

    @property
    def state(self) -> State[Batch, Output]:
        """State of the run; see :class:`State`."""
        return self._state

    @state.setter
    def state(self, state: State[Batch, Output]) -> None:
        state._add_counters(self._dispatcher.counters)
        self._state = state

    # --- events and handlers -------------------------------------------------------------------------------

    def register_events(self, *event_names: str | EventEnum, event_to_attr: dict[Any, str] | None = None) -> None:
        """Register user-defined events.

        Args:
            event_names: names, or members of an ``EventEnum``.
            event_to_attr: for each event that filters are used with, the attribute of ``state`` that counts it. It
                starts at 0; the code that fires the event has to increment it.

        Raises:
            TypeError: an event is neither a name nor a member of an ``EventEnum``.
            ValueError: ``event_to_attr`` is not a dict.

        >>> engine = Engine(lambda engine, batch: None)
        >>> engine.register_events("token_made", event_to_attr={"token_made": "tokens"})
        >>> engine.state.tokens
        0
        """
        self._dispatcher.register(event_names, event_to_attr)
        if event_to_attr:
            self.state._add_counters(event_to_attr)

    def has_registered_events(self, event: Any) -> bool:
        """Return whether an event is registered."""
        return self._dispatcher.knows(event)

    # fmt: off
    @overload
    def add_event_handler(
        self, event_name: Literal[Events.EXCEPTION_RAISED, Events.TERMINATE_SINGLE_EPOCH],
        handler: Callable[..., object], *args: Any, **kwargs: Any,
    ) -> RemovableEventHandle: ...
    @overload
    def add_event_handler(
        self, event_name: EventLike, handler: Callable[..., object], *args: Any, order: int, **kwargs: Any,
    ) -> RemovableEventHandle: ...
    @overload
    def add_event_handler(
        self, event_name: EventLike,
        handler: Callable[Concatenate[Engine[Batch, Output], P], object], *args: P.args, **kwargs: P.kwargs,
    ) -> RemovableEventHandle: ...
    @overload
    def add_event_handler(
        self, event_name: EventLike, handler: Callable[P, object], *args: P.args, **kwargs: P.kwargs,
    ) -> RemovableEventHandle: ...
    # fmt: on
    def add_event_handler(  # type: ignore[misc]  # a ParamSpec leaves no room for `order`
        self, event_name: EventLike, handler: Callable[..., object], *args: Any, order: int = 0, **kwargs: Any
    ) -> RemovableEventHandle:
        """Call a handler whenever an event fires.

        It is called as ``handler(engine, *args, **kwargs)``, or without the engine if it does not take it. A handler
        of ``EXCEPTION_RAISED`` also gets the exception; one of ``TERMINATE_SINGLE_EPOCH`` may take ``iter_counter``,
        the iterations done in the epoch.

        Args:
            event_name: an event, with or without a filter, the name of one, or several joined by ``|``.
            handler: any callable.
            args: positional arguments for the handler.
            order: handlers with a smaller order run earlier, those with the same order as they were registered; see
                :class:`camshaft.engine.events.Order` for the values that the library uses.
            kwargs: keyword arguments for the handler.

        Returns:
            A handle that removes the registration.

        Raises:
            ValueError: the event is not registered, or the handler cannot be called in any of these ways.
            RuntimeError: the event has a filter, but no attribute counts it.

        >>> engine = Engine(lambda engine, batch: batch * 2)
        >>> def show(engine: Engine[int, int], name: str) -> None:
        ...     print(name, engine.state.output)
        >>> handle = engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), show, "output:")
        >>> _ = engine.run([1, 2, 3, 4])
        output: 4
        output: 8
        """
        try:
            numbers = self._dispatcher.add(event_name, handler, args, kwargs, order)
        except ValueError as error:
            if not all(map(self.has_registered_events, events_in(event_name))):
                self.logger.error("%s", error)
            raise
        self.logger.debug("Handler added for event %s", event_name)
        return RemovableEventHandle(event_name, handler, self, numbers)

    # fmt: off
    @overload
    def on(
        self, event_name: Literal[Events.EXCEPTION_RAISED, Events.TERMINATE_SINGLE_EPOCH],
        *args: Any, order: int = 0, **kwargs: Any,
    ) -> Callable[[AnyHandler], AnyHandler]: ...
    @overload
    def on(self, event_name: EventLike, *, order: int = 0) -> Callable[[Plain], Plain]: ...
    @overload
    def on(
        self, event_name: EventLike, *args: Any, order: int = 0, **kwargs: Any
    ) -> Callable[[AnyHandler], AnyHandler]: ...
    # fmt: on
    def on(self, event_name: EventLike, *args: Any, order: int = 0, **kwargs: Any) -> Any:
        """Register the decorated function, and return it unchanged; see :meth:`add_event_handler`.

        >>> engine = Engine(lambda engine, batch: batch)
        >>> @engine.on(Events.EPOCH_COMPLETED | Events.COMPLETED)
        ... def show(engine: Engine[int, int]) -> None:
        ...     print(engine.last_event_name.name, engine.state.iteration)
        >>> _ = engine.run([1, 2, 3])
        EPOCH_COMPLETED 3
        COMPLETED 3
        """

        def register(handler: AnyHandler) -> AnyHandler:
            self.add_event_handler(event_name, handler, *args, order=order, **kwargs)
            return handler

        return _Decorator(register, event_name)

    def has_event_handler(self, handler: Callable[..., object], event_name: EventLike | None = None) -> bool:
        """Return whether a handler is registered on an event, on any of several, or (``None``) on any event."""
        return self._dispatcher.has(handler, event_name)

    def remove_event_handler(self, handler: Callable[..., object], event_name: EventLike) -> None:
        """Remove all registrations of a handler on an event, or on each of several.

        Raises:
            ValueError: the handler is not registered there.
        """
        self._dispatcher.remove(handler, event_name)

    def fire_event(self, event_name: Any) -> None:
        """Fire an event: call its handlers now. ``OptimizerEvents.STEP_COMPLETED`` is also counted.

        Raises:
            ValueError: the event is not registered.

        >>> engine = Engine(lambda engine, batch: None)
        >>> engine.register_events("halfway")
        >>> handle = engine.add_event_handler("halfway", lambda: print("half of it"))
        >>> engine.fire_event("halfway")
        half of it
        """
        plan = self._steps if event_name is _STEP_COMPLETED else self._dispatcher.plan(event_name)
        if plan is self._steps:
            self.state.optimizer_steps += 1
            if not plan.registrations:
                return
        self._is_traced = self.logger.isEnabledFor(logging.DEBUG)
        plan.fire(self)

    # --- stop requests -------------------------------------------------------------------------------------

    should_terminate = StopFlag(Pending.STOP, "skip_completed")
    should_terminate_single_epoch = StopFlag(Pending.STOP_EPOCH, "skip_epoch_completed")
    should_interrupt = StopFlag(Pending.PAUSE)

    def terminate(self, skip_completed: bool = False, *, on_all_ranks: bool = False) -> None:
        """End the run after the current event: ``TERMINATE`` fires, then ``COMPLETED`` unless it is skipped.

        This method can be registered as a handler; an engine in place of ``skip_completed`` is ignored.

        Args:
            skip_completed: whether to skip ``COMPLETED``.
            on_all_ranks: whether all ranks call this after the same event, so that none waits for another one. To make
                them do so, see :func:`.stop_together`.
        """
        self.logger.info("Terminate signaled. Engine will stop after the current event is finished.")
        self.should_terminate = "skip_completed" if skip_completed is True else True
        if on_all_ranks:
            self._terminated_by = activity.TOGETHER

    def terminate_epoch(self, skip_epoch_completed: bool = False) -> None:
        """End the epoch after the current event: ``TERMINATE_SINGLE_EPOCH`` fires, then ``EPOCH_COMPLETED``."""
        self.logger.info(
            "Terminate current epoch is signaled. The epoch will stop after the current event is finished."
        )
        self.should_terminate_single_epoch = "skip_epoch_completed" if skip_epoch_completed is True else True

    def interrupt(self) -> None:
        """Pause after the current event: ``INTERRUPT`` fires and ``run`` returns. The next ``run`` continues there.

        Raises:
            RuntimeError: ``interrupt_resume_enabled`` is false.
        """
        if not self.interrupt_resume_enabled:
            raise RuntimeError("interrupt needs interrupt_resume_enabled to be True, got False")
        self.logger.info("Interrupt signaled. Engine will pause after the current event is finished.")
        self.should_interrupt = True

    # --- the run -------------------------------------------------------------------------------------------

    def run(
        self,
        data: Iterable[Batch] | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> State[Batch, Output]:
        """Run to the target, or resume a run that stopped before it.

        A new run starts if no target is set yet, or if the last one is reached and no larger one is given. Otherwise
        the run resumes from the state. An interrupted run continues with the very next event. If a loaded state has
        reached the target, as after a finished job, ``run`` warns and returns without firing any event.

        Args:
            data: batches; any iterable. With ``None``, the process function gets ``None`` as its batch, and
                ``epoch_length`` must be given.
            max_epochs: total number of epochs; 1 in a new run without ``max_iters``.
            max_iters: total number of iterations, instead of ``max_epochs``.
            epoch_length: iterations per epoch; by default ``len(data)``, or else the length of the first pass.

        Returns:
            The state of the engine, always the same object.

        Raises:
            TypeError: ``data`` is not iterable, or a number is not an integer.
            ValueError: a number is out of range, or contradicts another one or the state.
            RuntimeError: the engine is running already.

        >>> engine = Engine(lambda engine, batch: batch)
        >>> engine.run([1, 2, 3], max_epochs=2).iteration
        6
        >>> engine.run([1, 2, 3], max_epochs=5).iteration
        15
        """
        if self._run is not None and self._run.is_active:
            raise RuntimeError("run was called on an engine that is running: use another engine inside its handlers")
        state = self.state
        request = Request(self._next_data if data is None else data, max_epochs, max_iters, epoch_length)
        target = (None, None) if self._run is None else target_after(state, request, self._inferred)
        if self._run is not None and target != (None, None):
            check_length(state, request)
            state.max_epochs, state.max_iters = target
            state.epoch_length = state.epoch_length or request.epoch_length
            if request.data is not None and not self._run.passes.has_started:
                state.dataloader = request.data
            self._log_resuming(state.epoch_length)
        else:
            if request.data is None and self._needs_data:
                raise ValueError(f"data must be given to {type(self).__name__}, got None")
            start = plan(state, self._kept(), request, self._inferred)
            # A job that had finished was started again. What another engine runs, such as an evaluator, is not a job.
            if start is None and outermost_engine() is None:
                warnings.warn(
                    f"nothing was run: the loaded state has reached its target of {target_of(state)}; pass a larger "
                    "target to continue, or set engine.state.max_epochs = engine.state.max_iters = None first to start "
                    "from the beginning",
                    stacklevel=2,
                )
                return state
            self._start(start or start_anew(state, request, self._inferred))
        if state.max_iters is not None:
            self._inferred["max_epochs"] = state.max_epochs
        self._next_data = None
        with ExitStack() as surroundings:
            for surrounding in self._surroundings:
                surroundings.enter_context(surrounding(self))
            self._proceed()
        return state

    def _start(self, start: Start) -> None:
        """Start a run."""
        state = self.state
        if start.is_new:
            state.optimizer_steps = 0
            self._had_batches = state.iteration > 0
            self._is_exhausted = isinstance(start.data, Iterator) and start.data is state.dataloader
        if start.progress.lost:
            warnings.warn(f"the run resumes after an error, which has lost {start.progress.lost}", stacklevel=3)
        self._discard_run()
        before, state.epoch_length = state.epoch_length, start.epoch_length
        state.max_epochs, state.max_iters, self._inferred = start.max_epochs, start.max_iters, dict(start.inferred)
        state.iteration, state.epoch, state.dataloader = start.progress.iteration, start.progress.epoch, start.data
        if start.is_new:
            self.logger.info("Engine run starting with %s", target_of(state))
        else:
            self._log_resuming(before)
        self._pending.clear()
        self._keep(start.progress)
        self._run = Run(self)

    def _keep(self, progress: Progress) -> None:
        self._progress, self._counters = progress, (self.state.iteration, self.state.epoch)

    def _kept(self) -> Progress:
        """Return the progress of the last run or a loaded state, or that of the counters if the user changed them."""
        state = self.state
        if self._counters == (state.iteration, state.epoch):
            return self._progress
        done = state.iteration % state.epoch_length if state.epoch_length else 0
        return Progress(state.epoch, state.iteration, done, origin=Origin.COUNTERS)

    def _log_resuming(self, length_before: int | None) -> None:
        state = self.state
        if length_before not in (None, state.epoch_length):
            self.logger.info("An epoch now has %s iterations, before %d", state.epoch_length or "?", length_before)
        self.logger.info(
            "Engine run resuming from iteration %d, epoch %d until %s", state.iteration, state.epoch, target_of(state)
        )

    def _proceed(self) -> None:
        """Run to the next pause or to the end."""
        run = self._run
        assert run is not None, "started just now, or paused"
        self._is_traced = self.logger.isEnabledFor(logging.DEBUG)
        with activity.lock:
            outer = activity.begin(self)
            if outer is not None:
                outer._pass_on_error(self)
        run.is_active = has_ended = True
        error: BaseException | None = None
        try:
            try:
                next(run.generator)
                has_ended = False
            except StopIteration as end:
                error = end.value
            finally:
                run.is_active = False
            if error is not None:
                raise error
            if has_ended:
                run.passes.source.completed_by_all(self.run_number, run.final_progress(), None)
                self._warn_if_no_step_was_fired(run.final_progress().epoch)
        finally:
            error = None  # its traceback holds this frame
            with activity.lock:
                activity.running.remove(self)
                self._pass_on_error(outer)
            if has_ended:
                self._keep(run.final_progress())
                self._run = None

    def raise_soon(self, error: BaseException) -> None:
        """Raise an error in the thread of this engine, as if a handler of the current event had raised it.

        It is raised in the innermost engine that runs there, after the event that is current there. For other threads;
        if the engine is not running, nothing happens.
        """
        with activity.lock:
            if self in activity.running:
                activity.in_thread(self.run_thread)[-1]._pending[Pending.ERROR] = error

    def _pass_on_error(self, other: Engine[Any, Any] | None) -> None:
        """Move the error that :meth:`raise_soon` left here to another engine, which raises it."""
        error = self._pending.pop(Pending.ERROR, None)
        if error is not None and other is not None:
            other._pending[Pending.ERROR] = error

    def _discard_run(self) -> None:
        """Discard a paused run."""
        if self._run is not None:
            self._run.generator.close()  # its handlers do not notice
            self._run = None

    def _report_that_data_are_empty(self) -> None:
        """Raise or warn if a pass over data without a length has no batches, unless that is usual for this engine.

        A rank without samples takes part in what the others do.
        """
        problem = f"data must hold at least one batch, got an empty or exhausted {type(self.state.dataloader).__name__}"
        if self._is_exhausted:
            raise ValueError(f"{problem}: pass data that can be iterated over again")
        if self._had_batches:
            warnings.warn(f"{problem}; results in the state are those of an earlier run", stacklevel=level_of_caller())

    def _warn_if_no_step_was_fired(self, epoch: int) -> None:
        """Warn if handlers wait for steps of the optimizer which a whole epoch of this run did not fire."""
        waits = self._steps.registrations and not self.state.optimizer_steps
        if waits and epoch > self._progress.epoch:
            warnings.warn(
                "handlers of OptimizerEvents.STEP_COMPLETED never ran: call engine.fire_event with this event in the "
                "process function, after each step of the optimizer",
                stacklevel=level_of_caller(),
            )

    def _infer_epoch_length(self, length: int) -> None:
        """Set the length of an epoch to that of the first pass over data without a length."""
        state = self.state
        state.epoch_length = self._inferred["epoch_length"] = length
        if state.max_iters is not None:
            state.max_epochs = self._inferred["max_epochs"] = epochs_of(state.max_iters, length)

    # --- what a step or a handler may ask for --------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """What the engine is doing, in any thread; see :class:`.Phase`."""
        if self._run is None:
            return Phase.IDLE
        return Phase.RUNNING if self._run.is_active else Phase.PAUSED

    @property
    def resumed_at(self) -> int | None:
        """Number of iterations completed before the present run, ``None`` if that is a new one."""
        progress = self._progress
        return progress.iteration if progress.iteration or progress.origin in (Origin.LOADED, Origin.FAILED) else None

    def surround(self, context: Callable[[Engine[Batch, Output]], AbstractContextManager[object]]) -> None:
        """Enter ``context(engine)`` in each call of ``run``, before its first event, and exit it after its last.

        >>> from contextlib import contextmanager
        >>> @contextmanager
        ... def announced(engine: Engine[int, int]) -> Iterator[None]:
        ...     print("running")
        ...     yield
        ...     print("done")
        >>> engine = Engine(lambda engine, batch: batch)
        >>> engine.surround(announced)
        >>> _ = engine.run([1, 2, 3])
        running
        done
        """
        self._surroundings.append(context)

    def registrations(self) -> Iterator[Registration]:
        """Yield the registrations of handlers, by event and in the order of calls."""
        for planned in self._dispatcher.plans.values():
            yield from planned.registrations

    def wrap(self, wrapper: Wrapper) -> None:
        """Wrap the calls of all handlers, also of those registered later.

        Args:
            wrapper: called with the event, the registration, and the function that calls the handler with the engine;
                returns a function to call instead.
        """
        self._dispatcher.wrap(wrapper)

    def unwrap(self, wrapper: Wrapper) -> None:
        """Remove a wrapper of :meth:`wrap`."""
        self._dispatcher.unwrap(wrapper)

    def silenced(self) -> AbstractContextManager[None]:
        """Return a context manager that sets aside the handlers registered now, except those that complete a step."""
        return self._dispatcher.silenced()

    @property
    def iteration_in_epoch(self) -> int:
        """Number of iterations begun in the current epoch, 0 outside of a run."""
        return 0 if self._run is None else self._run.begun

    @property
    def batch_share(self) -> float:
        """Size of this rank's batch over the mean size of the batches of all ranks in this iteration.

        Multiply the mean loss of this rank's batch by it, ``(loss * engine.batch_share).backward()``: the gradients,
        averaged over ranks, are then those of the mean loss of all samples of the iteration. The share is computed
        without communication, and is 1 in a single process and for data that do not define it.
        """
        return 1.0 if self._run is None else self._run.passes.share()

    @property
    def in_step(self) -> bool:
        """Whether a step is open, whose end :meth:`defer` waits for.

        It is open from the fetch of a batch until the process function has returned, and while :attr:`is_accumulating`.
        """
        return self._run is not None and self._run.in_step

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients wait for a later iteration.

        Steps that accumulate gradients over several iterations set it to True, and to False when the optimizer has
        stepped; those of supervised trainers do. The end of an epoch sets it to False.
        """
        return self._run is not None and self._run.is_accumulating

    @is_accumulating.setter
    def is_accumulating(self, value: bool) -> None:
        if self._run is not None:
            self._run.is_accumulating = value

    def defer(self, function: Callable[[Engine[Batch, Output]], object]) -> None:
        """Call ``function(engine)`` once no step is open: now, or after the handlers of the iteration that ends it.

        What is saved then belongs together: the position in the data, the weights, and what handlers have counted and
        averaged. A function that is due already is called once. If the run is terminated meanwhile, the function is
        called after ``TERMINATE``; after an error, it is not called.

        >>> from camshaft.engine import Events
        >>> engine = Engine(lambda engine, batch: print(batch))
        >>> @engine.on(Events.ITERATION_STARTED(once=2))
        ... def request() -> None:
        ...     engine.defer(lambda engine: print("saved after iteration", engine.state.iteration))
        >>> _ = engine.run(["first", "second", "third"])
        first
        second
        saved after iteration 2
        third
        """
        if self._run is None or not self._run.in_step:
            function(self)
        else:
            self._pending.setdefault(Pending.DUE, {})[function] = True

    def change_epoch_length(self, length: int) -> None:
        """Change the length of epochs, in ``EPOCH_STARTED``."""
        if self._run is None or not self._run.in_epoch or self._run.begun:
            raise RuntimeError("change_epoch_length must be called in EPOCH_STARTED of an epoch without iterations yet")
        if not has_given_length(self.state, self._inferred):
            self._inferred["epoch_length"] = length
        self.state.epoch_length = positive("length", length)

    def set_data(self, data: Iterable[Batch]) -> None:
        """Continue with other data: from the next fetch in a run, otherwise in the next run without data of its own.

        Raises:
            TypeError: ``data`` is not iterable.
        """
        check_iterable(data)
        if self._run is None:
            self._next_data = data
        else:
            self._run.passes.replace(data)

    # --- saving and loading --------------------------------------------------------------------------------

    @property
    def _keys_of_ranks(self) -> tuple[str, ...]:
        """Keys of the state that are different on each rank: a checkpoint holds them for every rank."""
        return ("position",) if source_of(self.state.dataloader).saves_itself else ()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the progress, the target, and the attributes that ``state_dict_user_keys`` names.

        ``iteration`` counts completed iterations. ``epochs_completed`` and ``iterations_in_epoch``, those completed in
        the epoch after them, are present once a run has started. ``position`` is present if the data can start in the
        middle of a pass: loaders of ``auto_dataloader``, and data with ``state_dict`` and ``load_state_dict``.
        ``data_length``, the number of batches in the data, is present if an epoch is a pass over them, and
        ``optimizer_steps`` once a step of the optimizer was counted.

        While a step is open, what else is saved may be ahead of these values, and accumulated gradients are not saved:
        this warns. Save in a function that :meth:`defer` calls, as :class:`.Checkpoint` does.

        >>> from camshaft.engine import Events
        >>> engine = Engine(lambda engine, batch: None)
        >>> dict(engine.state_dict())
        {'epoch_length': None, 'iteration': 0, 'max_epochs': None}
        >>> handle = engine.add_event_handler(Events.ITERATION_COMPLETED(once=4), engine.terminate)
        >>> _ = engine.run(range(3), max_epochs=2)
        >>> dict(engine.state_dict())  # doctest: +NORMALIZE_WHITESPACE
        {'epoch_length': 3, 'iteration': 4, 'max_epochs': 2, 'epochs_completed': 1, 'iterations_in_epoch': 1,
         'data_length': 3}
        """
        state, kept = self.state, self._kept()
        if self.in_step or self.is_accumulating:
            what = "accumulated gradients are lost" if self.is_accumulating else "what is saved with it may be ahead"
            hint = "; save in a function that engine.defer calls" if self.in_step else ""
            warnings.warn(f"the state is saved while a step is open: {what}{hint}", stacklevel=level_of_caller())
        progress = kept
        if self._run is not None:
            source = self._run.passes.present_source()
            progress = source.completed_by_all(self.run_number, self._run.progress(), self._progress)
        target = "max_epochs" if state.max_iters is None else "max_iters"
        saved: OrderedDict[str, Any] = OrderedDict(epoch_length=state.epoch_length, iteration=progress.iteration)
        saved.update((key, getattr(state, key)) for key in [target, *self.state_dict_user_keys])
        if self._run is not None or kept.origin is not Origin.COUNTERS:
            saved.update(epochs_completed=progress.epoch, iterations_in_epoch=progress.done)
        if progress.position is not None:
            saved["position"] = progress.position
        if state.optimizer_steps:
            saved["optimizer_steps"] = state.optimizer_steps
        length, is_given = state.epoch_length, has_given_length(state, self._inferred)
        if length is not None and not is_given and length_of(state.dataloader) in (None, length):
            saved["data_length"] = length
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load progress and target, from which the next ``run`` resumes. A paused run is discarded.

        Args:
            state_dict: with ``epoch_length``, one of ``iteration`` and ``epoch`` (completed), one of ``max_epochs`` and
                ``max_iters``, and the keys of ``state_dict_user_keys``. With ``position``, the next run continues with
                the very next sample; without it, the data are read from their beginning.

        Raises:
            TypeError: ``state_dict`` or ``position`` is not a mapping, or a number is not an integer; the engine is
                unchanged.
            ValueError: a key is missing, or a number is out of range; likewise.
            RuntimeError: the engine is in an epoch.

        >>> engine = Engine(lambda engine, batch: None)
        >>> engine.load_state_dict({"epoch": 3, "epoch_length": 10, "max_epochs": 5})
        >>> engine.run(range(10)).iteration
        50
        """
        run, state = self._run, self.state
        if run is not None and run.is_active and run.in_epoch:
            raise RuntimeError(
                "load_state_dict was called in an epoch of the engine's own run: load before it, or in STARTED"
            )
        super().load_state_dict(state_dict)
        if missing := [key for key in self.state_dict_user_keys if key not in state_dict]:
            raise ValueError(f"state_dict lacks the user keys {missing}, it has {list(state_dict)}")
        progress, measures = read(state_dict)
        length = measures["epoch_length"]
        inferred: Mapping[str, int | None] = {} if state_dict.get("data_length") != length else {"epoch_length": length}
        if run is not None and run.is_active:  # in STARTED, when the data are known
            loaded = State[Any, Any](dataloader=state.dataloader, epoch_length=length)
            request = Request(state.dataloader, None, None, None)
            measures["epoch_length"], inferred, progress = resume(loaded, progress, request, inferred)
        else:
            self._discard_run()
        for name, value in (*measures.items(), *((key, state_dict[key]) for key in self.state_dict_user_keys)):
            setattr(state, name, value)
        self._inferred = dict(inferred)
        state.iteration, state.epoch = progress.iteration, progress.epoch
        self._keep(progress)


def check_engine(name: str, value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` is an engine of this library."""
    check_type(name, value, Engine, "an Engine")
