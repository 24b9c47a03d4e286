"""The exceptions, where imports written for the API look for them."""

from __future__ import annotations

from camshaft.errors import DamagedCheckpointError, NotComputableError, RankDivergenceError

__all__ = ["DamagedCheckpointError", "NotComputableError", "RankDivergenceError"]
