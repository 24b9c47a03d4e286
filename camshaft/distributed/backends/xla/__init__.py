"""Backend xla-tpu: devices that torch_xla drives, one process each, or all of them by one process (SPMD)."""

from camshaft.distributed.backends.xla.start import adopt, create

__all__ = ["adopt", "create"]
