"""Which launcher started this process, and the place it gave it: environment variables, read as a value."""

from __future__ import annotations

from camshaft.distributed.environments.detection import detect, infer

__all__ = ["detect", "infer"]
