"""Who started this process, and where it stands: what launchers leave in the environment, read as a value."""

from __future__ import annotations

from camshaft.distributed.launchers.environment import detect
from camshaft.distributed.launchers.launch import Launch

__all__ = ["Launch", "detect"]
