"""The curve of a search."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any


def draw(
    pyplot: Any,
    results: dict[str, list[Any]],
    suggestion: int | None,
    skip_start: int,
    skip_end: int,
    log_lr: bool,
    ax: Any,
    **kwargs: Any,
) -> Any:
    """Draw losses over rates, a line for each parameter group; ``suggestion`` is the index of a point to mark."""
    for name, value in (("skip_start", skip_start), ("skip_end", skip_end)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if ax is None:
        _, ax = pyplot.subplots(**kwargs)
    rows = [rate if isinstance(rate, list) else [rate] for rate in results["lr"]]
    shown = slice(skip_start, max(skip_start, len(rows) - skip_end))
    for number, rates in enumerate(zip(*rows, strict=True)):
        label = f"group {number}" if len(rows[0]) > 1 else None
        (line,) = ax.plot(rates[shown], results["loss"][shown], label=label)
        if suggestion is not None:
            _mark(ax, rates, results["loss"], suggestion, line.get_color())
    if suggestion is not None and suggestion < skip_start:
        warnings.warn(
            f"the suggested rate is that of point {suggestion}, among the first {skip_start} that are not drawn: "
            "choose a smaller skip_start",
            stacklevel=3,
        )
    if log_lr:
        ax.set_xscale("log")
    ax.set_xlabel("Learning rate")
    ax.set_ylabel("Loss")
    if suggestion is not None or len(rows[0]) > 1:
        ax.legend()
    return ax


def _mark(ax: Any, rates: Sequence[float], losses: Sequence[float], index: int, color: str) -> None:
    label = f"suggested: {rates[index]:.3g}"
    ax.scatter([rates[index]], [losses[index]], color=color, marker="o", zorder=3, label=label)
