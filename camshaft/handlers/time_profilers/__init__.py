"""Where the time of a run goes: to the data, to the process function, and to which handlers."""

from __future__ import annotations

from camshaft.handlers.time_profilers.basic import BasicTimeProfiler
from camshaft.handlers.time_profilers.handlers import HandlersTimeProfiler

__all__ = ["BasicTimeProfiler", "HandlersTimeProfiler"]
