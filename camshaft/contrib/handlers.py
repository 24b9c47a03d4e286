"""Placeholder: importing it raises an error that says where to find handlers."""

raise ImportError(
    "camshaft.contrib has no handlers. Instead of ignite.contrib.handlers import from camshaft.handlers, as in 'from "
    "camshaft.handlers import ProgressBar'.",
    name=__name__,
)
