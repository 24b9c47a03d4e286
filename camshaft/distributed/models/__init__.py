"""Models, optimizers, and loaders on the ranks of a job."""

from __future__ import annotations
