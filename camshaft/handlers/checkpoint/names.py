"""Names of checkpoint files: ``[prefix_]name[_step][_score_name=score].pt``, or a custom pattern."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path, PurePath
from string import Formatter
from typing import Any

SAFETENSORS = ".safetensors"
_FIELDS = ("filename_prefix", "name", "score", "score_name", "global_step", "ext")


def make_pattern(
    with_prefix: bool = True, with_score: bool = True, with_score_name: bool = True, with_global_step: bool = True
) -> str:
    """Return the pattern of default names with the selected components.

    Raises:
        ValueError: there is neither a score nor a step, or the name of a score without the score.

    >>> make_pattern(with_prefix=False)
    '{name}_{global_step}_{score_name}={score}.{ext}'
    """
    if not (with_score or with_global_step):
        raise ValueError("at least one of with_score and with_global_step must be True, got False for both")
    if with_score_name and not with_score:
        raise ValueError("with_score_name=True needs with_score=True, got with_score=False")
    components = {
        "{filename_prefix}": with_prefix,
        "{name}": True,
        "{global_step}": with_global_step,
        "{score_name}={score}": with_score and with_score_name,
        "{score}": with_score and not with_score_name,
    }
    return "_".join(component for component, wanted in components.items() if wanted) + ".{ext}"


def check_pattern(pattern: str, objects: Mapping[str, Any], include_self: bool) -> None:
    """Raise if a pattern uses unknown fields (``KeyError``) or a format that holds a single model.

    >>> check_pattern("{name}_{global_step:06d}.{ext}", {}, False)
    >>> check_pattern("{epoch}.{ext}", {}, False)
    Traceback (most recent call last):
    KeyError: "filename_pattern '{epoch}.{ext}' uses {epoch}; ..."
    """
    try:
        fields = [field for _, field, _, _ in Formatter().parse(pattern)]
    except ValueError as error:
        raise ValueError(f"filename_pattern {pattern!r} is not a format string: {error}") from error
    for field in fields:
        if field is not None and field not in _FIELDS:
            known = ", ".join(f"{{{name}}}" for name in _FIELDS)
            raise KeyError(f"filename_pattern {pattern!r} uses {{{field}}}; it may use {known}")
    if pattern.endswith(SAFETENSORS) and (len(objects) > 1 or include_self):
        raise ValueError(
            f"filename_pattern {pattern!r} is for the weights of one model, but to_save holds {list(objects)}"
            f"{' and the record of include_self' * include_self}; save the rest with another Checkpoint, to .pt files"
        )


def check_path(argument: str, name: str) -> None:
    """Raise ``ValueError`` if a file name leads out of its directory.

    >>> check_path("filename_prefix", "../best")
    Traceback (most recent call last):
    ValueError: filename_prefix must stay in the directory, got '../best'
    """
    path = PurePath(name)
    if path.anchor or ".." in path.parts:
        raise ValueError(f"{argument} must stay in the directory, got {name!r}")


def check_folders(prefix: str, pattern: str | None) -> None:
    """Raise ``ValueError`` if a prefix leads out of the directory, or a pattern to another folder than the prefix.

    >>> check_folders("best/model", "../{name}")
    Traceback (most recent call last):
    ValueError: filename_pattern must be a component of a file name, without '/', got '../{name}'
    """
    check_path("filename_prefix", prefix)
    for separator in (os.sep, os.altsep):
        if pattern and separator and separator in pattern:
            raise ValueError(
                f"filename_pattern must be a component of a file name, without {separator!r}, got {pattern!r}"
            )
    if os.path.dirname(prefix) and pattern is not None and not pattern.startswith("{filename_prefix}"):
        raise ValueError(
            f"filename_prefix {prefix!r} contains a folder, so filename_pattern must start with {{filename_prefix}}, "
            f"got {pattern!r}"
        )


def checkpoints_in(directory: Path) -> list[Path]:
    """List the files of a directory that are checkpoints by their names."""
    try:
        names = os.listdir(directory)  # a glob would hide an error of the disk
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [directory / name for name in names if PurePath(name).suffix in (".pt", SAFETENSORS)]


def name_of(objects: Mapping[str, Any]) -> str:
    """Return the name of a checkpoint: that of its only object, or ``"checkpoint"``.

    >>> name_of({"model": None}), name_of({"model": None, "optimizer": None})
    ('model', 'checkpoint')
    """
    return str(next(iter(objects))) if len(objects) == 1 else "checkpoint"


def file_name(pattern: str | None, **fields: Any) -> str:
    """Return the name of a file by a pattern, or by default with the components that are given.

    >>> components = {"filename_prefix": "", "name": "model", "score": None, "score_name": None, "ext": "pt"}
    >>> file_name(None, global_step=3, **components)
    'model_3.pt'
    >>> file_name(None, global_step=3, **{**components, "score": 0.5, "score_name": "validation/accuracy"})
    'model_3_validation_accuracy=0.5000.pt'
    """
    for key in ("name", "score_name"):  # metrics have names like "validation/accuracy"
        fields[key] = fields[key] and fields[key].replace("/", "_").replace(os.sep, "_")
    score, score_name = fields["score"], fields["score_name"]
    if score is not None and not isinstance(score, str):
        fields["score"] = str(score) if isinstance(score, Integral) else f"{score:.4f}"
    chosen = pattern or make_pattern(
        with_prefix=bool(fields["filename_prefix"]),
        with_score=score is not None,
        with_score_name=score is not None and score_name is not None,
        with_global_step=fields["global_step"] is not None,
    )
    try:
        return chosen.format(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"filename_pattern {pattern!r} does not fit {fields}: {error}") from error
