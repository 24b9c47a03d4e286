"""Save objects while an engine runs, and load them."""

from __future__ import annotations

from camshaft.handlers.checkpoint.handler import Checkpoint, CheckpointEvents, ModelCheckpoint
from camshaft.handlers.checkpoint.savers import BaseSaveHandler, DiskSaver

__all__ = ["BaseSaveHandler", "Checkpoint", "CheckpointEvents", "DiskSaver", "ModelCheckpoint"]
