"""List, verify, and merge checkpoints.

python -m camshaft.checkpoint list checkpoints
python -m camshaft.checkpoint verify checkpoints
python -m camshaft.checkpoint consolidate checkpoints/checkpoint_30.sharded model.safetensors --object model
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from camshaft.arguments import load_optional
from camshaft.files import write_atomically
from camshaft.handlers.checkpoint.loading import find, read_checkpoint
from camshaft.handlers.checkpoint.manifest import Manifest
from camshaft.handlers.checkpoint.state import read_chunks
from camshaft.text import RED, Look, aligned

SAFETENSORS = ".safetensors"
_UNLISTED = "is not in the manifest, and cannot be verified"
Row = dict[str, Any]
"""What is printed about a checkpoint; the keys are those of ``--json``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 1 for damage, 2 if the command fails.

    >>> import tempfile
    >>> from camshaft.handlers import DiskSaver
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     DiskSaver(folder)({"weight": torch.ones(2)}, "model_30.pt", {"step": 30})
    ...     main(["verify", folder])
    checkpoint   step  problem
    model_30.pt  30    -
    0
    """
    parser = argparse.ArgumentParser(
        prog="python -m camshaft.checkpoint", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print one JSON object per line")
    for name, text in {
        "list": "print the checkpoints of a directory, newest first, and whether they are complete",
        "verify": "read all files and compare them with their checksums; exit with 1 if one is damaged or missing",
    }.items():
        command = commands.add_parser(name, help=text, description=text, parents=[shared])
        command.add_argument("directory", type=Path, help="where the checkpoints are")
    text = "write a checkpoint to a single file for torch.load or the safetensors library"
    command = commands.add_parser("consolidate", help=text, description=text)
    command.add_argument("checkpoint", type=Path, help="a directory of shards, or a file")
    command.add_argument(
        "file", type=Path, help=f"the new file; use the suffix {SAFETENSORS} for the weights of a model"
    )
    command.add_argument("--object", help="only this object of the checkpoint, such as 'model'")
    options = parser.parse_args(arguments)
    remark = ""
    try:
        if options.command == "consolidate":
            consolidate(options.checkpoint, options.file, options.object)
            return 0
        is_verify = options.command == "verify"
        rows = checkpoints(options.directory, is_verify)
        if any(row["problem"] == _UNLISTED for row in rows):
            remark = "files that are not in the manifest were saved by another library, such as PyTorch-Ignite, or "
            remark += "copied without the folder .manifest; Checkpoint.load_objects loads them"
    except (RuntimeError, OSError, ValueError, TypeError, ImportError, pickle.UnpicklingError) as error:
        sys.stderr.write(f"{Look.of(sys.stderr).styled('error:', RED)} {error}\n")
        return 2
    exit_code = int(is_verify and any(row["problem"] for row in rows))
    if options.json:
        sys.stdout.write("".join(f"{json.dumps(row)}\n" for row in rows))
        return exit_code
    columns = list(rows[0]) if rows else []
    cells = [[_text(row[name]) for name in columns] for row in rows]
    lines = [aligned([columns, *cells], Look.of(sys.stdout), {"problem": RED})] if rows else []
    if remark:
        lines.append(textwrap.fill(remark, 80))
    if not is_verify and any(row["problem"] is None for row in rows):
        lines.append("only sizes are checked: verify compares the contents with their checksums")
    nothing = f"no checkpoints in '{options.directory}': no .pt files, and no shards"
    sys.stdout.write("\n".join(lines or [nothing]) + "\n")
    return exit_code


def checkpoints(directory: Path, is_verify: bool) -> list[Row]:
    """Return what the manifest of a directory records about each checkpoint, newest first, and what is wrong with it.

    Args:
        directory: where the checkpoints are.
        is_verify: whether to compare the content of all files with their checksums, instead of only checking sizes.

    Raises:
        ValueError: it is not a directory, or it is a checkpoint itself.
    """
    if not directory.is_dir():
        raise ValueError(f"DIR must be an existing directory, got '{directory}'")
    if Manifest(directory.parent).lists(directory.name):
        raise ValueError(f"'{directory}' is a checkpoint: pass the directory that contains it")
    rows: list[Row] = []
    found = find(directory)
    for entry in sorted(found.values(), key=lambda one: one.saved_at, reverse=True):
        problem = entry.problem(directory / entry.file, reads=is_verify) if entry.checksum else _UNLISTED
        ranks = None if entry.shards is None else len(entry.shards)
        row = {"score": entry.score, "size": entry.size, "ranks": ranks, "problem": problem}
        rows.append({"checkpoint": entry.file, "step": entry.step, **row})
    with os.scandir(directory) as folders:
        for one in folders:
            if one.name not in found and one.is_dir(follow_symlinks=False) and any(Path(one).glob("shard-*.pt")):
                row = dict.fromkeys(("checkpoint", "step", "score", "size", "ranks"))
                rows.append({**row, "checkpoint": one.name, "problem": "is incomplete: its save was interrupted"})
    shown = ("checkpoint", "step", "problem")
    return [{name: row[name] for name in shown} for row in rows] if is_verify else rows


def consolidate(checkpoint: Path, file: Path, name: str | None = None) -> None:
    """Write a checkpoint, or one object of it, to a file that must not exist yet.

    Raises:
        ValueError: the file exists or has another suffix, or the checkpoint has no such object.
        TypeError: a ``.safetensors`` file cannot hold it.
        DamagedCheckpointError: the checkpoint is damaged or incomplete.
    """
    if file.suffix not in (".pt", SAFETENSORS):
        raise ValueError(f"FILE must end in .pt or {SAFETENSORS}, got '{file}'")
    if os.path.lexists(file):
        raise ValueError(f"FILE must not exist, got '{file}'")
    state = read_checkpoint(checkpoint)
    if name is not None:
        if not isinstance(state, Mapping) or name not in state:
            held = list(state) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"--object must be one of {held}, got {name!r}")
        state = state[name]
    state = read_chunks(state)
    if file.suffix == SAFETENSORS:
        content = as_safetensors(state)
        write_atomically(file, lambda opened: opened.write(content))
    else:
        write_atomically(file, lambda opened: torch.save(state, opened))


def as_safetensors(checkpoint: Any) -> bytes:
    """Serialize a dict of tensors."""
    values = list(checkpoint.values()) if isinstance(checkpoint, Mapping) else [[checkpoint]]
    if kinds := sorted({type(one).__name__ for one in values if not isinstance(one, torch.Tensor)}):
        raise TypeError(f"a {SAFETENSORS} file holds the state of one model, a dict of tensors; got values of {kinds}")
    # The format holds neither views nor shared memory, as tied weights have it.
    copies = {name: one.detach().cpu().clone(memory_format=torch.contiguous_format) for name, one in checkpoint.items()}
    library = load_optional("safetensors.torch", extra="safetensors", needed_by=f"a {SAFETENSORS} file")
    content: bytes = library.save(copies)
    return content


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)
