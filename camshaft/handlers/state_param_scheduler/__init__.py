"""Schedules for attributes of an engine's state.

Unlike the schedulers of an optimizer, these count first: their first call has index 1. So the same milestones act one
event earlier here.
"""

from __future__ import annotations

from camshaft.handlers.state_param_scheduler.base import StateParamScheduler
from camshaft.handlers.state_param_scheduler.formulas import (
    ExpStateScheduler,
    MultiStepStateScheduler,
    PiecewiseLinearStateScheduler,
    StepStateScheduler,
)
from camshaft.handlers.state_param_scheduler.function import LambdaStateScheduler

__all__ = [
    "ExpStateScheduler",
    "LambdaStateScheduler",
    "MultiStepStateScheduler",
    "PiecewiseLinearStateScheduler",
    "StateParamScheduler",
    "StepStateScheduler",
]
