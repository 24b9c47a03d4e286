"""Values, histograms and checkpoints for ClearML."""

from __future__ import annotations

from camshaft.handlers.clearml_logger.logger import (
    ClearMLLogger,
    GradsHistHandler,
    GradsScalarHandler,
    OptimizerParamsHandler,
    OutputHandler,
    WeightsHistHandler,
    WeightsScalarHandler,
)
from camshaft.handlers.clearml_logger.saver import ClearMLSaver
from camshaft.handlers.utils import global_step_from_engine

__all__ = [
    "ClearMLLogger",
    "ClearMLSaver",
    "GradsHistHandler",
    "GradsScalarHandler",
    "OptimizerParamsHandler",
    "OutputHandler",
    "WeightsHistHandler",
    "WeightsScalarHandler",
    "global_step_from_engine",
]
