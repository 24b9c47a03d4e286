"""Names of checkpoint files: ``[prefix_]name[_step][_score_name=score].pt``, or a pattern of one's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path, PurePath
from string import Formatter
from typing import Any

from camshaft.handlers.checkpoint.manifest import SUFFIX_LENGTH
from camshaft.handlers.checkpoint.weights import SUFFIX, is_weights_file

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


def check_pattern(pattern: str, objects: Mapping[str, Any], include_self: bool) -> None:
    """Raise if a pattern asks for what is not there (``KeyError``), or for a format that holds one model only.

    >>> check_pattern("{name}_{global_step:06d}.{ext}", {}, False)
    >>> check_pattern("{epoch}.{ext}", {}, False)
    Traceback (most recent call last):
    KeyError: "filename_pattern '{epoch}.{ext}' uses {epoch}; ..."
    """
    try:
        fields = [field for _, field, _, _ in Formatter().parse(pattern)]
    except ValueError as error:
        raise ValueError(f"filename_pattern {pattern!r} is no pattern: {error}") from error
    for field in fields:
        if field is not None and field not in FIELDS:
            known = ", ".join(f"{{{name}}}" for name in FIELDS)
            raise KeyError(f"filename_pattern {pattern!r} uses {{{field}}}; it may use {known}")
    if is_weights_file(pattern) and (len(objects) > 1 or include_self):
        raise ValueError(
            f"filename_pattern {pattern!r} is for the weights of one model, but to_save holds {list(objects)}"
            f"{' and the record of include_self' * include_self}; save the rest by another Checkpoint, to .pt files"
        )


def check_stays(argument: str, text: str) -> None:
    """Raise ``ValueError`` if a part of a file's name would lead to another directory.

    >>> check_stays("filename_pattern", "../{name}")
    Traceback (most recent call last):
    ValueError: filename_pattern must be a part of a file's name, without '/', got '../{name}'
    """
    separators = [one for one in (os.sep, os.altsep) if one and one in text]
    if separators:
        raise ValueError(f"{argument} must be a part of a file's name, without {separators[0]!r}, got {text!r}")


def check_inside(argument: str, text: str) -> None:
    """Raise ``ValueError`` if the name of a file would lead out of its directory.

    >>> check_inside("filename_prefix", "../best")
    Traceback (most recent call last):
    ValueError: filename_prefix must stay in the directory, got '../best'
    """
    path = PurePath(text)
    if path.anchor or ".." in path.parts:
        raise ValueError(f"{argument} must stay in the directory, got {text!r}")


def check_folder(prefix: str, pattern: str | None, directory: Path, is_used: bool) -> None:
    """Raise ``ValueError`` if a prefix leads to a folder of the directory that files cannot be written to.

    Args:
        prefix: of file names, such as ``"best/model"``.
        pattern: of file names, if there is one.
        directory: where the files go.
        is_used: whether this process writes there.
    """
    check_inside("filename_prefix", prefix)
    folder = directory / folder_of(prefix)
    if folder != directory and pattern is not None and not pattern.startswith("{filename_prefix}"):
        raise ValueError(
            f"filename_prefix {prefix!r} contains a folder, so filename_pattern must start with {{filename_prefix}}, "
            f"got {pattern!r}"
        )
    if is_used and not folder.is_dir():
        raise ValueError(f"filename_prefix {prefix!r} needs the folder '{folder}', which does not exist: create it")


def folder_of(name: str) -> str:
    """Return the folder within the directory to which a name, or a prefix of names, leads.

    >>> folder_of("best/model_10.pt"), folder_of("best/"), folder_of("model_10.pt")
    ('best', 'best', '')
    """
    return os.path.dirname(name)


def check_length(argument: str, path: Path) -> None:
    """Raise ``ValueError`` if the name of a file, or that of its entry in the manifest, is too long for the disk."""
    try:
        most = os.pathconf(path.parent, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):  # Windows, or a file system that does not tell
        most = 255
    most = (most if most > 0 else 255) - SUFFIX_LENGTH  # some file systems return 0, or -1 for no limit
    length = len(os.fsencode(path.name))
    if length > most:
        raise ValueError(
            f"{argument} is too long: a file name such as {path.name!r} has {length} bytes, and at most {most} "
            f"are allowed, because its manifest entry adds {SUFFIX_LENGTH}"
        )


def checkpoints_in(directory: Path) -> list[Path]:
    """List the files of a directory that are checkpoints, by their names; none if it does not exist."""
    try:
        names = os.listdir(directory)  # a glob would hide an error of the disk
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [directory / name for name in names if PurePath(name).suffix in (".pt", SUFFIX)]


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
    return str(next(iter(objects))) if len(objects) == 1 else "checkpoint"


def file_name(pattern: str | None, **fields: Any) -> str:
    """Name a file by a pattern, or if there is none by the parts that there are.

    >>> parts = {"filename_prefix": "", "name": "model", "score": None, "score_name": None, "ext": "pt"}
    >>> file_name(None, global_step=3, **parts)
    'model_3.pt'
    >>> file_name(None, global_step=3, **{**parts, "score": 0.5, "score_name": "validation/accuracy"})
    'model_3_validation_accuracy=0.5000.pt'
    """
    for key in ("name", "score_name"):  # metrics have names like "validation/accuracy"
        fields[key] = fields[key] and fields[key].replace("/", "_").replace(os.sep, "_")
    score, score_name = fields["score"], fields["score_name"]
    if not (score is None or isinstance(score, str)):
        fields["score"] = score_text(score)
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
