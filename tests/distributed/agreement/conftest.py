"""Fixtures of boards that have no processes."""

from tests.distributed.failures.conftest import board_at

__all__ = ["board_at"]
