"""Undo what the examples do to the logger of checkpoints, which prints where a run resumes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def original_logger() -> Iterator[None]:
    logger = logging.getLogger("camshaft.handlers.checkpoint")
    level, propagate = logger.level, logger.propagate
    yield
    logger.handlers.clear()
    logger.setLevel(level)
    logger.propagate = propagate
