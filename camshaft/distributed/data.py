"""The former path of :mod:`camshaft.data`."""

from __future__ import annotations

from camshaft.data import *  # noqa: F403  # the names are listed there
from camshaft.data import __all__ as __all__
