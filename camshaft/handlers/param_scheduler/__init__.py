"""Schedulers of learning rates, other parameters of optimizers, and batch sizes."""

from __future__ import annotations

from camshaft.handlers.param_scheduler.base import BaseParamScheduler, ParamScheduler
from camshaft.handlers.param_scheduler.batch_size import BatchSizeScheduler
from camshaft.handlers.param_scheduler.combined import (
    ConcatScheduler,
    ParamGroupScheduler,
    create_lr_scheduler_with_warmup,
)
from camshaft.handlers.param_scheduler.curves import (
    CosineAnnealingScheduler,
    CyclicalScheduler,
    LinearCyclicalScheduler,
    PiecewiseLinear,
)
from camshaft.handlers.param_scheduler.torch_schedulers import LRScheduler, ReduceLROnPlateauScheduler

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
