"""The engine and its events."""

from camshaft.engine.engine import Engine
from camshaft.engine.event import CallableEventWithFilter, EventEnum, Events, EventsList
from camshaft.engine.handle import RemovableEventHandle
from camshaft.engine.state import State

__all__ = [
    "CallableEventWithFilter",
    "Engine",
    "EventEnum",
    "Events",
    "EventsList",
    "RemovableEventHandle",
    "State",
]
