"""Base classes of objects with a state, and of handlers that can be reset."""

from camshaft.base.mixins import ResettableHandler, Serializable

__all__ = ["ResettableHandler", "Serializable"]
