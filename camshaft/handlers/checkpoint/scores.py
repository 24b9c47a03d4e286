"""What checkpoints are kept for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from camshaft.engine.engine import Engine

ScoreFunction = Callable[[Engine[Any, Any]], Any]


def score_of_metric(metric_name: str, score_sign: float = 1.0) -> ScoreFunction:
    """Make a score function of a metric; ``score_sign=-1.0`` is for those of which less is better.

    Raises:
        ValueError: ``score_sign`` is neither 1 nor -1.
        KeyError: from the function, if there is no such metric.
    """
    if score_sign not in (1, -1):
        raise ValueError(f"score_sign must be 1 or -1, got {score_sign!r}")

    def score(engine: Engine[Any, Any]) -> Any:
        metrics = engine.state.metrics
        if metric_name not in metrics:
            raise KeyError(f"there is no metric {metric_name!r} to be the score, but only {list(metrics)}")
        return metrics[metric_name] * score_sign

    return score
