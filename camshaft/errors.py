"""The exceptions of our own, and notes on those of others."""

from __future__ import annotations


class NotComputableError(RuntimeError):
    """Say that a value cannot be computed yet, for example a mean over no samples.

    >>> raise NotComputableError("accuracy needs at least one sample")
    Traceback (most recent call last):
    camshaft.errors.NotComputableError: accuracy needs at least one sample
    """


class RankDivergenceError(RuntimeError):
    """Say that ranks do different things where all must do the same: a collective that some cannot reach, say."""


class DamagedCheckpointError(RuntimeError):
    """Say that a checkpoint is not what was saved: it is cut off, or a part of it has changed, or it is gone."""


def annotate(error: BaseException, text: str) -> None:
    """Add a note to ``error``; Python prints it below the message (3.10 only keeps it in ``__notes__``).

    >>> error = ValueError("broken")
    >>> annotate(error, "in handler 'save' at epoch 3")
    >>> error.__notes__
    ["in handler 'save' at epoch 3"]
    """
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        # What add_note does since Python 3.11.
        error.__dict__.setdefault("__notes__", []).append(text)
