"""List, verify, merge, and compare checkpoints.

python -m camshaft.checkpoint list checkpoints
python -m camshaft.checkpoint verify checkpoints
python -m camshaft.checkpoint consolidate checkpoints/checkpoint_30.sharded model.safetensors --object model
python -m camshaft.checkpoint diff checkpoints/checkpoint_20.sharded checkpoints/checkpoint_30.pt --rtol 1e-5
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from camshaft.files import write_atomically
from camshaft.handlers.checkpoint.loading import read_checkpoint
from camshaft.handlers.checkpoint.savers import MISSING, SAFETENSORS, Entry, Manifest, as_safetensors, checkpoints_in
from camshaft.handlers.checkpoint.shards import Chunks
from camshaft.handlers.checkpoint.state import read_chunks, walk
from camshaft.text import RED, Look, aligned

_UNLISTED = "is not in the manifest, and cannot be verified"
Row = dict[str, Any]
"""What is printed about a checkpoint or a value; the keys are those of ``--json``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 1 for damage or differences, 2 if the command fails.

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
    text = "print the values that differ between two checkpoints; exit with 1 if there are any"
    command = commands.add_parser("diff", help=text, description=text, parents=[shared])
    command.add_argument("first", type=Path, help="a directory of shards, or a file")
    command.add_argument("second", type=Path, help="the other checkpoint, in any layout")
    text = "tolerance, as of torch.allclose: leave out tensors and floating-point numbers that differ by at most "
    text += "ATOL + RTOL * |element of the second checkpoint| (default: 0)"
    command.add_argument("--atol", type=float, default=0.0, help=f"absolute {text}")
    command.add_argument("--rtol", type=float, default=0.0, help="relative tolerance, likewise (default: 0)")
    options = parser.parse_args(arguments)
    summary: Row = {}
    remark = ""
    try:
        if options.command == "consolidate":
            consolidate(options.checkpoint, options.file, options.object)
            return 0
        if options.command == "diff":
            rows, summary = differences(options.first, options.second, options.atol, options.rtol)
            is_good, nothing = not rows, "no differences"
        else:
            is_verify = options.command == "verify"
            rows = checkpoints(options.directory, is_verify)
            is_good = not is_verify or not any(row["problem"] for row in rows)
            nothing = f"no checkpoints in '{options.directory}': no .pt or .safetensors files, and no shards"
            if any(row["problem"] == _UNLISTED for row in rows):
                remark = "files that are not in the manifest were saved by another library, such as PyTorch-Ignite, or "
                remark += "copied without the folder .manifest; Checkpoint.load_objects loads them"
    except (RuntimeError, OSError, ValueError, TypeError, ImportError, pickle.UnpicklingError) as error:
        sys.stderr.write(f"{Look.of(sys.stderr).styled('error:', RED)} {error}\n")
        return 2
    if options.json:
        sys.stdout.write("".join(f"{json.dumps(row)}\n" for row in (*rows, summary) if row))
        return 0 if is_good else 1
    columns = list(rows[0]) if rows else []
    cells = [[_text(row[name]) for name in columns] for row in rows]
    lines = [aligned([columns, *cells], Look.of(sys.stdout), {"problem": RED})] if rows else []
    if remark:
        lines.append(textwrap.fill(remark, 80))
    if summary and (rows or summary["largest"]):
        beyond = " beyond the tolerance" if options.atol or options.rtol else ""
        values, different, largest, relative = map(_text, summary.values())
        lines.append(
            f"values that differ{beyond}: {different} of {values}; largest difference: {largest}, relative: {relative}"
        )
    sys.stdout.write("\n".join(lines or [nothing]) + "\n")
    return 0 if is_good else 1


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
    rows: dict[str, Row] = {}
    for entry in Manifest(directory).entries():
        path = directory / entry.file
        problem = entry.problem(path) if is_verify else _incomplete(entry, path)
        row = {"checkpoint": entry.file, "step": entry.step}
        if not is_verify:
            ranks = None if entry.shards is None else len(entry.shards)
            row |= {"score": entry.score, "size": entry.size, "ranks": ranks}
        if entry.file not in rows or problem is None:  # the save that replaces it may have been interrupted
            rows[entry.file] = {**row, "problem": problem}
    unlisted: dict[str, os.stat_result] = {}
    for file in checkpoints_in(directory):
        with suppress(FileNotFoundError):  # removed meanwhile
            unlisted[file.name] = file.stat()
    newest_first = sorted(unlisted, key=lambda name: unlisted[name].st_mtime_ns, reverse=True)
    others = [(name, unlisted[name].st_size, _UNLISTED) for name in newest_first]
    with os.scandir(directory) as found:
        folders = [one.name for one in found if one.is_dir(follow_symlinks=False) and any(Path(one).glob("shard-*.pt"))]
    for name, size, problem in (
        *others,
        *((name, None, "is incomplete: its save was interrupted") for name in folders),
    ):
        if name not in rows:
            columns = {"step": None} if is_verify else {"step": None, "score": None, "size": size, "ranks": None}
            rows[name] = {"checkpoint": name, **columns, "problem": problem}
    return list(rows.values())


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


def differences(first: Path, second: Path, atol: float = 0.0, rtol: float = 0.0) -> tuple[list[Row], Row]:
    """Compare two checkpoints, whatever their layouts.

    The difference of two tensors or floating-point numbers is the largest among their elements. It is relative to the
    largest absolute value in both of them.

    Args:
        first: a directory of shards, or a file.
        second: the other checkpoint.
        atol, rtol: two tensors or floating-point numbers are considered equal if no element differs by more than
            ``atol + rtol * abs(element of the second)``.

    Returns:
        A row for each value that differs, and a summary.

    Raises:
        ValueError: a tolerance is negative.
    """
    for name, tolerance in (("--atol", atol), ("--rtol", rtol)):
        if not tolerance >= 0:
            raise ValueError(f"{name} must be 0 or more, got {tolerance}")
    states = [dict(walk(read_checkpoint(path))) for path in (first, second)]
    values, rows, largest = dict.fromkeys([*states[0], *states[1]]), [], {"largest": 0.0, "relative": 0.0}
    for where in values:
        numbers: dict[str, float] | None = None
        is_close = False
        if not all(where in state for state in states):
            text = f"only in {first if where in states[0] else second}"
        elif (found := _difference(_read(states[0][where]), _read(states[1][where]), atol, rtol)) is None:
            continue
        else:
            text, numbers, is_close = found
            largest = {name: max(one, (numbers or largest)[name]) for name, one in largest.items()}
        if not is_close:
            rows.append({"value": where, "difference": text, **(numbers or dict.fromkeys(largest))})
    return rows, {"values": len(values), "different": len(rows), **largest}


def _difference(a: Any, b: Any, atol: float, rtol: float) -> tuple[str, dict[str, float] | None, bool] | None:
    """Describe how two values differ, with numbers where there are any, and return whether it is tolerated.

    Returns:
        ``None`` if they are equal.
    """
    text = f"{a!r:.40} and {b!r:.40}"
    is_float = isinstance(a, float) and isinstance(b, float)
    if is_float:
        a, b = (torch.tensor(one, dtype=torch.float64) for one in (a, b))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return (text, None, False) if type(a) is not type(b) or a != b else None
    if a.shape != b.shape or a.dtype != b.dtype:
        kinds = (f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in (a, b))
        return " and ".join(kinds), None, False
    is_same = (a == b) | ((a != a) & (b != b))  # NaN is not equal to itself
    if is_same.all():
        return None
    if not is_float:
        text = f"{int((~is_same).sum()):,} of {a.numel():,} elements"
    a, b = (one.to(torch.complex128 if one.is_complex() else torch.float64) for one in (a, b))
    distance = (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(is_same, 0.0).max().item()
    is_close = bool(atol or rtol) and torch.allclose(a, b, rtol, atol, equal_nan=True)  # integers may have got rounded
    scale = max(one.abs().nan_to_num(nan=0.0, posinf=0.0).max().item() for one in (a, b))
    return text, {"largest": distance, "relative": distance / scale if scale else math.inf}, is_close


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, Chunks) else value


def _incomplete(entry: Entry, path: Path) -> str | None:
    """Return why a checkpoint is incomplete, by the sizes of its files."""
    sizes = {path / name: size for name, (_, size) in (entry.shards or {}).items()} or {path: entry.size}
    for file, size in sizes.items():
        try:
            if (found := file.stat().st_size) != size:
                return f"'{file.name}' has {found:,} bytes instead of {size:,}"
        except FileNotFoundError:
            return MISSING if file == path else f"'{file.name}' {MISSING}"
    return None


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
