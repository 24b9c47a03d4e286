"""What the registry asks of the module of a backend, for XLA."""

from camshaft.distributed.backends.xla_backend import XlaBackend
from camshaft.distributed.backends.xla_spawn import spawn
from camshaft.distributed.backends.xla_start import adopt, create

__all__ = ["XlaBackend", "adopt", "create", "spawn"]
