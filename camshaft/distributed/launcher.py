"""The path of PyTorch-Ignite's ``Parallel``."""

from __future__ import annotations

from camshaft.distributed.launch.parallel import Parallel

__all__ = ["Parallel"]
