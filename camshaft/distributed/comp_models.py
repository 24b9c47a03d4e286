"""The backends that this installation supports."""

from __future__ import annotations

from camshaft.distributed.registry import (
    backend_classes,
    has_hvd_support,
    has_native_dist_support,
    has_xla_support,
)

__all__ = ["has_hvd_support", "has_native_dist_support", "has_xla_support", "registered_computation_models"]

registered_computation_models = backend_classes()
"""The class of each installed backend: a single process, torch's, XLA's and Horovod's."""
