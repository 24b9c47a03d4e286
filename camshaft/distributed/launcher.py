"""``Parallel``, under the module path of the public API."""

from __future__ import annotations

from camshaft.distributed.launch.parallel import Parallel

__all__ = ["Parallel"]
