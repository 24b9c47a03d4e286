"""Objects of PyTorch-Ignite, in jobs that use both libraries."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from camshaft.errors import level_of_caller

REPLACEMENTS = {
    **dict.fromkeys(("VisdomLogger", "setup_visdom_logging"), "TensorboardLogger, setup_tb_logging"),
    **dict.fromkeys(
        ("NeptuneLogger", "NeptuneSaver", "PolyaxonLogger", "setup_neptune_logging", "setup_plx_logging"),
        "WandBLogger, MLflowLogger, or ClearMLLogger, and their setup functions",
    ),
}
"""What to use instead of names of PyTorch-Ignite that camshaft does not have."""


def missing_names(module: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module, which names the replacement of a name that camshaft does not have."""

    def __getattr__(name: str) -> Any:
        if name in REPLACEMENTS:
            raise ImportError(f"camshaft does not include {name}: use {REPLACEMENTS[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


def ignite_class(value: Any) -> type | None:
    """Return the class of PyTorch-Ignite that ``value`` is, or is an instance of, or ``None``."""
    kind = value if isinstance(value, type) else type(value)
    return next((base for base in kind.__mro__ if base.__module__.partition(".")[0] == "ignite"), None)


def check_metric(metric: Any) -> None:
    """Reject PyTorch-Ignite's metrics that collect samples, such as ``ROC_AUC``, in a job of several ranks.

    They gather the samples as if every rank had the same number. Where the numbers differ, gloo aborts the process, and
    MPI loses samples. A script that runs unmodified may have loaders that pad its data: there it is a warning.
    """
    if ignite_class(metric) is None:
        return
    group = getattr(metric, "metrics", None)
    for one in (metric, *(group.values() if isinstance(group, dict) else ())):
        collects = any(isinstance(getattr(one, name, None), list) for name in ("_predictions", "_y_pred"))
        if collects and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            name = type(one).__name__
            problem = (
                f"{name} of PyTorch-Ignite in a job of {dist.get_world_size()} ranks gathers samples as if every rank "
                "had the same number, and fails or leaves some out where the numbers differ: use "
                "camshaft.handlers.attach_metrics with a metric of torchmetrics, such as BinaryAUROC instead of ROC_AUC"
            )
            if getattr(sys.modules.get("ignite.distributed"), "__name__", None) != "camshaft.distributed":
                raise RuntimeError(problem)
            warnings.warn(problem, stacklevel=level_of_caller())
