"""Backend horovod: the processes that Horovod joined."""

from camshaft.distributed.backends.horovod.start import adopt, create

__all__ = ["adopt", "create"]
