"""Schedules for learning rates, other parameters of optimizers, and batch sizes."""

from __future__ import annotations

from camshaft.handlers.param_scheduler.base import BaseParamScheduler
from camshaft.handlers.param_scheduler.batch_size import BatchSizeScheduler
from camshaft.handlers.param_scheduler.concat import ConcatScheduler
from camshaft.handlers.param_scheduler.cyclical import (
    CosineAnnealingScheduler,
    CyclicalScheduler,
    LinearCyclicalScheduler,
)
from camshaft.handlers.param_scheduler.group import ParamGroupScheduler
from camshaft.handlers.param_scheduler.lr_scheduler import LRScheduler
from camshaft.handlers.param_scheduler.param import ParamScheduler
from camshaft.handlers.param_scheduler.piecewise import PiecewiseLinear
from camshaft.handlers.param_scheduler.plateau import ReduceLROnPlateauScheduler
from camshaft.handlers.param_scheduler.warmup import create_lr_scheduler_with_warmup

__all__ = [
    "BaseParamScheduler",
    "BatchSizeScheduler",
    "ConcatScheduler",
    "CosineAnnealingScheduler",
    "CyclicalScheduler",
    "LRScheduler",
    "LinearCyclicalScheduler",
    "ParamGroupScheduler",
    "ParamScheduler",
    "PiecewiseLinear",
    "ReduceLROnPlateauScheduler",
    "create_lr_scheduler_with_warmup",
]
