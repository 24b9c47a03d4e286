"""The version of the library; packaging reads it from here too, without importing torch."""

from __future__ import annotations

__version__ = "0.1.0"
