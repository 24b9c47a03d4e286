"""There are no metrics here; importing this module says where to find them."""

raise ImportError(
    "camshaft has no metrics of its own. Those of PyTorch-Ignite attach to its engines unchanged: leave 'from "
    "ignite.metrics import Accuracy' as it is. For those of torchmetrics use camshaft.handlers.attach_metrics(engine, "
    "{'accuracy': Accuracy(...)}), for a running average of an output camshaft.handlers.RunningAverage.",
    name=__name__,
)
