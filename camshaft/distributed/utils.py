"""The functions of :mod:`camshaft.distributed`, under the module path that they also have in the API."""

from camshaft.distributed import *  # noqa: F403  # the names are listed there
from camshaft.distributed import __all__ as __all__
