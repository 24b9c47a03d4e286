"""The event by which others hear of a saved checkpoint."""

from __future__ import annotations

from typing import Any

from camshaft.engine.engine import Engine
from camshaft.engine.events import HandlerEvents


class CheckpointEvents(HandlerEvents):
    """What :class:`Checkpoint` fires. Every engine knows these events."""

    SAVED_CHECKPOINT = "saved_checkpoint"


def announce(engine: Engine[Any, Any]) -> None:
    """Fire the event without a trace of it: other handlers on the event that led here look at its name."""
    event = engine.last_event_name
    engine.fire_event(CheckpointEvents.SAVED_CHECKPOINT)
    engine.last_event_name = event
