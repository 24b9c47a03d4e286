"""Placeholder: importing it raises an error that says where to find metrics."""

raise ImportError(
    "camshaft has no metrics of its own. Instead of ignite.contrib.metrics import from ignite.metrics, as in 'from "
    "ignite.metrics import ROC_AUC': metrics of PyTorch-Ignite attach to camshaft's engines. For those of torchmetrics "
    "use camshaft.handlers.attach_metrics(engine, {'accuracy': Accuracy(...)}).",
    name=__name__,
)
