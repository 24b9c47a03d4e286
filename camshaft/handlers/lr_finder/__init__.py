"""A search for a good learning rate: a short run with growing rates."""

from __future__ import annotations

from camshaft.handlers.lr_finder.finder import FastaiLRFinder

__all__ = ["FastaiLRFinder"]
