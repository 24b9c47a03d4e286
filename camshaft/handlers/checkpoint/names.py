"""Names of checkpoint files: ``[prefix_]name[_step][_score_name=score].pt``, or a custom pattern."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path, PurePath
from string import Formatter
from typing import Any

SAFETENSORS = ".safetensors"
_ENTRY_SUFFIX_LENGTH = len(".01234567.json")  # of entries in the manifest
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
    score = "{score_name}={score}" if with_score_name else "{score}"
    wanted = {"{filename_prefix}": with_prefix, "{name}": True, "{global_step}": with_global_step, score: with_score}
    return "_".join(component for component in wanted if wanted[component]) + ".{ext}"


def check_pattern(pattern: str, objects: Mapping[str, Any], include_self: bool) -> None:
    """Raise if a pattern uses unknown fields (``KeyError``) or a format that holds a single model.

    >>> check_pattern("{name}_{global_step:06d}.{ext}", {}, False)
    >>> check_pattern("{epoch}.{ext}", {}, False)
    Traceback (most recent call last):
    KeyError: "filename_pattern '{epoch}.{ext}' uses {epoch}; ..."
    """
    try:
        fields = {field for _, field, _, _ in Formatter().parse(pattern)} - {None}
    except ValueError as error:
        raise ValueError(f"filename_pattern {pattern!r} is not a format string: {error}") from error
    if unknown := fields.difference(_FIELDS):
        known = ", ".join(f"{{{name}}}" for name in _FIELDS)
        raise KeyError(f"filename_pattern {pattern!r} uses {{{unknown.pop()}}}; it may use {known}")
    if pattern.endswith(SAFETENSORS) and (len(objects) > 1 or include_self):
        raise ValueError(
            f"filename_pattern {pattern!r} is for the weights of one model, without include_self, but to_save holds "
            f"{list(objects)}; save the rest with another Checkpoint, to .pt files"
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
    ValueError: filename_pattern must be a file name, without a folder, got '../{name}'
    """
    check_path("filename_prefix", prefix)
    if pattern is not None and os.path.dirname(pattern):
        raise ValueError(f"filename_pattern must be a file name, without a folder, got {pattern!r}")
    if pattern is not None and os.path.dirname(prefix) and not pattern.startswith("{filename_prefix}"):
        raise ValueError(f"filename_pattern must start with {{filename_prefix}} if that has a folder, got {pattern!r}")


def check_length(argument: str, path: Path) -> None:
    """Raise ``ValueError`` if the name of a checkpoint, or that of its entry, is too long for the file system."""
    try:
        limit = os.pathconf(path.parent, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):  # Windows, or a file system that does not report it
        limit = 255
    limit = (limit if limit > 0 else 255) - _ENTRY_SUFFIX_LENGTH  # some file systems return 0, or -1 for no limit
    if (length := len(os.fsencode(path.name))) > limit:
        problem = f"a file name such as {path.name!r} has {length} bytes, and at most {limit} are allowed"
        raise ValueError(f"{argument} is too long: {problem}, because its manifest entry adds {_ENTRY_SUFFIX_LENGTH}")


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


def file_name(pattern: str | None, fields: dict[str, Any]) -> str:
    """Return the name of a file by a pattern, or by default with the components that are not ``None``.

    >>> file_name(None, {"name": "model", "global_step": 3, "ext": "pt"})
    'model_3.pt'
    >>> file_name(None, {"name": "model", "score": 0.5, "score_name": "validation/accuracy", "ext": "pt"})
    'model_validation_accuracy=0.5000.pt'
    """
    values = {**dict.fromkeys(_FIELDS), **fields}
    for key in ("name", "score_name"):  # metrics have names like "validation/accuracy"
        values[key] = values[key] and values[key].replace("/", "_").replace(os.sep, "_")
    score, has_score = values["score"], values["score"] is not None
    if has_score and not isinstance(score, str):
        values["score"] = str(score) if isinstance(score, Integral) else f"{score:.4f}"
    has_step, has_score_name = values["global_step"] is not None, has_score and values["score_name"] is not None
    chosen = pattern or make_pattern(bool(values["filename_prefix"]), has_score, has_score_name, has_step)
    try:
        return chosen.format(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"filename_pattern {pattern!r} does not fit {values}: {error}") from error
