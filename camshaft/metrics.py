"""Placeholder: importing it raises an error that says where to find metrics."""

raise ImportError(
    "camshaft has no metrics of its own. Those of PyTorch-Ignite attach to its engines unchanged: leave 'from "
    "ignite.metrics import Accuracy' as it is. For those of torchmetrics use camshaft.handlers.attach_metrics(engine, "
    "{'accuracy': Accuracy(...)}), for a running average of an output camshaft.handlers.RunningAverage.",
    name=__name__,
)
