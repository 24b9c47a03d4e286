"""The exceptions of this package, under the name of PyTorch-Ignite."""

from __future__ import annotations

from camshaft.errors import DamagedCheckpointError, NotComputableError, RankDivergenceError, RankFailedError

__all__ = ["DamagedCheckpointError", "NotComputableError", "RankDivergenceError", "RankFailedError"]
