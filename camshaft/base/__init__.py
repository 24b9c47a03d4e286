"""Base classes of what can be saved, and of handlers that can start afresh."""

from camshaft.base.mixins import ResettableHandler, Serializable

__all__ = ["ResettableHandler", "Serializable"]
