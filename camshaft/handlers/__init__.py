"""Handlers: saving, logging, scheduling, stopping, and measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from camshaft.handlers.checkpoint import Checkpoint, DiskSaver, ModelCheckpoint
from camshaft.handlers.clearml_logger import ClearMLLogger
from camshaft.handlers.early_stopping import EarlyStopping
from camshaft.handlers.ema_handler import EMAHandler
from camshaft.handlers.fbresearch_logger import FBResearchLogger
from camshaft.handlers.file_logger import CSVLogger, JSONLinesLogger
from camshaft.handlers.lr_finder import FastaiLRFinder
from camshaft.handlers.metrics import RunningAverage, attach_metrics
from camshaft.handlers.mlflow_logger import MLflowLogger
from camshaft.handlers.param_scheduler import (
    BaseParamScheduler,
    BatchSizeScheduler,
    ConcatScheduler,
    CosineAnnealingScheduler,
    CyclicalScheduler,
    LinearCyclicalScheduler,
    LRScheduler,
    ParamGroupScheduler,
    ParamScheduler,
    PiecewiseLinear,
    ReduceLROnPlateauScheduler,
    create_lr_scheduler_with_warmup,
)
from camshaft.handlers.preemption import Preemption
from camshaft.handlers.state_param_scheduler import (
    ExpStateScheduler,
    LambdaStateScheduler,
    MultiStepStateScheduler,
    PiecewiseLinearStateScheduler,
    StateParamScheduler,
    StepStateScheduler,
)
from camshaft.handlers.steps import global_step_from_engine
from camshaft.handlers.stopping import stop_together
from camshaft.handlers.stores import EpochOutputStore
from camshaft.handlers.stragglers import Stragglers
from camshaft.handlers.tensorboard_logger import TensorboardLogger
from camshaft.handlers.terminate_on_nan import TerminateOnNan
from camshaft.handlers.throughput import Throughput
from camshaft.handlers.time_limit import TimeLimit
from camshaft.handlers.time_profilers import BasicTimeProfiler, HandlersTimeProfiler
from camshaft.handlers.timing import Timer
from camshaft.handlers.torch_profiler import TorchProfiler
from camshaft.handlers.tqdm_logger import ProgressBar
from camshaft.handlers.wandb_logger import WandBLogger
from camshaft.interop import missing_names

__all__ = [
    "BaseParamScheduler",
    "BasicTimeProfiler",
    "BatchSizeScheduler",
    "CSVLogger",
    "Checkpoint",
    "ClearMLLogger",
    "ConcatScheduler",
    "CosineAnnealingScheduler",
    "CyclicalScheduler",
    "DiskSaver",
    "EMAHandler",
    "EarlyStopping",
    "EpochOutputStore",
    "ExpStateScheduler",
    "FBResearchLogger",
    "FastaiLRFinder",
    "HandlersTimeProfiler",
    "JSONLinesLogger",
    "LRScheduler",
    "LambdaStateScheduler",
    "LinearCyclicalScheduler",
    "MLflowLogger",
    "ModelCheckpoint",
    "MultiStepStateScheduler",
    "ParamGroupScheduler",
    "ParamScheduler",
    "PiecewiseLinear",
    "PiecewiseLinearStateScheduler",
    "Preemption",
    "ProgressBar",
    "ReduceLROnPlateauScheduler",
    "RunningAverage",
    "StateParamScheduler",
    "StepStateScheduler",
    "Stragglers",
    "TensorboardLogger",
    "TerminateOnNan",
    "Throughput",
    "TimeLimit",
    "Timer",
    "TorchProfiler",
    "WandBLogger",
    "attach_metrics",
    "create_lr_scheduler_with_warmup",
    "global_step_from_engine",
    "stop_together",
]

if not TYPE_CHECKING:  # or type checkers would accept every name
    __getattr__ = missing_names(__name__)
