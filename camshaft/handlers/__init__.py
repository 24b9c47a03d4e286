"""What reacts to events: saving, showing progress."""

from __future__ import annotations

from camshaft.handlers.checkpoint import Checkpoint, DiskSaver, ModelCheckpoint
from camshaft.handlers.tqdm_logger import ProgressBar
from camshaft.handlers.utils import global_step_from_engine

__all__ = ["Checkpoint", "DiskSaver", "ModelCheckpoint", "ProgressBar", "global_step_from_engine"]
