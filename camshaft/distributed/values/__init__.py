"""Any value over tensors: serialize it, exchange it, reduce numbers exactly."""

from __future__ import annotations
