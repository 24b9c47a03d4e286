"""Names of checkpoint files: ``[prefix_]name[_step][_score_name=score].pt``, or a pattern of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from string import Formatter
from typing import Any

FIELDS = ("filename_prefix", "name", "score", "score_name", "global_step", "ext")


def make_pattern(
    with_prefix: bool = True, with_score: bool = True, with_score_name: bool = True, with_global_step: bool = True
) -> str:
    """Make the pattern of default names, with the parts asked for.

    Raises:
        ValueError: there is neither a score nor a step, or a score's name without the score.

    >>> make_pattern(with_prefix=False)
    '{name}_{global_step}_{score_name}={score}.{ext}'
    """
    if not (with_score or with_global_step):
        raise ValueError("at least one of with_score and with_global_step must be True, got False for both")
    if with_score_name and not with_score:
        raise ValueError("with_score_name=True needs with_score=True, got with_score=False")
    parts = {
        "{filename_prefix}": with_prefix,
        "{name}": True,
        "{global_step}": with_global_step,
        "{score_name}={score}": with_score and with_score_name,
        "{score}": with_score and not with_score_name,
    }
    return "_".join(part for part, wanted in parts.items() if wanted) + ".{ext}"


def check_pattern(pattern: str) -> None:
    """Raise ``KeyError`` if a pattern asks for what is not there.

    >>> check_pattern("{name}_{global_step:06d}.{ext}")
    >>> check_pattern("{epoch}.{ext}")
    Traceback (most recent call last):
    KeyError: "filename_pattern '{epoch}.{ext}' uses {epoch}; ..."
    """
    for _, field, _, _ in Formatter().parse(pattern):
        if field is not None and field not in FIELDS:
            known = ", ".join(f"{{{name}}}" for name in FIELDS)
            raise KeyError(f"filename_pattern {pattern!r} uses {{{field}}}; it may use {known}")


def score_text(score: Any) -> str:
    """Write a score as it stands in file names: integers as they are, other numbers with 4 decimals.

    >>> score_text(12), score_text(0.98765)
    ('12', '0.9877')
    """
    return str(score) if isinstance(score, Integral) else f"{score:.4f}"


def name_of(objects: Mapping[str, Any]) -> str:
    """Name a checkpoint: after its object where it is but one.

    >>> name_of({"model": None}), name_of({"model": None, "optimizer": None})
    ('model', 'checkpoint')
    """
    return next(iter(objects)) if len(objects) == 1 else "checkpoint"
