"""Wishes to stop, as values, and how they travel through the loop."""

from __future__ import annotations

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


def flag(stops: set[Stop], stop: Stop, quietly: Stop) -> bool | str:
    """Show a wish to stop in the form of the public attribute: ``False``, ``True`` or the name of what to skip."""
    return stop in stops and (quietly.name.lower() if quietly in stops else True)


def set_flag(stops: set[Stop], stop: Stop, quietly: Stop, value: bool | str) -> None:
    """Set a wish to stop from the form of the public attribute."""
    name = quietly.name.lower()
    if value not in (False, True, name):
        raise ValueError(f"the flag must be False, True or {name!r}, got {value!r}")
    stops.difference_update((stop, quietly))
    if value:
        stops.update((stop, quietly) if value == name else (stop,))
