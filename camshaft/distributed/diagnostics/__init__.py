"""What a process sees of its distributed configuration, and which backend fits it."""

from __future__ import annotations
