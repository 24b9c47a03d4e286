"""Wishes to stop, as values, and how they travel through the loop."""

from __future__ import annotations

import logging
from enum import Enum, auto


class Stop(Enum):
    """What was asked of a running engine; acted on after the event in which it was asked."""

    RUN = auto()
    SKIP_COMPLETED = auto()
    EPOCH = auto()
    SKIP_EPOCH_COMPLETED = auto()
    PAUSE = auto()


EPOCH_STOPS = frozenset({Stop.EPOCH, Stop.SKIP_EPOCH_COMPLETED})


class StopRun(BaseException):
    """Leaves the loop for the end of the run; no ``Exception``, so that no handler of errors takes it for one."""


class StopEpoch(BaseException):
    """Leaves the iterations of one epoch."""


def _flag(stops: set[Stop], stop: Stop, quietly: Stop) -> bool | str:
    """Show a wish to stop in the form of the public attribute: ``False``, ``True`` or the name of what to skip."""
    return stop in stops and (quietly.name.lower() if quietly in stops else True)


def _set_flag(stops: set[Stop], stop: Stop, quietly: Stop, value: bool | str) -> None:
    """Set a wish to stop from the form of the public attribute."""
    name = quietly.name.lower()
    if value not in (False, True, name):
        raise ValueError(f"the flag must be False, True or {name!r}, got {value!r}")
    stops.difference_update((stop, quietly))
    if value:
        stops.update((stop, quietly) if value == name else (stop,))


class Stoppable:
    """Takes wishes to stop, which the run acts on after the current event."""

    logger: logging.Logger
    interrupt_resume_enabled = True

    def __init__(self) -> None:
        super().__init__()
        self._stops: set[Stop] = set()

    @property
    def should_terminate(self) -> bool | str:
        """Whether the run is to end: ``False``, ``True`` or ``"skip_completed"``."""
        return _flag(self._stops, Stop.RUN, Stop.SKIP_COMPLETED)

    @should_terminate.setter
    def should_terminate(self, value: bool | str) -> None:
        _set_flag(self._stops, Stop.RUN, Stop.SKIP_COMPLETED, value)

    @property
    def should_terminate_single_epoch(self) -> bool | str:
        """Whether the epoch is to end: ``False``, ``True`` or ``"skip_epoch_completed"``."""
        return _flag(self._stops, Stop.EPOCH, Stop.SKIP_EPOCH_COMPLETED)

    @should_terminate_single_epoch.setter
    def should_terminate_single_epoch(self, value: bool | str) -> None:
        _set_flag(self._stops, Stop.EPOCH, Stop.SKIP_EPOCH_COMPLETED, value)

    @property
    def should_interrupt(self) -> bool:
        """Whether the run is to pause."""
        return Stop.PAUSE in self._stops

    @should_interrupt.setter
    def should_interrupt(self, value: bool) -> None:
        (self._stops.add if value else self._stops.discard)(Stop.PAUSE)

    def terminate(self, skip_completed: bool = False) -> None:
        """End the run after the current event: ``TERMINATE`` fires, then ``COMPLETED`` unless skipped.

        It may be a handler itself, which is handed the engine in the place of ``skip_completed``.
        """
        self.logger.info("Terminate signaled. Engine will stop after the current event is finished.")
        self.should_terminate = Stop.SKIP_COMPLETED.name.lower() if skip_completed is True else True

    def terminate_epoch(self, skip_epoch_completed: bool = False) -> None:
        """End the epoch after the current event: ``TERMINATE_SINGLE_EPOCH`` fires, then ``EPOCH_COMPLETED``."""
        self.logger.info(
            "Terminate current epoch is signaled. The epoch will stop after the current event is finished."
        )
        self.should_terminate_single_epoch = (
            Stop.SKIP_EPOCH_COMPLETED.name.lower() if skip_epoch_completed is True else True
        )

    def interrupt(self) -> None:
        """Pause after the current event: ``INTERRUPT`` fires and ``run`` returns; the next ``run`` goes on from there.

        Raises:
            RuntimeError: ``interrupt_resume_enabled`` is false.
        """
        if not self.interrupt_resume_enabled:
            raise RuntimeError("interrupt needs interrupt_resume_enabled to be True, got False")
        self.logger.info("Interrupt signaled. Engine will pause after the current event is finished.")
        self._stops.add(Stop.PAUSE)
