"""What ranks agree on outside of collectives."""

from __future__ import annotations
