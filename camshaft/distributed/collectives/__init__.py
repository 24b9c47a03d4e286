"""What ranks exchange, and what is checked before and told after."""

from __future__ import annotations
