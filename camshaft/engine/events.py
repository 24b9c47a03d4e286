"""The names of the event system, importable from one place."""

from camshaft.engine.event import CallableEventWithFilter, EventEnum, Events, EventsList
from camshaft.engine.handle import RemovableEventHandle
from camshaft.engine.state import State

__all__ = ["CallableEventWithFilter", "EventEnum", "Events", "EventsList", "RemovableEventHandle", "State"]
