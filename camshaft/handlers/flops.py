"""Floating point operations: how many an iteration takes, and how many a device could do."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from camshaft.engine.engine import Engine
from camshaft.engine.events import Events, FailureEvents, RemovableEventHandle

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI250X": 191e12,
}
"""Dense bfloat16 (on older ones float16) operations per second of a device, by a part of its name; first fit counts."""

_FIRST, _LAST = -(2**42), 2**42  # of the handlers of an event, but within those of the profilers of handlers
_LEAVING = Events.ITERATION_COMPLETED | Events.TERMINATE | Events.TERMINATE_SINGLE_EPOCH | Events.INTERRUPT


def peak_of(device: torch.device) -> float | None:
    """Give the operations per second that a device could do; ``None`` with a warning if that is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    found = next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
    if found is None:
        warnings.warn(f"there is no MFU, because nobody knows the peak of {name!r}: give peak_flops", stacklevel=2)
    return found


class FlopCount:
    """Lets torch count the operations of one iteration, the first that is completed; others are as long."""

    def __init__(self) -> None:
        self._counter: FlopCounterMode | None = None
        self._count: int | None = None

    def __call__(self, batch: Any) -> int:
        """Give the count, 0 as long as there is none."""
        return self._count or 0

    def attach(self, engine: Engine[Any, Any]) -> list[RemovableEventHandle]:
        """Count in the next iteration of an engine."""
        return [
            engine.add_event_handler(Events.ITERATION_STARTED, self._begin, order=_LAST),
            engine.add_event_handler(_LEAVING, self._end, order=_FIRST),
            engine.add_event_handler(FailureEvents.ERROR_MET, self._leave),
        ]

    def _begin(self) -> None:
        if self._count is None:
            from torch.utils.flop_counter import FlopCounterMode  # imports triton, where that is installed

            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()  # type: ignore[no-untyped-call]  # torch does not say

    def _end(self, engine: Engine[Any, Any]) -> None:
        counter = self._leave()
        if counter is None or engine.last_event_name != Events.ITERATION_COMPLETED:
            return
        self._count = counter.get_total_flops()
        if self._count == 0:
            warnings.warn(
                "torch counted no floating point operations in an iteration, so there is no MFU: "
                "if they are in compiled code, give flops as a number",
                stacklevel=2,
            )

    def _leave(self) -> FlopCounterMode | None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch does not say
        return counter
