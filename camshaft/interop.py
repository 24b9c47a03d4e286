"""Objects of PyTorch-Ignite, in jobs that use both libraries."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def ignite_class(value: Any) -> type | None:
    """Return the class of PyTorch-Ignite that ``value`` is, or is an instance of, or ``None``."""
    kind = value if isinstance(value, type) else type(value)
    return next((base for base in kind.__mro__ if base.__module__.partition(".")[0] == "ignite"), None)


def check_metric(metric: Any) -> None:
    """Reject metrics that collect samples, such as ``ROC_AUC``, in a job of several ranks.

    They gather the samples as if every rank had the same number. Where the numbers differ, gloo aborts the process, and
    MPI loses samples.
    """
    group = getattr(metric, "metrics", None)
    for one in (metric, *(group.values() if isinstance(group, dict) else ())):
        collects = any(isinstance(getattr(one, name, None), list) for name in ("_predictions", "_y_pred"))
        if collects and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            name = type(one).__name__
            raise RuntimeError(
                f"{name} of PyTorch-Ignite must not be attached in a job of {dist.get_world_size()} ranks: it gathers "
                "samples as if every rank had the same number, and fails or leaves some out where they differ; use "
                "camshaft.handlers.attach_metrics with a metric of torchmetrics, such as BinaryAUROC instead of ROC_AUC"
            )
