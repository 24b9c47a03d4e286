"""Setting up a trainer with the usual handlers in one call, and truncated backpropagation through time."""

from __future__ import annotations

from camshaft.contrib.engines import common as common
from camshaft.contrib.engines.tbptt import Tbptt_Events, create_supervised_tbptt_trainer

__all__ = ["Tbptt_Events", "create_supervised_tbptt_trainer"]
