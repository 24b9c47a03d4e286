"""What the registry asks of the module of a backend, for those of torch."""

from camshaft.distributed.backends.native_spawn import spawn
from camshaft.distributed.backends.native_start import adopt, create

__all__ = ["adopt", "create", "spawn"]
