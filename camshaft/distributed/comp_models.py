"""The backends that this installation supports."""

from __future__ import annotations

from importlib import import_module

from camshaft.distributed.backends.registry import has_hvd_support, has_native_dist_support, has_xla_support

__all__ = ["has_hvd_support", "has_native_dist_support", "has_xla_support", "registered_computation_models"]

_CLASSES = {
    ("serial", "SerialBackend"): True,
    ("torch_distributed", "NativeBackend"): has_native_dist_support,
    ("xla", "XlaBackend"): has_xla_support,
    ("horovod", "HorovodBackend"): has_hvd_support,
}
registered_computation_models = [
    getattr(import_module(f"camshaft.distributed.backends.{module}"), name)
    for (module, name), is_installed in _CLASSES.items()
    if is_installed
]
"""The class of each installed backend: a single process, torch's, XLA's and Horovod's."""
