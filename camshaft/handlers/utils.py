"""The path under which PyTorch-Ignite has :func:`global_step_from_engine`."""

from camshaft.handlers.steps import global_step_from_engine

__all__ = ["global_step_from_engine"]
