"""Saving objects while an engine runs, and loading them again."""

from __future__ import annotations

from camshaft.handlers.checkpoint.events import CheckpointEvents
from camshaft.handlers.checkpoint.handler import Checkpoint
from camshaft.handlers.checkpoint.model import ModelCheckpoint
from camshaft.handlers.checkpoint.savers import BaseSaveHandler, DiskSaver

__all__ = ["BaseSaveHandler", "Checkpoint", "CheckpointEvents", "DiskSaver", "ModelCheckpoint"]
