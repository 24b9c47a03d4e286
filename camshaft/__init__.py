"""camshaft: an event-driven training engine for PyTorch."""

from camshaft import base, distributed, engine, exceptions, handlers, utils
from camshaft.version import __version__

__all__ = ["__version__", "base", "distributed", "engine", "exceptions", "handlers", "utils"]
