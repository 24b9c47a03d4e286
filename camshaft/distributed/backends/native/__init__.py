"""The backends of torch.distributed: gloo, nccl, and what is registered with torch for other devices."""

from camshaft.distributed.backends.native.backend import adopt, check_options, create

__all__ = ["adopt", "check_options", "create"]
